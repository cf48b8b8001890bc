"""What MkDocs does to the pages beyond its own means: brings in files of the project, draws formulas, writes the commands.

Pages link to files outside of docs/ as they do in the checkout, as in `../benchmarks/results/run.json`. Each such file comes
into the site under `project/`, and a link to the contributing guide or the changelog leads to its page.
"""

import posixpath
import re
from pathlib import Path

import commands
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PROJECT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\w$])\$(?! )([^$\n]+?)(?<! )\$(?![\w$])", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand in the root of the checkout, and every file of the project that a page links to."""
    for name, page in PROJECT_PAGES.items():
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, content=(ROOT / name).read_text("utf-8")))
    for page_file in files.documentation_pages():
        for _, target, _ in LINK.findall(CODE.sub("", page_file.content_string)):
            linked = _project_file(page_file.src_uri, target)
            if linked and files.get_file_from_path(f"project/{linked}") is None:
                files.append(File.generated(config, f"project/{linked}", abs_src_path=str(ROOT / linked)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Complete a page: the commands where it asks for them, links to files of the project, formulas as MathML."""
    text = markdown.replace(commands.MARK, commands.reference() if commands.MARK in markdown else "")
    parts = CODE.split(text)  # code is every second part
    parts[::2] = [LINK.sub(lambda found: _led(found, page.file.src_uri), FORMULA.sub(_drawn, part)) for part in parts[::2]]
    return "".join(parts)


def _project_file(page: str, target: str) -> str:
    """The file of the project, as a path from its root, that a link leads to outside of docs/; empty where it is none."""
    if "://" in target or target.startswith("mailto:"):
        return ""
    folder = "" if page in PROJECT_PAGES.values() and page != "index.md" else posixpath.join("docs", posixpath.dirname(page))
    path = posixpath.normpath(posixpath.join(folder, target))
    is_page = path.startswith("docs/") or path in PROJECT_PAGES
    return "" if is_page or not (ROOT / path).is_file() else path


def _led(found: re.Match[str], page: str) -> str:
    """A link as the site needs it."""
    opening, target, closing = found.groups()
    here = posixpath.dirname(page)
    linked = _project_file(page, target)
    if linked:
        return f"{opening}{posixpath.relpath(f'project/{linked}', here or '.')}{closing}"
    if page in PROJECT_PAGES.values() and target.startswith("docs/"):
        return f"{opening}{target.removeprefix('docs/')}{closing}"
    name = posixpath.basename(target)
    if name in PROJECT_PAGES and "://" not in target:
        return f"{opening}{posixpath.relpath(PROJECT_PAGES[name], here or '.')}{closing}"
    return found[0]


def _drawn(found: re.Match[str]) -> str:
    """A formula as MathML, which browsers draw without a script."""
    block, line = found.groups()
    return convert(" ".join((block or line).split()), display="block" if block else "inline")
