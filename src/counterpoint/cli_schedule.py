"""The command line's part for `schedule`: copy schedules looked at without running anything, or measured on GPUs."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from counterpoint.errors import DeviceError, ScheduleError, shown_path
from counterpoint.schedule.actions import ELEMENT_BYTES, DataType, ExpertOperation, Operation, Problem
from counterpoint.schedule.description import (
    LEAST_GROWTH,
    MAX_CHUNKS,
    MAX_COPY_STREAMS,
    MOST_GROWTH,
    Along,
    MatmulGranularity,
    Pattern,
    ScheduleDescription,
)
from counterpoint.schedule.operations import OPERATORS
from counterpoint.schedule.routing import Routing, RoutingKind, example_routing, read_routing
from counterpoint.value import check_outputs, write_json

schedule = typer.Typer(
    help="Look at copy schedules, or measure them: how a collective and its matmul are cut and ordered.",
    rich_markup_mode=None,
)
USUAL = ScheduleDescription()  # what the choices that are not made have, once one is made
TORCHRUN = "torchrun --nproc-per-node W -m counterpoint schedule tune OPERATION"
ESTIMATE = "Without GPUs, counterpoint schedule show estimates."
OPERATIONS = f"{', '.join(list(OPERATORS)[:-1])} or {list(OPERATORS)[-1]}."
EXPERT_OPERATIONS = f"{', '.join(get_args(ExpertOperation)[:-1])} or {get_args(ExpertOperation)[-1]}."
OPTIONS = {  # the fields that errors name, as they are typed
    "num_ranks": "--ranks",
    "num_rows": "--rows",
    "num_inner": "--inner",
    "num_columns": "--columns",
    "num_hidden": "--hidden",
    "pattern": "--pattern",
    "chunks": "--chunks",
    "chunk_growth": "--chunk-growth",
    "along": "--along",
    "matmul": "--matmul",
    "local": "--local-last",
    "num_copy_streams": "--copy-streams",
    "num_compute_streams": "--compute-streams",
}
OperationArgument = Annotated[Operation, typer.Argument(metavar="OPERATION", help=OPERATIONS, show_choices=False)]
RanksOption = Annotated[int, typer.Option("--ranks", metavar="W", help="Number of GPUs that take part, all of one node.")]
RowsOption = Annotated[int, typer.Option("--rows", metavar="M", help="Number of rows of the undivided left matrix.")]
InnerOption = Annotated[int, typer.Option("--inner", metavar="K", help="Number of its columns, and of a weight's rows.")]
ColumnsOption = Annotated[int, typer.Option("--columns", metavar="N", help="Number of columns of a rank's weight.")]
DataTypeOption = Annotated[DataType, typer.Option("--dtype", metavar="TYPE", help="fp8, bf16, fp16, fp32 or fp64.")]
PatternOption = Annotated[
    Pattern | None,
    typer.Option(
        "--pattern",
        metavar="NAME",
        help="Who sends to whom: sequential (the library's collective), ring, one_peer or all_peers."
        f"  [default: {USUAL.pattern}]",
    ),
]
ChunksOption = Annotated[
    int | None,
    typer.Option(
        "--chunks",
        metavar="N",
        help=f"Number of pieces that a rank's block travels in, 1 to {MAX_CHUNKS}.  [default: {USUAL.chunks}]",
    ),
]
GrowthOption = Annotated[
    float | None,
    typer.Option(
        "--chunk-growth",
        metavar="X",
        help=f"Rows of each chunk over those of the one before, {LEAST_GROWTH:g} to {MOST_GROWTH:g}."
        f"  [default: {USUAL.chunk_growth:g}]",
    ),
]
AlongOption = Annotated[
    Along | None,
    typer.Option(
        "--along",
        metavar="NAME",
        help=f"Chunks are rows, or slices: columns of the product, or inner (rounds more).  [default: {USUAL.along}]",
    ),
]
MatmulOption = Annotated[
    MatmulGranularity | None,
    typer.Option(
        "--matmul",
        metavar="NAME",
        help="One matmul for each chunk or peer; fused: for a chunk of all; rest: for all that arrives."
        f"  [default: {USUAL.matmul}]",
    ),
]
LocalOption = Annotated[bool, typer.Option("--local-last", help="The matmul of a rank's own rows comes last, not first.")]
CopyStreamsOption = Annotated[
    int | None,
    typer.Option(
        "--copy-streams",
        metavar="N",
        help=f"Number of streams that copies take turns on, 1 to {MAX_COPY_STREAMS}.  [default: {USUAL.num_copy_streams}]",
    ),
]
ComputeStreamsOption = Annotated[
    int | None,
    typer.Option(
        "--compute-streams",
        metavar="N",
        help=f"Number of streams that matmul pieces take turns on, 1 or 2.  [default: {USUAL.num_compute_streams}]",
    ),
]
ExpertArgument = Annotated[ExpertOperation, typer.Argument(metavar="OPERATION", help=EXPERT_OPERATIONS, show_choices=False)]
ExpertRowsOption = Annotated[
    int, typer.Option("--rows", metavar="T", help="Number of rows of each rank: its tokens times the experts of each.")
]
ExpertInnerOption = Annotated[int, typer.Option("--inner", metavar="K", help="Number of columns of a row.")]
HiddenOption = Annotated[int, typer.Option("--hidden", metavar="H", help="Hidden size of an expert.")]
ExpertsOption = Annotated[int, typer.Option("--experts", metavar="E", help="Number of experts of all ranks together.")]
RoutingOption = Annotated[
    str,
    typer.Option(
        "--routing",
        metavar="NAME",
        help="balanced, zipf, one-hot, or a JSON file with a list of counts for each rank, one for each expert.",
    ),
]
GatedOption = Annotated[bool, typer.Option("--gated/--plain", help="Whether the first matmul has a gate, as with SwiGLU.")]
GroupsOption = Annotated[
    int | None,
    typer.Option("--groups", metavar="N", help=f"Groups that each rank's experts are in, 1 to {MAX_CHUNKS}."),
]
BackwardOption = Annotated[bool, typer.Option("--backward", help="The backward pass of the same operator.")]
RankOption = Annotated[int, typer.Option("--rank", metavar="R", help="The number of the rank that is drawn, from 0.")]
MachineOption = Annotated[
    str, typer.Option("--machine", metavar="NAME", help="A machine's name, or the path of a machine file (.toml).")
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Save the plan (.toml), for counterpoint.ops.use_plan.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]


@schedule.command(short_help="Draw one schedule, with its estimated time.")
def show(
    operation: OperationArgument,
    *,
    num_ranks: RanksOption,
    num_rows: RowsOption,
    num_inner: InnerOption,
    num_columns: ColumnsOption,
    dtype: DataTypeOption = "bf16",
    pattern: PatternOption = None,
    chunks: ChunksOption = None,
    chunk_growth: GrowthOption = None,
    along: AlongOption = None,
    matmul: MatmulOption = None,
    is_local_last: LocalOption = False,
    num_copy_streams: CopyStreamsOption = None,
    num_compute_streams: ComputeStreamsOption = None,
    is_backward: BackwardOption = False,
    rank: RankOption = 0,
    machine: MachineOption = "h200",
    json: JsonOption = False,
) -> None:
    """Draw the schedule of (M, K) @ (K, N) over W ranks with its estimated time against sequential and ideal.

    Where no choice is made from --pattern to --compute-streams, the heuristic makes them all; where one is, the others have
    their defaults.
    """
    from counterpoint.machine import load_machine  # noqa: PLC0415  a fast --help
    from counterpoint.report.schedule import Question, print_schedule, summarize_schedule  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415

    sizes = {"num_ranks": num_ranks, "num_rows": num_rows, "num_inner": num_inner, "num_columns": num_columns}
    choices = {
        "pattern": pattern,
        "chunks": chunks,
        "chunk_growth": chunk_growth,
        "along": along,
        "matmul": matmul,
        "local": "last" if is_local_last else None,
        "num_copy_streams": num_copy_streams,
        "num_compute_streams": num_compute_streams,
    }
    with _fields_as_options():
        question = Question(
            problem=Problem(operation=operation, element_bytes=ELEMENT_BYTES[dtype], **sizes),
            dtype=dtype,
            machine=load_machine(machine),
            direction="backward" if is_backward else "forward",
            description=_description({name: choice for name, choice in choices.items() if choice is not None}),
            rank=rank,
        )
    found = summarize_schedule(question)
    if json:
        print(write_json(found))
    else:
        print_schedule(new_console(), found)


@schedule.command(short_help="Draw the schedule of an operator for experts.")
def experts(
    operation: ExpertArgument,
    *,
    num_rows: ExpertRowsOption,
    num_inner: ExpertInnerOption,
    num_hidden: HiddenOption,
    num_experts: ExpertsOption,
    num_ranks: RanksOption,
    routing: RoutingOption = "balanced",
    is_gated: GatedOption = True,
    num_groups: GroupsOption = None,
    dtype: DataTypeOption = "bf16",
    rank: RankOption = 0,
    machine: MachineOption = "h200",
    json: JsonOption = False,
) -> None:
    """Draw how tokens go to their experts and back beside grouped matmuls, with the estimated time against sequential and
    ideal.

    Without --groups a table decides by the bytes that go from rank to rank.
    """
    from counterpoint.machine import load_machine  # noqa: PLC0415  a fast --help
    from counterpoint.report.expert_schedule import ExpertQuestion, print_experts, summarize_experts  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415
    from counterpoint.schedule.expert_choice import expert_description  # noqa: PLC0415
    from counterpoint.schedule.expert_schedules import ExpertProblem  # noqa: PLC0415

    with _fields_as_options():
        question = ExpertQuestion(
            problem=ExpertProblem(
                operation=operation,
                routing=_routing(routing, num_ranks, num_rows, num_experts),
                num_inner=num_inner,
                num_hidden=num_hidden,
                is_gated=is_gated,
                element_bytes=ELEMENT_BYTES[dtype],
            ),
            machine=load_machine(machine),
            description=None if num_groups is None else expert_description(num_ranks, num_groups),
            rank=rank,
        )
    found = summarize_experts(question)
    if json:
        print(write_json(found))
    else:
        print_experts(new_console(), found)


@schedule.command(short_help="Choose schedules by measurement on the GPUs at hand.")
def tune(
    operation: OperationArgument,
    *,
    num_rows: RowsOption,
    num_inner: InnerOption,
    num_columns: ColumnsOption,
    dtype: DataTypeOption = "bf16",
    output: OutputOption = None,
    json: JsonOption = False,
) -> None:
    """Measure the schedules of (M, K) @ (K, N), forward and backward, against sequential, and keep the fastest.

    Start it once for every GPU: torchrun --nproc-per-node W -m counterpoint schedule tune OPERATION --rows M ...
    """
    from counterpoint.plan import check_plan_name  # noqa: PLC0415  a fast --help

    check_outputs((output,))
    if output is not None:
        check_plan_name(output)
    started = os.environ.get("WORLD_SIZE", "1")  # torchrun's
    num_ranks = int(started) if started.isdecimal() else 1
    sizes = {"num_ranks": num_ranks, "num_rows": num_rows, "num_inner": num_inner, "num_columns": num_columns}
    with _fields_as_options():
        problem = Problem(operation=operation, element_bytes=ELEMENT_BYTES[dtype], **sizes)
    if num_ranks == 1:
        raise DeviceError(
            f"Schedules are measured by several ranks, and this process is alone. Start it on W GPUs: {TORCHRUN}. {ESTIMATE}"
        )
    from counterpoint.cuda.ranks import run_and_leave  # noqa: PLC0415

    run_and_leave(lambda: _tune(problem, dtype, output, json))


def _tune(problem: Problem, dtype: DataType, output: Path | None, is_json: bool) -> None:
    from counterpoint.cuda.ranks import join_ranks  # noqa: PLC0415

    rank = join_ranks(ESTIMATE)
    from counterpoint.ops.schedule_benchmark import request_for  # noqa: PLC0415  needs torch
    from counterpoint.plan import save_plan  # noqa: PLC0415
    from counterpoint.planner.operators_on_gpu import measure_operators  # noqa: PLC0415

    passes = OPERATORS[problem.operation].passes()
    tuning = measure_operators(requests=[request_for(problem, direction, dtype) for direction in passes])
    if rank != 0:
        return
    if output is not None:
        save_plan(tuning.plan, output)
    if is_json:
        print(write_json(tuning))
        return
    from counterpoint.report import gpu, text  # noqa: PLC0415
    from counterpoint.report.plan import print_to_apply  # noqa: PLC0415
    from counterpoint.report.to_apply import PlanOrigin, ways_to_apply  # noqa: PLC0415

    console = text.new_console()
    for tuned in tuning.operators:
        gpu.print_tuned_operator(console, tuned)
    text.print_plan(console, tuning.plan)
    print_to_apply(console, ways_to_apply(tuning.plan, PlanOrigin(file=None if output is None else str(output))))
    if output is not None:
        print(f"Plan saved to {output}, for counterpoint.ops.use_plan.")


def _routing(named: str, num_ranks: int, num_rows: int, num_experts: int) -> Routing:
    """An example by its name, or the routing of a file, which has to be for these ranks and experts."""
    kind = next((each for each in get_args(RoutingKind) if each == named), None)
    if kind is not None:
        return example_routing(kind, num_ranks, num_rows, num_experts)
    routing = read_routing(named)
    found = routing.num_ranks, routing.num_ranks * routing.num_local_experts
    if found != (num_ranks, num_experts):
        raise ScheduleError(
            f"{shown_path(named)} is for {found[0]} ranks and {found[1]} experts; --ranks is {num_ranks} and --experts "
            f"{num_experts}. Give the file's."
        )
    return routing


@contextmanager
def _fields_as_options() -> Iterator[None]:
    """An error about a field names the option that was typed: one that starts with its name, and any `num_`."""
    try:
        yield
    except ScheduleError as problem:
        message = re.sub(r"^\w+\b|\bnum_\w+", lambda found: OPTIONS.get(found[0], found[0]), str(problem))
        raise ScheduleError(message) from problem


def _description(choices: dict[str, Any]) -> ScheduleDescription | None:
    """What the user described, or None where the heuristic is to choose."""
    if choices.get("pattern") == "sequential" and len(choices) > 1:
        others = ", ".join(OPTIONS[name] for name in choices if name != "pattern")
        raise ScheduleError(
            f"The pattern 'sequential' has nothing to cut or order; found also {others}. Leave out one or the other."
        )
    return ScheduleDescription(**choices) if choices else None
