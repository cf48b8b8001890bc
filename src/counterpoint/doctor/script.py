"""Hints of a job's parallelism in the source of its script, which is read and not run.

Only the script itself is read, not its imports, and a name counts wherever it stands. A hint with its line means that
the script mentions something, not that it runs it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from counterpoint.doctor.job_context import Hint, HintKind
from counterpoint.errors import JobContextError
from counterpoint.files import read_limited

NAME_SIGNS: dict[str, HintKind] = {
    "fully_shard": "fsdp2",
    "FullyShardedDataParallel": "fsdp1",
    "DistributedDataParallel": "data_parallel",
    "is_high_priority_stream": "high_priority",
    "_set_sm_carveout_experimental": "sm_carveout",
    "_symmetric_memory": "symmetric_memory",
    "cta_policy": "zero_cta",
    "CUDAGraph": "cuda_graph",
    "make_graphed_callables": "cuda_graph",
}
# modes of torch.compile that replay CUDA graphs (documentation of torch.compile)
TEXT_SIGNS: dict[str, HintKind] = {"reduce-overhead": "cuda_graph", "max-autotune": "cuda_graph"}


def read_script(path: str) -> tuple[Hint, ...] | None:
    """Return the first hint of each kind, in the order of lines; None if the source cannot be read or is not Python."""
    try:
        tree = ast.parse(bytes(read_limited(path, JobContextError, "give a script")))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    first: dict[HintKind, int] = {}
    for kind, line in _mentions(tree):
        first[kind] = min(line, first.get(kind, line))
    found = sorted(first.items(), key=lambda entry: entry[1])
    return tuple(Hint(kind=kind, where=f"{Path(path).name}:{line}") for kind, line in found)


def _mentions(tree: ast.AST) -> Iterator[tuple[HintKind, int]]:
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for name in _names(node):
            if name in NAME_SIGNS:
                yield NAME_SIGNS[name], line
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in TEXT_SIGNS:
            yield TEXT_SIGNS[node.value], line


def _names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name():
            yield node.id
        case ast.Attribute():
            yield node.attr
        case ast.keyword(arg=str() as name):
            yield name
        case ast.Import() | ast.ImportFrom():
            for alias in node.names:
                yield from alias.name.split(".")
            if isinstance(node, ast.ImportFrom):
                yield from (node.module or "").split(".")
        case _:
            return
