"""Progress of long operations on the terminal, or nothing without a terminal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress

log = logging.getLogger("charonia")


class Progress:
    """Progress bars and warnings on stderr if `show`; otherwise warnings in the log."""

    def __init__(self, show: bool) -> None:
        self._console = Console(stderr=True) if show else None
        self.lasting: list[str] = []  # warnings that remain true

    def warn(self, text: str, *, lasting: bool = True) -> None:
        """Print a warning. lasting: whether it remains true later."""
        if lasting:
            self.lasting.append(text)
        if self._console:
            self._console.print(f"[yellow]warning:[/yellow] {escape(text)}", highlight=False)
        else:
            log.warning(text)

    def task(self, title: str, total_bytes: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show a progress bar in bytes. Yields the function that advances it."""
        return self._bar(title, total_bytes, DownloadColumn(), TransferSpeedColumn())

    def count(self, title: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show a progress bar with a count. Yields the function that advances it."""
        return self._bar(title, total, MofNCompleteColumn())

    @contextmanager
    def _bar(self, title: str, total: int, *columns: ProgressColumn) -> Iterator[Callable[[int], None]]:
        if not self._console:
            yield lambda _: None
            return
        described = TextColumn("{task.description}")
        with RichProgress(described, BarColumn(), *columns, TimeRemainingColumn(), console=self._console) as bars:
            task = bars.add_task(title, total=total)
            yield lambda done: bars.advance(task, done)
