"""Finds the clock of a step under the power limit, from the mean power of its operations.

A GPU lowers its clock to hold its mean power over some tens of milliseconds at the limit. Lone times that were taken in
short bursts or follow from sizes belong to a burst's higher clock, so a step that runs continuously takes longer. At a
share c of the burst's clock, an operation takes 1 / c as long. Its watts above an idle GPU are multiplied by c to the power
of `exponent`, because the voltage falls with the clock. Kernels that the memory limits take no longer: matmuls of 128 rows
draw as much as large ones, at a clock that is as low, and take as long as in a burst. Matmuls of small tiles wait for L2:
they take as long down to a clock at which the SMs limit them. With few CTAs on an SM, which wait for their tiles, they slow
down from the start.
The power of an operation does not depend on what runs beside it. The mean power of a step is the sum of each operation's
watts times its time alone, divided by the time of the step. At the clock sought, it equals the power that the limit leaves
above an idle GPU. The step is simulated again at that clock.

Lone times of a captured step are taken one after the other. What comes after the limit's window already has the lower clock
that the limit allows operations one after the other.

The clock is unchanged if a calibration has no figures of power, or if lone times come from a job that ran continuously.
"""

from collections.abc import Callable, Sequence

import msgspec

from counterpoint.machine import Machine
from counterpoint.sim.calibration import Calibration, PowerFigure
from counterpoint.sim.matmul_rates import share_of_instructions
from counterpoint.sim.tiles import tile_of
from counterpoint.step import Character, Collective, Copy, Kernel, Operation

SAME_CLOCK = 2e-4  # a smaller difference has no measurable effect
MOST_ROUNDS = 8  # each changes the clock by at most a third of what the one before did
# Reads from L2 limit the matmul of a smaller tile than 128x128: by the reuse of its elements, or, where the tile is not
# known, by the registers that its results take.
LARGE_TILE_REUSE = 128
LARGE_TILE_REGISTERS = 128 * 128
# Attention that is made for compute capability 9 has a group of warps that loads, and two that multiply. It keeps the matrix
# units busier than FlashAttention 2, whose CTAs have fewer threads.
SPECIALIZED_THREADS = 384
KNEE_EXPONENT = 12  # how sharply the clock begins to limit a matmul that waits for L2 at a burst's clock
OF_CHARACTERS: dict[Character, PowerFigure] = {
    "attention": "attention_w",
    "streaming": "streaming_w",
    "row_wise": "row_wise_w",
    "other": "other_w",
}


class Drawn(msgspec.Struct, frozen=True):
    """An operation's energy in a burst: watts above idle times microseconds."""

    operation: Operation
    energy: float


class PowerModel:
    """Finds the clock under the power limit from the power figures of one calibration, which must have them."""

    def __init__(self, machine: Machine, calibration: Calibration) -> None:
        self._machine, self._calibration, self._figures = machine, calibration, calibration.power

    def share_in_burst(self, lone_us: Sequence[float]) -> float:
        """Return the share of lone times, taken one after the other, that ends before the power limit acts."""
        return min(1.0, self._figures["window_us"].value / max(sum(lone_us), 1.0))

    def drawn(self, operation: Operation, lone_us: float, *, is_copied: bool) -> Drawn:
        """Return the energy of an operation that takes `lone_us` alone; `is_copied`: copy engines move it."""
        return Drawn(operation, self._figures[_figure_of(operation, is_copied=is_copied)].value * lone_us)

    def allowed(self, drawn: Sequence[Drawn], time_us: Callable[[float], float], first: float = 1.0) -> float:
        """Return the share of a burst's clock at which the mean power of operations is at the limit.

        `time_us` returns how long they take together at a share of the clock, `first` is where the search begins.
        """
        found = first
        for _ in range(MOST_ROUNDS):
            before, found = found, self._nearer(drawn, time_us(found), found)
            if abs(found - before) < SAME_CLOCK:
                break
        return found

    def _nearer(self, drawn: Sequence[Drawn], makespan_us: float, clock_share: float) -> float:
        """Return a clock, as a share of a burst's, that is nearer to the limit than the one that gave this makespan."""
        exponent = self._figures["exponent"].value
        left = self._figures["limit_w"].value - self._figures["idle_w"].value
        slower = (slowdown(each.operation, self._machine, self._calibration, clock_share) for each in drawn)
        energy = sum(each.energy * longer for each, longer in zip(drawn, slower, strict=True))
        used = energy * clock_share**exponent / makespan_us
        return min(1.0, clock_share * (left / used) ** (1 / exponent)) if used else 1.0


def slowdown(operation: Operation, machine: Machine, calibration: Calibration, clock_share: float) -> float:
    """Return how much longer an operation takes alone at this share of a burst's clock: 1 for communication and copies, and
    for kernels that the memory limits.
    """
    if not isinstance(operation, Kernel) or calibration.characters[operation.character].bottleneck == "hbm":
        return 1.0
    if not calibration.power:
        return 1 / clock_share
    figure = _figure_of(operation, is_copied=False)
    if figure == "matmul_w":
        knee = calibration.power["matmul_clock_knee"].value
        longer = (1 + (knee / clock_share) ** KNEE_EXPONENT) / (1 + knee**KNEE_EXPONENT)
        return float(longer ** (1 / KNEE_EXPONENT))
    if figure == "large_matmul_w":
        return float(clock_share ** -calibration.power["large_matmul_clock_exponent"].value)
    return float(clock_share ** -share_of_instructions(operation, machine, calibration))


def tile_latency(kernel: Kernel, calibration: Calibration, clock_share: float) -> float:
    """Return how much longer tiles of a matmul are on their way at this share of a burst's clock; 1 for other kernels, and
    for large tiles, whose own exponent says it.
    """
    if not calibration.power or _figure_of(kernel, is_copied=False) != "matmul_w":
        return 1.0
    return float(clock_share ** -calibration.power["tile_clock_exponent"].value)


def _figure_of(operation: Operation, *, is_copied: bool) -> PowerFigure:
    """Return the name of the power figure that applies to an operation."""
    if is_copied or isinstance(operation, Copy):
        return "copy_w"
    if isinstance(operation, Collective):
        return "collective_w"
    if operation.character == "attention" and operation.footprint.threads_per_cta < SPECIALIZED_THREADS:
        return "flash_attention_w"
    if operation.character != "matmul":
        return OF_CHARACTERS[operation.character]
    if operation.element_type == "fp32":
        return "fp32_matmul_w"
    if operation.is_work_sharing:
        return "library_matmul_w"
    footprint, tile = operation.footprint, tile_of(operation)
    if tile is not None:
        return "large_matmul_w" if tile.reuse >= LARGE_TILE_REUSE else "matmul_w"
    is_large = footprint.threads_per_cta * footprint.registers_per_thread >= LARGE_TILE_REGISTERS
    return "large_matmul_w" if is_large else "matmul_w"
