"""Runs a sweep on all cores or on a Ray cluster, and saves finished rows: an interrupted sweep resumes where it stopped.

Combinations are handed out in pieces, in their order, so that neighbors share simulated passes. Each piece that is done is
appended to a CSV file at once. A combination that is impossible is kept too, with the reason, so that it is not tried again.
"""

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import msgspec

from counterpoint.cluster.estimate import ClusterEstimate, PassMemory, estimate_step
from counterpoint.cluster.sweep_file import SweepFile
from counterpoint.cluster.sweep_store import SweepRow, SweepStore
from counterpoint.errors import CounterpointError, DeviceError, cause_of
from counterpoint.workers import num_cores, worker_processes

PIECE = 16  # combinations handed out at a time
MOST_PIECES = 4  # a worker's share that waits, so that Ctrl-C ends soon
REACH_S = 5.0
RAY = "ray>=2.40,<3"
Point = dict[str, Any]


def run_sweep(
    sweep: SweepFile, store: SweepStore, *, ray_address: str | None = None, on_rows: Callable[[int, int], None] | None = None
) -> list[SweepRow]:
    """Estimate what the store lacks, append it, and return all rows in the order of the combinations.

    `ray_address`: a Ray cluster's; None: the cores of this machine. `on_rows` hears how many of all are done, at first of
    those that the store held. Raises `DeviceError` where Ray cannot be reached, or a worker process is killed.
    """
    points = {sweep.key(point): point for point in sweep.axes.points()}
    # the store's values of axes are text
    known = {key: msgspec.structs.replace(row, point=points[key]) for key, row in store.read(points.keys()).items()}
    if on_rows is not None:
        on_rows(len(known), len(points))
    missing = [point for key, point in points.items() if key not in known]
    pieces = [missing[start : start + PIECE] for start in range(0, len(missing), PIECE)]
    done = _on_ray(sweep, pieces, ray_address) if ray_address is not None else _on_cores(sweep, pieces)
    for rows in done:
        store.append(rows)
        known.update({row.key: row for row in rows})
        if on_rows is not None:
            on_rows(len(known), len(points))
    return [known[key] for key in points]


def estimate_points(sweep: SweepFile, points: Sequence[Point]) -> list[SweepRow]:
    """Estimate some combinations, one after the other."""
    memory = PassMemory()
    return [_estimate(sweep, point, memory) for point in points]


def _estimate(sweep: SweepFile, point: Point, memory: PassMemory) -> SweepRow:
    key = sweep.key(point)
    try:
        return SweepRow(key=key, point=point, estimate=estimate_step(sweep.configuration(point), memory))
    except CounterpointError as problem:
        return SweepRow(key=key, point=point, problem=str(problem))


def front(rows: Iterable[SweepRow]) -> list[SweepRow]:
    """Return rows that fit in memory, and that no other beats in tokens per second and GPU, memory and number of GPUs.

    Of rows with equal figures, as where a control changes nothing, the first stands for all.
    """
    able: dict[tuple[float, ...], tuple[SweepRow, ClusterEstimate]] = {}
    for row in rows:
        if row.estimate is not None and row.estimate.fits_memory:
            able.setdefault(_ranked(row.estimate), (row, row.estimate))
    found = [row for row, figures in able.values() if not any(_beats(other, figures) for _, other in able.values())]
    return sorted(found, key=lambda row: -(row.estimate.tokens_per_s_per_gpu if row.estimate else 0.0))


def _beats(one: ClusterEstimate, other: ClusterEstimate) -> bool:
    better = [mine - others for mine, others in zip(_ranked(one), _ranked(other), strict=True)]
    return min(better) >= 0 and max(better) > 0


def _ranked(figures: ClusterEstimate) -> tuple[float, ...]:
    """Return the figures that decide, of each of which more is better."""
    return figures.tokens_per_s_per_gpu, -figures.memory_bytes, -float(figures.num_gpus)


def _on_cores(sweep: SweepFile, pieces: Sequence[Sequence[Point]]) -> Iterator[list[SweepRow]]:
    workers = min(num_cores(), len(pieces))
    if workers <= 1:
        yield from (estimate_points(sweep, piece) for piece in pieces)
        return
    with worker_processes(workers, DeviceError, "use fewer cores (taskset); rows that are done are kept") as pool:
        waiting: set[Future[list[SweepRow]]] = set()
        for piece in pieces:
            waiting.add(pool.submit(estimate_points, sweep, piece))
            if len(waiting) >= MOST_PIECES * workers:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def _on_ray(sweep: SweepFile, pieces: Sequence[Sequence[Point]], address: str) -> Iterator[list[SweepRow]]:
    """Run pieces as tasks of a Ray cluster, whose nodes must have this version of Counterpoint installed."""
    try:
        import ray  # noqa: PLC0415  an extra
    except ModuleNotFoundError as problem:
        raise DeviceError(f"--ray needs 'ray', which is not installed. Install it: pip install '{RAY}'.") from problem
    try:
        _check_reachable(address)
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except Exception as problem:  # Ray raises many kinds, none of them its own base
        raise DeviceError(
            f"No Ray cluster answers at '{address}': {cause_of(problem, 200).rstrip('.')}. Start one (ray start --head), or "
            "leave --ray out."
        ) from problem
    try:
        task = ray.remote(estimate_points)
        shared = ray.put(sweep)
        waiting = [task.remote(shared, piece) for piece in pieces]
        while waiting:
            done, waiting = ray.wait(waiting)
            for each in done:
                yield _result(ray, each)
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise `OSError` where nothing listens at host:port, for which Ray itself would wait a minute and end the process."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if separator and port.isdigit():
        socket.create_connection((host, int(port)), timeout=REACH_S).close()


def _result(ray: Any, task: Any) -> list[SweepRow]:
    try:
        rows: list[SweepRow] = ray.get(task)
    except ray.exceptions.RayError as problem:
        raise DeviceError(
            f"A task of the Ray cluster failed: {cause_of(problem, 200)} What was done is kept; run the sweep again."
        ) from problem
    return rows
