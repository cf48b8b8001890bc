"""The benchmark of graph launches, as far as it goes without a GPU: its cases, its arguments, and its loop in C."""

import ctypes
import subprocess
import sys
from pathlib import Path

from benchmarks.graph_launches import cases, load_direct_calls


def test_branches_divide_nodes_and_no_case_comes_twice() -> None:
    found = cases()
    assert len({case.label() for case in found}) == len(found)
    assert all(case.num_nodes % case.num_branches == 0 for case in found)


def test_the_loop_in_c_makes_every_copy_in_order_and_stops_at_an_error(tmp_path: Path) -> None:
    made: list[tuple[int, int, int]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    def copy(target: int, source: int, num_bytes: int, _stream: int) -> int:
        made.append((target, source, num_bytes))
        return 700 if source == 30 else 0

    words = ctypes.c_uint64 * 4
    library = load_direct_calls(tmp_path)
    error = library.issue_copies(copy, words(1, 2, 3, 4), words(10, 20, 30, 40), ctypes.c_size_t(1 << 33), 4, None)
    assert error == 700
    assert made == [(1, 10, 1 << 33), (2, 20, 1 << 33), (3, 30, 1 << 33)]


def test_cases_are_listed_without_a_gpu_and_bad_rounds_are_one_line() -> None:
    command = [sys.executable, "-m", "benchmarks.graph_launches", "--kind", "signal"]
    root = Path(__file__).parents[2]
    listed = subprocess.run([*command, "--list"], cwd=root, capture_output=True, text=True, check=True)
    assert "16 x signal on 4 branches, graph in flight" in listed.stdout.splitlines()
    refused = subprocess.run([*command, "--rounds", "1"], cwd=root, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "--rounds takes 2 or more; found 1" in refused.stderr
