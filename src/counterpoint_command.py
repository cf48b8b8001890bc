"""Entry point of the `counterpoint` command, outside the package so that it runs before the package is loaded.

Until the command line is loaded, Ctrl-C ends the process as the kernel does it, without a traceback. Afterwards
`cli/main.py` turns it into the exit status 130.
"""

import signal
import sys


def main() -> None:
    """Load the command line and run it."""
    is_heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell ignores it for background jobs
    if is_heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from counterpoint.cli.main import main as run_command_line  # noqa: PLC0415

    try:
        if is_heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run_command_line()
    except KeyboardInterrupt:
        sys.exit(130)
