"""Fits constants that depend on several points: what saturates an SM or the memory, and the bandwidth of collectives.

Saturation is fitted with the simulator itself: it simulates the probe's kernel at each residency, and the constant is the
one whose times are nearest to the measured ones. Collectives are fitted with their formula (`costs.py`).
"""

import math
from collections.abc import Sequence

import msgspec

from counterpoint.controls import Priority, ResidencyCap
from counterpoint.footprints import communication_footprint
from counterpoint.machine import Machine
from counterpoint.measurement.points import Point
from counterpoint.occupancy import cap_shared_bytes
from counterpoint.plan import Directive, Match, Plan
from counterpoint.sim.calibration import LARGE_BYTES, Calibration, CollectiveConstants
from counterpoint.sim.calibration_fit import Fitted, Points, log_error, minimize, num_ranks
from counterpoint.sim.matmul_rates import is_l2_limited
from counterpoint.sim.rates import EXPONENT, SM_EXPONENT, smooth_minimum
from counterpoint.sim.reach import wire_bytes
from counterpoint.sim.simulator import Simulator
from counterpoint.step import Character, Collective, CollectiveKind, Dependency, Footprint, Kernel, Step
from counterpoint.units import MIB, US_PER_S, format_numbers
from counterpoint.workloads.gemm import parse_tile, stage_bytes

LEAST_FRACTION, MOST_LATENCY_US = 0.05, 200.0
USUAL_WEIGHT = 20
LEAST_WAVES = 8.0  # least waves of a tiled matmul: with fewer, the last wave and L2's contents determine its time
WARP_SIZE = 32  # of the GPUs that `counterpoint calibrate` measures
BYTES_OF_A_THREAD = {"bf16": 16, "fp32": 32}  # bytes that PyTorch's elementwise kernel keeps in flight
NUM_STREAMING = 16  # number of kernels in a row, enough to outlast a collective beside them
CONTENDING_BYTES = 256 * MIB
TWO_RANKS = {"ranks": 2}
OF_MORE = "; of more ranks: "  # in a source, before what the figures of more than two ranks follow from
FIGURES_OF_MORE = ("link_fraction_of_more", "bytes_per_s_per_cta_of_more", "latency_us_by_bytes_of_more")
REFERENCE_KIND: CollectiveKind = "all_reduce"  # `latency_per_load` describes its CTAs
# PyTorch's elementwise kernel on 512 MiB of fp32, as in the probe
STREAMING = Footprint(num_ctas=131_072, threads_per_cta=128, registers_per_thread=32)
# for each character the constant that says what saturates an SM, and the name and the conditions of the points that tell it
SATURATIONS: dict[Character, tuple[str, str, dict[str, float | str]]] = {
    "row_wise": ("saturation_warps", "rows_capped_us", {}),
    "attention": ("saturation_registers", "attention_capped_us", {}),
    "other": ("saturation_warps", "arithmetic_capped_us", {"chains": 1}),
}
Sample = tuple[int, float, float]  # CTAs, bytes on the wire, microseconds


def fit_saturation(points: Points, machine: Machine, calibration: Calibration, character: Character) -> Fitted | None:
    """Fit the warps or registers that saturate an SM."""
    constant, name, at = SATURATIONS[character]
    groups = _by_kernel(points.all(name, **at))
    if not groups:
        return None
    constants = calibration.characters[character]

    def error(figures: Sequence[float]) -> float:
        changed = msgspec.structs.replace(constants, **{constant: figures[0]})
        tried = msgspec.structs.replace(calibration, characters=calibration.characters | {character: changed})
        return _error_of(tried, machine, character, groups)

    (value,), left = minimize(error, [getattr(constants, constant)])
    return Fitted(value=value, spread=left, source=_source_of(name, groups, left))


def fit_tiles(points: Points, machine: Machine, calibration: Calibration) -> dict[str, Fitted]:
    """Fit the bytes in flight that saturate an SM with tiles of matmuls, and `l2_crowding`, to matmuls at each residency.

    If L2 limits none of them, they say nothing of `l2_crowding`.
    """
    groups = [group for group in _by_kernel(points.all("matmul_capped_us")) if _tells_of_load(group, machine)]
    if not groups:
        return {}
    matmul = calibration.characters["matmul"]

    def error(figures: Sequence[float]) -> float:
        changed = msgspec.structs.replace(matmul, saturation_bytes_in_flight=figures[0])
        crowding = msgspec.structs.replace(calibration.l2_crowding, value=figures[1])
        characters = calibration.characters | {"matmul": changed}
        tried = msgspec.structs.replace(calibration, characters=characters, l2_crowding=crowding)
        return _error_of(tried, machine, "matmul", groups)

    start = (matmul.saturation_bytes_in_flight or 0.0, calibration.l2_crowding.value)
    (in_flight, crowding), left = minimize(error, start)
    source = _source_of("matmul_capped_us", groups, left)
    values = {"saturation_bytes_in_flight": in_flight}
    if any(is_l2_limited(_kernel(group[0], "matmul"), machine, calibration) for group in groups):
        values["l2_crowding"] = crowding
    return {name: Fitted(value=value, spread=left, source=source) for name, value in values.items()}


def _error_of(calibration: Calibration, machine: Machine, character: Character, groups: Sequence[Sequence[Point]]) -> float:
    simulator = Simulator(calibration)
    return log_error(pair for group in groups for pair in _capped_times(simulator, machine, character, group))


def _source_of(name: str, groups: Sequence[Sequence[Point]], left: float) -> str:
    seen = ", ".join(_by_residency(group) for group in groups)
    return f"{name} by CTAs on an SM: {seen}; mean error of the fit {100 * left:.1f} %"


def _by_kernel(points: Sequence[Point]) -> list[list[Point]]:
    """Return the points of each kernel that was timed at several residencies."""
    kernels: dict[tuple[tuple[str, float | str], ...], list[Point]] = {}
    for each in points:
        key = tuple((name, value) for name, value in each.at.items() if name != "ctas_per_sm")
        kernels.setdefault(key, []).append(each)
    return [group for group in kernels.values() if len(group) > 1]


def _by_residency(group: Sequence[Point]) -> str:
    return ", ".join(f"{each.at['ctas_per_sm']}: {each.value:,.0f}" for each in group)


def fit_streaming(points: Points, machine: Machine, calibration: Calibration) -> dict[str, Fitted]:
    """Fit `saturation_warps` of streaming kernels and `latency_at_low_load` to one kernel at each residency, by type.

    Threads of fp32 keep twice the bytes of bf16 in flight, so half as many warps saturate the memory; the constant holds
    for bf16.
    """
    by_type = {name: points.all("streaming_capped_us", type=name) for name in BYTES_OF_A_THREAD}
    groups = {name: group for name, group in by_type.items() if len(group) > 2}
    if not groups:
        return {}
    constants = calibration.characters["streaming"]

    def error(figures: Sequence[float]) -> float:
        latency = msgspec.structs.replace(calibration.latency_at_low_load, value=figures[1])
        pairs = []
        for name, group in groups.items():
            warps = figures[0] * BYTES_OF_A_THREAD["bf16"] / BYTES_OF_A_THREAD[name]
            streaming = msgspec.structs.replace(constants, saturation_warps=warps)
            characters = calibration.characters | {"streaming": streaming}
            tried = msgspec.structs.replace(calibration, characters=characters, latency_at_low_load=latency)
            pairs += _capped_times(Simulator(tried), machine, "streaming", group)
        return log_error(pairs)

    (warps, latency), left = minimize(error, (constants.saturation_warps, calibration.latency_at_low_load.value))
    seen = "; ".join(f"{name} {_by_residency(group)}" for name, group in groups.items())
    source = f"streaming_capped_us by CTAs on an SM, one fit of both constants: {seen}; mean error {100 * left:.1f} %"
    values = {"saturation_warps": warps, "latency_at_low_load": latency}
    return {name: Fitted(value=value, spread=left, source=source) for name, value in values.items()}


def _tells_of_load(group: Sequence[Point], machine: Machine) -> bool:
    """Return whether a tiled matmul was measured under load, as in real steps, and has enough waves.

    A cool GPU keeps its clock for a short time, so it then takes more CTAs to saturate it than in a step.
    """
    if not group or not all(each.at.get("loaded_ms") for each in group):
        return False
    usual = max(group, key=lambda each: each.at["ctas_per_sm"])
    return int(usual.at["ctas"]) / int(usual.at["ctas_per_sm"]) / machine.gpu.num_sms >= LEAST_WAVES


def row_wise_fraction(points: Points, hbm_bytes_per_s: float, saturation_warps: float) -> float | None:
    """Return the share of the memory's bandwidth that softmax along long rows would reach on saturated SMs, reading and
    writing bf16 once. It waits for its own loads, so of a wider memory it reaches less.
    """
    times = points.all("rows_capped_us", kernel="softmax")
    if not times:
        return None
    usual = max(times, key=lambda each: (each.at["columns"], each.at["ctas_per_sm"]))
    warps = float(usual.at["ctas_per_sm"]) * float(usual.at["threads"]) / WARP_SIZE
    reached = 2 * 2 * float(usual.at["rows"]) * float(usual.at["columns"]) * US_PER_S / usual.value / hbm_bytes_per_s
    return reached / smooth_minimum(warps / saturation_warps, 1.0, SM_EXPONENT)


def _capped_times(
    simulator: Simulator, machine: Machine, character: Character, group: Sequence[Point]
) -> list[tuple[float, float]]:
    """Return simulated and measured times of one kernel at each residency except its own, which the simulator is given."""
    usual = max(group, key=lambda each: each.at["ctas_per_sm"])
    kernel = _kernel(usual, character)
    step = Step(name="probe", num_ranks=1, operations=(kernel,))
    times = []
    for each in group:
        if each is usual:
            continue
        wanted = int(each.at["ctas_per_sm"])
        dynamic_bytes = cap_shared_bytes(machine.gpu, kernel.footprint, wanted)
        cap = ResidencyCap(ctas_per_sm=wanted, dynamic_shared_bytes=dynamic_bytes, carveout_percent=-1)
        plan = Plan(directives=(Directive(match=Match(operations=(0,)), controls=(cap,), reason="probe"),))
        times.append((simulator.run(step, machine, plan).intervals[0].end_us, each.value))
    return times


def _kernel(each: Point, character: Character) -> Kernel:
    """Return the kernel that a residency probe measured."""
    number = {key: int(each.at[key]) for key in ("ctas", "threads", "registers", "shared_bytes")}
    footprint = Footprint(
        num_ctas=number["ctas"],
        threads_per_cta=number["threads"],
        registers_per_thread=number["registers"],
        dynamic_shared_bytes=number["shared_bytes"],
    )
    tile = str(each.at.get("tile", "")).partition(",")[0]  # the number of stages may follow
    return Kernel(
        name="probe",
        stream=0,
        footprint=footprint,
        character=character,
        lone_us=each.value,
        stage_bytes=stage_bytes("bf16", parse_tile(tile, each.name)) if tile else None,
    )


def fit_l2(points: Points, machine: Machine, calibration: Calibration) -> Fitted | None:
    """Fit the bytes per cycle and SM from L2 to tiled matmuls at their own residency, which read every tile from there."""
    tiles = {"64x64x32": 64, "128x128x32": 128}
    rates = []
    for tile, length in tiles.items():
        measured = points.all("matmul_capped_us", tile=tile)
        if not _tells_of_load(measured, machine):
            continue
        each = max(measured, key=lambda point: point.at["ctas_per_sm"])
        size = int(each.at["size"])
        moved = (size // length) ** 2 * size * 2 * length * 2
        kernel = msgspec.structs.replace(_kernel(each, "matmul"), lone_us=None, flops=1.0, l2_bytes=float(moved))
        step = Step(name="probe", num_ranks=1, operations=(kernel,))
        (simulated,) = Simulator(calibration).lone_times_us(step, machine)
        rates.append(calibration.l2_bytes_per_cycle_per_sm.value * simulated / each.value)
    if not rates:
        return None
    middle = (max(rates) + min(rates)) / 2
    source = f"Triton bf16 matmuls of tiles {' and '.join(tiles)}: {', '.join(f'{rate:.1f}' for rate in rates)}"
    return Fitted(value=middle, spread=(max(rates) - min(rates)) / 2 / middle, source=source)


def fit_contention(points: Points, machine: Machine, calibration: Calibration) -> dict[str, Fitted] | None:
    """Fit `latency_per_load` and `hbm_bytes_per_wire_byte` to an all-reduce among streaming kernels, and to a streaming
    kernel beside all-reduces, of the fewest ranks. Both are simulated, as for saturation.
    """
    found = points.of_fewest_ranks("collective_beside_us", kind="all_reduce", kernel="streaming")
    if not found:
        return None
    slowed, ranks = found[-1], _at_ranks(found[-1])
    alone = points.one("kernel_us", kernel="streaming", group="contention", **ranks)
    collective = points.one("collective_us", kind="all_reduce", ctas="usual", bytes=CONTENDING_BYTES, **(ranks or TWO_RANKS))
    kernel = points.one("kernel_beside_us", kind="all_reduce", kernel="streaming", **ranks)
    if alone is None or collective is None or kernel is None:
        return None
    lone, group_size = (alone.value, collective.value), num_ranks(collective)

    def error(figures: Sequence[float]) -> float:
        changed = {
            "latency_per_load": msgspec.structs.replace(calibration.latency_per_load, value=figures[0]),
            "hbm_bytes_per_wire_byte": msgspec.structs.replace(calibration.hbm_bytes_per_wire_byte, value=figures[1]),
        }
        simulator = Simulator(msgspec.structs.replace(calibration, **changed))
        times = _contending_us(simulator, machine, lone, group_size)
        return log_error(zip(times, (slowed.value, kernel.value), strict=True))

    start = (calibration.latency_per_load.value, calibration.hbm_bytes_per_wire_byte.value)
    (per_load, per_wire), left = minimize(error, start)
    source = (
        f"an all-reduce of 256 MiB takes {slowed.value:,.0f} us among streaming kernels, alone {lone[1]:,.0f}; one of these "
        f"takes {kernel.value:.0f} beside all-reduces, alone {lone[0]:.0f}; error of the fit {100 * left:.1f} %"
    )
    return {
        "latency_per_load": Fitted(value=per_load, spread=left, source=source),
        "hbm_bytes_per_wire_byte": Fitted(value=per_wire, spread=left, source=source),
    }


def _at_ranks(each: Point) -> dict[str, int]:
    """Return the condition that other points of the same ranks meet; no condition if the point does not state its ranks."""
    return {"ranks": num_ranks(each)} if num_ranks(each) else {}


def _contending_us(
    simulator: Simulator, machine: Machine, lone_us: tuple[float, float], group_size: int
) -> tuple[float, float]:
    """Simulate an all-reduce of the highest priority among streaming kernels, and a streaming kernel beside all-reduces."""
    streaming = Kernel(name="streaming", stream=0, footprint=STREAMING, character="streaming", lone_us=lone_us[0])
    communication = Collective(
        name="all-reduce",
        stream=1,
        collective="all_reduce",
        num_bytes=CONTENDING_BYTES,
        group_size=group_size,
        lone_us=lone_us[1],
    )
    priority = Priority(priority=machine.gpu.greatest_priority)
    plan = Plan(directives=(Directive(match=Match(kind="communication"), controls=(priority,), reason="probe"),))
    late = msgspec.structs.replace(communication, waits_for=(Dependency(operation=0),))
    among = Step(name="among", num_ranks=group_size, operations=(*[streaming] * NUM_STREAMING, late))
    beside = Step(name="beside", num_ranks=group_size, operations=(*[communication] * 3, streaming, streaming))
    times = []
    for step, number in ((among, NUM_STREAMING), (beside, 4)):
        intervals = simulator.run(step, machine, plan).intervals
        times += [each.end_us - each.start_us for each in intervals if each.operation == number]
    return times[0], times[1]


def latency_weight(points: Points, machine: Machine, calibration: Calibration, kind: CollectiveKind) -> float | None:
    """Return how much the memory's latency slows a kind's CTAs among streaming kernels, relative to an all-reduce's.

    Inverts the formula of a collective's rate: how much less each CTA moves among streaming kernels than alone.
    """
    growth = [_slowdown_of_ctas(points, machine, calibration, each) for each in (kind, REFERENCE_KIND)]
    if growth[0] is None or not growth[1]:
        return None
    return growth[0] / growth[1]


def _slowdown_of_ctas(points: Points, machine: Machine, calibration: Calibration, kind: CollectiveKind) -> float | None:
    """Return by what share CTAs that move 256 MiB take longer among streaming kernels than alone, as the fewest ranks
    measured it; None if not measured.
    """
    found = points.of_fewest_ranks("collective_beside_us", kind=kind, kernel="streaming", bytes=CONTENDING_BYTES)
    if not found:
        return None
    beside, ranks = found[-1], _at_ranks(found[-1]) or TWO_RANKS
    alone = points.one("collective_us", kind=kind, ctas="usual", bytes=CONTENDING_BYTES, **ranks)
    if alone is None:
        return None
    size = num_ranks(alone)
    constants = calibration.collectives[kind].of_ranks(size)
    limit = constants.link_fraction * machine.link.per_peer_bytes_per_s
    moved = wire_bytes(kind, CONTENDING_BYTES, size)
    rates = [US_PER_S * moved / (each.value - constants.latency_us) for each in (alone, beside)]
    if not 0 < rates[1] < rates[0] < limit:
        return None
    # solves the smooth minimum of c and the limit for c
    alone_rate, beside_rate = (float((rate**-EXPONENT - limit**-EXPONENT) ** (-1 / EXPONENT)) for rate in rates)
    return alone_rate / beside_rate - 1


def fit_collective(
    points: Points, machine: Machine, kind: CollectiveKind, known: CollectiveConstants
) -> CollectiveConstants | None:
    """Fit bandwidth and latency of one kind with two ranks, its latency by bytes, and the share of the link that more ranks
    reach. What was not measured stays as known; None if nothing was.
    """
    of_two = _of_two_ranks(points, machine, kind, known)
    found = of_two or known
    more = _of_more_ranks(points, machine, kind, found)
    source = found.source.partition(OF_MORE)[0]
    if more is not None:
        figures, told = more
        return msgspec.structs.replace(found, source=f"{source}{OF_MORE}{told}", **figures)
    if of_two is None or all(getattr(known, name) in (None, ()) for name in FIGURES_OF_MORE):
        return of_two
    by_cta = known.bytes_per_s_per_cta_of_more
    if by_cta is not None:  # a CTA with more ranks moves so much more on any GPU
        by_cta = float(f"{by_cta * of_two.bytes_per_s_per_cta / known.bytes_per_s_per_cta:.4g}")
    return msgspec.structs.replace(
        of_two, bytes_per_s_per_cta_of_more=by_cta, source=f"{source}{OF_MORE}as before: {known.source}"
    )


def _of_two_ranks(
    points: Points, machine: Machine, kind: CollectiveKind, known: CollectiveConstants
) -> CollectiveConstants | None:
    """Return the constants as two ranks measured them; None without enough points."""
    usual = communication_footprint(machine.gpu, "nccl").num_ctas
    found = points.all("collective_us", kind=kind, ranks=2)
    measured = [(_sample(each, kind, usual), float(each.at["bytes"])) for each in found]
    large = [sample for sample, num_bytes in measured if num_bytes >= LARGE_BYTES]
    if len({num_ctas for num_ctas, _, _ in large}) < 2:
        return None
    link = machine.link.per_peer_bytes_per_s
    # the numbers of CTAs that jobs use get the largest weight
    weighted = large + [sample for sample in large if sample[0] == usual] * USUAL_WEIGHT

    def error(figures: Sequence[float]) -> float:
        by_cta, fraction, latency_us = figures
        if not LEAST_FRACTION <= fraction <= 1 or not 1 <= latency_us <= MOST_LATENCY_US:
            return math.inf
        rates = [smooth_minimum(num_ctas * by_cta, fraction * link) for num_ctas, _, _ in weighted]
        times = [latency_us + US_PER_S * moved / rate for rate, (_, moved, _) in zip(rates, weighted, strict=True)]
        return log_error(zip(times, (time_us for _, _, time_us in weighted), strict=True))

    start = (known.bytes_per_s_per_cta, known.link_fraction, known.latency_us)
    (by_cta, fraction, latency_us), left = minimize(error, start)
    best = {"bytes_per_s_per_cta": by_cta, "link_fraction": fraction, "latency_us": latency_us}
    small = _small_latencies(found, kind, usual, msgspec.structs.replace(known, **best), link)
    return msgspec.structs.replace(
        known,
        bytes_per_s_per_cta=float(f"{by_cta:.4g}"),
        link_fraction=float(f"{fraction:.3g}"),
        latency_us=float(f"{latency_us:.3g}"),
        latency_us_by_bytes=small,
        spread=round(left, 4),
        source=f"{len(measured)} times of 2 ranks, {usual} CTAs and fewer; mean error of the fit {100 * left:.1f} %",
    )


def _rising(latencies: Sequence[tuple[float, float]], largest_us: float) -> tuple[tuple[float, float], ...]:
    """Return latencies by bytes, without disturbed ones: a smaller message must not have a greater latency than a larger
    one.
    """
    found, most = [], largest_us
    for num_bytes, latency_us in sorted(latencies, reverse=True):
        most = min(most, latency_us)
        found.append((num_bytes, most))
    return tuple(reversed(found))


def _of_more_ranks(
    points: Points, machine: Machine, kind: CollectiveKind, of_two: CollectiveConstants
) -> tuple[dict[str, object], str] | None:
    """Return the figures of more than two ranks by name, and what they follow from; None if more ranks measured nothing.

    Ranks that send to one peer (`send_recv`) use the link as two ranks do, so they have no such figures.
    """
    usual, link = communication_footprint(machine.gpu, "nccl").num_ctas, machine.link.per_peer_bytes_per_s
    found = [each for each in points.all("collective_us", kind=kind) if num_ranks(each) > 2]
    large = [each for each in found if float(each.at["bytes"]) >= LARGE_BYTES]
    if kind == "send_recv" or not any(each.at["ctas"] == "usual" for each in large):
        return None
    weighted = large + [each for each in large if each.at["ctas"] == "usual"] * USUAL_WEIGHT
    has_less = any(each.at["ctas"] != "usual" for each in large)

    def tried(figures: Sequence[float]) -> CollectiveConstants:
        by_cta = figures[1] if has_less else of_two.bytes_per_s_per_cta
        more = {"link_fraction_of_more": figures[0], "bytes_per_s_per_cta_of_more": by_cta}
        return msgspec.structs.replace(of_two, **more)

    def error(figures: Sequence[float]) -> float:
        if not LEAST_FRACTION <= figures[0] <= 1:
            return math.inf
        constants = tried(figures).of_ranks(num_ranks(large[0]))
        return log_error((_time_us(constants, each, kind, usual, link), each.value) for each in weighted)

    start = [of_two.link_fraction, of_two.bytes_per_s_per_cta]
    best, left = minimize(error, start if has_less else start[:1])
    constants = tried(best)
    figures: dict[str, object] = {
        "link_fraction_of_more": float(f"{best[0]:.3g}"),
        "latency_us_by_bytes_of_more": _small_latencies(found, kind, usual, constants, link),
    }
    if has_less:
        figures["bytes_per_s_per_cta_of_more"] = float(f"{best[1]:.4g}")
    ranks = sorted({num_ranks(each) for each in found})
    told = f"{len(found)} times of {format_numbers(ranks)} ranks; mean error of the fit {100 * left:.1f} %"
    return figures, told


def _time_us(constants: CollectiveConstants, each: Point, kind: CollectiveKind, usual: int, link: float) -> float:
    """Return the time of a measured collective by the simulator's formula."""
    num_ctas, moved, _ = _sample(each, kind, usual)
    by_cta = constants.bytes_per_s_per_cta
    if num_ctas < usual:
        by_cta = constants.rate_of_few(moved / (num_ranks(each) - 1) if kind == "all_to_all" else moved, num_ctas)
    return constants.latency_us + US_PER_S * moved / smooth_minimum(num_ctas * by_cta, constants.link_fraction * link)


def _small_latencies(
    found: Sequence[Point], kind: CollectiveKind, usual: int, constants: CollectiveConstants, link: float
) -> tuple[tuple[float, float], ...]:
    """Return the latencies by bytes of small messages of the usual CTAs: their times beyond those of their bytes."""
    small = []
    for each in found:
        num_bytes = float(each.at["bytes"])
        if each.at["ctas"] == "usual" and num_bytes < LARGE_BYTES:
            own = constants.of_ranks(num_ranks(each))
            moving_us = _time_us(own, each, kind, usual, link) - own.latency_us
            small.append((num_bytes, round(max(0.0, each.value - moving_us), 2)))
    return _rising(small, constants.latency_us)


def more_ranks_alone(
    kept: CollectiveConstants, before: CollectiveConstants, now: CollectiveConstants
) -> CollectiveConstants | None:
    """Return `kept` with the figures of more ranks as they are now; None if other figures differ from before, too."""
    changed = {name for name in now.__struct_fields__ if getattr(now, name) != getattr(before, name)}
    if not changed <= {*FIGURES_OF_MORE, "date", "source"}:
        return None
    source = f"{kept.source.partition(OF_MORE)[0]}{OF_MORE}{now.source.partition(OF_MORE)[2]}"
    figures = {name: getattr(now, name) for name in FIGURES_OF_MORE}
    return msgspec.structs.replace(kept, **figures, date=now.date, source=source)


def _sample(each: Point, kind: CollectiveKind, usual: int) -> Sample:
    num_ctas = usual if each.at["ctas"] == "usual" else int(each.at["ctas"])
    return num_ctas, wire_bytes(kind, int(each.at["bytes"]), int(each.at["ranks"])), each.value
