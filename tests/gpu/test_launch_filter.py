"""The launch filter under real CUDA libraries: it sees every launch that the profiler sees; the driver takes its changes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.launch_filter.control_block import INITIAL_BLOCK, ControlBlock, FilterState, block_paths
from counterpoint.launch_filter.library import filter_library
from counterpoint.launch_filter.rules import FilterRule

# What a training step uses: ATen, cuBLAS, cuDNN or flash attention, Triton through torch.compile, a CUDA graph.
JOB = """
import json, os, sys
from collections import Counter
from pathlib import Path
import torch
from torch.profiler import ProfilerActivity, profile
from counterpoint.launch_filter.control_block import ControlBlock

def census():
    folder = os.environ.get("COUNTERPOINT_FILTER_DIRECTORY")
    if not folder:
        return Counter()
    block = ControlBlock(Path(folder) / f"{os.getpid()}.block")
    state = block.state()
    block.close()
    return Counter({"all": state.num_launches}) + Counter({seen.name: seen.num_launches for seen in state.functions})

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
values = torch.randn(16, 256, 512, device="cuda", dtype=torch.bfloat16)
single = torch.randn(2048, 2048, device="cuda")
side = torch.cuda.Stream()
fused = torch.compile(lambda x: torch.nn.functional.gelu(x * 2 + 1).sum(-1))

def step():
    with torch.cuda.stream(side):  # what the test takes for a collective
        single @ single
    loss = layer(values).float().square().mean() + (single @ single).mean() + fused(single).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

for _ in range(3):
    step()
torch.cuda.synchronize()
before = census()
with profile(activities=[ProfilerActivity.CUDA]) as profiler:
    losses = [step().item() for _ in range(5)]
    torch.cuda.synchronize()
after = census()
profiler.export_chrome_trace(sys.argv[1])
kernels = Counter(event["name"] for event in json.load(open(sys.argv[1]))["traceEvents"] if event.get("cat") == "kernel")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    doubled = single * 2
graph.replay()
torch.cuda.synchronize()
print(json.dumps({"losses": losses, "profiled": sum(kernels.values()), "seen": after["all"] - before["all"],
                  "doubled": bool((doubled == single * 2).all())}))
"""


def run_job(folder: Path, rules: list[FilterRule] | None) -> tuple[dict[str, object], FilterState | None]:
    """The job's answers and its filter's state; without rules it runs as it is."""
    variables = dict(os.environ)
    directory = folder / "run"
    if rules is not None:
        directory.mkdir()
        ControlBlock.write_initial(directory / INITIAL_BLOCK, rules)
        variables |= {"LD_PRELOAD": str(filter_library()), "COUNTERPOINT_FILTER_DIRECTORY": str(directory)}
    command = [sys.executable, "-c", JOB, str(folder / "trace.json")]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    answers = json.loads(ended.stdout.splitlines()[-1])
    states = []
    for path in block_paths(directory):
        block = ControlBlock(path)
        states.append(block.state())
        block.close()
    return answers, max(states, key=lambda state: state.num_launches) if states else None


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return run_job(tmp_path_factory.mktemp("untouched"), None)[0]


def test_it_sees_every_launch_that_the_profiler_sees_and_changes_none(tmp_path: Path, untouched: dict[str, object]) -> None:
    answers, state = run_job(tmp_path, [])
    assert state is not None
    assert (state.driver, state.problem) == ("cuda", "")
    assert answers["seen"] == answers["profiled"] == untouched["profiled"]
    assert answers["losses"] == untouched["losses"]
    assert sum(seen.num_changed for seen in state.functions) == 0


def test_the_driver_takes_every_change(tmp_path: Path, untouched: dict[str, object]) -> None:
    rules = [
        FilterRule(pattern="*", priority=-1),
        FilterRule(pattern="*elementwise*", dynamic_shared_bytes=115_840, ctas_per_sm=1, carveout_percent=100),
        FilterRule(pattern="*gemm*", is_collective=True),  # fp32 matmuls, in the place of collectives
        FilterRule(pattern="nvjet*", is_collective=True),
        FilterRule(pattern="*elementwise*", hold_us=5.0),
    ]
    answers, state = run_job(tmp_path, rules)
    assert state is not None
    assert answers["losses"] == untouched["losses"]
    assert answers["doubled"]
    priority, cap, _, _, hold = state.counters
    assert priority.num_prioritized > 100
    assert (cap.residency_found, cap.num_capped > 20) == (1, True)
    assert hold.num_held >= 5
    assert sum(counters.num_retried for counters in state.counters) == 0, state.counters


def test_a_cap_that_cannot_be_is_refused_and_the_job_goes_on(tmp_path: Path, untouched: dict[str, object]) -> None:
    answers, state = run_job(tmp_path, [FilterRule(pattern="*", dynamic_shared_bytes=400_000)])
    assert state is not None
    assert answers["losses"] == untouched["losses"]
    (counters,) = state.counters
    assert counters.num_capped == 0
    assert "does not allow the kernel so much shared memory" in counters.refusal


def test_the_driver_takes_a_carveout_of_every_kernel_and_results_stay(tmp_path: Path, untouched: dict[str, object]) -> None:
    answers, state = run_job(tmp_path, [FilterRule(pattern="*", dynamic_shared_bytes=0, carveout_percent=57)])
    assert answers["losses"] == untouched["losses"]
    assert answers["doubled"]
    assert state is not None
    (counters,) = state.counters
    assert counters.num_capped + counters.num_refused == counters.num_matched
    assert counters.num_capped > 0.9 * counters.num_matched
