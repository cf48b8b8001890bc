"""A C compiler that copies what the same command built before; for tests of where a library is kept, not of what is in it.

A command is the same where its words, its folder and its sources are. What fails is not remembered.
"""

import shutil
import sys
from pathlib import Path

SCRIPT = """#!{python} -SE
import hashlib, os, shutil, subprocess, sys

words = sys.argv[1:]
place = words.index("-o") + 1 if "-o" in words else 0
wanted = words[place]
told = [os.getcwd(), *words[: place - 1], *words[place + 1 :]]
sources = [open(word, "rb").read() for word in words if word.endswith(".c") and os.path.exists(word)]
kept = os.path.join({folder!r}, hashlib.sha256(repr((told, sources)).encode()).hexdigest())
if not place or not os.path.exists(kept):
    status = subprocess.call([{compiler!r}, *words])
    if status or not place:
        sys.exit(status)
    shutil.copyfile(wanted, f"{{kept}}.{{os.getpid()}}")
    os.replace(f"{{kept}}.{{os.getpid()}}", kept)
else:
    shutil.copyfile(kept, wanted)
    os.chmod(wanted, 0o700)
"""


def remembering_compiler(folder: Path) -> Path:
    """Make it as `cc` in the folder, which is to stand first in PATH, for the `cc` that is found now."""
    compiler = shutil.which("cc")
    assert compiler is not None
    path = folder / "cc"
    path.write_text(SCRIPT.format(python=sys.executable, folder=str(folder), compiler=compiler))
    path.chmod(0o755)
    return path
