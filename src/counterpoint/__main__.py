"""`python -m counterpoint` is the `counterpoint` command; torchrun starts it as `torchrun -m counterpoint ...`."""

import sys


def main() -> None:
    """Entry point of the command. Ctrl-C ends it while it is still loading as at any later time."""
    try:
        from counterpoint.cli.main import main as run_command_line  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.exit(130)
    run_command_line()


if __name__ == "__main__":
    main()
