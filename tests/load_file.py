"""Loads programs and models that belong to no package as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_file(file: Path) -> ModuleType:
    """Run the file as a new module, under a name that no package has."""
    spec = importlib.util.spec_from_file_location(f"loaded_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module
