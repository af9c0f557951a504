"""Prints what the packages of this checkout need, for `pip install --requirement`: one requirement a line. What they
need of one another is left out. So pip can install it while the engine is compiled.

    dependencies.py serve|test     with the extra of charonia of that name
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
    """What a project's extra names, and what the extras named in it do."""
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
