"""Recording known causes: what is asked for, traces made small, and two ranks on CPUs."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from benchmarks.known_causes import add_to_expected, parse
from benchmarks.small_traces import trim, write_small

from counterpoint.traces.formats import read_activity

ROOT = Path(__file__).parents[2]
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
LIMIT_S = 120


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cases", "hardware_queue", "tail"], "start it by itself"),
        (["--cases", "tail", "fused", "--device", "cpu"], "fused cannot run with --device cpu"),
        (["--steps", "1"], "2 or more"),
        (["--cases", "unheard"], "invalid choice"),
    ],
)
def test_what_cannot_be_recorded_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["-o", "folder", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_case_of_another_process_is_left_out_unless_it_is_named() -> None:
    assert "hardware_queue" not in parse(["-o", "folder"]).cases
    assert parse(["-o", "folder", "--cases", "hardware_queue"]).cases == ["hardware_queue"]


@pytest.mark.parametrize("name", ["moe.rank0", "tp.rank0"])
def test_a_small_trace_reads_like_the_whole_one(name: str, tmp_path: Path) -> None:
    whole = ROOT / "examples" / "traces" / f"{name}.json.gz"
    document = json.loads(gzip.decompress(whole.read_bytes()))
    small = tmp_path / whole.name
    small.write_text(json.dumps(trim(document)))
    assert small.stat().st_size < 0.9 * len(json.dumps(document))
    found, wanted = (msgspec.structs.replace(read_activity(path), path="") for path in (small, whole))
    assert found == wanted


def test_the_same_trace_gives_the_same_bytes(tmp_path: Path) -> None:
    exported, path = tmp_path / "exported.json", tmp_path / "small.json.gz"
    exported.write_text(json.dumps({"traceEvents": [], "traceName": "elsewhere"}))
    sizes = [write_small(exported, path) for _ in range(2)]
    assert sizes == [len(path.read_bytes())] * 2
    assert json.loads(gzip.decompress(path.read_bytes()))["traceName"] == path.name


def test_a_case_recorded_again_takes_the_place_of_its_failure(tmp_path: Path) -> None:
    path = tmp_path / "expected.json"
    add_to_expected(path, "fused", {}, "no such operator")
    add_to_expected(path, "tail", {"cause": "tail"}, "")
    assert json.loads(path.read_text())["failed"] == {"fused": "no such operator"}
    add_to_expected(path, "fused", {"cause": "dependent"}, "")
    found = json.loads(path.read_text())
    assert set(found["cases"]) == {"tail", "fused"}
    assert not found["failed"]


def test_two_ranks_record_steps_with_their_collectives(tmp_path: Path) -> None:
    cases = ["slow_rank", "queued", "uneven"]
    ended = subprocess.run(
        [*TORCHRUN, "-m", "benchmarks.known_causes", "-o", tmp_path, "--device", "cpu", "--cases", *cases],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads((tmp_path / "expected.json").read_text())
    assert list(found["cases"]) == cases
    assert not found["failed"]
    assert all(1000 < case["bytes"] < 60_000 for case in found["cases"].values())
    slow = found["cases"]["slow_rank"]
    assert slow["ranks"]["0"] == {"slow_rank": slow["parts_us"]["more"], "dependent": slow["parts_us"]["collective"]}
    assert slow["ranks"]["1"] == {"dependent": slow["parts_us"]["collective"]}
    for case, collective in zip(cases, ("all_reduce", "all_reduce", "all_to_all"), strict=True):
        for rank in range(2):
            trace = json.loads(gzip.decompress((tmp_path / f"{case}.rank{rank}.json.gz").read_bytes()))
            names = [event["name"] for event in trace["traceEvents"]]
            assert sum(name.startswith("ProfilerStep#") for name in names) == 4
            assert sum(name.startswith("gloo:") and collective in name for name in names) == 4, set(names)
            assert trace["distributedInfo"]["rank"] == rank
