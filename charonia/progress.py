"""Progress of long work on the terminal; silent where nobody looks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

log = logging.getLogger("charonia")


class Progress:
    """Progress bars and warnings on stderr when `show`, else warnings to the log."""

    def __init__(self, show: bool) -> None:
        self._console = Console(stderr=True) if show else None

    def warn(self, text: str) -> None:
        """Says something that the user should know and that is no error."""
        if self._console:
            self._console.print(f"[yellow]warning:[/yellow] {text}", highlight=False)
        else:
            log.warning(text)

    @contextmanager
    def task(self, title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        """A bar over bytes; yields the function that advances it."""
        if not self._console:
            yield lambda _: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with RichProgress(*columns, TimeRemainingColumn(), console=self._console) as bars:
            task = bars.add_task(title, total=total_bytes)
            yield lambda done: bars.advance(task, done)
