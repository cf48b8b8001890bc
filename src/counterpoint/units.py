"""Conversions and formatting of quantities. Times are microseconds outside the simulator, picoseconds inside."""

from collections.abc import Iterable

PS_PER_US = 1_000_000
NS_PER_US = 1_000
US_PER_S = 1_000_000.0
KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def us_to_ps(time_us: float) -> int:
    """Round microseconds to whole picoseconds."""
    return round(time_us * PS_PER_US)


def ps_to_us(time_ps: int) -> float:
    """Turn picoseconds into microseconds."""
    return time_ps / PS_PER_US


def format_us(time_us: float) -> str:
    """Print a time with four significant digits and the unit that suits it."""
    magnitude = abs(time_us)
    if magnitude >= 999_950:
        return f"{time_us / 1e6:.4g} s"
    if magnitude >= 999.95:
        return f"{time_us / 1e3:.4g} ms"
    return f"{time_us:.4g} us"


def format_span(low_us: float, high_us: float) -> str:
    """Print two times as a span, with three significant digits in the unit of the greater, as in "1.8 to 2.6 ms"."""
    number, unit = format_us(high_us).split()
    scale = float(number) / high_us if high_us else 1.0
    return f"{low_us * scale:.3g} to {high_us * scale:.3g} {unit}"


def format_bytes(num_bytes: float) -> str:
    """Print a size in binary units."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:.0f} B"


def format_exact_bytes(num_bytes: int) -> str:
    """Print a size in binary units, and its bytes where the former are rounded: "128 MiB (134,234,112 B)"."""
    rounded = format_bytes(num_bytes)
    number, unit = rounded.split()
    factor = {"GiB": GIB, "MiB": MIB, "KiB": KIB, "B": 1}[unit]
    return rounded if float(number) * factor == num_bytes else f"{rounded} ({num_bytes:,} B)"


def format_rate(bytes_per_s: float) -> str:
    """Print a bandwidth in decimal units, as vendors and nccl-tests do."""
    return f"{bytes_per_s / 1e12:.4g} TB/s" if bytes_per_s >= 999.95e9 else f"{bytes_per_s / 1e9:.4g} GB/s"


def format_count(number: int, singular: str, plural: str = "") -> str:
    """Print a number with its noun: "1 CTA", "2 CTAs"; give `plural` if appending an s is not enough."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def format_numbers(numbers: Iterable[int], most_shown: int | None = None) -> str:
    """Print whole numbers as ranges, ascending: "0-3, 6"; if there are more than `most_shown` ranges, the first ones and
    the count.
    """
    ordered = sorted(set(numbers))
    starts = [n for place, n in enumerate(ordered) if not place or ordered[place - 1] != n - 1]
    ends = [n for place, n in enumerate(ordered) if place + 1 == len(ordered) or ordered[place + 1] != n + 1]
    ranges = [str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    if most_shown is not None and len(ranges) > most_shown:
        ranges = [*ranges[:most_shown], f"... ({len(ordered)} in all)"]
    return ", ".join(ranges)


def format_numbered(noun: str, numbers: Iterable[int], most_shown: int | None = None) -> str:
    """Print numbers, as `format_numbers` does, behind their noun: "rank 3", "ranks 0-3, 6"."""
    found = set(numbers)
    return f"{noun}{'s' * (len(found) != 1)} {format_numbers(found, most_shown)}"


def format_choice(names: Iterable[str]) -> str:
    """Print names to choose from: "chunk, peer or fused"."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def format_percent(fraction: float) -> str:
    """Print a fraction as a percentage with one decimal."""
    return f"{100 * fraction:z.1f} %"


def format_change(fraction: float) -> str:
    """Print a change as a percentage with its sign and one decimal; a change that rounds to zero has no sign."""
    shown = f"{100 * fraction:+.1f} %"
    return shown[1:] if shown[1:] == "0.0 %" else shown
