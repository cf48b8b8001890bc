"""`python -m counterpoint` is the `counterpoint` command; torchrun starts it as `torchrun -m counterpoint ...`."""

import sys


def main() -> None:
    """Entry point of the command. Ctrl-C ends it while it is still loading as at any later time."""
    try:
        from counterpoint import cli  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
