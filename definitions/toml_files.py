"""Reads the .toml files and checks their entries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Entry = TypeVar("Entry")

_FOLDER = Path(__file__).resolve().parent


def entries(file: str, kind: type[Entry]) -> Iterator[Entry]:
    """Yield the tables of a file as instances of the dataclass `kind`; its field `name` is the table's name. Raises
    ValueError with file and entry for an unknown or a missing key."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    needed = {name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING}
    with (_FOLDER / file).open("rb") as opened:
        tables: dict[str, dict[str, Any]] = tomllib.load(opened)
    for name, table in tables.items():
        wrong = sorted(set(table) - (set(known) - {"name"}))
        missing = sorted(needed - {"name"} - set(table))
        if wrong:
            raise ValueError(f"{file}: [{name}] has {', '.join(wrong)}; an entry has {', '.join(known)}")
        if missing:
            raise ValueError(f"{file}: [{name}] lacks {', '.join(missing)}")
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
        make: Any = kind
        yield make(name=name, **values)
