"""The command `schedule`: shows copy schedules without running anything, or measures them on GPUs."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import click

from counterpoint.cli.options import Group, argument, json_option, machine_option, output_option
from counterpoint.errors import DeviceError, ScheduleError, shown_path
from counterpoint.machine import ELEMENT_BYTES
from counterpoint.schedule.actions import DataType, ExpertOperation, Operation, Problem
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
from counterpoint.value import check_outputs, cyclic_gc_paused, write_json

USUAL = ScheduleDescription()  # values of the choices that are not given, once one is given
TORCHRUN = "torchrun --nproc-per-node W -m counterpoint schedule tune OPERATION"
ESTIMATE = "Without GPUs, counterpoint schedule show estimates."
OPERATIONS = f"{', '.join(list(OPERATORS)[:-1])} or {list(OPERATORS)[-1]}."
EXPERT_OPERATIONS = f"{', '.join(get_args(ExpertOperation)[:-1])} or {get_args(ExpertOperation)[-1]}."
SIZES = ("num_ranks", "num_rows", "num_inner", "num_columns")
OPTIONS = {  # the options for the fields that errors name
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
BALANCED, ROUTINGS = (
    "balanced",
    "balanced, zipf, one-hot, or a JSON file with a list of counts for each rank, one for each expert.",
)


def _number(
    option: str, name: str, metavar: str, help: str, *, kind: type = int, default: int | None = None, required: bool = False
) -> Callable[..., Any]:
    # click treats a default of None as a given value, so an option without a default must not pass one
    usual: dict[str, Any] = {} if default is None else {"default": default, "show_default": True}
    return click.option(option, name, type=kind, metavar=metavar, help=help, required=required, **usual)


def _choice(option: str, of: object, help: str, usual: str) -> Callable[..., Any]:
    return click.option(option, type=click.Choice(get_args(of)), metavar="NAME", help=f"{help}  [default: {usual}]")


operation_argument = argument("operation", metavar="OPERATION", type=click.Choice(tuple(OPERATORS)), help=OPERATIONS)
ranks_option = _number("--ranks", "num_ranks", "W", "The number of GPUs that take part, all in one node.", required=True)
rows_option = _number("--rows", "num_rows", "M", "The number of rows of the undivided left matrix.", required=True)
inner_option = _number(
    "--inner", "num_inner", "K", "The number of columns of that matrix, and of rows of a weight.", required=True
)
columns_option = _number("--columns", "num_columns", "N", "The number of columns of a rank's weight.", required=True)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(get_args(DataType)),
    metavar="TYPE",
    default="bf16",
    show_default=True,
    help="fp8, bf16, fp16, fp32 or fp64.",
)
backward_option = click.option(
    "--backward", "is_backward", is_flag=True, help="Draw the backward pass of the same operator."
)
rank_option = _number("--rank", "rank", "R", "The rank to draw, from 0.", default=0)
estimated_machine_option = machine_option("A machine's name or file (.toml).", default="h200")


@click.group(cls=Group)
def schedule() -> None:
    """Draw copy schedules, or choose them by measurement.

    A copy schedule says how a collective and its matmul are cut into pieces, and in which order the pieces run.
    """


@schedule.command(
    examples=("counterpoint schedule show all_gather_matmul --ranks 4 \\\n  --rows 8192 --inner 8192 --columns 2048",)
)
@operation_argument
@ranks_option
@rows_option
@inner_option
@columns_option
@dtype_option
@_choice(
    "--pattern",
    Pattern,
    "Who sends to whom: sequential (the library's collective), ring, one_peer or all_peers.",
    USUAL.pattern,
)
@_number("--chunks", "chunks", "N", f"Chunks that a rank's block is sent in, 1 to {MAX_CHUNKS}.  [default: {USUAL.chunks}]")
@_number(
    "--chunk-growth",
    "chunk_growth",
    "X",
    f"Rows of a chunk over those of the one before, {LEAST_GROWTH:g} to {MOST_GROWTH:g}.  [default: {USUAL.chunk_growth:g}]",
    kind=float,
)
@_choice(
    "--along",
    Along,
    "What chunks consist of: rows; columns of the product; or inner, slices of the sum, which round more.",
    USUAL.along,
)
@_choice(
    "--matmul",
    MatmulGranularity,
    "chunk or peer: one matmul for each. fused: one for a chunk of all peers. rest: one for all that arrives.",
    USUAL.matmul,
)
@click.option("--local-last", "is_local_last", is_flag=True, help="Run the matmul of a rank's own rows last, not first.")
@_number(
    "--copy-streams",
    "num_copy_streams",
    "N",
    f"Streams that copies take turns on, 1 to {MAX_COPY_STREAMS}.  [default: {USUAL.num_copy_streams}]",
)
@_number(
    "--compute-streams",
    "num_compute_streams",
    "N",
    f"Streams that pieces of the matmul take turns on, 1 or 2.  [default: {USUAL.num_compute_streams}]",
)
@backward_option
@rank_option
@estimated_machine_option
@json_option
def show(
    operation: Operation,
    *,
    dtype: DataType,
    is_local_last: bool,
    is_backward: bool,
    rank: int,
    machine: str,
    is_json: bool,
    **numbers: Any,
) -> None:
    """Draw one schedule, with its estimated time.

    The schedule is that of (M, K) @ (K, N) over W ranks. Its time stands beside the sequential time and the ideal. If none
    of the options from --pattern to --compute-streams is given, the heuristic chooses them all. If any is given, the others
    have their defaults.
    """
    from counterpoint.machine import load_machine  # noqa: PLC0415  a fast --help
    from counterpoint.report.schedule import Question, print_schedule, summarize_schedule  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415

    sizes = {name: numbers.pop(name) for name in SIZES}
    choices = {name: choice for name, choice in numbers.items() if choice is not None}
    if is_local_last:
        choices["local"] = "last"
    with _fields_as_options():
        question = Question(
            problem=Problem(operation=operation, element_bytes=ELEMENT_BYTES[dtype], **sizes),
            dtype=dtype,
            machine=load_machine(machine),
            direction="backward" if is_backward else "forward",
            description=_description(choices),
            rank=rank,
        )
    with cyclic_gc_paused():
        found = summarize_schedule(question)
    if is_json:
        print(write_json(found))
    else:
        print_schedule(new_console(), found)


@schedule.command(
    examples=(
        "counterpoint schedule experts expert_ffn --ranks 8 --experts 64 \\\n  --rows 8192 --inner 4096 --hidden 2048",
    )
)
@argument("operation", metavar="OPERATION", type=click.Choice(get_args(ExpertOperation)), help=EXPERT_OPERATIONS)
@_number(
    "--rows",
    "num_rows",
    "T",
    "The number of rows of each rank: its tokens times the experts per token. With --routing: the rows of the busiest rank.",
    required=True,
)
@_number("--inner", "num_inner", "K", "The number of columns of a row.", required=True)
@_number("--hidden", "num_hidden", "H", "The hidden size of an expert.", required=True)
@_number("--experts", "num_experts", "E", "The number of experts of all ranks together.", required=True)
@ranks_option
@click.option("--routing", metavar="NAME", default=BALANCED, show_default=True, help=ROUTINGS)
@click.option(
    "--gated/--plain", "is_gated", default=True, show_default=True, help="Whether the first matmul has a gate, as in SwiGLU."
)
@_number("--groups", "num_groups", "N", f"Groups that each rank's experts are divided into, 1 to {MAX_CHUNKS}.")
@backward_option
@dtype_option
@rank_option
@estimated_machine_option
@json_option
def experts(
    operation: ExpertOperation,
    *,
    num_rows: int,
    num_inner: int,
    num_hidden: int,
    num_experts: int,
    num_ranks: int,
    routing: str,
    is_gated: bool,
    num_groups: int | None,
    is_backward: bool,
    dtype: DataType,
    rank: int,
    machine: str,
    is_json: bool,
) -> None:
    """Draw the schedule of an operator for experts.

    Tokens are sent to their experts and back beside grouped matmuls. The estimated time stands beside the sequential time
    and the ideal. Without --groups, a table chooses the number by the bytes that ranks exchange.
    """
    from counterpoint.machine import load_machine  # noqa: PLC0415  a fast --help
    from counterpoint.report.expert_schedule import ExpertQuestion, print_experts, summarize_experts  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415
    from counterpoint.schedule.expert_choice import expert_description  # noqa: PLC0415
    from counterpoint.schedule.expert_schedules import ExpertProblem  # noqa: PLC0415
    from counterpoint.schedule.heuristic import num_copy_streams_on  # noqa: PLC0415

    with _fields_as_options(OPTIONS | {"chunks": "--groups"}):
        on_machine = load_machine(machine)
        num_streams = num_copy_streams_on(on_machine.link, num_ranks)
        question = ExpertQuestion(
            problem=ExpertProblem(
                operation=operation,
                routing=_routing(routing, num_ranks, num_rows, num_experts),
                num_inner=num_inner,
                num_hidden=num_hidden,
                is_gated=is_gated,
                element_bytes=ELEMENT_BYTES[dtype],
                direction="backward" if is_backward else "forward",
            ),
            machine=on_machine,
            description=None if num_groups is None else expert_description(num_groups, num_streams),
            rank=rank,
        )
    with cyclic_gc_paused():
        found = summarize_experts(question)
    if is_json:
        print(write_json(found))
    else:
        print_experts(new_console(), found)


@schedule.command(
    examples=(
        "torchrun --nproc-per-node 4 -m counterpoint schedule tune \\\n"
        "  all_gather_matmul --rows 8192 --inner 8192 --columns 2048",
    )
)
@operation_argument
@rows_option
@inner_option
@columns_option
@dtype_option
@output_option("Save the plan (.toml), for counterpoint.ops.use_plan.")
@json_option
def tune(
    operation: Operation,
    *,
    num_rows: int,
    num_inner: int,
    num_columns: int,
    dtype: DataType,
    output: Path | None,
    is_json: bool,
) -> None:
    """Choose schedules by measurement on the GPUs of this machine.

    The schedules of (M, K) @ (K, N), forward and backward, are measured beside the sequential form. The fastest are kept.
    torchrun starts the command, once for every GPU.
    """
    from counterpoint.plan import PLAN  # noqa: PLC0415  a fast --help

    check_outputs(((output, PLAN),))
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

    run_and_leave(lambda: _tune(problem, dtype, output, is_json))


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
    from counterpoint.report.refusals import print_left_out  # noqa: PLC0415
    from counterpoint.report.to_apply import PlanOrigin, ways_to_apply  # noqa: PLC0415

    console = text.new_console()
    for tuned in tuning.operators:
        gpu.print_tuned_operator(console, tuned)
    text.print_plan(console, tuning.plan)
    print_to_apply(console, ways_to_apply(tuning.plan, PlanOrigin(file=None if output is None else str(output))))
    print_left_out(console, tuning.plan)
    if output is not None:
        print(f"Plan saved to {output}, for counterpoint.ops.use_plan.")


def _routing(named: str, num_ranks: int, num_rows: int, num_experts: int) -> Routing:
    """Return an example by its name, or the routing of a file, which must be for these ranks, rows and experts."""
    kind = next((each for each in get_args(RoutingKind) if each == named), None)
    if kind is not None:
        return example_routing(kind, num_ranks, num_rows, num_experts)
    routing = read_routing(named)
    most_rows = max(routing.num_sent(rank) for rank in range(routing.num_ranks))
    found = routing.num_ranks, most_rows, routing.num_ranks * routing.num_local_experts
    if found != (num_ranks, num_rows, num_experts):
        raise ScheduleError(
            f"{shown_path(named)} is for {found[0]} ranks of at most {found[1]} rows, and {found[2]} experts; --ranks is "
            f"{num_ranks}, --rows {num_rows} and --experts {num_experts}. Give the file's."
        )
    return routing


@contextmanager
def _fields_as_options(options: Mapping[str, str] = OPTIONS) -> Iterator[None]:
    """Make errors about a field name the option that was typed: errors that start with its name, and any `num_` field."""
    try:
        yield
    except ScheduleError as problem:
        message = re.sub(r"^\w+\b|\bnum_\w+", lambda found: options.get(found[0], found[0]), str(problem))
        raise ScheduleError(message) from problem


def _description(choices: dict[str, Any]) -> ScheduleDescription | None:
    """Return the user's description, or None if the heuristic chooses."""
    if choices.get("pattern") == "sequential" and len(choices) > 1:
        others = ", ".join(OPTIONS[name] for name in choices if name != "pattern")
        raise ScheduleError(
            f"The pattern 'sequential' has nothing to cut or order; found also {others}. Leave out one or the other."
        )
    return ScheduleDescription(**choices) if choices else None
