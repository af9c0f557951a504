"""Where the engine finds llguidance: its extension module, and the Python library whose symbols that needs.

The engine reads both paths from the environment. This module imports nothing of this package, so that CMake can run it.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Mapping
from pathlib import Path

LIBRARY_VARIABLE = "CHARONIA_LLGUIDANCE_LIBRARY"
PYTHON_VARIABLE = "CHARONIA_PYTHON_LIBRARY"


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """The variables for the engine. Values that `base` has are kept."""
    found = {LIBRARY_VARIABLE: _llguidance(), PYTHON_VARIABLE: _python()}
    return {name: base.get(name) or path for name, path in found.items() if base.get(name) or path}


def _llguidance() -> str:
    spec = importlib.util.find_spec("llguidance")
    folders = spec.submodule_search_locations if spec else None
    return next((str(Path(folder) / "_lib.abi3.so") for folder in folders or ()), "")


def _python() -> str:
    """The path of libpython; "" if this Python has none, or if the name alone must do."""
    names = (sysconfig.get_config_var("INSTSONAME"), f"libpython{sysconfig.get_config_var('LDVERSION')}.so.1.0")
    folders = (sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LIBPL"), "/usr/lib/x86_64-linux-gnu")
    paths = [Path(folder) / name for folder in folders if folder for name in names if name and ".so" in name]
    return next((str(path) for path in paths if path.exists()), "")


if __name__ == "__main__":
    found = environment({})
    if len(found) < 2:
        raise SystemExit(1)
    print(";".join(found.values()))
