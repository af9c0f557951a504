"""Answers all requests of a file with a model in this process, without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charonia import disk
from charonia.errors import CharoniaError, InvalidRequestError
from charonia.progress import Progress
from charonia.serve.model import prepare_all, prepare_draft
from charonia.settings import ServeSettings, inference_settings

if TYPE_CHECKING:
    from charonia_gateway.batches.lines import AnswerFile, Line, LineError
    from charonia_gateway.settings import Settings

    from charonia.web.engine_server import EngineServer

# The field that says which endpoint a line without `url` is for.
_ENDPOINTS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}
# Settings of a gateway that listens on a port.
_NO_SERVER: dict[str, Any] = {
    "keys_file": None,
    "models_file": None,
    "control_dir": None,
    "log_requests": None,
    "batch_dir": None,
    "redis_url": "",
    "tracing_endpoint": "",
    "more_models": "",
    "workers": 1,
    "page": False,
}


def generate(settings: ServeSettings, inference: Mapping[str, str], source: Path, target: Path) -> None:
    """Write an answer to each request of `source` to `target`, in the order in which they end. Requests whose answer is
    in `target` already are skipped, so the same call continues after an interruption.

    Raises InvalidRequestError for a wrong line, before the model is loaded, and CharoniaError."""
    from charonia.web.serve import gateway_settings, load_server, say

    with ExitStack() as opened:
        total = _check(source)
        answers = opened.enter_context(closing(_open(target)))
        missing = _check_is_of(answers, source, target)
        if not missing:
            say(f"{target} has all {total} answers already")
            return
        if answers.done:
            say(f"{target} has {total - missing} of {total} answers; the others follow")
        run_dir = settings.run_dir.expanduser().absolute()
        chosen = prepare_draft(inference_settings(inference), run_dir, say, opened)
        served = prepare_all(settings, run_dir, chosen, say, opened)
        if len(served) > 1:
            raise InvalidRequestError(f"{len(served)} models were named, and all requests are for one model: name one")
        server = load_server(served[0], chosen, settings)
        opened.callback(server.shutdown)
        for warning in server.info.warnings:
            say(f"warning: {warning}")
        given = gateway_settings(settings, model_name=served[0].name, **_NO_SERVER)
        with Progress(True).count("generating", total) as advance:
            advance(total - missing)
            try:
                failed = asyncio.run(_run(given, server, served[0].names[0], source, answers, advance))
            except KeyboardInterrupt:
                say(f"interrupted: {target} has {len(answers.done)} of {total} answers; the same command continues")
                raise
            except OSError as error:
                if not disk.is_full_or_read_only(error):
                    raise
                raise CharoniaError(
                    f"{target} has {len(answers.done)} of {total} answers: {disk.reason(error)}; then the same command "
                    "continues"
                ) from error
    say(f"{target} has {total} answers" + (f"; {failed} of the new ones are errors" if failed else ""))


def _check(source: Path) -> int:
    """Check all lines, and return their number."""
    count = 0
    for line in _lines(source):
        if isinstance(line, Exception):
            raise InvalidRequestError(f"{source}, {line}")
        count += 1
    return count


def _lines(source: Path) -> Iterator[Line | LineError]:
    from charonia_gateway.batches.lines import read_lines

    try:
        with source.open("rb") as file:
            yield from read_lines(file, _parse)
    except OSError as error:
        raise InvalidRequestError(f"{source} cannot be read: {error.strerror}") from None


def _parse(text: bytes, number: int) -> Line:
    """Parse a line of OpenAI's batch files, or a request alone, which may have a custom_id."""
    from charonia_gateway.batches.lines import LineError, parse_line

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and "body" not in value:
        endpoint = next((path for name, path in _ENDPOINTS.items() if name in value), None)
        if endpoint is None:
            raise LineError(number, f"it has none of {', '.join(_ENDPOINTS)}, and no body: send one of them")
        custom_id = value.pop("custom_id", f"line-{number}")
        text = json.dumps({"custom_id": custom_id, "url": endpoint, "body": value}).encode()
    return parse_line(text, number)


def _open(target: Path) -> AnswerFile:
    from charonia_gateway.batches.lines import AnswerFile

    try:
        return AnswerFile(target)
    except OSError as error:
        full = disk.is_full_or_read_only(error)
        raise InvalidRequestError(f"--out: {disk.reason(error)}" if full else str(error)) from None
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


def _check_is_of(answers: AnswerFile, source: Path, target: Path) -> int:
    """Return the number of requests without an answer."""
    left = set(answers.done)
    missing = 0
    for line in _lines(source):
        if isinstance(line, Exception):
            continue
        missing += line.custom_id not in left
        left.discard(line.custom_id)
    if left:
        raise InvalidRequestError(
            f"{target} has an answer to {min(left)[:100]!r}, and {source} has no such request: it belongs to another "
            "file of requests; name another --out"
        )
    return missing


async def _run(
    settings: Settings,
    server: EngineServer,
    model: str,
    source: Path,
    answers: AnswerFile,
    advance: Callable[[int], None],
) -> int:
    """Return the number of answers that are errors."""
    from charonia_gateway.app import create_app
    from charonia_gateway.batches.runner import Runner
    from charonia_gateway.record import Inner

    failed = 0

    def write(custom_id: str, line: bytes, succeeded: bool) -> None:
        nonlocal failed
        failed += not succeeded
        answers.write(custom_id, line)
        advance(1)

    def retries(status: int) -> bool:
        if status == 503:
            raise CharoniaError("the engine has failed; run the same command again to continue")
        return status == 429

    adapts = bool(await server.adapters())  # then `model` may name an adapter, and no other name is ignored

    todo = (
        replace(line, body={**line.body, "model": line.body.get("model", model) if adapts else model})
        for line in _lines(source)
        if not isinstance(line, Exception) and line.custom_id not in answers.done
    )
    app = create_app(settings, servers={model: server})
    async with app.router.lifespan_context(app):
        most = 2 * server.info.max_batch_size  # while a step computes, the next prompts are prepared
        runner = Runner(app, Inner(None, "127.0.0.1"), asyncio.Semaphore(most), most, write, retries=retries)
        await runner.run(todo)
    return failed
