"""Analyses made by hand, small or large, with figures that agree with each other."""

from itertools import cycle

from counterpoint.analysis.values import (
    Analysis,
    Breakdown,
    Cause,
    CauseTotal,
    Change,
    CollectiveSize,
    CollectiveSkew,
    ExposedInterval,
    Headline,
    IdleRow,
    LaneInterval,
    OperatorRow,
    PathRow,
    RankAnalysis,
    RankWaits,
    Recoverable,
    Role,
    Slowdown,
    StepFigures,
    TracedCollective,
)

CAUSES: tuple[Cause, ...] = (
    "dependent",
    "starved",
    "own_stream",
    "queued",
    "hardware_queue",
    "launched_late",
    "slow_rank",
    "uneven",
    "tail",
)
HOSTILE = "kernel</script><script>document.title='broken'</script>\"'&<b>\u202ereversed\u2028"
NAMES = (
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16> >",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
    "ncclDevKernel_AllGather_RING_LL",
    "Memcpy PtoP (Device -> Device)",
    HOSTILE,
)
STEP_US = 40_000.0
CLOCK_SHIFT_US = 1_000.0  # of each rank's clock to that of the one before
NUM_STEPS = 4
SHOWN_STEP = 2


def rank_analysis(rank: int, num_operations: int = 60, num_exposed: int = 9) -> RankAnalysis:
    """A rank whose computation, collectives and copies alternate on three streams; its clock is its own."""
    start_us = SHOWN_STEP * STEP_US - rank * CLOCK_SHIFT_US
    each_us = STEP_US / num_operations
    lanes = []
    for place in range(num_operations):
        at_us = start_us + place * each_us
        if place % 6 == 3:
            lanes.append(_lane(20, at_us, 1.4 * each_us, 2 + place // 6 % 2, "communication"))
        elif place % 30 == 5:
            lanes.append(_lane(24, at_us, 0.7 * each_us, 4, "copy"))
        else:
            lanes.append(_lane(7, at_us, 0.9 * each_us, 5 if place == 1 else place % 2, "computation"))
    steps = tuple(_step(rank, step) for step in range(NUM_STEPS))
    return RankAnalysis(
        path=f"traces/rank{rank}.json.gz",
        rank=rank,
        world_size=8,
        device_name="NVIDIA H200",
        num_operations=num_operations * NUM_STEPS,
        steps=steps,
        collectives=tuple(
            TracedCollective(
                rank=rank,
                number=number,
                group_number=number,
                step=SHOWN_STEP,
                name=NAMES[2],
                collective="reduce_scatter",
                transport="nccl",
                stream=20,
                start_us=start_us,
                end_us=start_us + 300,
            )
            for number in range(3)
        ),
        exposed=exposed_intervals(rank, num_exposed, start_us),
        operators=(
            OperatorRow(
                name="aten::mm",
                kernel=NAMES[0],
                shapes="[8192, 4096] x [4096, 14336]",
                count=64,
                total_us=20_100.0,
                mean_us=314.0,
                tflops=612.4,
            ),
            OperatorRow(name="aten::add_", kernel=HOSTILE, count=12, total_us=800.0, mean_us=66.7),
        ),
        idle=(
            IdleRow(rank=rank, stream=7, cause="host", time_us=812.0),
            IdleRow(rank=rank, stream=20, cause="event", time_us=9),
        ),
        critical_path=(
            PathRow(rank=rank, cause="computation", time_us=30_000.0),
            PathRow(rank=rank, cause="communication", time_us=10_000.0),
        ),
        slowdowns=(
            Slowdown(
                rank=rank,
                kernel=NAMES[0],
                beside=NAMES[2],
                count=14,
                alone_us=300,
                beside_us=360,
                lost_us=840,
                by="SMs",
            ),
        ),
        shown_step=SHOWN_STEP,
        lanes=tuple(sorted(lanes, key=lambda lane: lane.start_us)),
        names=NAMES,
        notes=("Stand-alone times are the shortest of each kernel.",),
        problems=("The trace has no synchronization events: waits of streams are not known.",) if rank == 1 else (),
    )


def _lane(stream: int, start_us: float, duration_us: float, name: int, role: Role) -> LaneInterval:
    return LaneInterval(stream=stream, start_us=start_us, end_us=start_us + duration_us, name=name, role=role)


def _step(rank: int, step: int) -> StepFigures:
    start_us = step * STEP_US - rank * CLOCK_SHIFT_US
    slow = 1.5 if step == 0 else 1.0
    return StepFigures(
        rank=rank,
        step=step,
        start_us=start_us,
        end_us=start_us + STEP_US * slow,
        computation_us=30_000.0,
        communication_us=12_000.0,
        waiting_us=500.0,
        copy_us=100.0,
        exposed_us=4_500.0,
        overlapped_us=7_500.0,
        idle_us=5_500.0 * slow,
        launch_bound_us=800.0,
        overlap_ratio=0.625,
        is_steady=step > 0,
    )


def exposed_intervals(rank: int, number: int, start_us: float) -> tuple[ExposedInterval, ...]:
    """4.5 ms in all, spread over the step, the causes in turn."""
    length_us, gap_us = 4_500.0 / number, STEP_US / number
    return tuple(
        ExposedInterval(
            rank=rank,
            step=SHOWN_STEP,
            start_us=start_us + place * gap_us,
            end_us=start_us + place * gap_us + length_us,
            collective=place % 3,
            cause=cause,
            evidence=f"The reduce-scatter ran for {length_us:.0f} us while nothing computed; {HOSTILE} held 132 SMs.",
            other_rank=(rank + 1) % 8 if cause == "slow_rank" else None,
        )
        for place, cause in zip(range(number), cycle(CAUSES), strict=False)
    )


def analysis(num_ranks: int = 2, num_operations: int = 60, num_exposed: int = 9) -> Analysis:
    """An analysis of `num_ranks` ranks on the clock of the first one."""
    ranks = tuple(rank_analysis(rank, num_operations, num_exposed) for rank in range(num_ranks))
    share = 1 / len(CAUSES)
    return Analysis(
        ranks=ranks,
        headline=Headline(
            verdict="11.2 % of the step is exposed communication: 4.5 of 40 ms.",
            why=(
                "1.9 ms: reduce-scatters of the optimizer start only after the last backward kernel.",
                "1.2 ms: rank 3 comes 0.8 ms later than the others to the all-gathers.",
            ),
            next=(
                "counterpoint run --path fsdp2=copy_engine -- torchrun train.py",
                "Give rank 3 as many tokens as the others.",
            ),
        ),
        step_us=STEP_US,
        communication_us=12_000.0,
        exposed_us=4_500.0,
        overlap_ratio=0.625,
        idle_us=5_500.0,
        launch_bound_us=800.0,
        causes=tuple(
            CauseTotal(cause=cause, exposed_us=4_500 * share, share=share, num_intervals=12, example=f"because of {HOSTILE}")
            for cause in CAUSES
        ),
        exposed=tuple(
            each for rank in range(num_ranks) for each in exposed_intervals(rank, num_exposed, SHOWN_STEP * STEP_US)
        ),
        breakdowns=(
            Breakdown(aspect="stream", name="20", num_collectives=30, communication_us=12_000, exposed_us=4_500),
            Breakdown(aspect="phase", name="forward", num_collectives=10, communication_us=4_000, exposed_us=500),
            Breakdown(aspect="phase", name="backward", num_collectives=20, communication_us=8_000, exposed_us=4_000),
        ),
        sizes=(
            CollectiveSize(
                collective="reduce_scatter",
                transport="nccl",
                process_group="mesh_fsdp",
                num_bytes=218 << 20,
                group_size=8,
                count=64,
                mean_us=640,
                least_us=601,
                most_us=903,
                bus_bytes_per_s=312e9,
                imbalance=1.4,
            ),
        ),
        waits=tuple(
            RankWaits(
                rank=rank,
                waited_us=900.0 * rank,
                mean_us=9.0 * rank,
                times_last=8 - rank,
                times_first=rank,
                num_collectives=64,
            )
            for rank in range(num_ranks)
        ),
        skews=tuple(
            CollectiveSkew(
                name=NAMES[2],
                process_group="mesh_fsdp",
                group_number=number,
                step=SHOWN_STEP,
                first_rank=1,
                last_rank=0,
                skew_us=100.0 + number,
                latency_us=600.0,
                waits_us=((0, 0.0), (1, 100.0 + number)),
                last_did="rank 0 ran aten::mm for 700 us",
            )
            for number in range(30)
        ),
        clock_offsets_us=tuple((rank, rank * CLOCK_SHIFT_US) for rank in range(num_ranks)),
        missing_ranks=tuple(range(num_ranks, 8)),
        recoverable=(
            Recoverable(
                causes=("dependent", "tail"),
                what="move reduce-scatters by copy engines",
                recovers_us=1_900.0,
                apply=("from counterpoint.integrations import fsdp2", "fsdp2.use_copy_engines(model)"),
            ),
            Recoverable(
                causes=("starved",),
                what="raise the stream priority",
                recovers_us=90,
                apply=("x",),
                is_within_replay_error=True,
            ),
        ),
        unrecoverable_us=1_100.0,
        changes=(
            Change(what="exposed", before=4_500, after=4_900, spread=100, unit="us"),
            Change(what="overlap", before=0.625, after=0.6, spread=0.05, unit="share"),
            Change(what="collectives", before=30, after=32, spread=0, unit="count"),
        ),
        notes=("Clocks of 2 ranks were aligned by the ends of 64 shared collectives.",),
    )


def empty_analysis() -> Analysis:
    """A trace without communication."""
    return Analysis(
        ranks=(RankAnalysis(path="alone.json", rank=0),),
        headline=Headline(verdict="The trace holds no communication.", why=(), next=()),
        step_us=1_000,
        communication_us=0,
        exposed_us=0,
    )
