"""Affinity: which server has the history of a session, and which has computed the beginning of a prompt before."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

from charonia_client import GenerateRequest

Key = TypeVar("Key")
Value = TypeVar("Value")

# A KV block of 64 tokens is about this many characters of English, and prefixes are cached in whole blocks.
CHUNK_CHARACTERS = 256
_MAX_CHARACTERS = 64 * CHUNK_CHARACTERS
_MAX_PREFIXES = 200_000
MAX_SESSIONS = 100_000


class Recent(OrderedDict[Key, Value]):
    """A mapping that forgets what was not used for the longest time once it holds more than `limit`."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def remember(self, key: Key, value: Value) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)


class Affinity(NamedTuple):
    """The server of a session."""

    target: str
    answered: bool  # the session has had an answer there, and so has a history there


class SessionAffinity(Recent[str, Affinity]):
    """The server of each session, by session id."""

    def __init__(self, limit: int = MAX_SESSIONS) -> None:
        super().__init__(limit)


def rendezvous(session_id: str, targets: Collection[str]) -> str:
    """The server of a new session. Every gateway in front of the same servers finds the same one. Adding or removing a
    server moves only the sessions that come to it or were on it."""

    def weight(target: str) -> bytes:
        return hashlib.blake2b(f"{target}\0{session_id}".encode(), digest_size=8).digest()

    return max(targets, key=lambda target: (weight(target), target))


def prefix_keys(request: GenerateRequest) -> list[int]:
    """Keys of the prompt's beginnings, from the shortest to the longest: each stands for all the text up to its end.
    Short prompts have none, as there is nothing to win. Those of another
    cache_salt are others: a server does not find their blocks."""
    text = _beginning(request)
    keys, key = [], hash(request.cache_salt or "")
    for end in range(CHUNK_CHARACTERS, len(text) + 1, CHUNK_CHARACTERS):
        key = hash((key, text[end - CHUNK_CHARACTERS : end]))
        keys.append(key)
    return keys


def _beginning(request: GenerateRequest) -> str:
    """What the prompt is made of, in its order, as far as it is looked at."""
    if request.text is not None:
        return request.text[:_MAX_CHARACTERS]
    if request.prompt_token_ids is not None:  # spelled out, they are about as long as the text
        return " ".join(map(str, request.prompt_token_ids[: _MAX_CHARACTERS // 2]))[:_MAX_CHARACTERS]
    found = [request.tools_json().decode()] if request.tools else []
    characters = sum(map(len, found))
    for message in request.messages or ():
        if characters >= _MAX_CHARACTERS:
            break
        found.append(f"{message['role']}\0{message.get('content') or ''}\0")
        characters += len(found[-1])
    return "".join(found)[:_MAX_CHARACTERS]


class Prefixes:
    """Which server last computed a prompt with a given beginning."""

    def __init__(self, limit: int = _MAX_PREFIXES) -> None:
        self._targets: Recent[int, str] = Recent(limit)

    def remember(self, keys: Sequence[int], target: str) -> None:
        # The shortest last: what many prompts share is forgotten last.
        for key in reversed(keys):
            self._targets.remember(key, target)

    def find(self, keys: Sequence[int], among: Mapping[str, Value]) -> Value | None:
        """Of the servers in `among` the one with the longest beginning."""
        for key in reversed(keys):
            target = self._targets.get(key)
            if target is not None and target in among:
                return among[target]
        return None
