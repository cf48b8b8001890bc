"""Reads a workload file and builds a step from it: entries become operations, and iterations follow one another.

This module does not know the machine: kernels have their work, not their time, unless the file states a lone time.
Operations are issued iteration by iteration. Within one, an entry comes after all entries it waits for, and otherwise in the
order of the file's tables (GEMMs, kernels, collectives, copies). The format is documented in `docs/workloads.md`.
"""

from pathlib import Path

from msgspec.structs import replace

from counterpoint.errors import StepError, WorkloadError, require_kind, shown
from counterpoint.footprints import known_footprint
from counterpoint.step import Collective, Copy, Dependency, Footprint, Kernel, Operation, Step, UnevenParts
from counterpoint.value import (
    check_suffix,
    copy_output,
    read_shipped,
    read_toml,
    require,
    save_text,
    shipped_names,
    shipped_text,
    toml_output,
)
from counterpoint.workloads.description import (
    CollectiveEntry,
    CopyEntry,
    Description,
    Entry,
    Gemm,
    OtherKernel,
    Wait,
    parse_bytes,
    parse_traffic,
    parts_in_bytes,
)
from counterpoint.workloads.gemm import matmul_flops, matmul_hbm_bytes, matmul_l2_bytes, stage_bytes, tile_count

# If a collective states only some launch figures, the rest are those of the NCCL kernel for this architecture.
STATED_FOR = "9.0"
WORKLOAD = toml_output("workload")
TEMPLATE_HEAD = """\
# Give it a name of its own: plans carry the name. What each figure means: docs/workloads.md.
"""


def workload_names() -> list[str]:
    """Return the names of the shipped workloads, sorted."""
    return shipped_names("workloads")


def load_workload(name_or_path: Path | str, *, num_ctas: int | None = None) -> Step:
    """Load a shipped workload by name, or a user's own from a path that ends in `.toml`.

    `num_ctas`, from 1 to the number of tiles, runs every GEMM of the file with that many persistent CTAs, whatever the
    file says. Use it to sweep the CTA count of the computation. Raises `WorkloadError`, in one line that names the file, the
    entry and the value.
    """
    known = f"Known: {', '.join(workload_names())}."
    require_kind(name_or_path, (str, Path), "load_workload takes a name or a path", known)
    if num_ctas is not None:
        require_kind(num_ctas, int, "num_ctas must be a whole number", "Pass one, or leave it out.")
    file, description = _read(name_or_path)
    try:
        return build_step(description, num_ctas)
    except StepError as problem:
        raise WorkloadError(f"{file}: {problem}") from problem


def load_description(name_or_path: Path | str) -> Description:
    """Return the contents of a workload file, for a caller that changes some figures and then calls `build_step`.

    Raises `WorkloadError` as `load_workload` does.
    """
    return _read(name_or_path)[1]


def workload_text(name_or_path: Path | str) -> str:
    """Return a workload's file unchanged, with its comments. Raises `WorkloadError` as `load_workload` does."""
    load_workload(name_or_path)
    path = Path(name_or_path)
    return path.read_text("utf-8") if path.suffix.lower() == ".toml" else shipped_text(f"workloads/{str(path).lower()}.toml")


def save_template(name_or_path: Path | str, path: Path | str) -> None:
    """Write a workload's file as a template for a user's own. Raises `WorkloadError`, also if `path` has no .toml suffix, or
    holds something else or a template that was edited.
    """
    check_suffix(Path(path), WORKLOAD, WorkloadError)
    text = TEMPLATE_HEAD + workload_text(name_or_path).removeprefix(TEMPLATE_HEAD)
    save_text(path, text, copy_output(WORKLOAD.name, text), WorkloadError)


def _read(name_or_path: Path | str) -> tuple[str, Description]:
    """Return the file's name for messages, and its contents."""
    path = Path(name_or_path)
    if path.suffix.lower() == ".toml":
        return str(path), read_toml(path, Description, WorkloadError)
    name, names = str(name_or_path).lower(), workload_names()
    if name not in names:
        raise WorkloadError(
            f"Unknown workload '{shown(name_or_path)}'. Known: {', '.join(names)}; or give the path of a workload "
            "file (.toml)."
        )
    file = f"workloads/{name}.toml"
    return file, read_shipped(file, Description, WorkloadError)


def build_step(description: Description, num_ctas: int | None = None) -> Step:
    """Build the step of a description; `num_ctas` is as in `load_workload`. Raises `StepError` without a file name."""
    if num_ctas is not None:
        description = _with_ctas(description, num_ctas)
    operations: list[Operation] = []
    entries = _issue_order(description)
    previous: dict[str, int] = {}
    for _ in range(description.iterations):
        current: dict[str, int] = {}
        for entry in entries:
            current[entry.name] = len(operations)
            try:
                waits_for = _dependencies(entry, current, previous)
                operation = operation_of(entry, waits_for, description.num_ranks)
            except StepError as problem:
                raise WorkloadError(f"'{shown(entry.name)}': {problem}") from problem
            operations.append(operation)
        previous = current
    return Step(name=description.name, num_ranks=description.num_ranks, operations=tuple(operations))


def _with_ctas(description: Description, num_ctas: int) -> Description:
    require(
        bool(description.gemms),
        WorkloadError,
        f"Workload '{shown(description.name)}' has no GEMM to run with {num_ctas} CTAs; leave num_ctas out.",
    )
    return replace(description, gemms=tuple(replace(gemm, num_ctas=num_ctas) for gemm in description.gemms))


def _waits(entry: Entry) -> list[Wait]:
    return [Wait(name=wait) if isinstance(wait, str) else wait for wait in entry.waits_for]


def _issue_order(description: Description) -> list[Entry]:
    """Return the entries of one iteration, each after all entries it waits for within the iteration."""
    names = {entry.name for entry in description.entries}
    for entry in description.entries:
        for wait in _waits(entry):
            if wait.name not in names:
                raise WorkloadError(
                    f"'{shown(entry.name)}' waits for '{shown(wait.name)}', which the file does not describe. "
                    f"It describes {shown(', '.join(sorted(names)), 400)}."
                )
    waiting = list(description.entries)
    ordered: list[Entry] = []
    issued: set[str] = set()
    while waiting:
        ready = next((entry for entry in waiting if all(w.previous or w.name in issued for w in _waits(entry))), None)
        if ready is None:
            raise WorkloadError(
                f"These entries wait for each other in a cycle: {shown(_cycle(waiting), 400)}. "
                f"Break it, or make one wait for the previous iteration (previous = true)."
            )
        waiting.remove(ready)
        ordered.append(ready)
        issued.add(ready.name)
    return ordered


def _cycle(waiting: list[Entry]) -> str:
    """Return one cycle among entries of which none can be issued, as `a -> b -> a`: each waits for the next."""
    by_name = {entry.name: entry for entry in waiting}
    path = [waiting[0].name]
    while True:
        blocker = next(w.name for w in _waits(by_name[path[-1]]) if not w.previous and w.name in by_name)
        if blocker in path:
            return " -> ".join([*path[path.index(blocker) :], blocker])
        path.append(blocker)


def _dependencies(entry: Entry, current: dict[str, int], previous: dict[str, int]) -> tuple[Dependency, ...]:
    """Return what the operation waits for; in the first iteration there is no previous one."""
    numbers = [
        (previous if wait.previous else current)[wait.name]
        for wait in _waits(entry)
        if not wait.previous or wait.name in previous
    ]
    return tuple(Dependency(operation=number) for number in sorted(set(numbers)))


def operation_of(entry: Entry, waits_for: tuple[Dependency, ...], num_ranks: int) -> Operation:
    """Return the operation that an entry describes, in a step of `num_ranks`."""
    match entry:
        case Gemm():
            return _gemm_kernel(entry, waits_for)
        case OtherKernel():
            return _other_kernel(entry, waits_for)
        case CollectiveEntry():
            return _collective(entry, waits_for, num_ranks)
        case CopyEntry():
            return Copy(
                name=entry.name,
                stream=entry.stream,
                direction=entry.direction,
                num_bytes=parse_bytes(entry.bytes, entry.name),
                lone_us=entry.lone_us,
                waits_for=waits_for,
            )


def _gemm_kernel(gemm: Gemm, waits_for: tuple[Dependency, ...]) -> Kernel:
    tile = gemm.tile_sizes
    stated_bytes = parse_traffic(gemm.hbm_bytes, gemm.name)
    modeled_bytes = matmul_hbm_bytes(gemm.m, gemm.n, gemm.k, gemm.dtype, tile)
    return Kernel(
        name=gemm.name,
        stream=gemm.stream,
        footprint=Footprint(
            num_ctas=tile_count(gemm.m, gemm.n, tile) if gemm.num_ctas is None else gemm.num_ctas,
            threads_per_cta=gemm.threads_per_cta,
            registers_per_thread=gemm.registers_per_thread,
            dynamic_shared_bytes=gemm.shared_bytes,
            carveout_percent=gemm.carveout_percent,
        ),
        character="matmul",
        lone_us=gemm.lone_us,
        flops=matmul_flops(gemm.m, gemm.n, gemm.k),
        hbm_bytes=modeled_bytes if stated_bytes is None else stated_bytes,
        l2_bytes=matmul_l2_bytes(gemm.m, gemm.n, gemm.k, gemm.dtype, tile),
        matmul_sizes=(gemm.m, gemm.k, gemm.n),
        stage_bytes=stage_bytes(gemm.dtype, tile),
        element_type=gemm.dtype,
        is_work_sharing=gemm.is_work_sharing,
        cta_time_spread=gemm.cta_time_spread,
        waits_for=waits_for,
    )


def _other_kernel(kernel: OtherKernel, waits_for: tuple[Dependency, ...]) -> Kernel:
    return Kernel(
        name=kernel.name,
        stream=kernel.stream,
        footprint=Footprint(
            num_ctas=kernel.num_ctas,
            threads_per_cta=kernel.threads_per_cta,
            registers_per_thread=kernel.registers_per_thread,
            dynamic_shared_bytes=kernel.shared_bytes_per_cta,
            ctas_per_cluster=kernel.ctas_per_cluster,
            carveout_percent=kernel.carveout_percent,
        ),
        character=kernel.character,
        lone_us=kernel.lone_us,
        flops=kernel.flops,
        hbm_bytes=parse_traffic(kernel.hbm_bytes, kernel.name),
        element_type=kernel.dtype,
        is_work_sharing=kernel.is_work_sharing,
        cta_time_spread=kernel.cta_time_spread,
        waits_for=waits_for,
    )


def _collective(entry: CollectiveEntry, waits_for: tuple[Dependency, ...], num_ranks: int) -> Collective:
    group_size = num_ranks if entry.group_size is None else entry.group_size
    if not 1 <= group_size <= num_ranks:
        raise WorkloadError(f"group_size must be from 1 to {num_ranks} (num_ranks); found {group_size}.")
    return Collective(
        name=entry.name,
        stream=entry.stream,
        collective=entry.collective,
        num_bytes=parse_bytes(entry.bytes, entry.name),
        group_size=group_size,
        parts=_parts(entry, group_size),
        library=entry.library,
        transport=entry.transport,
        footprint=None if entry.num_ctas is None else _nccl_footprint(entry, entry.num_ctas),
        lone_us=entry.lone_us,
        waits_for=waits_for,
    )


def _parts(entry: CollectiveEntry, group_size: int) -> UnevenParts | None:
    """Return what rank 0 sends to each rank and receives from each in an all-to-all, as the file states."""
    if not entry.sent:
        return None
    if len(entry.sent) != group_size:
        raise WorkloadError(f"sent must have a size for each of {group_size} ranks; found {len(entry.sent)}.")
    sent, received = (parts_in_bytes(parts, entry.name) for parts in (entry.sent, entry.received))
    return UnevenParts(sent_bytes=sent, received_bytes=received, group_rank=0)


def _nccl_footprint(entry: CollectiveEntry, num_ctas: int) -> Footprint:
    """Return the file's figures, completed by NCCL's. NCCL uses no cluster if the cluster size does not divide the grid."""
    usual = known_footprint("nccl", STATED_FOR).footprint()
    cluster = usual.ctas_per_cluster if num_ctas % usual.ctas_per_cluster == 0 else 1
    stated = {
        "num_ctas": num_ctas,
        "threads_per_cta": entry.threads_per_cta,
        "registers_per_thread": entry.registers_per_thread,
        "ctas_per_cluster": cluster if entry.ctas_per_cluster is None else entry.ctas_per_cluster,
    }
    if entry.shared_bytes_per_cta is not None:
        stated |= {"static_shared_bytes": 0, "dynamic_shared_bytes": entry.shared_bytes_per_cta}
    return replace(usual, **{name: figure for name, figure in stated.items() if figure is not None})
