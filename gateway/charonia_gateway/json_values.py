"""How many values texts of JSON have, counted without parsing them."""

from __future__ import annotations

from collections.abc import Sequence

# Lists, objects and what follows a comma in one body: more than all lists here may have. Each is an object in memory. A
# body has room for millions of them, and the event loop stands still while they are made. The texts in a body that are
# JSON themselves may together have as many again.
MAX_VALUES = 1 << 19
TOO_MANY = f"too many values: send at most {MAX_VALUES} lists, objects and entries of them"


def has_too_many_values(texts: Sequence[bytes]) -> bool:
    """Together. Of what is no JSON the answer does not matter."""
    if sum(map(_marks, texts)) <= MAX_VALUES:
        return False
    # They may be in strings, which lie between quotes that no backslash comes before.
    bare = [text.replace(rb"\\", b"").replace(rb"\"", b"") for text in texts]
    if sum(text.count(b'"') for text in bare) > 4 * MAX_VALUES:
        return True
    return sum(_marks(b"".join(text.split(b'"')[::2])) for text in bare) > MAX_VALUES


def _marks(text: bytes) -> int:
    return sum(text.count(mark) for mark in (b"[", b"{", b","))
