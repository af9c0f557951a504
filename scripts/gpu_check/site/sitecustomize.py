"""On PYTHONPATH: the package charonia of an editable installation no longer comes before the one on PYTHONPATH."""

from __future__ import annotations

import sys


def has_charonia(finder: object) -> bool:
    modules = (*getattr(finder, "known_source_files", ()), *getattr(finder, "known_wheel_files", ()))
    return any(name.partition(".")[0] == "charonia" for name in modules)


sys.meta_path[:] = [finder for finder in sys.meta_path if not has_charonia(finder)]
