"""Times NCCL's collectives alone, by kind, bytes and CTAs, on all ranks of the calibration.

Each number of CTAs has a communicator of its own, set by `min_ctas` and `max_ctas`; None is NCCL's own choice. Bytes are
those of the buffer that a step names: the gathered or scattered whole, the reduced tensor, what a rank sends to all.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from counterpoint.cuda.probes.session import Issue, Session
from counterpoint.measurement.points import Point, point
from counterpoint.units import MIB

CTA_COUNTS = (None, 4, 8, 16)
SIZES = (MIB // 16, MIB, 8 * MIB, 64 * MIB, 256 * MIB)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv")
LEAST_BYTES_OF_LESS_CTAS = 8 * MIB


def probe_collectives(session: Session) -> list[Point]:
    """Measure the time per collective, back to back; each round counts with its slowest rank."""
    whole = torch.zeros(SIZES[-1] // 2, dtype=torch.bfloat16, device="cuda")
    other = torch.zeros_like(whole)
    points = []
    for num_ctas in CTA_COUNTS:
        group = group_of(num_ctas)
        for kind in KINDS:
            for num_bytes in SIZES:
                if num_ctas is not None and num_bytes < LEAST_BYTES_OF_LESS_CTAS:
                    continue
                issue = collective(kind, num_bytes, (whole, other), group)
                at: dict[str, str | int] = {
                    "kind": kind,
                    "ranks": session.num_ranks,
                    "ctas": num_ctas or "usual",
                    "bytes": num_bytes,
                }
                times = session.times_of_ranks_us(issue, calls=8 if num_bytes <= 8 * MIB else 2)
                points.append(point("collective_us", times, **at))
        session.wait()
    return points


def group_of(num_ctas: int | None) -> dist.ProcessGroup | None:
    """Create a process group of all ranks whose collectives use `num_ctas` CTAs; None: the default group."""
    if num_ctas is None:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = num_ctas
    group: dist.ProcessGroup = dist.new_group(backend="nccl", pg_options=options)
    return group


def collective(
    kind: str, num_bytes: int, buffers: tuple[torch.Tensor, torch.Tensor], group: dist.ProcessGroup | None = None
) -> Issue:
    """Return a function that issues a collective on the current stream; both buffers are bf16, of `num_bytes` or more."""
    count, ranks, rank = num_bytes // 2, dist.get_world_size(), dist.get_rank()
    first, second = buffers[0][:count], buffers[1][:count]
    part = second[: count // ranks]

    def exchange() -> None:
        """Send to the next rank, and receive from the previous one."""
        sent = dist.P2POp(dist.isend, first, (rank + 1) % ranks, group)
        received = dist.P2POp(dist.irecv, second, (rank - 1) % ranks, group)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()

    issues: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(first, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(first, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, first, group=group),
        "all_to_all": lambda: dist.all_to_all_single(second, first, group=group),
        "broadcast": lambda: dist.broadcast(first, 0, group=group),
        "reduce": lambda: dist.reduce(first, 0, group=group),
        "send_recv": exchange,
    }
    return issues[kind]
