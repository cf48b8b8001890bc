"""Sweeps as plots: what is refused before anything runs, and that a file is drawn where matplotlib is installed."""

from pathlib import Path

import pytest

from counterpoint import load_machine
from counterpoint.errors import CounterpointError
from counterpoint.paper.cases import paper_description
from counterpoint.paper.sweep import simulate_sweep
from counterpoint.report import plots
from counterpoint.value import check_outputs


def test_without_matplotlib_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(CounterpointError, match="--plot needs 'matplotlib', which is not installed"):
        plots.check_plot()


def test_other_formats_and_too_many_sweeps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CounterpointError, match=r"A plot file must end in \.svg, \.png or \.pdf; found 'sweep\.txt'"):
        check_outputs(((Path("sweep.txt"), plots.PLOT),))
    sweep = simulate_sweep(paper_description("cb_ar_opt1"), load_machine("a40"), "types", ("bf16",))
    with pytest.raises(CounterpointError, match="A plot shows at most 32 sweeps; found 33"):
        plots.draw_sweeps([sweep] * 33, tmp_path / "sweep.svg", "none")


def test_every_variant_and_every_point_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "sweep.svg"
    sweeps = [
        simulate_sweep(paper_description("cb_ar_opt1"), load_machine("a40"), axis, values)
        for axis, values in (("ctas", ("64", "tiles")), ("types", ("bf16", "fp8")))
    ]
    plots.draw_sweeps(sweeps, file, "none used, simulated")
    drawn = file.read_text()
    for words in ("TimeRatio, plain overlap", "overlap ratio, priority", "cb_ar_opt1, a40", "Simulated, not measured"):
        assert words in drawn
    assert "none used" not in drawn  # said already
