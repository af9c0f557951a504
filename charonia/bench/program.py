"""The C++ benchmarks of benchmarks/: started here, which print a record a line (benchmarks/record.h)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from charonia.bench.records import Record
from charonia.errors import InvalidRequestError


def run_program(program: Path, arguments: Sequence[str]) -> list[Record]:
    """Its figures. What else it has to say goes to stderr. Raises InvalidRequestError where it fails, or is another."""
    try:
        done = subprocess.run([program.absolute(), *arguments], stdout=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise InvalidRequestError(
            f"{program} cannot be run: {error.strerror}; benchmarks/README.md says how to build it"
        ) from error
    if done.returncode != 0:
        raise InvalidRequestError(f"{program} ended with exit code {done.returncode}")
    records = []
    for line in done.stdout.splitlines():
        try:
            records.append(Record.from_json(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(f"{program} is no benchmark of benchmarks/: it printed {line[:80]!r}") from error
    return records
