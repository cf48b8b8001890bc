"""What a package index shows: links that work there, or none, and no extra without a name in the documentation."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("hatchling")
HOOKS = runpy.run_path(str(ROOT / "hatch_build.py"))
README = """# Title
<picture><source srcset="docs/dark.svg"><img src="docs/light.svg"></picture>
![image](docs/a.png)
See [the docs](docs/run.md#there), [a site](https://example.com/x) and [below](#below).
"""


def test_links_to_files_become_absolute_at_the_tag_of_the_version() -> None:
    text = HOOKS["readable_alone"](README, "https://host/a/b", "1.2")
    assert 'srcset="https://host/a/b/raw/v1.2/docs/dark.svg"' in text
    assert 'src="https://host/a/b/raw/v1.2/docs/light.svg"' in text
    assert "![image](https://host/a/b/raw/v1.2/docs/a.png)" in text
    assert "[the docs](https://host/a/b/blob/v1.2/docs/run.md#there)" in text
    assert "[a site](https://example.com/x) and [below](#below)" in text


def test_without_an_address_the_words_stay_and_no_link_is_dead() -> None:
    text = HOOKS["readable_alone"](README, "", "1.2")
    assert text == "# Title\nSee the docs, [a site](https://example.com/x) and [below](#below).\n"
    assert HOOKS["addresses"]("") == {}


@pytest.mark.parametrize("homepage", ["", "https://host/a/b"])
def test_no_relative_link_of_the_readme_is_left(homepage: str) -> None:
    text = HOOKS["readable_alone"]((ROOT / "README.md").read_text(), homepage, "1.2")
    assert HOOKS["LINK"].sub("", text) == text
    assert 'src="docs/' not in text


def test_the_hook_refuses_an_address_without_https(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOOKS["HOMEPAGE"], "host/a/b")
    with pytest.raises(ValueError, match="must start with https://; found 'host/a/b'"):
        HOOKS["LinksHook"](str(ROOT), {}).update({"version": "1.2"})


def test_dependencies_have_two_bounds_and_the_training_environments_own_packages_are_none() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        assert ">=" in requirement
        assert "<" in requirement
    named = {requirement.partition(">=")[0] for requirement in project["dependencies"]}
    assert named == {"click", "msgspec", "numpy", "rich", "tomli-w"}


def test_every_extra_that_a_document_installs_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    named = {name for document in documents for name in re.findall(r"'\.\[(\w+)\]'", document.read_text())}
    assert {"cuda", "report"} <= named <= set(extras)
