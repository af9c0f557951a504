"""Counts the values in JSON texts without parsing them."""

from __future__ import annotations

from collections.abc import Sequence

# Maximum number of values in one body: more than the limits of all lists together. Each is an object in memory. A body
# could contain millions of them, and nothing else runs in this process while they are created, also if a thread creates
# them. Strings in a body that contain JSON have a separate limit of the same size.
MAX_VALUES = 1 << 19
_WEIGHT = 4  # a list, an object and a key take a microsecond each
TOO_MANY = (
    f"too many values: send at most {MAX_VALUES} entries of lists and objects; a list, an object and a key count as "
    f"{_WEIGHT}"
)


def has_too_many_values(texts: Sequence[bytes]) -> bool:
    """Whether the texts have too many values in total. For invalid JSON the result has no meaning."""
    if sum(map(_marks, texts)) <= MAX_VALUES:
        return False
    # Count again outside of strings. A string is between quotes that no backslash precedes.
    bare = [text.replace(rb"\\", b"").replace(rb"\"", b"") for text in texts]
    if sum(text.count(b'"') for text in bare) > 4 * MAX_VALUES:
        return True
    return sum(_marks(b"".join(text.split(b'"')[::2])) for text in bare) > MAX_VALUES


def _marks(text: bytes) -> int:
    return text.count(b",") + _WEIGHT * sum(text.count(mark) for mark in (b"[", b"{", b":"))
