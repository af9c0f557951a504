"""What the package's folders import of each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "charonia"


def part_of(module: str) -> str:
    """The folder of the package in which a module is, or the module itself beside them."""
    return module.split(".")[1]


def imported(file: Path) -> Iterator[str]:
    """Modules of the package, also those that are imported in functions or for types alone."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:  # others stay in their folder
            names = [f"{node.module}.{one.name}" for one in node.names]
        else:
            continue
        yield from (name for name in names if name.startswith("charonia."))


def test_no_two_folders_import_each_other_by_whatever_way() -> None:
    graph: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        own = part_of(".".join(("charonia", *file.relative_to(PACKAGE).with_suffix("").parts)))
        graph.setdefault(own, set()).update(part_of(module) for module in imported(file) if part_of(module) != own)
    assert {"api", "text", "weights"} <= set(graph) and "text" in graph["api"]
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names them
