"""Limits the time in which an engine must start: a kernel that no GPU has run may hang when the start measures it."""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Iterator
from typing import Any
from unittest import mock

START_S = 60.0


@contextlib.contextmanager
def limited_starts(limit_s: float = START_S) -> Iterator[None]:
    """End this process, with the stacks of its threads, if an engine does not start in `limit_s` seconds."""
    from charonia import Engine

    start = Engine.from_pretrained

    def limited(*model: Any, **settings: Any) -> Engine:
        faulthandler.dump_traceback_later(limit_s, exit=True)
        try:
            return start(*model, **settings)
        finally:
            faulthandler.cancel_dump_traceback_later()

    with mock.patch.object(Engine, "from_pretrained", limited):
        yield
