"""Prints the dependencies of this checkout's packages for `pip install --requirement`, one requirement per line,
without their dependencies on each other. With this list, pip can install them while the engine is compiled.

    dependencies.py serve|test     with charonia's extra of this name
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDERS = (".", "client", "gateway")


def needed(project: dict, extra: str) -> Iterator[Requirement]:
    """Yield the requirements of a project's extra, and of the extras that it includes."""
    for line in project["optional-dependencies"][extra]:
        one = Requirement(line)
        if one.name == project["name"]:
            for further in one.extras:
                yield from needed(project, further)
        else:
            yield one


def main() -> None:
    root = Path(__file__).parent.parent
    projects = [tomllib.loads((root / folder / "pyproject.toml").read_text())["project"] for folder in FOLDERS]
    lines = [Requirement(line) for project in projects for line in project["dependencies"]]
    lines += needed(projects[0], sys.argv[1])
    here = {project["name"] for project in projects}
    for line in sorted({str(line) for line in lines if line.name not in here}):
        print(line)


if __name__ == "__main__":
    main()
