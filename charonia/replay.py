"""`charonia replay`: sends logged requests again and compares the tokens (docs/determinism.md)."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from charonia.bench.targets import gateway_client
from charonia.errors import ModelError
from charonia.tables import print_table

_WAIT_S = 600.0  # for a request that is rejected with 429


@dataclass
class Outcome:
    """The result of one line of the log. `result`: equal, different, failed or skipped."""

    line: int
    request_id: str
    path: str
    result: str = "skipped"
    detail: str = ""  # the first different token, the error, or why the request was skipped
    logged_fingerprint: str | None = None
    fingerprint: str | None = None  # of the server now

    @property
    def broken(self) -> bool:
        """Whether the tokens differ although the fingerprints promise the same."""
        return self.result == "different" and self.fingerprint == self.logged_fingerprint


def read_log(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the content of each line. Raises ModelError for a line that is not from a request log."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    entry = json.loads(line)
                    known = isinstance(entry["path"], str) and isinstance(json.loads(entry["body"]), dict)
                    known = known and all({"token_ids", "finish_reason"} <= set(one) for one in entry["choices"])
                except (ValueError, KeyError, TypeError):
                    known = False
                if not known:
                    raise ModelError(
                        f"line {number} of {file} is not from a request log: name a file that the gateway wrote "
                        "for CHARONIA_GATEWAY_LOG_REQUESTS"
                    )
                yield number, entry
            if lines.tell() == 0:
                raise ModelError(f"{file} has no requests: the gateway has not completed a request since it was made")
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None


def stateless(path: str, text: str) -> str | None:
    """The body of a request without the fields that use or change the server's state, which change no token. None if
    the request continues what a server has kept. A body without such fields is unchanged."""
    body = json.loads(text)
    in_session = path == "/v1/chat/interactive" and body.get("session_id") not in (None, -1)
    if in_session or body.get("previous_response_id") is not None:
        return None
    kept = {name: value for name, value in body.items() if name not in ("session_id", "renew_session", "store")}
    return text if len(kept) == len(body) else json.dumps(kept)


def difference(logged: list[dict[str, Any]], now: list[dict[str, Any]]) -> str | None:
    """The first difference between the choices of two responses; None if they are equal."""
    if len(logged) != len(now):
        return f"{len(now)} responses, logged: {len(logged)}"
    for index, (before, after) in enumerate(zip(logged, now, strict=True)):
        old, new = before["token_ids"], after["token_ids"]
        at = next((at for at, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
        if at is None and len(old) != len(new):
            at = min(len(old), len(new))
        if at is not None:
            shown = (str(ids[at]) if at < len(ids) else "the end" for ids in (new, old))
            return f"response {index}, token {at}: {next(shown)}, logged: {next(shown)}"
        if before["finish_reason"] != after["finish_reason"]:
            return f"response {index}: ends with {after['finish_reason']}, logged: {before['finish_reason']}"
    return None


async def _posted(client: Any, body: dict[str, Any]) -> Any:
    """The response of /v1/replay. Waits as long as the gateway says if the server or the key is at its limit."""
    began = time.monotonic()
    while True:
        response = await client.post("/v1/replay", json=body)
        wait_s = float(response.headers.get("retry-after", 1))
        if response.status_code != 429 or time.monotonic() + wait_s - began > _WAIT_S:
            return response
        await asyncio.sleep(wait_s)


async def replayed(client: Any, number: int, entry: dict[str, Any]) -> Outcome:
    """Send a line of the log again."""
    outcome = Outcome(number, entry.get("request_id", ""), entry["path"])
    outcome.logged_fingerprint = entry.get("system_fingerprint")
    body = stateless(entry["path"], entry["body"])
    if body is None:
        outcome.detail = "it belongs to a session or continues a stored response"
        return outcome
    sent = {"path": entry["path"], "body": body, "seeds": entry.get("seeds", {})}
    sent["prompt_time"] = entry.get("prompt_time")
    try:
        response = await _posted(client, sent)
        if response.status_code != 200:
            raise ModelError(f"HTTP {response.status_code}: {response.text[:300]}")
        found = response.json()
    except Exception as error:  # httpx's errors may have no text
        outcome.result, outcome.detail = "failed", str(error) or repr(error)
        return outcome
    outcome.fingerprint = found["system_fingerprint"]
    outcome.detail = difference(entry["choices"], found["choices"]) or ""
    outcome.result = "different" if outcome.detail else "equal"
    return outcome


async def replay(
    entries: Iterable[tuple[int, dict[str, Any]]], url: str, api_key: str | None, tls_ca: Path | None, concurrency: int
) -> list[Outcome]:
    """Send the requests of a log, `concurrency` at the same time. Returns their results in the order of the log. Raises
    ModelError if no gateway responds."""
    rest = iter(list(entries))  # an unreadable line is an error before the first request
    outcomes: list[Outcome] = []

    async with gateway_client(url, api_key, tls_ca) as client:

        async def work() -> None:
            for number, entry in rest:
                outcomes.append(await replayed(client, number, entry))

        await asyncio.gather(*(work() for _ in range(concurrency)))
    return sorted(outcomes, key=lambda one: one.line)


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """The counts of results, the fingerprints, and the requests that are not equal."""
    counts = Counter(one.result for one in outcomes)
    return {
        "requests": len(outcomes),
        **{name: counts[name] for name in ("equal", "different", "failed", "skipped")},
        "broken": sum(one.broken for one in outcomes),
        "logged_fingerprints": sorted({one.logged_fingerprint for one in outcomes if one.logged_fingerprint}),
        "fingerprints": sorted({one.fingerprint for one in outcomes if one.fingerprint}),
        "not_equal": [asdict(one) for one in outcomes if one.result != "equal"],
    }


def show(outcomes: list[Outcome]) -> None:
    """Print the summary for people."""
    found = summary(outcomes)
    names = ("requests", "equal", "different", "failed", "skipped")
    print_table(names, [[str(found[name]) for name in names]])
    if others := [one for one in outcomes if one.result != "equal"]:
        print()
        rows = [[str(one.line), one.result, one.request_id, one.path, one.detail] for one in others]
        print_table(("line", "result", "request", "path", "first difference, or reason"), rows)
    if found["fingerprints"] and found["fingerprints"] != found["logged_fingerprints"]:
        logged, now = (", ".join(found[name]) for name in ("logged_fingerprints", "fingerprints"))
        print(f"\nThe log has the fingerprint {logged}, this server {now}: tokens may differ.")
    if found["broken"]:
        print("\nTokens differ with equal fingerprints. On a GPU this is expected without the setting `reproducible`.")
