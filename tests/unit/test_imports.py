"""Imports between the folders and modules of the packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "charonia"


def name_of(file: Path, package: Path) -> str:
    return ".".join((package.name, *file.relative_to(package).with_suffix("").parts)).removesuffix(".__init__")


def part_of(module: str) -> str:
    """Return the package's folder that contains a module, or the module itself if it is not in a folder."""
    return module.split(".")[1]


def imported(file: Path, package: Path) -> Iterator[str]:
    """Yield the modules of the package that a file imports, also in functions and for types only."""
    folder = [package.name, *file.relative_to(package).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) + 1 - node.level] if node.level else []
            names = [".".join((*base, *([node.module] if node.module else []), one.name)) for one in node.names]
        else:
            continue
        yield from (name for name in names if name.startswith(f"{package.name}."))


@pytest.mark.slow
def test_no_two_folders_import_each_other_by_whatever_way() -> None:
    graph: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        own = part_of(".".join(("charonia", *file.relative_to(PACKAGE).with_suffix("").parts)))
        parts = map(part_of, imported(file, PACKAGE))
        graph.setdefault(own, set()).update(part for part in parts if part != own)
    assert {"api", "text", "weights"} <= set(graph) and "text" in graph["api"]
    list(TopologicalSorter(graph).static_order())  # raises CycleError with the cycle


@pytest.mark.parametrize("folder", ["gateway/charonia_gateway", "client/charonia_client"])
def test_no_two_modules_import_each_other_by_whatever_way(folder: str) -> None:
    package = ROOT / folder
    files = {name_of(file, package): file for file in package.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for own, file in files.items():
        # A name that is not a module is defined in the module before its last dot.
        names = {name if name in files else name.rpartition(".")[0] for name in imported(file, package)}
        graph[own] = (names & set(files)) - {own}
    assert sum(map(len, graph.values())) > len(graph)
    list(TopologicalSorter(graph).static_order())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("starts", "started"),
    [
        ("charonia_gateway.__main__, charonia_gateway.workers", ["fastapi", "charonia_client", "numpy"]),
        ("charonia.cli, charonia.serve.launcher", ["fastapi", "numpy"]),
    ],
)
def test_starting_programs_import_no_large_packages(starts: str, started: list[str]) -> None:
    code = f"import sys, {starts}; print([name for name in {started} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_one_file_of_the_engine_includes_the_library_of_json() -> None:
    files = [file for ending in ("h", "cpp", "cu") for file in (ROOT / "engine").rglob(f"*.{ending}")]
    assert [file.name for file in files if "nlohmann/json" in file.read_text(encoding="utf-8")] == ["json.h"]
