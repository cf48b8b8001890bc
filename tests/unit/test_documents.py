"""README and docs: their Python blocks run in order, and every `$ counterpoint` line of a console block exits with 0."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
COUNTERPOINT = Path(sys.executable).with_name("counterpoint")


def blocks(document: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(document.read_text()) if found == language]


def commands(document: Path) -> list[str]:
    """Each `$ counterpoint ...` line, with the lines that a backslash continues it on."""
    text = "\n".join(blocks(document, "console")).replace("\\\n", " ")
    return [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ counterpoint ")]


@pytest.fixture
def reader_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the checkout to a reader: it has the examples, and what the documents write ends here."""
    if (ROOT / "examples").is_dir():
        (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_run_in_order(document: Path, reader_folder: Path) -> None:
    names: dict[str, object] = {"__name__": document.stem}
    for number, block in enumerate(blocks(document, "python"), start=1):
        exec(compile(block, f"{document.name}, python block {number}", "exec"), names)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_console_commands_succeed(document: Path, reader_folder: Path) -> None:
    for command in commands(document):
        done = subprocess.run(
            [COUNTERPOINT, *shlex.split(command, comments=True)[1:]],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"


@pytest.mark.parametrize("name", ["metrics.md", "workloads.md"])
def test_a_document_with_a_worked_example_has_blocks_to_run(name: str) -> None:
    assert blocks(ROOT / "docs" / name, "python")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_of_the_project_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target
