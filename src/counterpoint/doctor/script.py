"""Hints of a job's parallelism in the source of its script, which is read and not run.

Only the script itself is read, not its imports, and a name counts wherever it stands. A hint with its line means that
the script mentions something, not that it runs it. The names are those of torch 2.13, Lightning and Fabric 2.6,
accelerate 1.15, transformers 5.24 and torchtune's main branch.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from counterpoint.doctor.job_context import Hint, HintKind
from counterpoint.errors import JobContextError
from counterpoint.files import read_limited
from counterpoint.value import Value

NAME_SIGNS: dict[str, HintKind] = {
    "fully_shard": "fsdp2",
    "training.shard_model": "fsdp2",  # torchtune
    "FullyShardedDataParallel": "fsdp1",
    "FSDPStrategy": "fsdp1",
    "FullyShardedDataParallelPlugin": "fsdp",
    "DistributedDataParallel": "data_parallel",
    "DistributedDataParallelKwargs": "data_parallel",
    "DDPStrategy": "data_parallel",
    "deepspeed.initialize": "deepspeed",
    "DeepSpeedPlugin": "deepspeed",
    "DeepSpeedStrategy": "deepspeed",
    "parallelize_module": "tensor_parallel",
    "ColwiseParallel": "tensor_parallel",
    "RowwiseParallel": "tensor_parallel",
    "ModelParallelStrategy": "tensor_parallel",
    "TorchTensorParallelConfig": "tensor_parallel",
    "TorchTensorParallelPlugin": "tensor_parallel",
    "context_parallel": "context_parallel",
    "TorchContextParallelConfig": "context_parallel",
    "pipelining": "pipeline_parallel",
    "is_high_priority_stream": "high_priority",
    "_set_sm_carveout_experimental": "sm_carveout",
    "_symmetric_memory": "symmetric_memory",
    "cta_policy": "zero_cta",
    "CUDAGraph": "cuda_graph",
    "make_graphed_callables": "cuda_graph",
}
# arguments, or keys of a dictionary, that tell something unless their value switches them off
SETTING_SIGNS: dict[str, HintKind] = {
    "fsdp": "fsdp",
    "fsdp_config": "fsdp",
    "fsdp_plugin": "fsdp",
    "dp_shard_size": "fsdp",
    "fsdp_size": "fsdp2",
    "ModelParallelStrategy.data_parallel_size": "fsdp2",
    "deepspeed": "deepspeed",
    "deepspeed_config": "deepspeed",
    "deepspeed_plugin": "deepspeed",
    "tp_plan": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "cp_size": "context_parallel",
}
# the start of a strategy's name up to "_": "fsdp_cpu_offload", "ddp_find_unused_parameters_true", "deepspeed_stage_2"
STRATEGY_SIGNS: dict[str, HintKind] = {
    "fsdp": "fsdp",
    "fsdp2": "fsdp2",
    "ddp": "data_parallel",
    "deepspeed": "deepspeed",
}
# modes of torch.compile that replay CUDA graphs (documentation of torch.compile)
TEXT_SIGNS: dict[str, HintKind] = {"reduce-overhead": "cuda_graph", "max-autotune": "cuda_graph"}


class ReadScript(Value, frozen=True, kw_only=True):
    """The first hint of each kind, in the order of lines, and the imported packages whose source could hold more."""

    hints: tuple[Hint, ...] = ()
    imported: tuple[str, ...] = ()


def read_script(path: str) -> ReadScript | str:
    """Return what a script tells, or why it was not read."""
    if not Path(path).exists():
        return "there is no such file here"
    try:
        tree = ast.parse(bytes(read_limited(path, JobContextError, "give a script")))
    except SyntaxError as problem:
        version = ".".join(map(str, sys.version_info[:2]))
        return f"it is no Python {version} ({problem.msg}" + (f", line {problem.lineno})" if problem.lineno else ")")
    except (OSError, ValueError, RecursionError):
        return "its source cannot be read"
    first: dict[HintKind, int] = {}
    for kind, line in _mentions(tree):
        first[kind] = min(line, first.get(kind, line))
    found = sorted(first.items(), key=lambda entry: entry[1])
    return ReadScript(
        hints=tuple(Hint(kind=kind, where=f"{Path(path).name}:{line}") for kind, line in found),
        imported=tuple(sorted({package for node in ast.walk(tree) for package in _packages(node)})),
    )


def strategy_sign(strategy: str) -> HintKind | None:
    """Return what a strategy tells, by the name that Lightning registers or by that of its class."""
    return NAME_SIGNS.get(strategy.rpartition(".")[2], STRATEGY_SIGNS.get(strategy.partition("_")[0]))


def _mentions(tree: ast.AST) -> Iterator[tuple[HintKind, int]]:
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for name in _names(node):
            if name in NAME_SIGNS:
                yield NAME_SIGNS[name], line
        for name, value in _settings(node):
            if name in SETTING_SIGNS and not _is_off(value):
                yield SETTING_SIGNS[name], value.lineno
            elif name == "strategy":
                yield from _strategies(value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in TEXT_SIGNS:
            yield TEXT_SIGNS[node.value], line


def _names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name():
            yield node.id
        case ast.Attribute():
            yield node.attr
            if isinstance(node.value, ast.Name):
                yield f"{node.value.id}.{node.attr}"
        case ast.keyword(arg=str() as name):
            yield name
        case ast.Import() | ast.ImportFrom():
            for alias in node.names:
                yield from alias.name.split(".")
            if isinstance(node, ast.ImportFrom):
                yield from (node.module or "").split(".")
        case _:
            return


def _settings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Return names and the values given to them: a call's arguments, also as call.argument; a dictionary's keys; variables
    that get a constant.
    """
    match node:
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)):
            for keyword in node.keywords:
                if keyword.arg is not None:
                    yield keyword.arg, keyword.value
                    yield f"{called}.{keyword.arg}", keyword.value
        case ast.Dict():
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, value
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() as constant)
            | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant() as constant)
        ):
            yield name, constant
        case _:
            return


def _is_off(value: ast.expr) -> bool:
    """Return whether a value switches its setting off: nothing, false, or one rank."""
    return isinstance(value, ast.Constant) and value.value is not True and value.value in (None, "", 0, 1)


def _strategies(value: ast.expr) -> Iterator[tuple[HintKind, int]]:
    """Return what the texts in a strategy's value tell: it may choose between several."""
    for node in ast.walk(value):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            kind = strategy_sign(node.value)
            if kind is not None:
                yield kind, node.lineno


def _packages(node: ast.AST) -> Iterator[str]:
    """Return the packages that a statement imports, but for Python's own and torch, whose names are known; a module of
    the script's own package with the dots before it.
    """
    match node:
        case ast.Import():
            modules = [alias.name for alias in node.names]
        case ast.ImportFrom(level=0, module=str() as module):
            modules = [module]
        case ast.ImportFrom():
            yield "." * node.level + (node.module or "")
            return
        case _:
            return
    yield from {module.partition(".")[0] for module in modules} - {"torch", *sys.stdlib_module_names}
