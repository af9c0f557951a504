"""Complete responses as JSON. Many log probabilities make megabytes of JSON. They are encoded in a thread and in
pieces, so that the event loop continues between two pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from charonia_client.offload import offload
from fastapi import Response
from pydantic_core import to_json

_PIECE = 100  # entries of a list


def listed(values: Iterable[Any]) -> bytes:
    """Encode a JSON list in pieces."""
    rest = iter(values)
    pieces = []
    while piece := list(islice(rest, _PIECE)):
        pieces.append(to_json(piece)[1:-1])
    return b"[" + b",".join(pieces) + b"]"


def _choice(choice: Mapping[str, Any], logprobs: Mapping[str, Iterable[Any] | None] | None) -> bytes:
    made = b"null"
    if logprobs is not None:
        lists = (
            to_json(name) + b":" + (b"null" if values is None else listed(values)) for name, values in logprobs.items()
        )
        made = b"{" + b",".join(lists) + b"}"
    return to_json(choice)[:-1] + b',"logprobs":' + made + b"}"


async def whole_answer(
    fields: Mapping[str, Any],
    choices: Iterable[tuple[Mapping[str, Any], Mapping[str, Iterable[Any] | None] | None]],
    entries: int,
    headers: Mapping[str, str],
) -> Response:
    """The response with `fields` and `choices`, each with its log probabilities by name. `entries`: the number of log
    probabilities. If they are many, a thread iterates over `choices`."""

    def make() -> bytes:
        made = b",".join(_choice(choice, logprobs) for choice, logprobs in choices)
        return to_json(fields)[:-1] + b',"choices":[' + made + b"]}"

    return Response(await offload(entries, make), headers=dict(headers), media_type="application/json")
