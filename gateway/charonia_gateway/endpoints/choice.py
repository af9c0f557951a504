"""Which server a request goes to.

1. A request of a session goes to the server that has the session's history, its owner. A session without an owner goes
   to a server by rendezvous hashing of its id.
2. Another request goes to a server by rendezvous hashing of the beginning of its prompt, because that server may have
   the beginning in its cache. Servers with many more requests than the least loaded one are passed over.
3. A short request goes to the server with the fewest requests.

Hashing needs no memory: all processes and gateways in front of the same servers choose the same server. Adding or
removing a server moves only the keys of that server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from charonia_client import GenerateRequest
from charonia_client.types import as_json

from charonia_gateway.endpoints.endpoint import Endpoint

# A KV block of 64 tokens has about 256 characters of English. Caches hold whole blocks.
MIN_CHARACTERS = 256
KEY_CHARACTERS = 2048
# A server may have this many requests more than the least loaded one before a prefix no longer counts.
_FACTOR = 1.5
_MORE = 4


def choose(
    endpoints: Sequence[Endpoint], request: GenerateRequest, tried: Collection[Endpoint] = (), owner: str | None = None
) -> Endpoint | None:
    """The server for a request, or None if no server can take it.

    `tried`: servers that failed or rejected the request. `owner`: the target of the server with the session's history.
    """
    # The only server gets every request: the request is the best check.
    usable = [one for one in endpoints if one.usable or (len(endpoints) == 1 and not one.removed)]
    home = next((one for one in usable if one.target == owner), None)
    if home and home not in tried:
        return home
    if home and request.interactive:
        return None  # another server does not have the history
    left = [one for one in usable if one not in tried]
    left = [one for one in left if not one.doubtful] or left
    if not left:
        return None
    if request.session_id is not None:
        return ranked(request.session_id, left)[0]
    least = min(left, key=lambda one: (one.requests, one.turn))
    key = prefix_key(request)
    if key is None:
        return least
    limit = _FACTOR * least.requests + _MORE
    return next(one for one in ranked(key, left) if one.requests <= limit)


def ranked(key: str, endpoints: Collection[Endpoint]) -> list[Endpoint]:
    """The servers in the order of rendezvous hashing for a key."""
    return sorted(endpoints, key=lambda one: weight(key, one.target), reverse=True)


def weight(key: str, target: str) -> bytes:
    text = f"{target}\0{key}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).digest()


def prefix_key(request: GenerateRequest) -> str | None:
    """The beginning of a prompt, with its cache_salt and its LoRA adapter. For messages it ends with the first user
    message, so that all turns of a conversation have the same key. None for a prompt that is too short to be worth a
    cache."""
    if request.text is not None:
        beginning, length = request.text, len(request.text)
    elif request.prompt_token_ids is not None:
        ids = request.prompt_token_ids
        beginning, length = " ".join(map(str, ids[: KEY_CHARACTERS // 4])), 4 * len(ids)
    else:
        parts = [f"tools\0{as_json(request.tools)}\0"] if request.tools else []
        beginning = ""
        for message in request.messages or ():
            parts.append(f"{message['role']}\0{message.get('content') or ''}\0")
            if message["role"] == "user" and not beginning:
                beginning = "".join(parts)
            if beginning and sum(map(len, parts)) >= MIN_CHARACTERS:
                break
        beginning = beginning or "".join(parts)
        length = sum(map(len, parts))
    if length < MIN_CHARACTERS:
        return None
    return f"{request.cache_salt or ''}{request.lora_name or ''}\0{beginning[:KEY_CHARACTERS]}"
