"""Entry point of the `counterpoint` command, outside the package so that it runs before the package is loaded.

Ctrl-C ends the command with status 130 and no traceback, while it is loading and at any later time.
"""

import os
import signal
import sys


def main() -> None:
    """Load the command line and run it."""
    is_heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell ignores it for background jobs
    if is_heeded:  # at once: a KeyboardInterrupt within an import can be printed and lost
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        from counterpoint.cli.main import main as run_command_line  # noqa: PLC0415

        if is_heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run_command_line()
    except KeyboardInterrupt:
        sys.exit(130)
