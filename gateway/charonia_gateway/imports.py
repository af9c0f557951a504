"""The application is imported where it is needed, which takes half a second."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept() -> Iterator[None]:
    """What is imported here stays to the end of the process. The garbage collector does not go through it: now, which
    would be a tenth of the time, and later, when requests would wait for it."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
