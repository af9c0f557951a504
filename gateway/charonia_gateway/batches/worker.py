"""Runs all batches of a folder. If a gateway has several processes, one of them does it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from starlette.types import ASGIApp

from charonia_gateway.batches.lines import AnswerFile, Line, LineError, parse_line, read_lines, unanswered_line
from charonia_gateway.batches.runner import PRIORITY, Runner
from charonia_gateway.batches.store import BatchStore, StoredBatch
from charonia_gateway.drain import Drain
from charonia_gateway.record import Inner

log = logging.getLogger("charonia_gateway")

_CHECK_S = 1.0
_DELETE_S = 600.0
_PAUSE_S = 10.0  # after an error of the disk
_MAX_JOBS = 4  # batches of one key that run at the same time
_ROOM_BYTES = 1 << 20  # of answers between two checks of the room for them
_NO_ROOM = "the files of this key have no more room for answers: delete files, and send the other requests again"
_MAX_ERRORS = 100  # of a wrong file, in its batch


class BatchWorker:
    """most: requests of batches that run at the same time."""

    def __init__(self, app: ASGIApp, store: BatchStore, drain: Drain, most: int) -> None:
        self._app = app
        self._store = store
        self._drain = drain
        self._most = most
        self._free = asyncio.Semaphore(most)
        self._jobs: dict[str, _Job] = {}
        self._changed = asyncio.Event()
        self._deleted_at = 0.0

    def wake(self) -> None:
        """A batch is new, or was cancelled."""
        self._changed.set()

    async def follow(self) -> None:
        """Run batches until the task is cancelled. Answers that are not written then are computed again later."""
        tasks: dict[str, asyncio.Task[None]] = {}
        try:
            async with _lock(self._store.folder / "lock"):
                while not self._drain.begun:
                    await self._look(tasks)
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), _CHECK_S)
                    self._changed.clear()
                for job in self._jobs.values():
                    job.pause()
                await asyncio.gather(*tasks.values())
                await asyncio.Event().wait()  # the process keeps the lock until its end
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _look(self, tasks: dict[str, asyncio.Task[None]]) -> None:
        """Start new batches, and tell cancelled ones."""
        for id in [id for id, task in tasks.items() if task.done()]:
            del tasks[id], self._jobs[id]
        try:
            for batch in await asyncio.to_thread(self._store.unfinished):
                if batch.id not in tasks:
                    if self._must_wait(batch):
                        continue
                    job = self._jobs[batch.id] = _Job(self._app, self._store, batch, self._free, self._most)
                    tasks[batch.id] = asyncio.create_task(job.run())
                await self._jobs[batch.id].check()
            if time.monotonic() - self._deleted_at > _DELETE_S or not self._deleted_at:
                self._deleted_at = time.monotonic()
                await asyncio.to_thread(self._store.delete_old)
        except Exception:
            log.exception("checking the batches failed; the check will be repeated")

    def _must_wait(self, batch: StoredBatch) -> bool:
        """Whether other batches of the key run. A batch that only ends need not wait."""
        running = sum(job.owner == batch.owner for job in self._jobs.values())
        ends = self._store.is_cancelled(batch) or time.time() >= batch.expires_at
        return running >= _MAX_JOBS and not ends


class _Job:
    """One batch while it runs."""

    def __init__(self, app: ASGIApp, store: BatchStore, batch: StoredBatch, free: asyncio.Semaphore, most: int) -> None:
        self.owner = batch.owner
        self._store = store
        self._batch = batch
        inner = Inner(batch.owner, batch.address, max_priority=PRIORITY)
        self._runner = Runner(app, inner, free, most, self._write)
        self._answers: AnswerFile | None = None
        self._errors: AnswerFile | None = None
        self._paused = False
        self._saving = asyncio.Lock()
        self._saved = (0, 0)
        self._unchecked = _ROOM_BYTES  # bytes of answers since the last check of the room

    def pause(self) -> None:
        """The gateway shuts down: begin no other request. The batch goes on after the restart."""
        self._paused = True
        self._runner.stop()

    async def check(self) -> None:
        """Save the numbers of answers. Stop a batch that was cancelled, or whose time is over."""
        batch = self._batch
        if (batch.completed, batch.failed) != self._saved:
            self._saved = (batch.completed, batch.failed)
            await self._save()
        if self._runner.stopping or batch.status == "finalizing":
            return
        if self._store.is_cancelled(batch):
            batch.end = "cancelled"
            batch.times["cancelling"] = int(time.time())
        elif time.time() >= batch.expires_at:
            batch.end = "expired"
        elif await self._is_without_room():
            batch.end = "failed"
            batch.errors = [{"code": "storage_exceeded", "message": _NO_ROOM, "param": None, "line": None}]
        else:
            return
        self._runner.stop(cancel=True)

    async def _is_without_room(self) -> bool:
        """Whether the key's files have too many bytes, if the answers have grown much since the last time."""
        if self._unchecked < _ROOM_BYTES:
            return False
        self._unchecked = 0
        return await asyncio.to_thread(self._store.free_bytes, self.owner) < 0 and not self._runner.stopping

    async def run(self) -> None:
        try:
            if self._batch.status == "validating":
                await asyncio.to_thread(self._check_lines)
                await self._set("failed" if self._batch.errors else "in_progress")
            if self._batch.status == "in_progress":
                await self._answer()
            if self._batch.status == "finalizing":
                await self._publish()
        except FileNotFoundError:
            text = "its file of requests, or of answers, no longer exists"
            await self._fail(text)
        except OSError as error:
            log.error("the batch %s waits %g s: %s", self._batch.id, _PAUSE_S, error)
            await asyncio.sleep(_PAUSE_S)  # the worker then begins it again, with the answers that exist
        except Exception as error:
            log.exception("the batch %s failed with an internal error of the gateway", self._batch.id)
            await self._fail(str(error))

    async def _fail(self, message: str) -> None:
        """The answers that exist are kept."""
        with contextlib.suppress(OSError):
            await self._publish_answers()
        self._batch.errors = [{"code": "server_error", "message": message, "param": None, "line": None}]
        await self._set("failed")

    def _check_lines(self) -> None:
        """Check all lines before the first request runs. A wrong file has no answers."""
        batch = self._batch
        for line in self._lines():
            batch.total += 1
            if isinstance(line, LineError):
                batch.errors.append(line.to_json())
                if len(batch.errors) == _MAX_ERRORS:
                    return
        if not batch.total:
            text = "the file has no requests: write one JSON object per line"
            batch.errors.append({"code": "empty_file", "message": text, "param": None, "line": None})

    async def _answer(self) -> None:
        with contextlib.ExitStack() as opened:
            for name in ("output", "errors"):
                made = await asyncio.to_thread(AnswerFile, self._store.output(self._batch, name))
                opened.enter_context(contextlib.closing(made))
                if name == "output":
                    self._answers = made
                else:
                    self._errors = made
            self._count()
            await self._runner.run(self._todo())
            if self._paused:
                await self._save()
                return
            if self._batch.end != "completed":
                await asyncio.to_thread(self._give_up)
        await self._set("finalizing")

    def _lines(self) -> Iterator[Line | LineError]:
        with self._store.input(self._batch).open("rb") as file:
            yield from read_lines(
                file, lambda text, number: parse_line(text, number, self._batch.endpoint), self._store.max_line_bytes
            )

    def _todo(self) -> Iterator[Line]:
        """The requests that have no answer yet."""
        assert self._answers and self._errors
        for line in self._lines():
            if (
                not isinstance(line, Line)
                or line.custom_id in self._answers.done
                or line.custom_id in self._errors.done
            ):
                continue
            yield line

    def _write(self, custom_id: str, line: bytes, succeeded: bool) -> None:
        file = self._answers if succeeded else self._errors
        assert file
        file.write(custom_id, line)
        self._unchecked += len(line)
        self._count()

    def _count(self) -> None:
        assert self._answers and self._errors
        self._batch.completed, self._batch.failed = len(self._answers.done), len(self._errors.done)

    def _give_up(self) -> None:
        """Write an error for each request without an answer."""
        assert self._errors
        texts = {
            "cancelled": "the batch was cancelled",
            "expired": "the batch's time was over before this request ran",
            "failed": _NO_ROOM,
        }
        code = f"batch_{self._batch.end}"
        for line in self._todo():
            self._errors.write(line.custom_id, unanswered_line(line.custom_id, code, texts[self._batch.end]))
        self._count()

    async def _publish(self) -> None:
        """After a crash within this step, the next run repeats it."""
        await self._publish_answers()
        await self._set(self._batch.end)

    async def _publish_answers(self) -> None:
        batch = self._batch
        batch.output_file_id = await asyncio.to_thread(self._store.publish, batch, "output")
        batch.error_file_id = await asyncio.to_thread(self._store.publish, batch, "errors")

    async def _set(self, status: str) -> None:
        self._batch.status = status
        self._batch.times[status] = int(time.time())
        await self._save()

    async def _save(self) -> None:
        async with self._saving:
            await asyncio.to_thread(self._store.save, self._batch)


@contextlib.asynccontextmanager
async def _lock(path: Path) -> AsyncIterator[None]:
    """Wait until no other process has the lock."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_CHECK_S)
        yield
