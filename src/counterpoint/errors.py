"""The errors a user can cause, one class per thing that can be wrong.

A message is one line: what is wrong, the limit, the value found, what to do next. The command line prints that line and
exits with code 2; it never shows a traceback for these.
"""

import sys
from contextlib import suppress

MAX_SHOWN = 60  # letters of a name or value that an error repeats
MAX_PATH_SHOWN = 200
MAX_LINE = 2000  # letters of a whole error line
INSTALL = "Install it: pip install 'torch>=2.11,<2.14' 'cuda-bindings>=13,<14'."  # the extra `cuda`, quoted for a shell


def shown(value: object, most: int = MAX_SHOWN) -> str:
    """A name or a value from outside as an error line repeats it: on one line, without control characters, and cut in the
    middle where it is long, so that a path keeps its end."""
    text = str(value)
    if len(text) > most:
        text = f"{text[: most - most // 2 - 3]}...{text[-(most // 2) :]}"
    return printable(text)


def shown_path(path: object) -> str:
    """A path as an error line repeats it: whole, unless it is longer than people's paths are."""
    return shown(path, MAX_PATH_SHOWN)


def printable(text: str) -> str:
    """The text with control characters, which a terminal would obey, written as escapes."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class CounterpointError(ValueError):
    """Base of every error that a user can cause; the message is one complete line, and never longer than `MAX_LINE`."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shown(" ".join(message.split()), MAX_LINE) if message else message)


class MachineError(CounterpointError):
    """A machine is unknown, or its description is missing a figure or holds an absurd one."""


class StepError(CounterpointError):
    """A step contradicts itself: a dependency on a later operation, a negative size, no operation at all."""


class TraceError(StepError):
    """A profiler trace cannot be read, or holds no step."""


class AnalysisError(CounterpointError):
    """An analysis cannot be made, read or compared: traces that do not belong together, a condition that is none."""


class WorkloadError(StepError):
    """A workload file is wrong: an unknown name, a cycle, a missing figure."""


class OccupancyError(CounterpointError):
    """A launch does not fit the GPU, or a residency cannot be reached."""


class PlanError(CounterpointError):
    """A plan cannot be read, or belongs to another step."""


class EngagementError(CounterpointError):
    """A control that was asked for did not take effect."""


class DeviceError(CounterpointError):
    """There is no GPU to run on, or the driver or a library refuses what is asked of it."""

    @classmethod
    def of_missing(cls, what: str, problem: ModuleNotFoundError) -> "DeviceError":
        """For a part that needs a package which is not installed; a module of our own that is missing is raised as it is."""
        if (problem.name or "").startswith("counterpoint"):
            raise problem
        return cls(f"{what} needs '{problem.name}', which is not installed. {INSTALL}")


class MissingPackageError(DeviceError, AttributeError):
    """A public name needs a package that is not installed; to whoever looks through the module, the name is not there."""


class ArgumentError(CounterpointError, TypeError):
    """A function was called with a value of another kind than it takes."""


class JobContextError(CounterpointError):
    """A file of context, or a command to check, cannot be read."""


class LaunchFilterError(CounterpointError):
    """The launch filter cannot be built, cannot be loaded by a command, or its control block cannot be read."""


class ScheduleError(CounterpointError):
    """A copy schedule contradicts itself, or no schedule fits what was asked for."""


class OperatorError(CounterpointError):
    """An operator was called with tensors that do not fit, or ranks do not agree, or one of them is gone."""


class RefusedTogetherError(OperatorError):
    """A rank cannot do what all ranks of its group were about to do; all of them raise this, and stay in step."""


class IntegrationError(CounterpointError):
    """A model cannot be served by an integration: it is not wrapped, not parallelized, or laid out in another way."""


def require_kind(found: object, kinds: type | tuple[type, ...], what: str, remedy: str) -> None:
    """Raise `ArgumentError` unless `found` is one of `kinds`; `what` says what must be what, `remedy` is a sentence."""
    if not isinstance(found, kinds) or (isinstance(found, bool) and kinds is int):
        kind = type(found).__name__
        value = f"'{shown(found)}'" if isinstance(found, str) else "None" if found is None else f"a value of type {kind}"
        raise ArgumentError(f"{what}; found {value}. {remedy}")


def cause_of(problem: BaseException, max_length: int | None = None) -> str:
    """The first line of somebody else's error, cut if need be, for a line of ours; empty where it says nothing."""
    return str(problem).strip().split("\n")[0][:max_length]


def reason_of(problem: Exception) -> str:
    """What went wrong, for a line of ours that names it: our errors' words, and of others' the type as well."""
    cause = cause_of(problem, 200).rstrip(".")
    return cause if cause and isinstance(problem, CounterpointError) else f"{type(problem).__name__}: {cause}".rstrip(": ")


def say(line: str) -> None:
    """This line on standard error, marked as ours. In one write: ranks share it, and under torchrun Python buffers nothing.
    Where nobody listens any more, the job goes on."""
    if sys.stderr is None:  # it was closed when Python started, and `print` would take standard output
        return
    with suppress(OSError, ValueError):
        print(f"counterpoint: {line}\n", end="", file=sys.stderr, flush=True)


def package_version() -> str:
    """The version that is installed, for messages; that none is, where the package is imported from a folder."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  `import counterpoint` does without

    try:
        return version("counterpoint")
    except PackageNotFoundError:
        return "not installed"
