"""`python -m counterpoint` is the `counterpoint` command; torchrun starts it as `torchrun -m counterpoint ...`."""

from counterpoint_command import main

if __name__ == "__main__":
    main()
