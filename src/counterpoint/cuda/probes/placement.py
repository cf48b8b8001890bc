"""Tests the rules for placing CTAs that the simulator assumes, each by a figure that shows whether the rule holds.

A long kernel of several waves takes its slots; a second kernel is ready a little later on another stream. The time at which
the second kernel's CTAs start, in waves of the first, shows the rule. CTAs only wait, so no figure depends on rates.
"""

import torch

from counterpoint.cuda.probes.occupying import Marks, ProbeLaunch, occupy
from counterpoint.cuda.probes.session import Session
from counterpoint.measurement.points import Point, point

WAVES = 4
WAVE_US = 200.0
ROUNDS = 5
THREADS = 256
COMMUNICATION = ProbeLaunch(num_ctas=24, threads=512, shared_bytes=100 * 1024)  # footprint of an NCCL CTA on such GPUs
HEAD_STARTS_US = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0)


def probe_placement(session: Session) -> list[Point]:
    """Test the leftover policy, refill by priority, the carveout, and how CTAs spread over SMs."""
    full = session.gpu.max_warps_per_sm * session.gpu.warp_size // THREADS
    greatest = session.gpu.greatest_priority
    small = ProbeLaunch(num_ctas=1, threads=32)
    points = []
    for name, ctas_per_sm, second, priority in (
        ("equal_priority_with_room", 2, small, 0),
        ("equal_priority_full", full, small, 0),
        ("greatest_priority_with_room", 2, small, greatest),
        ("greatest_priority_full", full, small, greatest),
        ("greatest_priority_large_full", full, COMMUNICATION, greatest),
    ):
        first = ProbeLaunch(num_ctas=WAVES * ctas_per_sm * session.num_sms, threads=THREADS)
        if ctas_per_sm < full:
            first = _with_residency(session, first, ctas_per_sm)
        waves = [_start_in_waves(session, first, second, priority) for _ in range(1 + ROUNDS)][1:]
        points.append(point("second_kernel_starts_waves", waves, case=name))
    return [*points, *_carveouts(session), *_spread(session)]


def probe_head_start(session: Session) -> list[Point]:
    """Measure how long a kernel must wait so that a second one, ready at the same event on another stream, goes first."""
    full = session.gpu.max_warps_per_sm * session.gpu.warp_size // THREADS
    first = ProbeLaunch(num_ctas=full * session.num_sms, threads=THREADS)
    points = []
    for hold_us in HEAD_STARTS_US:
        won = [_goes_first(session, first, hold_us) for _ in range(8)][1:]
        points.append(point("second_kernel_goes_first_share", [sum(won) / len(won)], head_start_us=hold_us))
    return points


def _with_residency(session: Session, launch: ProbeLaunch, ctas_per_sm: int) -> ProbeLaunch:
    """Return the launch with the shared memory that lets `ctas_per_sm` CTAs fit on an SM, and the largest carveout."""
    gpu = session.gpu
    least = gpu.shared_bytes_per_sm // (ctas_per_sm + 1) + gpu.shared_allocation_unit_bytes
    wanted = least - gpu.reserved_shared_bytes_per_cta
    return ProbeLaunch(num_ctas=launch.num_ctas, threads=launch.threads, shared_bytes=wanted, carveout_percent=100)


def _start_in_waves(session: Session, first: ProbeLaunch, second: ProbeLaunch, priority: int) -> float:
    """Return the time from the first kernel's start to the start of the second's last CTA, in waves of the first."""
    marks, later = Marks(first.num_ctas), Marks(second.num_ctas)
    side = torch.cuda.Stream(priority=priority)
    session.wait()
    session.hold(200)
    ready = session.mark()
    occupy(first, marks, WAVE_US)
    side.wait_event(ready)
    with torch.cuda.stream(side):
        session.delay_without_sm()
        occupy(second, later, 10.0)
        done = session.mark()
    session.wait(done, session.mark())
    return (max(later.starts_us()) - min(marks.starts_us())) / WAVE_US


def _goes_first(session: Session, first: ProbeLaunch, hold_us: float) -> bool:
    marks, later = Marks(first.num_ctas), Marks(COMMUNICATION.num_ctas)
    side = torch.cuda.Stream()
    session.wait()
    session.hold(300)
    ready = session.mark()
    if hold_us:
        session.hold(hold_us)
    occupy(first, marks, WAVE_US)
    side.wait_event(ready)
    with torch.cuda.stream(side):
        occupy(COMMUNICATION, later, 10.0)
        done = session.mark()
    session.wait(done, session.mark())
    return max(later.starts_us()) - min(marks.starts_us()) < WAVE_US / 2


def _carveouts(session: Session) -> list[Point]:
    """Place a large kernel beside one that leaves room for it, with the driver's carveout and with the largest."""
    points = []
    for carveout in (-1, 100):
        # a single wave, so the free slots are free from the start
        first = ProbeLaunch(num_ctas=2 * session.num_sms, threads=THREADS, shared_bytes=8192, carveout_percent=carveout)
        greatest = session.gpu.greatest_priority
        waves = [_start_in_waves(session, first, COMMUNICATION, greatest) for _ in range(1 + ROUNDS)][1:]
        points.append(point("second_kernel_starts_waves", waves, case="beside_with_room", carveout_percent=carveout))
    return points


def _spread(session: Session) -> list[Point]:
    """Count the SMs that a kernel's CTAs spread over on an idle GPU."""
    points = []
    for num_ctas in (session.num_sms // 2, session.num_sms, 2 * session.num_sms):
        launch, marks = ProbeLaunch(num_ctas=num_ctas, threads=THREADS), Marks(num_ctas)
        session.wait()
        occupy(launch, marks, WAVE_US)
        session.wait()
        used = marks.sms()
        points.append(point("most_ctas_on_an_sm", [max(used.count(sm) for sm in set(used))], ctas=num_ctas))
    return points
