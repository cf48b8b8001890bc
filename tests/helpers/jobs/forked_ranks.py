"""Stands for a launcher: has the ranks of a script forked by the servers of the tests (`helpers/gloo_ranks.py`), which have
imported torch already.

SOCKET NUM_RANKS SCRIPT ARGUMENT...: the ranks get this process's environment and its streams.
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    asked = {"launcher": os.getpid(), "num_ranks": int(sys.argv[2]), "words": sys.argv[3:], "environment": dict(os.environ)}
    connection.sendall(json.dumps(asked).encode() + b"\n")
    sys.exit(int(connection.makefile().readline()))
