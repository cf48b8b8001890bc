"""A GPU's calibration file: derived from the measurements of its probes, and readable for people.

Constants that were not measured are the H200's, and on another GPU they are marked as assumed. Points are at the end of the
file, one per line.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from counterpoint.errors import MachineError
from counterpoint.machine import Machine, load_machine
from counterpoint.measurement.points import Point
from counterpoint.sim.calibration import (
    BASE,
    TABLES,
    AnyConstant,
    Calibration,
    CharacterConstants,
    CollectiveConstants,
    Constant,
    MeasuredRule,
    ProbeRecord,
    as_assumed_elsewhere,
    constants_of,
    load_calibration,
)
from counterpoint.sim.calibration_curves import (
    SATURATIONS,
    fit_collective,
    fit_contention,
    fit_l2,
    fit_saturation,
    fit_streaming,
    fit_tiles,
    latency_weight,
    more_ranks_alone,
    row_wise_fraction,
)
from counterpoint.sim.calibration_fit import Fitted, Points, fit_matmul_fractions, fit_scalars
from counterpoint.sim.calibration_power import fit_power
from counterpoint.step import Character
from counterpoint.value import save_text, toml_output, write_toml

CALIBRATION = toml_output("calibration")
JOINT = ("latency_per_load", "hbm_bytes_per_wire_byte")  # constants that one fit gives together
RACE = ("launch_gap_us", "dependency_latency_us")
WAVES = 4  # waves of the probes' first kernel
RULE_TOLERANCE = 0.2  # tolerance in waves; if the rule does not hold, the figure is off by half a wave or more
RANKS = re.compile(r" of (\d+) ranks$")  # in the name of a probe between GPUs
POWER_LIMIT = "power limit"  # the condition that says the GPU's limit, as "700 W"
# The rule behind each case of the placement probe: when the second kernel starts, in waves of the first.
RULES: dict[str, tuple[dict[str, float | str], float, str]] = {
    "leftover_with_room": (
        {"case": "equal_priority_with_room"},
        WAVES - 1,
        "at equal priority a kernel starts when the earlier one has placed all its CTAs, although there is room",
    ),
    "leftover_full": ({"case": "equal_priority_full"}, WAVES, "at equal priority no freed slot goes to a later kernel"),
    "priority_with_room": (
        {"case": "greatest_priority_with_room"},
        0.13,
        "the greatest priority starts at once where there is room",
    ),
    "priority_stops_refill": ({"case": "greatest_priority_full"}, 1.0, "the greatest priority gets the first freed slot"),
    "priority_stops_refill_until_it_fits": (
        {"case": "greatest_priority_large_full"},
        1.0,
        "lesser kernels wait until a large CTA of the greatest priority fits",
    ),
    "carveout_of_first_kernel": (
        {"case": "beside_with_room", "carveout_percent": -1},
        1.0,
        "an SM's carveout is set by the first kernel on it and holds until it is empty",
    ),
    "carveout_asked_for": (
        {"case": "beside_with_room", "carveout_percent": 100},
        0.13,
        "with a carveout of 100 % a large CTA starts beside the first kernel at once",
    ),
}
HEAD = """\
# Constants of the simulator, measured on {device} by `counterpoint calibrate`.
# Each says where it is from and when; `spread` is relative. What is missing is assumed to be the H200's.
# The points that the constants were derived from stand at the end. What each means: docs/calibrate.md, docs/simulator.md.

"""


def derive(
    machine: Machine, device_name: str, conditions: Mapping[str, str], probes: Mapping[str, ProbeRecord]
) -> Calibration:
    """Derive the constants of a GPU from its probes; the rest are the H200's.

    A constant that was measured in whole steps on the H200 is scaled by the ratio of the same probe here and there,
    because a probe is not a step. An assumed constant is replaced by the probe's value.
    """
    reference, points = load_calibration(), _points(probes)
    day = max((record.date for record in probes.values()), default="")
    base = as_assumed_elsewhere(reference, device_name)
    base = msgspec.structs.replace(base, conditions=dict(conditions), probes=dict(probes), rules={})
    there, home = _points(reference.probes), load_machine(BASE)
    base = _with_scalars(base, fit_scalars(points, machine), fit_scalars(there, home), day)
    base = _with_types(base, points, machine, day)
    collectives = dict(base.collectives)
    for kind, known in base.collectives.items():
        found = fit_collective(points, machine, kind, known)
        if found is not None:
            collectives[kind] = msgspec.structs.replace(found, status="measured", date=day)
    base = msgspec.structs.replace(base, collectives=collectives)
    base = _with_weights(base, points, machine)
    streaming, tiles = fit_streaming(points, machine, base), fit_tiles(points, machine, base)
    base = _with_saturation(base, "streaming", streaming, day)
    base = _with_saturation(base, "matmul", tiles, day)
    base = msgspec.structs.replace(base, characters=_characters(base, points, machine, day), rules=_rules(points, day))
    here, at_home = fit_contention(points, machine, base), fit_contention(there, home, reference)
    if here is not None and at_home is not None:
        base = _with_scalars(base, here, at_home, day)
    l2 = fit_l2(points, machine, base)
    if l2 is not None:
        base = msgspec.structs.replace(base, l2_bytes_per_cycle_per_sm=_constant(l2, day))
    return _with_power(base, points, conditions.get(POWER_LIMIT, ""), day)


def with_points_alone(
    file: Calibration | None, device_name: str, conditions: Mapping[str, str], probes: Mapping[str, ProbeRecord]
) -> Calibration:
    """Return a file's constants, or the H200's without a file, beside points from which no constant could be derived.

    Probes that the file does not hold, or holds with other points, are marked; those that it holds stay as they are.
    """
    base = file or msgspec.structs.replace(as_assumed_elsewhere(load_calibration(), device_name), probes={}, rules={})
    marked = {
        name: record if record == base.probes.get(name) else msgspec.structs.replace(record, is_derived=False)
        for name, record in probes.items()
    }
    return msgspec.structs.replace(base, conditions=dict(conditions), probes=marked)


def renewed(file: Calibration, earlier: Calibration, now: Calibration) -> Calibration:
    """Return `now`, with the constants and rules as a file has them that the latest points do not change.

    `earlier` was derived from the file's points alone, and `now` from the latest ones, too. What both agree on was not
    measured since, so it keeps the file's value, date and source.
    """
    changed: dict[str, object] = {}
    for name in now.__struct_fields__:
        mine = getattr(now, name)
        kept, before = getattr(file, name), getattr(earlier, name)
        if isinstance(mine, Constant):
            changed[name] = kept if _is_same(mine, before) else mine
        elif name in (*TABLES, "rules"):
            changed[name] = {key: _renewed_entry(kept.get(key), before.get(key), each) for key, each in mine.items()}
    return msgspec.structs.replace(now, **changed)


def _renewed_entry(
    kept: AnyConstant | MeasuredRule | None, before: AnyConstant | MeasuredRule | None, now: AnyConstant | MeasuredRule
) -> AnyConstant | MeasuredRule:
    """Return a table's entry as the file has it if its points did not change, otherwise as it is now."""
    if kept is None:
        return now
    if _is_same(now, before):
        return kept
    if (
        isinstance(kept, CollectiveConstants)
        and isinstance(before, CollectiveConstants)
        and isinstance(now, CollectiveConstants)
    ):
        return more_ranks_alone(kept, before, now) or now
    return now


def _is_same(one: AnyConstant | MeasuredRule, other: AnyConstant | MeasuredRule | None) -> bool:
    """Return whether two entries differ by their date at most."""
    return other is not None and one == msgspec.structs.replace(other, date=one.date)


def _points(probes: Mapping[str, ProbeRecord]) -> Points:
    """Return the points of all probes. Those of a probe between GPUs state its number of ranks."""
    return Points(_with_ranks(point, label) for label, record in probes.items() for point in record.points)


def _with_ranks(point: Point, label: str) -> Point:
    found = RANKS.search(label)
    return point if found is None else msgspec.structs.replace(point, at={"ranks": int(found[1])} | point.at)


def _with_scalars(base: Calibration, here: Mapping[str, Fitted], there: Mapping[str, Fitted], day: str) -> Calibration:
    """Return the constants with the probes' values here, and on the H200 (`there`)."""
    reference, changed = load_calibration(), {}
    is_paired = all(name in here and name in there for name in RACE)
    for name, found in here.items():
        if name in RACE and not is_paired:
            continue  # the difference decides which of two kernels goes first
        known = getattr(reference, name)
        if known.status == "assumed" and name not in JOINT:
            changed[name] = _constant(found, day)
        elif name in there:
            value, other = known.value * found.value / there[name].value, there[name].value
            is_home = base.device_name == reference.device_name
            whose, compared = ("", "now and before") if is_home else ("the H200's ", "here and there")
            scaled = f"{whose}{known.value:g} x {found.value:.4g} / {other:.4g}"
            source = f"{scaled}, this probe {compared}: {found.source}"
            changed[name] = _constant(Fitted(value=value, spread=found.spread, source=source), day)
    return msgspec.structs.replace(base, **changed)


def _with_types(base: Calibration, points: Points, machine: Machine, day: str) -> Calibration:
    """Return the constants with the matmul fractions by type."""
    found = {name: _constant(each, day) for name, each in fit_matmul_fractions(points, machine).items()}
    return msgspec.structs.replace(base, matmul_peak_fractions=base.matmul_peak_fractions | found)


def _with_weights(base: Calibration, points: Points, machine: Machine) -> Calibration:
    """Return the constants with the latency weight of each kind of collective that was measured among streaming kernels."""
    collectives = dict(base.collectives)
    for kind, known in base.collectives.items():
        weight = latency_weight(points, machine, base, kind)
        if weight is not None:
            collectives[kind] = msgspec.structs.replace(known, latency_weight=float(f"{weight:.3g}"))
    return msgspec.structs.replace(base, collectives=collectives)


def _with_saturation(base: Calibration, character: Character, found: Mapping[str, Fitted], day: str) -> Calibration:
    """Return the constants of one fit: what saturates kernels of a character, and another constant."""
    changed = base
    for name, fitted in found.items():
        if name in CharacterConstants.__struct_fields__:
            constants = _saturated(changed.characters[character], name, fitted, day)
            changed = msgspec.structs.replace(changed, characters=changed.characters | {character: constants})
        else:
            changed = msgspec.structs.replace(changed, **{name: _constant(fitted, day)})
    return changed


def _saturated(constants: CharacterConstants, name: str, found: Fitted, day: str) -> CharacterConstants:
    figures = {name: float(f"{found.value:.4g}"), "spread": round(found.spread, 4), "source": found.source}
    return msgspec.structs.replace(constants, status="measured", date=day, **figures)


def _with_power(base: Calibration, points: Points, limit: str, day: str) -> Calibration:
    """Return the constants with the figures of power that points of load tell. `limit` is that condition."""
    found = fit_power(points, float(limit.removesuffix(" W"))) if limit else {}
    return msgspec.structs.replace(base, power=base.power | {name: _constant(each, day) for name, each in found.items()})


def _constant(found: Fitted, day: str) -> Constant:
    value, spread = float(f"{found.value:.4g}"), round(found.spread, 4)
    return Constant(value=value, spread=spread, status="measured", date=day, source=found.source)


def _characters(base: Calibration, points: Points, machine: Machine, day: str) -> dict[Character, CharacterConstants]:
    characters = dict(base.characters)
    for character, (constant, *_) in SATURATIONS.items():
        found = fit_saturation(points, machine, base, character)
        if found is not None:
            characters[character] = _saturated(characters[character], constant, found, day)
    row_wise, reached = characters["row_wise"], base.hbm_efficiency.value * machine.gpu.hbm_bytes_per_s
    fraction = row_wise_fraction(points, reached, row_wise.saturation_warps)
    if fraction is not None:
        characters["row_wise"] = msgspec.structs.replace(row_wise, hbm_fraction=float(f"{fraction:.3g}"))
    return characters


def _rules(points: Points, day: str) -> dict[str, MeasuredRule]:
    rules = {}
    for name, (at, expected, says) in RULES.items():
        found = points.one("second_kernel_starts_waves", **at)
        if found is not None:
            holds = abs(found.value - expected) <= RULE_TOLERANCE
            rules[name] = MeasuredRule(value=found.value, expected=expected, holds=holds, date=day, source=says)
    return rules


def broken_rules(calibration: Calibration) -> tuple[str, ...]:
    """Describe the dispatch rules that the simulator assumes and that this GPU breaks."""
    return tuple(
        f"{name}: {rule.source}; measured {rule.value:g} waves, expected {rule.expected:g}"
        for name, rule in calibration.rules.items()
        if not rule.holds
    )


def save_calibration(calibration: Calibration, path: Path | str) -> None:
    """Write the calibration to a file. Raises `MachineError` if that is impossible, or if the file holds something else."""
    text = HEAD.format(device=calibration.device_name) + write_toml(_without_assumed(calibration))
    for name, record in calibration.probes.items():
        head = write_toml({"probes": {name: msgspec.structs.replace(record, points=())}})
        text += f"\n{head.removeprefix('[probes]').strip()}\n{_point_lines(record.points)}"
    save_text(path, text, CALIBRATION, MachineError)


def _without_assumed(calibration: Calibration) -> dict[str, object]:
    """Return what the file holds before its points; for another GPU than the H200, only measured constants."""
    found: dict[str, object] = {"device_name": calibration.device_name, "conditions": calibration.conditions}
    is_elsewhere = calibration.device_name != load_calibration().device_name
    for name, entry in constants_of(calibration).items():
        if is_elsewhere and entry.status == "assumed":
            continue
        group, _, key = name.partition(".")
        if key:
            table = found.setdefault(group, {})
            assert isinstance(table, dict), "constants and tables have different names"
            table[key] = entry
        else:
            found[name] = entry
    return {**found, "rules": calibration.rules}


def _point_lines(points: Iterable[Point]) -> str:
    """Return the points as a TOML array of inline tables, one per line."""
    lines = []
    for each in points:
        at = ", ".join(f"{key} = {_plain(value)}" for key, value in each.at.items())
        lines.append(
            f"  {{ name = {_plain(each.name)}, value = {each.value!r}, spread = {each.spread!r}, at = {{ {at} }} }},"
        )
    return "\n".join(["points = [", *lines, "]", ""])


def _plain(value: float | str) -> str:
    return msgspec.json.encode(value).decode()
