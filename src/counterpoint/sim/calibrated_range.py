"""Finds operations outside the calibrated range, and says why.

Only operations whose times are predicted from sizes are checked: a traced or captured time needs no calibration.
"""

from counterpoint.machine import Machine
from counterpoint.measurement.points import Point
from counterpoint.sim.calibration import Calibration, load_calibration
from counterpoint.sim.matmul_rates import USUAL_ELEMENT_TYPE
from counterpoint.step import Collective, Copy, Kernel, Operation, Step
from counterpoint.units import format_bytes, format_count, format_numbers

# Beyond the largest measured message, bandwidth grows no further; below the smallest, latency shrinks no further. An
# assumption.
MARGIN = 4.0


def is_collective_measured(collective: Collective, machine: Machine) -> bool:
    """Return whether the library's kernels for such a collective were measured on the machine's own GPU.

    A send and receive among more than two ranks takes other times than between two, which were measured.
    """
    calibration = load_calibration(machine)
    is_own = calibration.device_name in machine.device_names and (collective.library, collective.transport) == ("nccl", "sm")
    is_pair = collective.collective != "send_recv" or collective.group_size == 2
    return is_own and is_pair and not _why_no_collective(collective, calibration)


def outside_calibration(step: Step, machine: Machine) -> tuple[str, ...]:
    """Return why operations of the step are outside the measured range, each reason once; nothing for a GPU that was
    never calibrated, because a report states that once for the whole step.
    """
    calibration = load_calibration(machine)
    if calibration.device_name not in machine.device_names:
        return ()
    reasons = [_why_not(each, calibration) for each in step.operations if not _is_given(each)]
    return tuple(dict.fromkeys(reason for reason in reasons if reason))


def _is_given(operation: Operation) -> bool:
    return operation.lone_us is not None or (isinstance(operation, Kernel) and operation.cta_us is not None)


def _why_not(operation: Operation, calibration: Calibration) -> str:
    """Return why an operation's predicted time is outside the measured range; empty if it is inside."""
    match operation:
        case Collective():
            return _why_no_collective(operation, calibration)
        case Kernel():
            return _why_no_kernel(operation, calibration)
        case Copy(direction="peer_to_peer"):
            return "" if _points(calibration, "copy_us") else "copies between GPUs were not measured"
    return ""


def _why_no_collective(operation: Collective, calibration: Calibration) -> str:
    kind = operation.collective.replace("_", "-")
    points = [each for each in _points(calibration, "collective_us") if each.at.get("kind") == operation.collective]
    if not points:
        return f"{kind}s were not measured"
    ranks = sorted({int(each.at["ranks"]) for each in points})
    more = calibration.collectives[operation.collective].link_fraction_of_more
    if operation.group_size not in ranks and (operation.group_size < max(ranks) or more is None):
        return f"{kind}s of {format_count(operation.group_size, 'rank')} (measured: {format_numbers(ranks)})"
    sizes = [float(each.at["bytes"]) for each in points]
    if not min(sizes) / MARGIN <= operation.num_bytes <= max(sizes) * MARGIN:
        measured = f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
        return f"{kind}s of {format_bytes(operation.num_bytes)} (measured: {measured})"
    return ""


def _why_no_kernel(operation: Kernel, calibration: Calibration) -> str:
    if operation.character not in ("matmul", "attention"):
        return "" if _points(calibration, "streaming_us") else "kernels that stream were not measured"
    if operation.character == "attention":
        return "attention from sizes (measured: long sequences with heads of 128)"
    types = sorted({str(each.at["type"]) for each in _points(calibration, "matmul_us")})
    wanted = operation.element_type or USUAL_ELEMENT_TYPE
    return "" if wanted in types else f"matmuls of {wanted} (measured: {', '.join(types) or 'none'})"


def _points(calibration: Calibration, name: str) -> list[Point]:
    return [each for record in calibration.probes.values() for each in record.points if each.name == name]
