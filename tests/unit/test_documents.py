"""README and docs: a block of code runs, or says what it needs; a link leads somewhere; a page is easy to read."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from helpers.command import counterpoint
from helpers.readability import of_markdown

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [ROOT / "README.md", *PAGES]
NO_PROSE = ("log.md", "python.md")  # a history, and names whose text is in their docstrings
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BELOW = re.compile(r"^```\n+```text\n", re.MULTILINE)
TITLE = re.compile(r'title="([^"]*)"')
TABLE = re.compile(r"^(?:\|.*\n)+", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
LANGUAGES = {  # what becomes of a block
    "python": "runs, in order with the page's other ones",
    "console": "each line that begins with $ runs, and its output has what is shown, to the figure",
    "toml": "is parsed",
    "py": "does not run: its title says what it needs",
    "sh": "does not run: its title says what it needs",
    "text": "shows output or a drawing, and no command; directly below a console block it is that command's output",
    "diff": "shows a change",
}
MOST_BLOCKS_THAT_NEED_SOMETHING = 60  # more of them, and the pages lean on what nobody has tested
COMMAND_OR_CODE = re.compile(r"(\$|counterpoint(?!:)|torchrun|pip|python3?|make|import|from|srun|mpirun) ")
OMITTED = "..."


class Block(NamedTuple):
    language: str
    title: str
    text: str


def blocks(document: Path, text: str = "") -> list[Block]:
    """Blocks of code at the margin, with the title that the site shows above them; `text` in place of the document's."""
    found = FENCE.findall(text or document.read_text())
    return [Block(language, title[1] if (title := TITLE.search(rest)) else "", text) for language, rest, text in found]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """Each `$ ...` line of a console block, continued where a backslash ends it, with the lines of output below it."""
    found: list[tuple[str, list[str]]] = []
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        else:
            found[-1][1].append(line)
    return found


@pytest.fixture
def reader_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the checkout to a reader: it has the examples, and what the documents write ends here."""
    if (ROOT / "examples").is_dir():
        (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_python_blocks_run_in_order(document: Path, reader_folder: Path) -> None:
    names: dict[str, object] = {"__name__": document.stem}
    for number, block in enumerate(blocks(document), start=1):
        if block.language == "python":
            exec(compile(block.text, f"{document.name}, block {number}", "exec"), names)
        elif block.language == "toml":
            tomllib.loads(block.text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_console_commands_run_and_print_what_is_shown(document: Path, reader_folder: Path) -> None:
    for block in blocks(document, BELOW.sub("", document.read_text())):
        for command, shown in commands(block) if block.language == "console" else ():
            words = shlex.split(command, comments=True)
            assert words[0] == "counterpoint", f"{document.name}: only counterpoint runs here; found {command}"
            done = counterpoint(*words[1:])
            status = int(block.title.removeprefix("ends with ") or 0)
            assert done.returncode == status, f"{command}\n{done.stderr}"
            printed = words_of(done.stdout)
            missing = [line for line in shown if words_of(line).removesuffix(OMITTED).rstrip() not in printed]
            assert not missing, f"{document.name}: {command} does not print\n" + "\n".join(missing)


def words_of(text: str) -> str:
    """The words and figures of a text, wherever its lines end."""
    return " ".join(text.split())


@pytest.mark.parametrize("document", PAGES, ids=name_of)
def test_a_block_runs_or_says_what_it_needs(document: Path) -> None:
    for block in blocks(document):
        assert block.language in LANGUAGES, f"{document.name} has a block of {block.language}"
        if block.language in ("py", "sh"):
            assert block.title.startswith("needs "), (
                f"{document.name}: give the block a title, as in needs GPUs:\n{block.text}"
            )
        if block.language == "text":
            code = [line for line in block.text.splitlines() if COMMAND_OR_CODE.match(line)]
            assert not code, f"{document.name}: {code} in a block of text; make it console or python, or say what it needs"


def test_few_blocks_need_something() -> None:
    assert (
        sum(block.title.startswith("needs ") for page in PAGES for block in blocks(page)) <= MOST_BLOCKS_THAT_NEED_SOMETHING
    )


@pytest.mark.parametrize("name", ["metrics.md", "workloads.md"])
def test_a_document_with_a_worked_example_has_blocks_to_run(name: str) -> None:
    assert any(block.language == "python" for block in blocks(ROOT / "docs" / name))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_to_files_and_addresses_are_well_formed(document: Path) -> None:
    for target in LINK.findall(document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target
            continue
        address = urlsplit(target)
        assert address.scheme == "https", target
        assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", address.netloc), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_row_is_of_a_table(document: Path) -> None:
    """Rows without a header, as below a blank line within a table, would be shown as text with bars."""
    for table in TABLE.findall(FENCE.sub("", document.read_text())):
        rows = table.splitlines()
        assert len(rows) > 2, rows[0]
        assert set(rows[1]) <= set("|-: "), rows[0]


@pytest.mark.parametrize("document", [page for page in PAGES if page.name not in NO_PROSE], ids=name_of)
def test_a_page_is_easy_to_read(document: Path) -> None:
    found = of_markdown(document.read_text())
    assert found.words_per_sentence < 20, found.longest
    assert found.reading_ease > 50
