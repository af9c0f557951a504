"""API keys: the file of keys, and the keys that are valid now.

A key is 256 random bits, and the file has its SHA-256. Passwords need a slow hash. Keys do not, because 2^256 keys
cannot be tried, and a slow hash would cost each request a tenth of a second. The time of a look-up by hash reveals
nothing: a client cannot choose a hash with the same beginning as the hash of another key.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from charonia_gateway.files import FollowedFiles

_PREFIX = "ck-"
_RANDOM_BYTES = 32
_MAX_FILE_BYTES = 1 << 26
Access = Literal["inference", "metrics", "admin"]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]


class KeysError(ValueError):
    """The file of keys cannot be used; the message says why."""


class Key(BaseModel):
    """One entry of the file. A limit of None means no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(
        pattern="^[0-9a-f]{12}$", description="owner of sessions and stored responses; an id is never reused"
    )
    name: str = Field(pattern="^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$", description="name in logs and metrics")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="hash of the key's UTF-8")
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None
    access: tuple[Access, ...] = Field(
        ("inference",),
        min_length=1,
        description="metrics: GET /metrics; admin: loading and unloading of models and LoRA adapters",
    )
    models: tuple[str, ...] | None = Field(None, min_length=1, description="None: all")
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    max_concurrent: Positive | None = Field(None, description="concurrent sequences: a request has n per prompt")
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = Field(
        None, description="default and maximum priority of its requests"
    )

    def why_not_valid(self, now: datetime) -> str | None:
        """The reason why the key is not valid, None for a valid key."""
        if self.revoked:
            return "was revoked"
        return "has expired" if self.expires and self.expires <= now else None

    def allows_model(self, name: str) -> bool:
        return self.models is None or name in self.models

    def session(self, session_id: str) -> str:
        """The engine's id for a session that this key's client names `session_id`. Different keys never have the same
        id. The length is fixed, so a long name fits the engine's limit."""
        return f"{self.id}/{hashlib.sha256(session_id.encode()).hexdigest()}"

    def cache_salt(self, salt: str | None) -> str:
        """The engine's cache_salt for requests of this key with `salt`. Different keys never have the same salt."""
        return f"{self.id}/{hashlib.sha256((salt or '').encode()).hexdigest()}"


class KeysFile(BaseModel):
    """The content of the file. It is JSON, so a file that was read only partly is not valid."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    keys: list[Key] = []

    @model_validator(mode="after")
    def _are_unique(self) -> KeysFile:
        for field in ("id", "name", "sha256"):
            times = Counter(getattr(key, field) for key in self.keys)
            if twice := [value for value, count in times.items() if count > 1]:
                raise ValueError(f"duplicate {field} {min(twice)!r}")
        return self


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def new_key() -> tuple[str, str]:
    """A new key and its id."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES), secrets.token_hex(6)


def read_keys(path: Path) -> KeysFile:
    """Raises KeysError if the file is missing or not valid."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would block forever
            raise KeysError(f"{path} is not a file")
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error.strerror}") from None
    if len(text) > _MAX_FILE_BYTES:
        raise KeysError(f"{path} is larger than {_MAX_FILE_BYTES} bytes")
    try:
        return KeysFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise KeysError(f"{path} is not a file of keys: {place + ': ' if place else ''}{first['msg']}") from None


def write_keys(path: Path, keys: KeysFile) -> None:
    """Replace the file atomically: readers see the old file or the new one. Only the owner can read a new file. A
    replaced file keeps its owner, group and mode, so that a gateway of another user can still read it. Raises OSError
    on failure."""
    path = path.resolve()  # a symbolic link is kept
    before = path.stat() if path.exists() else None
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(keys.model_dump_json(indent=2, exclude_none=True) + "\n")
            file.flush()
            if before:
                own = os.fstat(file.fileno())
                if (own.st_uid, own.st_gid) != (before.st_uid, before.st_gid):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), before.st_mode & 0o777)
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def changing(path: Path) -> Iterator[KeysFile]:
    """Yield the file's keys (empty if the file does not exist), and write them if the block ends without an error.
    Other processes that change the file wait."""
    path = path.resolve()
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise KeysError(f"{path.parent} cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        keys = read_keys(path) if path.exists() else KeysFile()
        yield keys
        try:
            # Validate everything again: names must be unique.
            write_keys(path, KeysFile.model_validate(keys.model_dump()))
        except OSError as error:
            raise KeysError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        os.close(folder)


class KeyRing(FollowedFiles):
    """The current keys."""

    def __init__(self, path: Path) -> None:
        """Raises KeysError if the file is missing or not valid."""
        self._path = path
        self._by_hash: dict[str, Key] = {}
        self._by_id: dict[str, Key] = {}
        super().__init__(path)

    def find(self, presented: str) -> Key | None:
        """The key, valid or not."""
        return self._by_hash.get(hash_of(presented))

    def by_id(self, id: str | None) -> Key | None:
        """The key, valid or not."""
        return self._by_id.get(id or "")

    def expiries(self) -> dict[str, float]:
        """When valid keys and expired keys expire or have expired, in seconds since 1970, by name."""
        return {key.name: key.expires.timestamp() for key in self._by_hash.values() if key.expires and not key.revoked}

    def _read(self) -> None:
        keys = read_keys(self._path).keys
        self._by_hash, self._by_id = {key.sha256: key for key in keys}, {key.id: key for key in keys}


_LENGTH = re.compile(r"(\d+)([hdw])")
_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}


def parse_expiry(text: str) -> datetime:
    """Parse the expiry of a key: 12h, 30d or 8w from now, or a date or time in ISO 8601 (UTC if it has no zone). Raises
    ValueError for other texts and for past times."""
    now = time.time()
    wrong = ValueError(f"{text!r} is not an expiry: expected 12h, 30d, 8w, 2030-01-31 or 2030-01-31T12:00:00+01:00")
    try:
        if found := _LENGTH.fullmatch(text):
            expires = datetime.fromtimestamp(now + int(found[1]) * _SECONDS[found[2]], timezone.utc)
        else:
            expires = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except (ValueError, OverflowError, OSError):
        raise wrong from None
    expires = expires if expires.tzinfo else expires.replace(tzinfo=timezone.utc)
    if expires.timestamp() <= now:
        raise ValueError(f"{text!r} is past")
    return expires
