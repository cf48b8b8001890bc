"""What MkDocs does to the pages beyond its own means: brings in files of the project, draws formulas, writes the commands.

Pages link to each other and to files of the project as in the checkout: `../benchmarks/results/run.json`. Guides outside of
docs/ become pages. Every other file that a page links to comes into the site under `project/`.
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
EXAMPLES = sorted(guide.parent.name for guide in ROOT.glob("examples/*/README.md"))
GUIDES = {  # outside of docs/, and the pages that they become
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples/index.md",
    **{f"examples/{name}/README.md": f"examples/{name}.md" for name in EXAMPLES},
}
SOURCES = {page: guide for guide, page in GUIDES.items()}
FIRST_PAGE = "index.md"  # a link to the README leads to it
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\w$])\$(?! )([^$\n]+?)(?<! )\$(?![\w$])", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the guides outside of docs/, and every file of the project that a page links to."""
    for guide, page in GUIDES.items():
        files.append(File.generated(config, page, content=(ROOT / guide).read_text("utf-8")))
    for page_file in files.documentation_pages():
        for _, target, _ in LINK.findall(CODE.sub("", page_file.content_string)):
            place = _place(page_file.src_uri, target)
            if place.startswith("project/") and files.get_file_from_path(place) is None:
                source = ROOT / place.removeprefix("project/")
                files.append(File.generated(config, place, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Complete a page: the commands where it asks for them, links as the site needs them, formulas as MathML."""
    here = page.file.src_uri
    text = markdown.replace(commands.MARK, commands.reference() if commands.MARK in markdown else "")
    parts = CODE.split(text)  # code is every second part
    parts[::2] = [LINK.sub(lambda found: _led(found, here), FORMULA.sub(_drawn, part)) for part in parts[::2]]
    return "".join(parts)


def _place(page: str, target: str) -> str:
    """Where in the site a link of a page leads; empty where it leads out of the project, or nowhere."""
    if "://" in target or target.startswith("mailto:"):
        return ""
    source = SOURCES.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    guide = f"{path}/README.md" if (ROOT / path).is_dir() else path
    if guide == "README.md":
        return FIRST_PAGE
    if guide in GUIDES:
        return GUIDES[guide]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"project/{path}" if (ROOT / path).is_file() else ""


def _led(found: re.Match[str], page: str) -> str:
    """A link as the site needs it; one that leads nowhere stays, and fails the build."""
    opening, target, closing = found.groups()
    place = _place(page, target)
    return f"{opening}{posixpath.relpath(place, posixpath.dirname(page) or '.')}{closing}" if place else found[0]


def _drawn(found: re.Match[str]) -> str:
    """A formula as MathML, which browsers draw without a script."""
    block, line = found.groups()
    return str(convert(" ".join((block or line).split()), display="block" if block else "inline"))
