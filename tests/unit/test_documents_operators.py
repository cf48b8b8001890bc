"""The figures of operators in docs/ops.md and docs/ops_measured.md are those of the stored runs."""

import json
import statistics
from pathlib import Path

import pytest
from benchmarks.heuristic_accuracy import choices
from benchmarks.heuristic_cases import AGAIN, PRESENT, STORED, stored_cases

from counterpoint import load_machine
from counterpoint.schedule import Problem
from counterpoint.schedule.heuristic import pick_schedule

ROOT = Path(__file__).parents[2]
OPERATIONS = ("ag_mm", "mm_rs")
BESIDE = ("collective", "matmul", "sequential", "peer", "picked")  # candidates that are not schedules of ours by name
NUM_GPUS = {"Two GPUs": 2, "Four GPUs": 4}


def stored(num_gpus: int, gpu: str = "h200") -> dict[tuple[str, str], dict]:
    """Cases of a stored run by operator and by the sizes of all-gather + matmul as the documents print them."""
    cases = json.loads((ROOT / "benchmarks" / "results" / f"ops_grid_{num_gpus}x_{gpu}.json").read_text())["result"]
    sizes = {case["shape"]["name"]: case["sizes_m_n_k"] for case in cases if case["op"] == "ag_mm"}
    return {(case["op"], ", ".join(map(str, sizes[case["shape"]["name"]]))): case for case in cases}


def rows(document: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading."""
    text = (ROOT / "docs" / document).read_text().split(f"## {heading}\n", maxsplit=1)[1]
    table = text.split("\n|---|", maxsplit=1)[1].split("\n\n", maxsplit=1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]


def time_us(case: dict, name: str) -> float:
    """A candidate's time; some runs time the pick once more, and others only by its own name."""
    timed = case["candidates"]
    return timed[case["picked"] if name == "picked" and name not in timed else name]["median_us"]


def ratio(case: dict, name: str) -> float:
    """How many times as fast the pick is as another candidate."""
    return time_us(case, name) / time_us(case, "picked")


def five_times(case: dict) -> str:
    best = min(each["median_us"] for name, each in case["candidates"].items() if name not in BESIDE)
    times = (*(time_us(case, name) for name in ("sequential", "peer", "picked")), best, case["ideal_us"])
    return " / ".join(f"{each:,.0f}" for each in times)


@pytest.mark.parametrize("heading", NUM_GPUS)
def test_the_full_tables_are_the_stored_runs(heading: str) -> None:
    cases = stored(NUM_GPUS[heading])
    found = rows("ops_measured.md", heading)
    assert len(found) == len(cases) / 2 == 24
    for shape, sizes, *cells in found:
        of_row = [cases[operation, sizes] for operation in OPERATIONS]
        assert shape == of_row[0]["shape"]["name"] + (" *" if of_row[0]["held_out"] else "")
        assert cells == [five_times(case) for case in of_row]


def test_the_short_table_is_of_the_run_on_two_gpus() -> None:
    cases = stored(2)
    *found, means = rows("ops.md", "When it pays")
    for sizes, *cells in found:
        expected = []
        for operation in OPERATIONS:
            case = cases[operation, sizes.removesuffix(" *")]
            assert case["held_out"] == sizes.endswith(" *")
            expected += [
                f"{time_us(case, 'picked'):,.0f} us",
                f"{ratio(case, 'sequential'):.2f}",
                f"{ratio(case, 'peer'):.3f}",
            ]
        assert cells == expected
    assert [cell for cell in means[1:] if cell] == geometric_means(2)


@pytest.mark.parametrize(("gpus", "run"), [("2", (2, "h200")), ("4", (4, "h200")), ("2 H100s", (2, "h100"))])
def test_the_means_among_the_results_are_of_the_stored_runs(gpus: str, run: tuple[int, str]) -> None:
    names = ("all-gather + matmul", "matmul + reduce-scatter")
    found = {(row[0], row[1]): row[2:] for row in rows("results.md", "Operators")}
    assert [cell for name in names for cell in found[name, gpus]] == geometric_means(*run)


def test_the_means_of_later_runs_are_those_of_todays_picks() -> None:
    runs = {"2 H200s": AGAIN["H200, again"][2], "4 H200s": STORED[4]}
    runs |= {f"{num_gpus} H100s": AGAIN["H100, again"][num_gpus] for num_gpus in (2, 4)}
    for label, gpus, *cells in rows("ops_measured.md", "Again, on other machines"):
        run = PRESENT["H200, present calls"][int(gpus[0])] if label.endswith("present calls") else runs[gpus]
        operation = "ag_mm" if label.startswith("all-gather") else "mm_rs"
        chosen = [each for each in choices(stored_cases(int(gpus[0]), run)) if each.case.op == operation]
        picked = [each.case.times_us[each.label] for each in chosen]
        fused = [each.case.peer_us / time_us for each, time_us in zip(chosen, picked, strict=True)]
        over = [each.case.times_us["sequential"] / time_us for each, time_us in zip(chosen, picked, strict=True)]
        best = [each.case.peer_us / min(each.case.times_us.values()) for each in chosen]
        means = [statistics.geometric_mean(ratios) for ratios in (over, fused, best)]
        assert cells[:3] == [f"{means[0]:.2f}", f"{means[1]:.3f}", f"{means[2]:.3f}"], (label, gpus)
        assert cells[4].split(",")[0] == str(sum(ratio < 1 for ratio in fused)), (label, gpus)


def geometric_means(num_gpus: int, gpu: str = "h200") -> list[str]:
    """Of both operators: sequential and the fused operator over the pick."""
    cases = [[case for (found, _), case in stored(num_gpus, gpu).items() if found == each] for each in OPERATIONS]
    return [
        f"{statistics.geometric_mean([ratio(case, name) for case in of_operation]):.{digits}f}"
        for of_operation in cases
        for name, digits in (("sequential", 2), ("peer", 3))
    ]


def stored_rows(name: str, num_gpus: int = 2) -> list[dict]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}_{num_gpus}x_h200.json").read_text())["result"]


def sizes(entry: dict) -> str:
    return ", ".join(map(str, entry["sizes_m_n_k"]))


def test_the_tables_of_both_losses_are_the_stored_run() -> None:
    entries, cutting, overlapping = stored_rows("ops_losses"), [], {}
    for entry in entries:
        if entry["loss"] == "contention":
            overlapping.setdefault(sizes(entry), []).append(entry)
            continue
        ratios = (
            " / ".join(f"{entry['over_whole'][f'{dimension}/{count} on 1']:.2f}" for count in (2, 4, 8))
            for dimension in ("rows", "columns", "inner")
        )
        cutting.append([sizes(entry), f"{entry['whole_us']:,.0f} us", *ratios])
    beside = [
        [
            size,
            *(
                f"{100 * (entry[f'{what}_beside_over_alone'] - 1):+.1f} %"
                for what in ("matmuls", "copies")
                for entry in of_size
            ),
        ]
        for size, of_size in overlapping.items()
    ]
    assert rows("ops_measured.md", "What cutting costs") == cutting
    assert rows("ops_measured.md", "What overlapping costs") == beside


def test_the_table_of_other_passes_is_the_stored_run() -> None:
    expected = []
    for entry in stored_rows("ops_passes"):
        times = {label: each["median_us"] for label, each in entry["candidates"].items()}
        best, picked = min(times, key=lambda label: times[label]), entry["picked"]
        name = entry["operation"] + (" backward" if entry["direction"] == "backward" else "")
        cells = [f"{times['sequential']:,.0f} us", *(f"{times[label]:,.0f} us, `{label}`" for label in (picked, best))]
        expected.append([name, entry["shape"], sizes(entry), *cells, f"{times['sequential'] / times[picked]:.2f}"])
    assert rows("ops_measured.md", "Other operators and backward passes") == expected


def test_the_table_of_whole_activations_is_the_stored_runs_as_picked_today() -> None:
    expected = []
    for num_gpus in (2, 4):
        for entry in stored_rows("ops_columns", num_gpus):
            num_rows, num_columns, num_inner = entry["sizes_m_n_k"]
            problem = Problem(
                operation=entry["operation"],
                num_ranks=num_gpus,
                num_rows=num_rows,
                num_inner=num_inner,
                num_columns=num_columns,
            )
            picked = pick_schedule(problem, load_machine("h200"), entry["direction"]).description.label()
            times = {label: each["median_us"] for label, each in entry["candidates"].items()}
            best = min(times, key=lambda label: times[label])
            assert times[picked] < 1.02 * times[best]
            name = entry["operation"] + (" backward" if entry["direction"] == "backward" else "")
            cells = [f"{times['sequential']:,.0f} us", *(f"{times[label]:,.0f} us, `{label}`" for label in (picked, best))]
            ratio_of_times = f"{times['sequential'] / times[picked]:.2f}"
            expected.append([name, str(num_gpus), entry["shape"], sizes(entry), *cells, ratio_of_times])
    assert rows("ops_measured.md", "Activations that are whole on every rank") == expected


def gemm_cells(entry: dict | None, divisor_name: str) -> list[str]:
    """Sizes and times in milliseconds of one operator on one of the paper's GEMMs."""
    if entry is None:
        return ["", "not run"]
    divisor, candidates = entry["shape"][divisor_name], entry["candidates"]
    best = min(each["median_us"] for name, each in candidates.items() if name not in BESIDE)
    times = (*(candidates[name]["median_us"] for name in ("sequential", "peer", entry["picked"])), best, entry["ideal_us"])
    return [
        sizes(entry) + (f" (M / {divisor})" if divisor > 1 else ""),
        " / ".join(f"{each / 1e3:,.1f}" for each in times),
    ]


def test_the_table_of_the_paper_gemms_is_the_stored_run() -> None:
    entries = {(entry["shape"]["name"], entry["op"]): entry for entry in stored_rows("ops_gemms")}
    names = sorted({name for name, _ in entries}, key=lambda name: int(name[1:]))
    assert rows("ops_measured.md", "The paper's GEMMs") == [
        [
            name,
            *gemm_cells(entries.get((name, "ag_mm")), "ag_divisor"),
            *gemm_cells(entries.get((name, "mm_rs")), "rs_divisor"),
        ]
        for name in names
    ]
