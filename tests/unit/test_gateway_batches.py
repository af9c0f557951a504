"""/v1/files and /v1/batches with the openai client."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from charonia_gateway.batches.lines import AnswerFile, Line, unanswered_line
from charonia_gateway.batches.runner import _piece
from charonia_gateway.batches.store import BatchStore, StoredBatch
from charonia_gateway.errors import ApiError
from gateway_in_process import HANG_S, MODEL, gateway, listening
from key_files import KeyFile
from triton_double import Double, error, input_number, input_text, part
from tritonclient.grpc import service_pb2 as pb
from waiting import until


class Echo:
    """A server's behaviour: the prompt is the answer. stops_at: this prompt and later ones wait for `go_on`."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.priorities: list[int | None] = []
        self.stops_at: str | None = None
        self.times = 1  # how often the answer repeats the prompt
        self.go_on = asyncio.Event()
        self.errors: dict[str, list[str]] = {}  # by prompt; each error once

    async def __call__(self, request: pb.ModelInferRequest) -> AsyncIterator[Any]:
        prompt = input_text(request, "text_input")
        self.prompts.append(prompt)
        self.priorities.append(input_number(request, "priority"))
        if self.errors.get(prompt):
            yield error(self.errors[prompt].pop())
            return
        if self.stops_at is not None and prompt >= self.stops_at:
            await self.go_on.wait()
        yield part(f"{prompt * self.times}!", "stop")


@dataclass
class Served:
    api: openai.AsyncOpenAI
    server: Double
    echo: Echo
    app: Any

    async def upload(self, *lines: Any) -> str:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        return (await self.api.files.create(file=("in.jsonl", text.encode()), purpose="batch")).id

    async def start(self, *lines: Any, **more: Any) -> Any:
        id = await self.upload(*lines)
        return await self.api.batches.create(
            input_file_id=id, endpoint="/v1/completions", completion_window="24h", **more
        )

    async def ended(self, id: str) -> Any:
        async def found() -> Any:
            batch = await self.api.batches.retrieve(id)
            return batch if batch.status in ("completed", "failed", "expired", "cancelled") else None

        return await until(found)

    async def content(self, id: str) -> dict[str, Any]:
        """The lines of a file by custom_id. Each is there once."""
        lines = [json.loads(line) for line in (await self.api.files.content(id)).text.splitlines()]
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines)
        return found


@asynccontextmanager
async def served(folder: Path, key: str = "any", **settings: Any) -> AsyncIterator[Served]:
    async with gateway(batch_dir=folder, **settings) as (web, server):
        server.behaviour = echo = Echo()
        transport: Any = web._transport
        async with (
            listening(transport.app) as (host, port),
            openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key=key, max_retries=0) as api,
        ):
            yield Served(api, server, echo, transport.app)


def line(prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, **fields}
    return {"custom_id": f"id {prompt}", "method": "POST", "url": "/v1/completions", "body": body}


async def test_batch_answers_each_request_in_openais_format(tmp_path: Path) -> None:
    async with served(tmp_path) as on:
        begun = await on.start(line("a"), line("b", priority=7), line("c", max_tokens=-1), metadata={"of": "me"})
        assert (begun.status, begun.endpoint, begun.completion_window) == ("validating", "/v1/completions", "24h")
        batch = await on.ended(begun.id)
        assert batch.status == "completed" and batch.metadata == {"of": "me"} and batch.errors is None
        assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        answers, errors = await on.content(batch.output_file_id), await on.content(batch.error_file_id)
        assert {id: one["response"]["body"]["choices"][0]["text"] for id, one in answers.items()} == {
            "id a": "a!",
            "id b": "b!",
        }
        first = answers["id a"]
        assert first["error"] is None and first["response"]["status_code"] == 200
        assert first["response"]["request_id"] == first["response"]["body"]["id"]
        (wrong,) = errors.values()
        assert wrong["response"]["status_code"] == 400 and wrong["response"]["body"]["error"]["param"] == "max_tokens"
        assert on.echo.priorities == [2**32 - 1] * 2, "-1, which is lower than that of other requests"
        files = [file async for file in on.api.files.list()]
        assert {file.purpose for file in files} == {"batch", "batch_output"} and len(files) == 3
        assert [one.id async for one in on.api.batches.list()] == [begun.id]


async def test_batch_continues_after_a_restart_without_a_lost_or_double_answer(tmp_path: Path) -> None:
    prompts = [f"{number:03}" for number in range(150)]
    async with served(tmp_path, batch_concurrency=4) as on:
        on.echo.stops_at = "070"
        id = (await on.start(*map(line, prompts))).id
        await until(lambda: len(on.echo.prompts) == 74)
        output = BatchStore(tmp_path, max_bytes=0, max_requests=0, ttl_s=1)
        batch = output.batch(id, None)
    with output.output(batch, "output").open("ab") as file:
        # The end of the gateway cut it off.
        file.write(b'{"id":"batch_req_1","custom_id":"id 070","resp')
    async with served(tmp_path) as on:
        batch = await on.ended(id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 150)
        assert sorted(await on.content(batch.output_file_id)) == [f"id {prompt}" for prompt in prompts]
        assert sorted(on.echo.prompts) == prompts[70:]


async def test_batch_survives_a_failure_of_each_of_its_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each failure the batch begins again with the files on the disk, as after a restart."""
    monkeypatch.setattr("charonia_gateway.batches.worker._PAUSE_S", 0)
    monkeypatch.setattr("charonia_gateway.batches.worker._CHECK_S", 0.02)
    writes, count, fails_at = BatchStore._write, 0, -1

    def write(self: BatchStore, folder: Path, entry: Any) -> None:
        nonlocal count
        count += 1
        if count == fails_at:
            raise OSError("no space left")
        writes(self, folder, entry)

    monkeypatch.setattr(BatchStore, "_write", write)
    async with served(tmp_path) as on:
        while count >= fails_at:
            count, fails_at = 0, max(fails_at, 2) + 1  # the first two writes are the upload and the new batch
            id = (await on.start(line("a"), line("b", max_tokens=-1))).id
            batch = await on.ended(id)
            assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 1)
            assert list(await on.content(batch.output_file_id)) == ["id a"]
            assert list(await on.content(batch.error_file_id)) == ["id b"]
        assert fails_at > 5
        files = [file async for file in on.api.files.list(purpose="batch_output")]
        assert len(files) == 2 * len([one async for one in on.api.batches.list()])


async def test_request_that_cannot_run_now_runs_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia_gateway.batches.runner._wait_s", lambda answer: 0)
    async with served(tmp_path) as on:
        on.echo.errors = {"a": ["[429] full; retry after 0 s", "[503] restarting; retry after 0 s"]}
        batch = await on.ended((await on.start(line("a"))).id)
        assert batch.status == "completed" and len(await on.content(batch.output_file_id)) == 1
        assert on.echo.prompts.count("a") >= 3


async def test_cancelled_batch_keeps_its_answers(tmp_path: Path) -> None:
    async with served(tmp_path, batch_concurrency=1) as on:
        on.echo.stops_at = "b"
        id = (await on.start(line("a"), line("b"), line("c"))).id
        await until(lambda: "b" in on.echo.prompts)
        assert (await on.api.batches.cancel(id)).status == "cancelling"
        batch = await on.ended(id)
        assert batch.status == "cancelled" and batch.cancelling_at <= batch.cancelled_at
        assert list(await on.content(batch.output_file_id)) == ["id a"]
        errors = await on.content(batch.error_file_id)
        assert {id: one["error"]["code"] for id, one in errors.items()} == {
            "id b": "batch_cancelled",
            "id c": "batch_cancelled",
        }
        await until(lambda: any(action == "cancel" for action, _ in on.server.actions))
        with pytest.raises(openai.ConflictError, match="it is cancelled"):
            await on.api.batches.cancel(id)


async def test_batch_whose_time_is_over_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia_gateway.routes.batches._DAY_S", 0)
    async with served(tmp_path) as on:
        on.echo.stops_at = ""
        batch = await on.ended((await on.start(line("a"))).id)
        assert batch.status == "expired" and batch.output_file_id is None
        assert (await on.content(batch.error_file_id))["id a"]["error"]["code"] == "batch_expired"


async def test_wrong_file_is_named_line_by_line(tmp_path: Path) -> None:
    chat = {**line("b"), "url": "/v1/chat/completions"}
    lines = [line("a"), "{", chat, line("a"), {**line("c"), "custom_id": None}, line("d", stream=True)]
    async with served(tmp_path) as on:
        batch = await on.ended((await on.start(*lines)).id)
        assert batch.status == "failed" and on.echo.prompts == []
        assert [(one.line, one.code) for one in batch.errors.data] == [
            (2, "invalid_json_line"),
            (3, "invalid_url"),
            (4, "duplicate_custom_id"),
            (5, "missing_required_parameter"),
            (6, "invalid_value"),
        ]
        assert "send the batch's endpoint" in batch.errors.data[1].message
        empty = await on.ended((await on.start("", "")).id)
        assert empty.errors.data[0].code == "empty_file"


async def test_lines_that_take_much_memory_are_rejected_before_they_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    watched = SimpleNamespace(loads=lambda text: parsed.append(1) or json.loads(text))
    monkeypatch.setattr("charonia_gateway.batches.lines.json", watched)
    lists = json.dumps(line("a", stop=[[]] * 200_000))
    deep = json.dumps(line("a"))[:-2] + ', "x": ' + "[" * 300 + "]" * 300 + "}}"
    async with served(tmp_path, max_body_bytes=1 << 20) as on:
        for wrong, says, code in (
            (lists, "too many values", "invalid_value"),
            (json.dumps(line("a" * (1 << 20))), "longer than 1048576 bytes", "line_too_long"),
            (deep, "fewer levels", "invalid_json_line"),
        ):
            parsed.clear()
            (found,) = (await on.ended((await on.start(wrong)).id)).errors.data
            assert found.code == code and says in found.message
            assert len(parsed) == (wrong is deep)


def test_lines_are_read_in_pieces_of_bytes() -> None:
    """Several large requests are not in memory at the same time."""
    large = Line(1, "a", "", {}, 1 << 20)
    assert [len(_piece(iter([one] * 100))) for one in (replace(large, size=1), large)] == [64, 2]


def test_failed_write_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AnswerFile(tmp_path / "out")
    whole, free = file._file, 10  # bytes on the disk

    class Full:
        truncate = staticmethod(whole.truncate)

        @staticmethod
        def write(text: bytes) -> int:
            nonlocal free
            if not free:
                raise OSError(errno.ENOSPC, "No space left on device")
            free -= whole.write(text[:free])
            return 10

    monkeypatch.setattr(file, "_file", Full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/out'"):
        file.write("a", unanswered_line("a", "code", "text"))
    monkeypatch.setattr(file, "_file", whole)
    file.write("b", unanswered_line("b", "code", "text"))
    file.close()
    assert AnswerFile(tmp_path / "out").done == {"b"}


async def test_files_and_batches_belong_to_their_key(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json", alice={}, bob={})
    async with served(tmp_path / "batches", keys.texts["alice"], keys_file=keys.path) as on:
        begun = await on.start(line("a"))
        assert (await on.ended(begun.id)).status == "completed"
        bob = on.api.with_options(api_key=keys.texts["bob"])
        for call, id in (
            (bob.files.retrieve, begun.input_file_id),
            (bob.files.content, begun.input_file_id),
            (bob.files.delete, begun.input_file_id),
            (bob.batches.retrieve, begun.id),
            (bob.batches.cancel, begun.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call(id)
        with pytest.raises(openai.NotFoundError):
            await bob.batches.create(
                input_file_id=begun.input_file_id, endpoint="/v1/completions", completion_window="24h"
            )
        assert [file async for file in bob.files.list()] == [] and [one async for one in bob.batches.list()] == []
        on.echo.stops_at = ""
        await on.start(line("b"))
        await until(lambda: "b" in on.echo.prompts)  # the gateway ends while it runs


async def test_limits_count_bytes_and_requests_of_a_key(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json", alice={"max_concurrent": 1}, bob={})
    limits = {"max_batch_bytes": 4 << 16, "max_batch_requests": 2}
    async with served(tmp_path / "batches", keys.texts["alice"], keys_file=keys.path, **limits) as on:
        with pytest.raises(openai.APIStatusError, match="is larger than") as caught:
            await on.upload("x" * 400_000)
        assert caught.value.status_code == 413
        on.echo.stops_at = ""
        begun = await on.start(line("a"), line("b"))
        with pytest.raises(openai.RateLimitError, match="unfinished batches have 2 requests"):
            await on.start(line("c"))
        await on.upload(line("d"))
        with pytest.raises(openai.RateLimitError, match="more than 262144 bytes"):
            await on.upload(line("e"))
        await until(lambda: len(on.echo.prompts) == 2)  # max_concurrent is for other requests
        with pytest.raises(openai.ConflictError, match="reads the file"):
            await on.api.files.delete(begun.input_file_id)
        bob = on.api.with_options(api_key=keys.texts["bob"])
        assert (await bob.files.create(file=b"{}", purpose="batch")).bytes == 2
        on.echo.go_on.set()
        assert (await on.ended(begun.id)).request_counts.completed == 2
        await on.api.files.delete(begun.input_file_id)


async def test_answers_count_for_the_room_of_their_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one small file could fill the disk."""
    monkeypatch.setattr("charonia_gateway.batches.worker._ROOM_BYTES", 1)
    monkeypatch.setattr("charonia_gateway.batches.worker._CHECK_S", 0.02)
    async with served(tmp_path, batch_concurrency=1, max_batch_bytes=3 << 16) as on:
        on.echo.times, on.echo.stops_at = 100_000, "b"
        batch = await on.ended((await on.start(line("a"), line("b"), line("c"))).id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "storage_exceeded")
        assert list(await on.content(batch.output_file_id)) == ["id a"]
        errors = await on.content(batch.error_file_id)
        assert {id: one["error"]["code"] for id, one in errors.items()} == dict.fromkeys(
            ("id b", "id c"), "batch_failed"
        )


async def test_uploads_at_the_same_time_share_the_room(tmp_path: Path) -> None:
    form = "--x\r\nContent-Disposition: form-data; name={}\r\n\r\n{}\r\n"
    go_on = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield form.format("purpose", "batch").encode()
        yield b"--x\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\n" + b"a" * 200_000
        await go_on.wait()
        yield b"\r\n--x--\r\n"

    async with served(tmp_path, max_batch_bytes=5 << 16) as on, httpx.AsyncClient(timeout=HANG_S) as client:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        first = asyncio.create_task(client.post(f"{on.api.base_url}files", content=body(), headers=headers))
        store = on.app.state.gateway.batches
        await until(lambda: store.arriving[None] >= 200_000)
        with pytest.raises(openai.APIStatusError, match="with others that arrive now") as caught:
            await on.upload("b" * 200_000)
        assert caught.value.status_code == 413
        go_on.set()
        assert (await first).json()["bytes"] == 200_000 and store.arriving[None] == 0


def test_limits_are_checked_while_no_other_entry_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[bool] = []

    def is_alone(store: BatchStore, owner: str | None, size: int) -> None:
        with (tmp_path / "adding.lock").open("w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        checks.append(True)

    monkeypatch.setattr(BatchStore, "check_room", is_alone)
    store = BatchStore(tmp_path, max_bytes=0, max_requests=1, ttl_s=1)
    path = store.new_path()
    path.write_text("{}")
    file = store.add_upload(path, None, "a", "batch")
    store.add_batch(StoredBatch(f"batch_{'0' * 32}", None, "", "/v1/completions", file.id, 0, 0, 1))
    assert len(checks) == 2


def test_unfinished_batches_of_a_key_are_limited_and_ended_ones_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key could otherwise slow the gateway down for all."""
    monkeypatch.setattr("charonia_gateway.batches.store.MAX_UNFINISHED", 1)
    store = BatchStore(tmp_path, max_bytes=1 << 20, max_requests=10, ttl_s=1)
    first, second = (
        StoredBatch(f"batch_{number * 32}", None, "", "/v1/completions", "file-", 0, 0, 1) for number in "12"
    )
    store.add_batch(first)
    with pytest.raises(ApiError, match="1 batches have not ended"):
        store.add_batch(second)
    store.save(replace(first, status="completed"))
    store.add_batch(second)
    reads: list[str] = []
    read = store._read
    monkeypatch.setattr(store, "_read", lambda folder, id, kind: reads.append(id) or read(folder, id, kind))
    for _ in range(2):
        assert store.unfinished() == [second] and len(store.batches(None)) == 2
    assert set(reads) == {second.id}


def test_what_a_crash_left_is_deleted_later(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, max_bytes=0, max_requests=0, ttl_s=1)
    left = [store.new_path(), tmp_path / "files" / f"file-{'0' * 32}", tmp_path / "batches" / f"batch_{'0' * 32}"]
    left[0].touch()
    for folder in left[1:]:
        folder.mkdir()
        (folder / "content").touch()
    store.delete_old()
    assert all(one.exists() for one in left)
    for one in left:
        os.utime(one, (0, 0))
    store.delete_old()
    assert not any(one.exists() for one in left)


async def test_requests_of_a_batch_are_charged_to_their_key(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json", alice={"tokens_per_minute": 1, "access": ("inference", "metrics")})
    async with served(tmp_path / "batches", keys.texts["alice"], keys_file=keys.path, batch_concurrency=1) as on:
        id = (await on.start(line("a"), line("b"))).id

        async def is_limited() -> bool:
            metrics = await on.api.with_options(base_url=str(on.api.base_url).replace("/v1", "")).get(
                "/metrics", cast_to=str
            )
            return 'key_limited_total{key="alice",limit="tokens"}' in metrics

        await until(is_limited)
        assert on.echo.prompts == ["a"], "b waits until the key has tokens again"
        await on.api.batches.cancel(id)
        batch = await on.ended(id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)


async def test_wrong_uploads_and_batches_name_the_field(tmp_path: Path) -> None:
    async with served(tmp_path) as on:
        with pytest.raises(openai.BadRequestError, match="purpose: send 'batch'"):
            await on.api.files.create(file=b"{}", purpose="fine-tune")
        id = await on.upload(line("a"))
        for fields, says in (
            ({"endpoint": "/v1/rerank"}, "endpoint: send one of"),
            ({"completion_window": "1h"}, "completion_window"),
            ({"input_file_id": "file-none"}, "there is no file"),
        ):
            given: Any = {"input_file_id": id, "endpoint": "/v1/completions", "completion_window": "24h", **fields}
            with pytest.raises(openai.APIStatusError, match=says):
                await on.api.batches.create(**given)
        for query, says in (("limit=0", "limit: "), ("order=up", "order: "), ("after=file-none", "after: there is no")):
            with pytest.raises(openai.BadRequestError, match=says):
                await on.api.get(f"/files?{query}", cast_to=object)
    async with gateway() as (web, _):
        answer = await web.get("/v1/files")
        assert answer.status_code == 404 and "CHARONIA_GATEWAY_BATCH_DIR" in answer.text


async def test_batch_without_its_file_and_a_broken_entry_do_not_stop_others(tmp_path: Path) -> None:
    async with served(tmp_path) as on:
        broken = tmp_path / "batches" / f"batch_{'0' * 32}"
        broken.mkdir()
        (broken / "meta.json").write_text('{"id": 7}')
        on.echo.stops_at = ""
        id = (await on.start(line("a"))).id
        await until(lambda: on.echo.prompts)
    batch = BatchStore(tmp_path, max_bytes=0, max_requests=0, ttl_s=1).batch(id, None)
    (tmp_path / "files" / batch.input_file_id / "content").unlink()
    async with served(tmp_path) as on:
        lost = await on.ended(id)
        assert lost.status == "failed" and "no longer exists" in lost.errors.data[0].message
        assert (await on.ended((await on.start(line("b"))).id)).status == "completed"


async def test_old_files_and_batches_are_deleted(tmp_path: Path) -> None:
    async with served(tmp_path) as on:
        await on.ended((await on.start(line("a"))).id)
        on.echo.stops_at = ""
        running = await on.start(line("b"))
        await until(lambda: "b" in on.echo.prompts)
        BatchStore(tmp_path, max_bytes=0, max_requests=0, ttl_s=-60).delete_old()
        assert [one.id async for one in on.api.batches.list()] == [running.id]
        assert [file.id async for file in on.api.files.list()] == [running.input_file_id]


async def test_batches_of_a_key_wait_for_each_other_and_not_for_other_keys(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json", alice={}, bob={})
    async with served(tmp_path / "batches", keys.texts["alice"], keys_file=keys.path) as on:
        on.echo.stops_at = "a"
        first = [(await on.start(line(f"a{number}"))).id for number in range(5)]
        await until(lambda: len(on.echo.prompts) == 4)
        bob = Served(on.api.with_options(api_key=keys.texts["bob"]), on.server, on.echo, on.app)
        assert (await bob.ended((await bob.start(line("B"))).id)).status == "completed"
        assert (await on.api.batches.cancel(first[-1])).status == "cancelling"
        assert (await on.ended(first[-1])).status == "cancelled" and "a4" not in on.echo.prompts
        on.echo.go_on.set()
        assert [(await on.ended(id)).status for id in first[:4]] == ["completed"] * 4
