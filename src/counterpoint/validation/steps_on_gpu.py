"""Runs the cases of the validation set on GPUs: tensors, streams, and one call that issues a case's operations."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from counterpoint.cuda.graph import AbstractExecutable
from counterpoint.paper.workloads import TYPES, matmul_kernel, sampled_bits
from counterpoint.validation.cases import (
    Attention,
    Case,
    CollectiveWork,
    Elementwise,
    HostCopy,
    Matmul,
    Scan,
    Softmax,
    Work,
)

Group = Any  # a torch process group, or None for the default one
Launch = Callable[[Group], object]  # issues one operation on the current stream; collectives run in the group
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class CaseOnGpu:
    """One case with its tensors, which all its steps share. Equal operations share their tensors, too."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._outputs: list[torch.Tensor] = []  # their bits are compared
        made: dict[Work, Launch] = {}
        for entry in case.entries:
            if entry.work not in made:
                made[entry.work] = self._make(entry.work)
        self._launches = [made[entry.work] for entry in case.entries]
        numbers = sorted({entry.stream for entry in case.entries} - {0})
        self._streams = {0: {number: torch.cuda.Stream() for number in numbers}}

    def step(self, group: Group = None, priority: int = 0) -> Callable[[], None]:
        """Return the step as a function; collectives run in `group` (default: None), other streams get `priority`."""
        if priority not in self._streams:
            made = {number: torch.cuda.Stream(priority=priority) for number in self._streams[0]}
            self._streams[priority] = made
        streams = self._streams[priority]
        return lambda: self._issue(group, streams)

    def _issue(self, group: Group, beside: dict[int, torch.cuda.Stream]) -> None:
        main = torch.cuda.current_stream()
        for stream in beside.values():
            stream.wait_stream(main)
        entries = self._case.entries
        streams = [beside.get(entry.stream, main) for entry in entries]
        waited = {
            wait for number, entry in enumerate(entries) for wait in entry.waits_for if streams[wait] != streams[number]
        }
        done: dict[int, torch.cuda.Event] = {}
        for number, (entry, launch) in enumerate(zip(entries, self._launches, strict=True)):
            for wait in entry.waits_for:
                if streams[wait] != streams[number]:
                    streams[number].wait_event(done[wait])
            with torch.cuda.stream(streams[number]):
                launch(group)
                if number in waited:
                    done[number] = torch.cuda.Event()
                    done[number].record(streams[number])
        for stream in beside.values():
            main.wait_stream(stream)

    def output_bits(self, executable: AbstractExecutable) -> bytes:
        """Return the bits of a sample of the outputs after one replay, as bytes.

        The sample excludes what an all-reduce reduces in place, and what attention returns.
        """
        return sampled_bits(executable, self._outputs, self._outputs)

    def _make(self, work: Work) -> Launch:
        match work:
            case Matmul(tile=None):
                return self._cublas(work)
            case Matmul():
                return self._triton(work)
            case Elementwise():
                given = _random(work.num_bytes // 2)
                got = self._output(torch.empty_like(given))
                return lambda _: torch.mul(given, 1.5, out=got)
            case Scan() | Softmax():
                return self._by_rows(work)
            case Attention():
                return _attention(work)
            case CollectiveWork():
                return self._exchange(work)
            case HostCopy():
                return _host_copy(work)

    def _output(self, tensor: torch.Tensor) -> torch.Tensor:
        self._outputs.append(tensor)
        return tensor

    def _cublas(self, work: Matmul) -> Launch:
        if work.dtype == "fp8":
            a = _random(work.m, work.k).to(torch.float8_e4m3fn)
            b = _random(work.n, work.k).to(torch.float8_e4m3fn).t()
            scale = torch.ones((), device="cuda")
            c = self._output(torch.empty(work.m, work.n, device="cuda", dtype=torch.bfloat16))
            return lambda _: torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, out=c)
        dtype = DTYPES[work.dtype]
        a, b = _random(work.m, work.k).to(dtype), _random(work.k, work.n).to(dtype)
        c = self._output(torch.empty(work.m, work.n, device="cuda", dtype=dtype))
        precision = "high" if work.dtype == "tf32" else "highest"

        def launch(_: Group) -> None:
            torch.set_float32_matmul_precision(precision)
            torch.mm(a, b, out=c)

        return launch

    def _triton(self, work: Matmul) -> Launch:
        assert work.tile is not None, "cuBLAS does those without"
        tm, tn, tk = work.tile
        a, b = _random(work.m, work.k), _random(work.k, work.n)
        c = self._output(torch.empty(work.m, work.n, device="cuda", dtype=torch.bfloat16))
        grid = (triton.cdiv(work.m, tm) * triton.cdiv(work.n, tn),)
        options = {"num_warps": work.num_warps, "num_stages": work.num_stages}
        return lambda _: matmul_kernel[grid](a, b, c, work.m, work.n, work.k, tm, tn, tk, TYPES["bf16"][2], **options)

    def _by_rows(self, work: Scan | Softmax) -> Launch:
        dtype = torch.float32 if isinstance(work, Scan) else torch.bfloat16
        given = _random(work.rows, work.columns).to(dtype)
        got = self._output(torch.empty_like(given))
        if isinstance(work, Scan):
            return lambda _: torch.cumsum(given, dim=1, out=got)
        return lambda _: torch.softmax(given, dim=1, out=got)

    def _exchange(self, work: CollectiveWork) -> Launch:
        whole, part = work.num_bytes // 2, work.num_bytes // 2 // dist.get_world_size()
        average = dist.ReduceOp.AVG
        match work.collective:
            case "all_reduce":
                both = _random(whole)
                dist.broadcast(both, 0)  # the all-reduce works in place, and the average of equal buffers equals the buffer
                return lambda group: dist.all_reduce(both, op=average, group=group)
            case "all_gather":
                given, got = _random(part), self._output(torch.empty(whole, device="cuda", dtype=torch.bfloat16))
                return lambda group: dist.all_gather_into_tensor(got, given, group=group)
            case "reduce_scatter":
                given, got = _random(whole), self._output(torch.empty(part, device="cuda", dtype=torch.bfloat16))
                return lambda group: dist.reduce_scatter_tensor(got, given, op=average, group=group)
            case _:
                given = _random(whole)
                got = self._output(torch.empty_like(given))
                return lambda group: dist.all_to_all_single(got, given, group=group)


def _random(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)


def _attention(work: Attention) -> Launch:
    query, key, value = (_random(work.batch, work.heads, work.tokens, work.head_size) for _ in range(3))

    def launch(_: Group) -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(query, key, value)

    return launch


def _host_copy(work: HostCopy) -> Launch:
    on_gpu = torch.zeros(work.num_bytes, device="cuda", dtype=torch.uint8)
    on_host = torch.zeros(work.num_bytes, dtype=torch.uint8, pin_memory=True)
    got, given = (on_host, on_gpu) if work.direction == "device_to_host" else (on_gpu, on_host)
    return lambda _: got.copy_(given, non_blocking=True)


def limited_groups(limits: Sequence[int]) -> dict[int, Any]:
    """Return a process group of all ranks for each limit of CTAs, ready to be captured."""
    groups: dict[int, Any] = {}
    for limit in limits:
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = limit
        groups[limit] = dist.new_group(backend="nccl", pg_options=options)
        dist.barrier(group=groups[limit])
    return groups
