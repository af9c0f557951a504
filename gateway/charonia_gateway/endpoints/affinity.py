"""What has been where: sessions have a home, and beginnings of prompts a server that has computed them before."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from charonia_client import GenerateRequest

Key = TypeVar("Key")
Value = TypeVar("Value")

# A k/v block of 64 tokens is about so many characters of English, and a prefix is kept in whole blocks.
PIECE_CHARACTERS = 256
_MOST_CHARACTERS = 64 * PIECE_CHARACTERS
_MOST_PREFIXES = 200_000
_MOST_SESSIONS = 100_000


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


class Homes(Recent[str, str]):
    """The server (its target) of each session, by session id."""

    def __init__(self, limit: int = _MOST_SESSIONS) -> None:
        super().__init__(limit)


def rendezvous(session_id: str, targets: Collection[str]) -> str:
    """The home of a session that has none: every gateway in front of the same servers finds the same one, and another
    server more or less moves none but the sessions that come to it or were there."""

    def weight(target: str) -> bytes:
        return hashlib.blake2b(f"{target}\0{session_id}".encode(), digest_size=8).digest()

    return max(targets, key=lambda target: (weight(target), target))


def pieces(request: GenerateRequest) -> list[int]:
    """Keys of the prompt's beginnings, from the shortest to the longest: each stands for all the text up to its end.
    Short prompts have none, as there is nothing to win."""
    text = _beginning(request)
    keys, key = [], 0
    for end in range(PIECE_CHARACTERS, len(text) + 1, PIECE_CHARACTERS):
        key = hash((key, text[end - PIECE_CHARACTERS : end]))
        keys.append(key)
    return keys


def _beginning(request: GenerateRequest) -> str:
    """What the prompt is made of, in its order, as far as it is looked at."""
    if request.text is not None:
        return request.text[:_MOST_CHARACTERS]
    found = [request.tools_json().decode()] if request.tools else []
    characters = sum(map(len, found))
    for message in request.messages or ():
        if characters >= _MOST_CHARACTERS:
            break
        found.append(f"{message['role']}\0{message.get('content') or ''}\0")
        characters += len(found[-1])
    return "".join(found)[:_MOST_CHARACTERS]


class Prefixes:
    """Which server last computed a prompt with a given beginning."""

    def __init__(self, limit: int = _MOST_PREFIXES) -> None:
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
