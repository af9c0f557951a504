"""Finds the tokens whose text is the content of a response, for their log probabilities."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from .events import Content, Event


class ContentTokens:
    """Add each token with the parser's events for it. `found` then has the indices of the tokens of the content. Tokens
    of markup and of dropped white space are not among them. A token may contain content and markup."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self._count = 0
        # Tokens that may become content: the parser holds their text back. Each with its bytes that are not yet used.
        self._pending: list[tuple[int, bytes]] = []

    def add(self, piece: bytes, events: Sequence[Event], *, mark: bool, reasons: tuple[bool, bool]) -> None:
        """piece: the token's bytes in the text. mark: it is a mark of markup. reasons: whether the parser is in the
        reasoning before and after the token."""
        before, after = reasons
        if mark or before:
            self._pending.clear()
        if piece:
            self._pending.append((self._count, piece))
        self._count += 1
        self.resolve(events)
        if after or (before and not events):
            self._pending.clear()

    def resolve(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self._take(event.text.encode(errors="replace"))
            else:
                del self._pending[:-1]
        if events and not isinstance(events[-1], Content):
            self._pending.clear()

    def _take(self, text: bytes) -> None:
        used = _places(text, b"".join(piece for _, piece in self._pending))
        at, rest = 0, []
        for index, piece in self._pending:
            first = bisect_left(used, at)
            is_used = first < len(used) and used[first] < at + len(piece)
            if is_used and self.found[-1:] != [index]:
                self.found.append(index)
            if at + len(piece) > used[-1] + 1:
                rest.append((index, piece[max(used[-1] + 1 - at, 0) :]))
            at += len(piece)
        self._pending = rest


def _places(text: bytes, held: bytes) -> Sequence[int]:
    """Return the places of the text's bytes in the bytes that the parser held back. Markup may stand between them, and
    calls between the white space at the beginning and the rest."""
    for part in (text, text.lstrip()):
        begin = held.find(part)
        if part and begin >= 0:
            return range(begin, begin + len(part))
    found: list[int] = []
    for byte in text:
        place = held.find(byte, found[-1] + 1 if found else 0)
        if place < 0:
            return range(len(held))  # the text has U+FFFD for invalid UTF-8
        found.append(place)
    return found
