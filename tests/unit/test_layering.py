"""The order of the parts: imports go strictly down, three parts may import torch or CUDA, and nothing grows too long."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "counterpoint"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Lowest first. A part may import only from lines above its own, and from itself.
ORDER = [
    {"display", "errors", "mismatch", "spans", "units"},
    {"kernel_names"},
    {"files", "workers"},
    {"ranks", "value"},
    {"measurement"},
    {"links"},
    {"machine"},
    {"step"},
    {"occupancy", "footprints"},
    {"schedule"},
    {"controls"},
    {"plan"},
    {"timeline", "engagement"},
    {"metrics", "traces", "workloads"},
    {"sim", "cuda"},
    {"launch_filter", "ops"},
    {"integrations"},
    {"planner", "doctor", "job"},
    {"analysis", "cluster", "paper", "supervised"},
    {"validation"},
    {"report"},
    {"cli"},
    {"__init__", "__main__"},
]
LEVEL = {part: level for level, parts in enumerate(ORDER) for part in parts}
DEVICE_PARTS = {"cuda", "ops", "integrations"}
DEVICE_MODULES = {
    "paper.workloads",
    "supervised.torch_job",
    "validation.on_gpu",
    "validation.steps_on_gpu",
}  # of parts that otherwise need no GPU
DEVICE_LIBRARIES = {"torch", "cuda", "cupy", "triton"}
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500
MOST_SMALL_MODULES = 3


def name_of(path: Path) -> str:
    """The module's dotted name below `counterpoint`; packages without their `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def part_of(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


NAMES = {name_of(path) for path in SOURCES}


def imported_modules(path: Path) -> Iterator[str]:
    """Every absolute dotted name that the file imports, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are absolute here"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}".removeprefix("counterpoint.")
                yield f"counterpoint.{submodule}" if submodule in NAMES else node.module


def own_imports(path: Path) -> set[str]:
    found = {name for name in imported_modules(path) if name == "counterpoint" or name.startswith("counterpoint.")}
    return {name.removeprefix("counterpoint.") if name != "counterpoint" else "__init__" for name in found}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_strictly_down(path: Path) -> None:
    part = part_of(name_of(path))
    assert part in LEVEL, f"{part} has no place in the order of imports; give it one here and in docs/architecture.md"
    for imported in own_imports(path):
        other = part_of(imported)
        assert other == part or LEVEL[other] < LEVEL[part], f"{name_of(path)} must not import {imported}"


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {name_of(path): own_imports(path) - {name_of(path)} for path in SOURCES}
    finished: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        if name not in finished:
            for imported in graph.get(name, ()):
                visit(imported, (*trail, name))
            finished.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_only_device_parts_import_device_libraries(path: Path) -> None:
    imported = {name.split(".", maxsplit=1)[0] for name in imported_modules(path)}
    if part_of(name_of(path)) not in DEVICE_PARTS and name_of(path) not in DEVICE_MODULES:
        assert not imported & DEVICE_LIBRARIES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_and_files_stay_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{path.name}:{node.lineno} {node.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    if path.read_text().strip():
        assert ast.get_docstring(ast.parse(path.read_text()))


def test_no_class_name_has_two_meanings() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name_of(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_few_modules_are_very_small() -> None:
    """Packages' faces are; any other module of a few lines belongs to a neighbor."""
    faces = ("__init__.py", "__main__.py")
    small = [name_of(path) for path in SOURCES if path.name not in faces and len(path.read_text().splitlines()) < 40]
    assert len(small) <= MOST_SMALL_MODULES, small


def test_no_import_hides_in_a_string() -> None:
    """Exempt are public names that load late, the question whether a package is there, and a user's own function."""
    exempt = {"__init__", "cuda.ranks", "cli.tune", "integrations"}
    hidden = {name_of(path) for path in SOURCES if "import_module" in path.read_text() or "__import__(" in path.read_text()}
    assert hidden == exempt
