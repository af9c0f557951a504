"""Helpers for the late import of the application, which takes half a second."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Exclude the modules imported in this block from garbage collection. They stay until the process ends. Collections
    would take a tenth of the import time, and later delay requests."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
