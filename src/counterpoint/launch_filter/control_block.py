"""The control block: a file that the launch filter of one process shares with Python. Python writes rules; the filter writes
counters and a census of kernels.

This module needs neither torch nor CUDA. Only one writer may swap tables (two at once would tear them); any number of
readers may read. A swap fills the oldest of the table slots and then raises the generation. The filter checks the slot's
generation and checksum before it uses a new table, so it sees either the old table or the new one, whole. A launch that is
being decided at that time keeps the old table; if as many swaps as there are slots happen within that one launch, it is
counted in a wrong table.

The file is read and written by calls and is not mapped here: if the file was cut short, a call returns an error, whereas
access to a mapped page would end the process.
"""

import os
import zlib
from collections.abc import Sequence
from ctypes import Structure, addressof, memmove, memset, sizeof, string_at
from pathlib import Path
from typing import Any, TypeVar

from counterpoint.errors import LaunchFilterError, PlanError
from counterpoint.launch_filter import layout
from counterpoint.launch_filter.layout import BlockRecord, CounterRecord, FunctionRecord, RuleRecord, SlotRecord
from counterpoint.launch_filter.rules import FilterRule, literal_pattern
from counterpoint.value import Value, require

INITIAL_BLOCK = "initial.block"
NUM_READS = 5  # attempts to read a table before it is reported as damaged
DRIVERS = {0: "", 1: "cuda", 2: "hip"}
REFUSALS = {
    1: "the launch is cooperative (a grid barrier needs all its CTAs resident at once), and such launches are left alone",
    2: "the kernel uses {value:,} bytes of dynamic shared memory already, more than the cap",
    3: "the driver does not allow the kernel so much shared memory (error {value})",
    4: "no CTA would fit an SM with so much shared memory",
    5: "no cluster of it would fit the GPU with so much shared memory",
    6: "the driver rejected the changed launch (error {value}), so launches of this kernel stay unchanged",
    7: "the driver has no cuLaunchKernelEx, which is needed to set a priority; update it",
    8: "the launch already has {value} attributes, so there is no room for one more",
    9: "the launch was captured in a CUDA graph before a launch outside of graphs had proven the change",
    10: "the head start kernel could not be loaded (error {value})",
    11: "the driver rejected the launch of the head start kernel (error {value})",
    12: "a later rule of the table sets the same control for this kernel",
    13: "the highest priority of this GPU is -{value}",
    14: "HIP launches have no priority: set TORCH_NCCL_HIGH_PRIORITY=1 and DEBUG_HIP_IGNORE_STREAM_PRIORITY=0",
    15: "the driver could not report how many CTAs would fit (error {value})",
    16: "{value:,} bytes exceed the 65,536 that a workgroup may use",
    17: "a head start on AMD would need a kernel compiled for each GPU, which the filter does not have",
    18: "AMD GPUs have no carveout: shared memory is not a part of their L1 cache",
}
T = TypeVar("T", bound=Structure)


class RuleCounters(Value, frozen=True, kw_only=True):
    """The launches that one rule matched since its table was put in force, and their outcomes.

    `residency_found` is the driver's answer for the capped launch, the largest of all kernels of the rule. `refusal` is the
    first reason why a control was not applied; `num_refused` counts every control of every launch that was left unchanged.
    """

    num_matched: int = 0
    num_capped: int = 0
    num_prioritized: int = 0
    num_held: int = 0
    num_refused: int = 0
    num_retried: int = 0
    residency_found: int | None = None
    refusal: str = ""


class SeenFunction(Value, frozen=True, kw_only=True):
    """One kernel that was launched, with the arguments of its last launch before any change by the filter.

    A rule with this `pattern` matches it. Kernels of one name, registers and static shared memory are one entry.
    """

    name: str
    pattern: str
    num_launches: int
    num_changed: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared_bytes: int
    static_shared_bytes: int
    registers_per_thread: int
    ctas_per_cluster: int
    is_cooperative: bool
    is_collective: bool
    residency_found: int | None = None


class FilterState(Value, frozen=True, kw_only=True):
    """The state of one process's filter. `counters` are those of `rules`, the table of `generation`, in the same order.

    `num_launches_ex` is how many of `num_launches` came through cuLaunchKernelEx. `driver` is "cuda", "hip", or
    empty before the process reached the launch functions of a driver.
    """

    pid: int
    rank: int
    generation: int
    num_launches: int
    num_launches_ex: int
    driver: str
    rules: tuple[FilterRule, ...]
    counters: tuple[RuleCounters, ...]
    functions: tuple[SeenFunction, ...]
    problem: str


class ControlBlock:
    """The open control block of one process. Close it; a second close does nothing.

    Raises `LaunchFilterError` if the file is no control block.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = _open_file(path)
        header = self._read(BlockRecord.magic.offset, 16)
        expected = _header()
        if header != expected:
            self.close()
            raise LaunchFilterError(f"{path} is not a control block of this version of Counterpoint; start the job again.")

    @classmethod
    def write_initial(cls, path: Path, rules: Sequence[FilterRule]) -> None:
        """Write the block that every process's filter copies when it starts. Raises `LaunchFilterError`, `PlanError`."""
        block = BlockRecord(
            magic=layout.MAGIC, layout_version=layout.LAYOUT_VERSION, block_bytes=sizeof(BlockRecord), rank=-1
        )
        _fill(block.slots[1], rules, 1)
        block.generation = 1
        try:
            path.write_bytes(bytes(block))
        except OSError as problem:
            raise LaunchFilterError(
                f"Cannot write {path}: {problem.strerror}; free space or choose another TMPDIR."
            ) from problem

    def swap(self, rules: Sequence[FilterRule]) -> int:
        """Put another table in force from the next launch on; counters start at 0. Return the new generation."""
        if os.fstat(self._opened()).st_size != sizeof(BlockRecord):
            raise self._damaged("was cut short")
        generation = self._number(BlockRecord.generation.offset) + 1 & (1 << 64) - 1
        slot = SlotRecord()
        _fill(slot, rules, generation)
        self._write(bytes(slot), _slot_offset(generation))
        self._write(generation.to_bytes(8, "little"), BlockRecord.generation.offset)
        return generation

    def state(self) -> FilterState:
        """Return what the filter has seen and done so far; counters advance meanwhile. Raises `LaunchFilterError`."""
        generation, slot = self._table()
        table = _rule_counters(slot)
        header = self._read(0, BlockRecord.slots.offset)
        block = BlockRecord.from_buffer_copy(header + bytes(sizeof(BlockRecord) - len(header)))
        if block.driver not in DRIVERS:
            raise self._damaged(f"names an unknown driver, {block.driver}")
        functions = tuple(self._function(index) for index in range(min(block.num_functions, layout.MAX_FUNCTIONS)))
        return FilterState(
            pid=block.pid,
            rank=block.rank,
            generation=generation,
            num_launches=block.num_untracked + sum(function.num_launches for function, _ in functions),
            num_launches_ex=sum(num_launches_ex for _, num_launches_ex in functions),
            driver=DRIVERS[block.driver],
            rules=tuple(rule for rule, _ in table),
            counters=tuple(counters for _, counters in table),
            functions=tuple(function for function, _ in functions),
            problem=bytes(block.problem)[: block.problem_bytes].decode(errors="replace"),
        )

    def rule_counters(self) -> tuple[tuple[FilterRule, RuleCounters], ...]:
        """Return the rules in force with their counters. Unlike `state`, it does not read the kernels seen, which takes
        milliseconds. Raises `LaunchFilterError`."""
        _, slot = self._table()
        return _rule_counters(slot)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _table(self) -> tuple[int, SlotRecord]:
        """Return the table in force; if a swap happens meanwhile, read again."""
        for _ in range(NUM_READS):
            generation = self._number(BlockRecord.generation.offset)
            slot = self._copy(SlotRecord, _slot_offset(generation))
            if slot.generation == generation and _is_whole(slot):
                return generation, slot
        raise self._damaged(f"holds no table of generation {generation}")

    def _function(self, index: int) -> tuple[SeenFunction, int]:
        record = self._copy(FunctionRecord, BlockRecord.functions.offset + index * sizeof(FunctionRecord))
        return _seen(record), record.num_launches_ex

    def _opened(self) -> int:
        if self._file is None:
            raise LaunchFilterError(f"The control block {self._path} is closed; open it again.")
        return self._file

    def _read(self, offset: int, size: int) -> bytes:
        content = os.pread(self._opened(), size, offset)
        if len(content) != size:
            raise self._damaged("was cut short")
        return content

    def _write(self, content: bytes, offset: int) -> None:
        if os.pwrite(self._opened(), content, offset) != len(content):
            raise self._damaged("could not be written completely")

    def _damaged(self, how: str) -> LaunchFilterError:
        return LaunchFilterError(f"The control block {self._path} is damaged: it {how}; start the job again.")

    def _number(self, offset: int) -> int:
        return int.from_bytes(self._read(offset, 8), "little")

    def _copy(self, kind: type[T], offset: int) -> T:
        return kind.from_buffer_copy(self._read(offset, sizeof(kind)))


def _rule_counters(slot: SlotRecord) -> tuple[tuple[FilterRule, RuleCounters], ...]:
    return tuple((_rule(slot, index), _counters(slot.counters[index])) for index in range(slot.num_rules))


def block_paths(directory: Path) -> list[Path]:
    """Return the blocks of the processes whose filter started, by name; none if the folder does not exist."""
    return sorted(path for path in directory.glob("*.block") if path.name != INITIAL_BLOCK)


def block_in_use(directory: Path, pid: int) -> Path | None:
    """Return the block that the filter of a running process has mapped; None if there is none. After exec, or if a process
    number is used again, the folder also holds earlier blocks of that number, which no filter reads any more.
    """
    candidates = [path for path in block_paths(directory) if path.stem.partition("-")[0] == str(pid)]
    if not candidates:
        return None
    mapped = {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines()}
    return next((path for path in candidates if bytes(path.resolve()) in mapped), None)


def _header() -> bytes:
    block = BlockRecord(magic=layout.MAGIC, layout_version=layout.LAYOUT_VERSION, block_bytes=sizeof(BlockRecord))
    return bytes(block)[:16]


def _open_file(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as problem:
        raise LaunchFilterError(
            f"Cannot open {path}: {problem.strerror}; name the control block of a running job."
        ) from problem
    size = os.fstat(descriptor).st_size
    if size != sizeof(BlockRecord):
        os.close(descriptor)
        raise LaunchFilterError(
            f"{path} has {size:,} bytes, but a control block has {sizeof(BlockRecord):,}; name one of this version."
        )
    return descriptor


def _slot_offset(generation: int) -> int:
    return int(BlockRecord.slots.offset) + generation % layout.NUM_SLOTS * sizeof(SlotRecord)


def _fill(slot: Any, rules: Sequence[FilterRule], generation: int) -> None:
    """Write a table into a slot; the filter does not use it before the checksum and both generations agree."""
    patterns = [rule.pattern.encode() for rule in rules]
    require(
        len(rules) <= layout.MAX_RULES,
        PlanError,
        f"A plan may have at most {layout.MAX_RULES} rules for launches; found {len(rules)}. Name kernels by patterns.",
    )
    pool = b"".join(patterns)
    require(
        len(pool) <= layout.PATTERN_POOL_BYTES,
        PlanError,
        f"The patterns of a plan may have at most {layout.PATTERN_POOL_BYTES:,} bytes; found {len(pool):,}. Use "
        "shorter patterns.",
    )
    memset(addressof(slot), 0, sizeof(SlotRecord))  # this also invalidates the table that was here
    offset = 0
    for index, (rule, pattern) in enumerate(zip(rules, patterns, strict=True)):
        slot.rules[index] = _record(rule, offset, len(pattern))
        slot.counters[index].residency_found = -1
        offset += len(pattern)
    memmove(addressof(slot) + SlotRecord.pool.offset, pool, len(pool))
    slot.num_rules = len(rules)
    slot.pool_bytes = len(pool)
    slot.checksum = _checksum(slot)
    slot.generation = generation


def _checksum(slot: Any) -> int:
    used = string_at(addressof(slot) + SlotRecord.rules.offset, slot.num_rules * sizeof(RuleRecord))
    pool = string_at(addressof(slot) + SlotRecord.pool.offset, slot.pool_bytes)
    return zlib.crc32(pool, zlib.crc32(used))


def _is_whole(slot: SlotRecord) -> bool:
    """Return whether a table is as it was written, so that every figure in it is in its range."""
    has_sizes = slot.num_rules <= layout.MAX_RULES and slot.pool_bytes <= layout.PATTERN_POOL_BYTES
    return has_sizes and bool(_checksum(slot) == slot.checksum)


def _record(rule: FilterRule, offset: int, size: int) -> RuleRecord:
    sets = {
        layout.HAS_CAP: rule.dynamic_shared_bytes is not None,
        layout.HAS_CTAS: rule.ctas_per_sm is not None,
        layout.HAS_CARVEOUT: rule.carveout_percent is not None,
        layout.HAS_PRIORITY: rule.priority is not None,
        layout.HAS_HOLD: rule.hold_us is not None,
        layout.IS_COLLECTIVE: rule.is_collective,
        layout.NOT_COLLECTIVE: rule.kind == "computation",
        layout.ONLY_COLLECTIVE: rule.kind == "communication",
    }
    return RuleRecord(
        pattern_offset=offset,
        pattern_bytes=size,
        sets=sum(bit for bit, is_set in sets.items() if is_set),
        dynamic_shared_bytes=rule.dynamic_shared_bytes or 0,
        ctas_per_sm=rule.ctas_per_sm or 0,
        carveout_percent=rule.carveout_percent or 0,
        priority=rule.priority or 0,
        hold_us=rule.hold_us or 0.0,
    )


def _rule(slot: SlotRecord, index: int) -> FilterRule:
    """Return the rule at an index of a slot."""
    record = slot.rules[index]
    pool = string_at(addressof(slot) + SlotRecord.pool.offset, slot.pool_bytes)
    kinds = {layout.NOT_COLLECTIVE: "computation", layout.ONLY_COLLECTIVE: "communication"}
    kind: Any = kinds.get(record.sets & (layout.NOT_COLLECTIVE | layout.ONLY_COLLECTIVE))
    return FilterRule(
        pattern=pool[record.pattern_offset : record.pattern_offset + record.pattern_bytes].decode(),
        kind=kind,
        dynamic_shared_bytes=record.dynamic_shared_bytes if record.sets & layout.HAS_CAP else None,
        ctas_per_sm=record.ctas_per_sm if record.sets & layout.HAS_CTAS else None,
        carveout_percent=record.carveout_percent if record.sets & layout.HAS_CARVEOUT else None,
        priority=record.priority if record.sets & layout.HAS_PRIORITY else None,
        hold_us=record.hold_us if record.sets & layout.HAS_HOLD else None,
        is_collective=bool(record.sets & layout.IS_COLLECTIVE),
    )


def _counters(record: CounterRecord) -> RuleCounters:
    code, value = record.refusal >> 32, record.refusal & 0xFFFF_FFFF
    return RuleCounters(
        num_matched=record.num_matched,
        num_capped=record.num_capped,
        num_prioritized=record.num_prioritized,
        num_held=record.num_held,
        num_refused=record.num_refused,
        num_retried=record.num_retried,
        residency_found=None if record.residency_found < 0 else record.residency_found,
        refusal=REFUSALS.get(code, f"reason {code}, which this version does not know").format(value=value) if code else "",
    )


def _seen(record: FunctionRecord) -> SeenFunction:
    def halves(word: int) -> tuple[int, int]:
        return word & 0xFFFF_FFFF, word >> 32

    name = bytes(record.name)[: record.name_bytes].decode(errors="replace")
    is_truncated = bool(record.traits & layout.IS_NAME_TRUNCATED)
    (grid_x, grid_y), (grid_z, block_x), (block_y, block_z) = map(
        halves, (record.grid_xy, record.grid_z_block_x, record.block_yz)
    )
    return SeenFunction(
        name=name,
        pattern=literal_pattern(name) + ("*" if is_truncated else ""),
        num_launches=record.num_launches,
        num_changed=record.num_changed,
        grid=(grid_x, grid_y, grid_z),
        block=(block_x, block_y, block_z),
        dynamic_shared_bytes=record.dynamic_shared_bytes,
        static_shared_bytes=record.static_shared_bytes,
        registers_per_thread=record.registers_per_thread,
        ctas_per_cluster=record.ctas_per_cluster,
        is_cooperative=bool(record.traits & layout.IS_COOPERATIVE),
        is_collective=bool(record.traits & layout.IS_COLLECTIVE_FUNCTION),
        residency_found=None if record.residency_found < 0 else record.residency_found,
    )
