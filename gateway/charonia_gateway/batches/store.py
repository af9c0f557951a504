"""Files and batches in a folder. They survive a restart of the gateway, and its processes share them.

    files/ID/content, files/ID/meta.json
    batches/ID/meta.json; while it runs: output.jsonl and errors.jsonl; cancel: a client has cancelled it

A file or batch exists if it has its JSON file, which is written last. All methods block; call them in a thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from charonia_gateway.errors import ApiError, too_many

log = logging.getLogger("charonia_gateway")

MIN_BYTES = 1 << 16  # each file and each batch counts at least so many bytes for the limit of its key
MAX_UNFINISHED = 100  # batches of one key; they are read every second
_UNFINISHED_S = 86_400  # an entry is written in less time
ENDED = ("completed", "failed", "expired", "cancelled")
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")


@dataclass
class StoredFile:
    """owner: the id of the key that it belongs to. num_lines: of a file with requests."""

    id: str
    owner: str | None
    filename: str
    purpose: str
    bytes: int
    created_at: int
    num_lines: int = 0

    def to_json(self) -> dict[str, Any]:
        """As OpenAI describes a file."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


@dataclass
class StoredBatch:
    """times: when it got each status, in seconds since 1970. num_lines: lines of its input file. address: of the
    client."""

    id: str
    owner: str | None
    address: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    num_lines: int
    status: str = "validating"
    end: str = "completed"  # its last status
    metadata: dict[str, str] | None = None
    times: dict[str, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def to_json(self) -> dict[str, Any]:
        """As OpenAI describes a batch."""
        times = {
            f"{status}_at": self.times.get(status) for status in ("in_progress", "finalizing", "cancelling", *ENDED)
        }
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **times,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


Entry = TypeVar("Entry", StoredFile, StoredBatch)


class BatchStore:
    def __init__(
        self, folder: Path, *, max_bytes: int, max_requests: int, ttl_s: float, max_line_bytes: int = 8 << 20
    ) -> None:
        """max_bytes, max_requests: of the files and of the unfinished batches of one key. ttl_s: after this time files
        and ended batches are deleted. max_line_bytes: of a request in a file."""
        self.folder = folder
        self.max_bytes = max_bytes
        self.max_requests = max_requests
        self.max_line_bytes = max_line_bytes
        self._ttl_s = ttl_s
        self._files, self._batches = folder / "files", folder / "batches"
        for one in (self._files, self._batches):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Entries that do not change any more, by folder and id: they are not read again.
        self._final: dict[Path, dict[str, Any]] = {}
        self.arriving: Counter[str | None] = Counter()  # bytes of uploads that have not ended, by owner

    # --- files

    def files(self, owner: str | None) -> list[StoredFile]:
        """The files of a key, oldest first."""
        return [one for one in self._all(self._files, StoredFile) if one.owner == owner]

    def file(self, id: str, owner: str | None) -> StoredFile:
        """Raises ApiError 404."""
        found = self._read(self._files, id, StoredFile)
        if found is None or found.owner != owner:
            raise ApiError(404, f"there is no file {id[:100]!r}", param="id", code="file_not_found")
        return found

    def content(self, file: StoredFile) -> Path:
        return self._files / file.id / "content"

    def free_bytes(self, owner: str | None) -> int:
        """The bytes that a key may still upload. Answers of batches that run count."""
        batches = self.batches(owner)
        used = sum(max(one.bytes, MIN_BYTES) for one in self.files(owner))
        used += sum(_size(self.output(one, name)) for one in batches for name in ("output", "errors"))
        return self.max_bytes - used - MIN_BYTES * len(batches)

    def add_upload(self, path: Path, owner: str | None, filename: str, purpose: str) -> StoredFile:
        """Like add_file(). Raises ApiError 429 if there is no room. Uploads of several processes take turns here."""
        with self._alone():
            self.check_room(owner, path.stat().st_size)
            return self.add_file(path, owner, filename, purpose)

    def add_file(self, path: Path, owner: str | None, filename: str, purpose: str, id: str = "") -> StoredFile:
        """Move a complete file into the store. If a crash interrupts it, the same call with the same id completes it.
        id: empty for a new one."""
        id = id or f"file-{uuid.uuid4().hex}"
        folder = self._files / id
        folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the call that was interrupted has moved it
            path.rename(folder / "content")
        with (folder / "content").open("rb") as file:
            num_lines = sum(bool(line.strip()) for line in file)
            size = file.tell()
        made = StoredFile(id, owner, filename, purpose, size, int(time.time()), num_lines)
        self._write(self._files, made)
        return made

    def check_room(self, owner: str | None, size: int) -> None:
        """Raises ApiError 429 if the files and batches of a key would have too many bytes."""
        if size > self.free_bytes(owner):
            raise too_many(
                f"the files and batches would have more than {self.max_bytes} bytes (each counts {MIN_BYTES} or more): "
                "delete files, or wait until old ones are deleted",
                code="storage_exceeded",
            )

    def delete_file(self, file: StoredFile) -> None:
        """Raises ApiError 409 if a batch still needs it."""
        for batch in self.batches(file.owner):
            if batch.input_file_id == file.id and not batch.has_ended:
                text = f"the batch {batch.id} reads the file {file.id}: cancel it, or wait for its end"
                raise ApiError(409, text, param="id", code="file_in_use")
        self._remove(self._files, file.id)

    def new_path(self) -> Path:
        """The path of a file that is being uploaded."""
        return self._files / f"upload-{uuid.uuid4().hex}"

    # --- batches

    def batches(self, owner: str | None) -> list[StoredBatch]:
        """The batches of a key, oldest first."""
        return [one for one in self._all(self._batches, StoredBatch) if one.owner == owner]

    def batch(self, id: str, owner: str | None) -> StoredBatch:
        """Raises ApiError 404."""
        found = self._read(self._batches, id, StoredBatch)
        if found is None or found.owner != owner:
            raise ApiError(404, f"there is no batch {id[:100]!r}", param="id", code="batch_not_found")
        if self.is_cancelled(found) and not found.has_ended:
            found.status = "cancelling"
        return found

    def add_batch(self, batch: StoredBatch) -> None:
        """Raises ApiError 429 if the key has too many unfinished requests, or no room."""
        with self._alone():
            self._check_limits(batch)
            (self._batches / batch.id).mkdir(mode=0o700)
            self._write(self._batches, batch)

    def _check_limits(self, batch: StoredBatch) -> None:
        self.check_room(batch.owner, MIN_BYTES)
        unfinished = [one for one in self.batches(batch.owner) if not one.has_ended]
        if len(unfinished) >= MAX_UNFINISHED:
            text = f"{len(unfinished)} batches have not ended, the most of a key: wait for one to end, or cancel it"
            raise too_many(text, 60)
        waiting = sum(one.num_lines for one in unfinished)
        if waiting + batch.num_lines > self.max_requests:
            raise too_many(
                f"the unfinished batches have {waiting} requests, and this one has {batch.num_lines}; at most "
                f"{self.max_requests} are allowed: wait for a batch to end, or send a smaller file",
                60,
            )

    def cancel(self, batch: StoredBatch) -> None:
        (self._batches / batch.id / "cancel").touch()

    def is_cancelled(self, batch: StoredBatch) -> bool:
        return (self._batches / batch.id / "cancel").exists()

    # --- for the process that runs the batches

    def unfinished(self) -> list[StoredBatch]:
        """The batches of all keys that have not ended, oldest first."""
        return [one for one in self._all(self._batches, StoredBatch) if not one.has_ended]

    def save(self, batch: StoredBatch) -> None:
        self._write(self._batches, batch)

    def output(self, batch: StoredBatch, name: str) -> Path:
        """The growing file of answers (`output`) or of errors (`errors`)."""
        return self._batches / batch.id / f"{name}.jsonl"

    def input(self, batch: StoredBatch) -> Path:
        return self._files / batch.input_file_id / "content"

    def publish(self, batch: StoredBatch, name: str) -> str | None:
        """Make a file of the answers or of the errors, and return its id. None if there are none."""
        path = self.output(batch, name)
        id = f"file-{hashlib.sha256(f'{batch.id} {name}'.encode()).hexdigest()[:32]}"
        if not (self._files / id).exists() and not path.stat().st_size:
            return None
        return self.add_file(path, batch.owner, f"{batch.id}_{name}.jsonl", "batch_output", id).id

    def delete_old(self) -> None:
        """Delete files and batches whose time is over, and what a crash or an upload that did not end has left."""
        oldest = time.time() - self._ttl_s
        needed = {batch.input_file_id for batch in self.unfinished()}
        for file in self._all(self._files, StoredFile):
            if file.created_at < oldest and file.id not in needed:
                self._remove(self._files, file.id)
        for batch in self._all(self._batches, StoredBatch):
            if batch.has_ended and batch.created_at < oldest:
                self._remove(self._batches, batch.id)
        for folder in (self._files, self._batches):
            for one in folder.iterdir():
                with contextlib.suppress(OSError):
                    if not (one / "meta.json").exists() and one.stat().st_mtime < time.time() - _UNFINISHED_S:
                        shutil.rmtree(one) if one.is_dir() else one.unlink()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Between a check of limits and the entry that it allows, no other thread or process adds one."""
        with (self.folder / "adding.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # --- JSON files

    def _all(self, folder: Path, kind: type[Entry]) -> list[Entry]:
        known = self._final.get(folder, {})
        read = ((id, known.get(id) or self._read(folder, id, kind)) for id in (one.name for one in folder.iterdir()))
        found: dict[str, Entry] = {id: entry for id, entry in read if entry}
        self._final[folder] = {id: one for id, one in found.items() if isinstance(one, StoredFile) or one.has_ended}
        return sorted(found.values(), key=lambda one: (one.created_at, one.id))

    def _read(self, folder: Path, id: str, kind: type[Entry]) -> Entry | None:
        if not _ID.fullmatch(id):
            return None
        try:
            return kind(**json.loads((folder / id / "meta.json").read_text("utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            log.error("%s cannot be read, so it is not shown: %s", folder / id, error)
            return None

    def _write(self, folder: Path, entry: StoredFile | StoredBatch) -> None:
        path = folder / entry.id / "meta.json"
        with _replacing(path) as temporary:
            temporary.write_text(json.dumps(asdict(entry), ensure_ascii=False), "utf-8")

    @staticmethod
    def _remove(folder: Path, id: str) -> None:
        """First the JSON file, so that no other process sees a part of the entry."""
        (folder / id / "meta.json").unlink(missing_ok=True)
        shutil.rmtree(folder / id, ignore_errors=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a path whose file then replaces `path`. Readers see the old file or the new one, also after a crash."""
    temporary = path.with_suffix(".new")
    yield temporary
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
