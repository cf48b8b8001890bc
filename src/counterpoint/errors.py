"""Errors that a user can cause, one class for each thing that can be wrong.

A message is one line: what is wrong, the limit, the value found, what to do next. The command line prints this line,
without a traceback, and exits with code 2.
"""

import sys
from contextlib import suppress

INTERRUPTED = 130  # exit code after Ctrl-C: 128 + SIGINT
READER_LEFT = 141  # exit code where the reader of the output, such as head, has exited: 128 + SIGPIPE, as shells have it
MAX_SHOWN = 60  # most letters of a name or value in an error
MAX_PATH_SHOWN = 200
MAX_LINE = 2000  # most letters of a whole error line
INSTALL = "Install it: pip install 'torch>=2.11,<2.16' 'cuda-bindings>=13,<14'."  # the extra `cuda`, quoted for a shell


def shown(value: object, most: int = MAX_SHOWN) -> str:
    """Make an outside name or value safe for an error line: on one line, without control characters, and cut in the
    middle if it is long, so that a path keeps its end.
    """
    text = str(value)
    if len(text) > most:
        text = f"{text[: most - most // 2 - 3]}...{text[-(most // 2) :]}"
    return printable(text)


def shown_path(path: object) -> str:
    """Make a path safe for an error line: whole, unless it is longer than usual paths."""
    return shown(path, MAX_PATH_SHOWN)


def printable(text: str) -> str:
    """Escape control characters, which a terminal would obey."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class CounterpointError(ValueError):
    """Base of every error that a user can cause. The message is one complete line of at most `MAX_LINE` letters."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shown(" ".join(message.split()), MAX_LINE) if message else message)


class MachineError(CounterpointError):
    """A machine is unknown, or its description is missing a figure or holds an absurd one."""


class StepError(CounterpointError):
    """A step contradicts itself: a dependency on a later operation, a negative size, no operation at all."""


class TraceError(StepError):
    """A profiler trace cannot be read, or holds no step."""


class AnalysisError(CounterpointError):
    """An analysis cannot be made, read or compared: for example traces that do not belong together, or an invalid
    condition.
    """


class WorkloadError(StepError):
    """A workload file is wrong: an unknown name, a cycle, a missing figure."""


class OccupancyError(CounterpointError):
    """A launch does not fit the GPU, or a residency cannot be reached."""


class PlanError(CounterpointError):
    """A plan cannot be read, or belongs to another step."""


class EngagementError(CounterpointError):
    """A control that was asked for did not take effect."""


class DeviceError(CounterpointError):
    """There is no GPU to run on, or the driver or a library rejects a request."""

    @classmethod
    def of_missing(cls, what: str, problem: ModuleNotFoundError) -> "DeviceError":
        """Return the error for a missing package that a part needs; if one of Counterpoint's own modules is missing,
        re-raise.
        """
        if (problem.name or "").startswith("counterpoint"):
            raise problem
        return cls(f"{what} needs '{problem.name}', which is not installed. {INSTALL}")


class MissingPackageError(DeviceError, AttributeError):
    """A public name needs a package that is not installed. It is also an `AttributeError`, so `hasattr` returns False."""


class ArgumentError(CounterpointError, TypeError):
    """A function was called with a value of the wrong type."""


class JobContextError(CounterpointError):
    """A job-context file, or a command to check, cannot be read."""


class LaunchFilterError(CounterpointError):
    """The launch filter cannot be built, cannot be loaded by a command, or its control block cannot be read."""


class ScheduleError(CounterpointError):
    """A copy schedule contradicts itself, or no schedule fits what was asked for."""


class OperatorError(CounterpointError):
    """An operator was called with tensors that do not fit, ranks disagree, or a rank is gone."""


class RefusedTogetherError(OperatorError):
    """A rank cannot do what all ranks of its group were about to do; every rank raises this, so that all stay in step."""


class IntegrationError(CounterpointError):
    """An integration cannot serve a model: it is not wrapped, not parallelized, or its layout differs."""


def require_kind(found: object, kinds: type | tuple[type, ...], what: str, remedy: str) -> None:
    """Raise `ArgumentError` unless `found` is one of `kinds`; `what` says what must have that type, `remedy` is a
    sentence.
    """
    if not isinstance(found, kinds) or (isinstance(found, bool) and kinds is int):
        kind = type(found).__name__
        value = f"'{shown(found)}'" if isinstance(found, str) else "None" if found is None else f"a value of type {kind}"
        raise ArgumentError(f"{what}; found {value}. {remedy}")


def cause_of(problem: BaseException, max_length: int | None = None) -> str:
    """Return the first line of another library's error, cut if need be, for use in a message; empty if it says nothing."""
    return str(problem).strip().split("\n")[0][:max_length]


def reason_of(problem: Exception) -> str:
    """Return the cause for a message that names it: the text of a Counterpoint error; for other errors, the type as
    well.
    """
    cause = cause_of(problem, 200).rstrip(".")
    return cause if cause and isinstance(problem, CounterpointError) else f"{type(problem).__name__}: {cause}".rstrip(": ")


def say(line: str) -> None:
    """Print this line on standard error with Counterpoint's name, in one write, because ranks share the stream and
    torchrun makes it unbuffered. If the stream is closed, or an object of the job that fails, the job goes on.
    """
    if sys.stderr is None:  # standard error was closed when Python started, and `print` would write to standard output
        return
    with suppress(Exception):
        print(f"counterpoint: {line}\n", end="", file=sys.stderr, flush=True)


def package_version() -> str:
    """Return the installed version for messages, or that none is installed, if the package is imported from a folder."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  `import counterpoint` does without

    try:
        return version("counterpoint")
    except PackageNotFoundError:
        return "not installed"
