"""/v1/messages, /v1/responses and /tokenize in front of a server that does what a test tells it to."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from charonia_gateway import files
from gateway_in_process import MODEL, ask, gateway
from key_files import KeyFile
from starlette.types import Message, Receive, Scope, Send
from triton_double import error, input_text, parsed, part, says, scripted_parse
from tritonclient.grpc import service_pb2 as pb
from waiting import until

from charonia.errors import ServeError
from charonia.serve import control

HANG_S = 120
USER = [{"role": "user", "content": "hi"}]
MESSAGES: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": USER}
RESPONSES: dict[str, Any] = {"model": MODEL, "input": "hi"}
Responses = AsyncIterator[Any]


@pytest.fixture(autouse=True)
def parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia_client.parsing.ResponseParser.parse", scripted_parse)


def events(text: str) -> list[dict[str, Any]]:
    found = []
    for written in text.removesuffix("\n\n").split("\n\n"):
        name, data = written.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_unset_sampling_fields_are_the_models_to_choose() -> None:
    """The gateway sends no values of its own. A response of /v1/responses shows the values of the model."""
    chosen = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
    routes = {
        "/v1/chat/completions": {"messages": "hi"},
        "/v1/completions": {"prompt": "hi"},
        "/v1/messages": {"messages": MESSAGES["messages"], "max_tokens": 5},
        "/v1/responses": {"input": "hi"},
        "/v1/chat/interactive": {"prompt": "hi"},
    }
    info = {"default_sampling_parameters": {"temperature": 0.6, "top_k": 20, "top_p": 0.95}}
    async with gateway(info=info) as (web, server):
        for route, body in routes.items():
            assert (await web.post(route, json={"model": MODEL, **body})).status_code == 200
        sent = [{tensor.name for tensor in request.inputs} & chosen for request in server.requests]
        assert sent == [set()] * len(routes)
        shown = (await web.post("/v1/responses", json=RESPONSES)).json()
        assert (shown["temperature"], shown["top_p"]) == (0.6, 0.95)
        shown = (await web.post("/v1/responses", json={**RESPONSES, "temperature": 0, "top_p": 0.5})).json()
        assert (shown["temperature"], shown["top_p"]) == (0, 0.5)
    async with gateway() as (web, _):
        shown = (await web.post("/v1/responses", json=RESPONSES)).json()
        assert (shown["temperature"], shown["top_p"]) == (1, 1)


breaks_off = says(part("x"), error("[503] the engine ends"))


async def test_an_error_in_a_stream_has_the_form_of_its_route() -> None:
    async with gateway() as (web, server):
        server.behaviour = breaks_off
        message = events((await web.post("/v1/messages", json={**MESSAGES, "stream": True})).text)
        response = events((await web.post("/v1/responses", json={**RESPONSES, "stream": True})).text)
    assert [one["type"] for one in message[-2:]] == ["content_block_delta", "error"]
    assert message[-1]["error"]["type"] == "overloaded_error" and message[-1]["request_id"].startswith("msg_")
    assert response[-1]["code"] == "service_unavailable" and response[-1]["sequence_number"] == len(response) - 1
    assert response[-2]["type"] == "response.output_text.delta"


@pytest.mark.parametrize(
    ("said", "status", "kind"),
    [
        ("[429] full; retry after 3 s", 429, "rate_limit_error"),
        ("[503] gone", 503, "overloaded_error"),
        ("[504] late", 504, "timeout_error"),
        ("broken", 500, "api_error"),
        ("[400] top_k: wrong", 400, "invalid_request_error"),
    ],
)
async def test_the_servers_errors_are_anthropics(said: str, status: int, kind: str) -> None:
    answer = await ask("/v1/messages", MESSAGES, headers={"x-request-id": "mine"}, behaviour=says(error(said)))
    assert answer.status_code == status and answer.json()["error"]["type"] == kind
    assert answer.json()["request_id"] == answer.headers["request-id"] == "mine"
    assert answer.headers.get("retry-after") == ({429: "3", 503: "5"}.get(status))


@pytest.mark.parametrize(("max_tokens", "reason"), [(1, "max_tokens"), (5, "model_context_window_exceeded")])
async def test_a_context_that_is_full_is_no_max_tokens(max_tokens: int, reason: str) -> None:
    answer = await ask("/v1/messages", {**MESSAGES, "max_tokens": max_tokens}, behaviour=says(part("x", "length")))
    assert answer.json()["stop_reason"] == reason


async def test_an_answer_without_text_has_no_block() -> None:
    async with gateway() as (web, server):
        server.behaviour = says(part("", "stop"))
        whole = await web.post("/v1/messages", json=MESSAGES)
        streamed = events((await web.post("/v1/messages", json={**MESSAGES, "stream": True})).text)
    assert whole.json()["content"] == [] and whole.json()["stop_reason"] == "end_turn"
    assert [one["type"] for one in streamed] == ["message_start", "message_delta", "message_stop"]


async def test_a_silent_stream_of_messages_has_pings() -> None:
    pings = asyncio.Semaphore(0)

    async def silent(request: pb.ModelInferRequest) -> Responses:
        for _ in range(3):
            await pings.acquire()
        yield part("x", "stop")

    async with gateway(heartbeat_s=0.05) as (web, server):
        server.behaviour = silent
        transport: Any = web._transport
        app = transport.app

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            async def count(message: Message) -> None:
                if b"event: ping" in message.get("body", b""):
                    pings.release()
                await send(message)

            await app(scope, receive, count)

        transport.app = counted
        asked = web.post("/v1/messages", json={**MESSAGES, "stream": True})
        found = events((await asyncio.wait_for(asked, HANG_S)).text)
    assert [one["type"] for one in found[:3]] == ["ping"] * 3


async def test_reasoning_is_not_part_of_the_text() -> None:
    thinks = says(parsed(reasoning="hm"), parsed("so"), parsed("!", reason="stop"))

    async with gateway() as (web, server):
        server.formats["reasoning"] = "think"
        while not server.asked:  # until the gateway has found the server
            await web.post("/v1/messages", json=MESSAGES)
        server.behaviour = thinks
        message = events((await web.post("/v1/messages", json={**MESSAGES, "stream": True})).text)
        response = events((await web.post("/v1/responses", json={**RESPONSES, "stream": True})).text)
    assert "".join(one["delta"]["text"] for one in message if one["type"] == "content_block_delta") == "so!"
    thought, said = response[-1]["response"]["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}] and said["content"][0]["text"] == "so!"


async def test_response_that_is_too_large_to_store_is_marked() -> None:
    async with gateway(max_response_bytes=1024) as (web, server):
        server.behaviour = says(part("x" * 2000, "stop"))
        answer = (await web.post("/v1/responses", json={**RESPONSES, "store": True})).json()
        assert answer["store"] is False
        assert (await web.get(f"/v1/responses/{answer['id']}")).status_code == 404


@pytest.mark.parametrize(("limit", "statuses"), [(0, [400] * 3), (2, [404, 200, 200])])
async def test_a_setting_limits_the_number_of_stored_responses(limit: int, statuses: list[int]) -> None:
    async with gateway(max_responses=limit) as (web, _):
        stored = [await web.post("/v1/responses", json={**RESPONSES, "store": True}) for _ in range(3)]
        found = [await web.get(f"/v1/responses/{one.json()['id']}") for one in stored if limit]
    assert [answer.status_code for answer in found or stored] == statuses


async def test_the_session_of_a_chain_ends_with_its_last_stored_answer() -> None:
    async with gateway() as (web, server):
        first = (await web.post("/v1/responses", json={**RESPONSES, "store": True})).json()["id"]
        again = {**RESPONSES, "store": True, "previous_response_id": first}
        second = (await web.post("/v1/responses", json=again)).json()["id"]
        assert (await web.delete(f"/v1/responses/{first}")).json() == {
            "id": first,
            "object": "response",
            "deleted": True,
        }
        assert server.actions == []
        await web.delete(f"/v1/responses/{second}")
        assert [action for action, _ in server.actions] == ["end_session"]


async def test_tokens_are_counted_and_the_routes_are_in_the_metrics() -> None:
    async with gateway() as (web, server):
        found = (await web.post("/tokenize", json={"prompt": "hello"})).json()
        tools = [{"name": "f", "input_schema": {"type": "object"}}]
        asked = {"model": MODEL, "messages": USER, "tools": tools, "tool_choice": {"type": "any"}}
        counted = (await web.post("/v1/messages/count_tokens", json=asked)).json()
        assert input_text(server.tokenized, "tool_choice") == "required", "it decides what the prompt may leave out"
        server.tokenizer_error = "[400] text_input: wrong"
        refused = await web.post("/tokenize", json={"prompt": "hello"})
        metrics = (await web.get("/metrics")).text
    assert (found["count"], found["max_model_len"]) == (5, 10)
    assert counted["input_tokens"] > 5
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    for route in ("/tokenize", "/v1/messages/count_tokens"):
        assert f'charonia_gateway_requests_total{{route="{route}",status="200"}} 1.0' in metrics


async def test_models_are_loaded_by_keys_with_admin_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHECK_INTERVAL_S", 0.05)
    admin = {"access": ["inference", "admin"]}
    keys = KeyFile(tmp_path / "keys", bob={}, admin=admin, limited={**admin, "models": ["b"]})
    models = tmp_path / "models"
    models.write_text("b=other", encoding="utf-8")
    orders: list[dict[str, str]] = []

    def obey(order: dict[str, str]) -> str:
        """What `charonia serve` does."""
        orders.append(order)
        if order["name"] == "c=nowhere":
            raise ServeError("nowhere is no model")
        models.write_text("b=other,c=more", encoding="utf-8")
        return "done"

    settings = {"keys_file": keys.path, "models_file": models, "control_dir": tmp_path}
    async with gateway(**settings) as (web, server):
        server.behaviour = says(part("Hi", "stop"))
        body = {"model": "c=/models/c"}
        silent = await web.post("/models/load", json=body, headers=keys.bearer("admin"))
        assert silent.status_code == 503 and "charonia serve does not respond" in silent.text
        with control.answering(tmp_path, obey):
            refused = await web.post("/models/load", json=body, headers=keys.bearer("bob"))
            assert refused.status_code == 403 and "'bob' has no access to admin" in refused.text
            for name in ("c=/models/c", MODEL, "=b", "c"):
                other = await web.post("/models/load", json={"model": name}, headers=keys.bearer("limited"))
                assert other.status_code == 403 and f"'limited' may not use the model {name!r}" in other.text
            wrong = await web.post("/models/load", json={"model": "c=nowhere"}, headers=keys.bearer("admin"))
            assert wrong.status_code == 400 and "nowhere is no model" in wrong.text
            chat = {"model": "c", "messages": "hi", "max_tokens": 5}
            before = await web.post("/v1/chat/completions", json=chat, headers=keys.bearer("bob"))
            assert before.status_code == 404 and f"this server has '{MODEL}', 'b'" in before.text
            loaded = await web.post("/models/load", json=body, headers=keys.bearer("admin"))
            assert loaded.json() == {"success": True, "message": "done"}
            unloaded = await web.post("/models/unload", json={"model": "b"}, headers=keys.bearer("admin"))
            assert unloaded.json() == {"success": True, "message": "done"}
        assert orders[1:] == [
            {"do": "load", "name": "c=/models/c", "from_key": "1"},
            {"do": "unload", "name": "b"},
        ]
        listed: list[str] = []
        while len(listed) < 3:
            listed = [one["id"] for one in (await web.get("/v1/models", headers=keys.bearer("bob"))).json()["data"]]
        assert listed == [MODEL, "b", "c"]
        answer = await web.post("/v1/chat/completions", json=chat, headers=keys.bearer("bob"))
        assert answer.status_code == 200 and server.requests[-1].model_name == "ensemble.more"
        server.unloaded = {"ensemble"}
        gone = await web.post("/v1/chat/completions", json={**chat, "model": MODEL}, headers=keys.bearer("bob"))
        assert gone.json()["error"]["code"] == "model_not_loaded", "the first model is one of several now"


async def test_model_that_another_process_loaded_is_found_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """POST /models/load waits for one process of the gateway."""
    monkeypatch.setattr(files, "CHECK_INTERVAL_S", 3600)
    models = tmp_path / "models"
    models.write_text("", encoding="utf-8")
    async with gateway(models_file=models) as (web, server):
        server.behaviour = says(part("Hi", "stop"))
        chat = {"model": "a", "messages": "hi", "max_tokens": 5}
        models.write_text("a", encoding="utf-8")
        found = await asyncio.gather(*(web.post("/v1/chat/completions", json=chat) for _ in range(3)))
        assert [one.status_code for one in found] == [200] * 3
        models.write_text("a,b", encoding="utf-8")
        assert (await web.get("/v1/models/b")).json()["id"] == "b"
        models.write_text("a,b,c", encoding="utf-8")
        assert [one["id"] for one in (await web.get("/v1/models")).json()["data"]] == [MODEL, "a", "b", "c"]
        models.write_text("a,b,c,d", encoding="utf-8")
        info = await web.get("/tokenizer_info", params={"model": "d"})
        assert info.status_code != 404, info.text
        assert (await web.post("/v1/chat/completions", json={**chat, "model": "e"})).status_code == 404


@pytest.mark.parametrize(
    ("status", "code", "retry"),
    [
        (400, "invalid_value", False),
        (404, "model_not_found", False),
        (409, "busy", True),
        (503, "not_ready", True),
    ],
)
async def test_failed_order_has_the_status_of_its_error(tmp_path: Path, status: int, code: str, retry: bool) -> None:
    """Clients retry 409 and 503."""
    keys = KeyFile(tmp_path / "keys", admin={"access": ["admin"]})

    def obey(order: dict[str, str]) -> str:
        raise ServeError("the reason", status)

    with control.answering(tmp_path, obey):
        given = {"headers": keys.bearer("admin"), "keys_file": keys.path, "control_dir": tmp_path}
        answer = await ask("/models/load", {"model": "a"}, **given)
    error = answer.json()["error"]
    assert (answer.status_code, error["message"], error["code"]) == (status, "the reason", code)
    assert ("retry-after" in answer.headers) is retry


async def test_key_for_a_model_loads_it_by_each_of_its_names(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys", a={"access": ["admin"], "models": ["a"]})
    with control.answering(tmp_path, lambda order: order["name"]):
        given = {"keys_file": keys.path, "control_dir": tmp_path, "model_name": "a,b", "more_models": "a=c=other"}
        async with gateway(**given) as (web, _):
            for name, status in (("a", 200), ("b", 200), ("a=c", 403)):
                answer = await web.post("/models/load", json={"model": name}, headers=keys.bearer("a"))
                assert answer.status_code == status, answer.text


async def test_models_are_not_loaded_without_keys(tmp_path: Path) -> None:
    answer = await ask("/models/load", {"model": "a"}, control_dir=tmp_path)
    assert answer.status_code == 403 and "charonia keys create NAME --access admin" in answer.text
    keys = KeyFile(tmp_path / "keys", admin={"access": ["admin"]})
    elsewhere = await ask("/models/load", {"model": "a"}, headers=keys.bearer("admin"), keys_file=keys.path)
    assert elsewhere.status_code == 503 and "did not start this gateway" in elsewhere.text


async def test_model_with_several_names_is_found_by_each(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys", bob={"models": ["b"]}, all={})
    async with gateway(model_name="a, b", more_models="c=other", keys_file=keys.path) as (web, server):
        server.behaviour = says(part("Hi", "stop"))
        body = {"messages": "hi", "max_tokens": 5}
        for model, key, status in (("b", "bob", 200), ("a", "bob", 403), ("b", "all", 200), ("d", "all", 404)):
            asked = {"model": model, **body}
            answer = await web.post("/v1/chat/completions", json=asked, headers=keys.bearer(key))
            assert answer.status_code == status, answer.text
            assert status != 200 or answer.json()["model"] == model
        assert "this server has 'a', 'b', 'c'" in answer.text
        for key, names in (("bob", ["b"]), ("all", ["a", "b", "c"])):
            listed = (await web.get("/v1/models", headers=keys.bearer(key))).json()["data"]
            assert [one["id"] for one in listed] == names


@pytest.fixture
def on_demand(tmp_path: Path) -> dict[str, Any]:
    """Settings of a gateway with the models a and b, which loads models on demand."""
    return {"control_dir": tmp_path, "models_autoload": True, "model_name": "a", "more_models": "b"}


async def test_request_waits_for_its_model(tmp_path: Path, on_demand: dict[str, Any]) -> None:
    orders: list[dict[str, Any]] = []
    may_load = threading.Event()

    def load(order: dict[str, Any]) -> str:
        orders.append(order)
        assert may_load.wait(HANG_S)
        server.unloaded.discard("ensemble.b")
        return "b is loaded"

    with control.answering(tmp_path, load):
        async with gateway(**on_demand) as (web, server):
            server.unloaded.add("ensemble.b")
            pool = web._transport.app.state.gateway.engines["b"].pool  # type: ignore[attr-defined]
            await until(lambda: not pool.usable)
            listed = (await web.get("/v1/models")).json()["data"]
            assert {one["id"]: one["status"] for one in listed} == {"a": "ready", "b": "on demand"}
            body = {"model": "b", "messages": "hi"}
            waiting = [asyncio.create_task(web.post("/v1/chat/completions", json=body)) for _ in range(3)]
            await until(lambda: orders)
            other = await web.post("/v1/chat/completions", json={**body, "model": "a"})
            assert other.status_code == 200 and not any(task.done() for task in waiting)
            may_load.set()
            assert [(await task).status_code for task in waiting] == [200] * 3
            assert orders == [{"do": "ensure", "name": "b", "limit_s": "120.0"}], "one order for all requests"
            # The gateway has not noticed yet that the model was unloaded again.
            server.unloaded.add("ensemble.b")
            assert (await web.post("/v1/completions", json={"model": "b", "prompt": "hi"})).status_code == 200
            assert len(orders) == 2


async def test_request_whose_model_cannot_be_loaded_says_when_to_retry(
    tmp_path: Path, on_demand: dict[str, Any]
) -> None:
    def refuse(order: dict[str, Any]) -> str:
        raise ServeError("b does not fit next to a, which have requests: try again", 503)

    body = {"model": "b", "messages": "hi"}
    stays = threading.Event()
    for handle, given, said in (
        (refuse, {}, "b does not fit next to a"),
        (lambda order: str(stays.wait(HANG_S)), {"load_timeout_s": 0.1}, "the model 'b' is still being loaded"),
        (lambda order: "b is loaded", {"load_timeout_s": 0.1}, "the model 'b' is"),
    ):
        with control.answering(tmp_path, handle):
            async with gateway(**on_demand, **given) as (web, server):
                server.unloaded |= {"ensemble.b"}
                answer = await web.post("/v1/chat/completions", json=body)
                assert answer.status_code == 503 and answer.headers["retry-after"], answer.text
                assert said in answer.json()["error"]["message"]
                server.unloaded |= {"ensemble"}
                assert (await web.get("/health/ready")).status_code == 200, "it loads models on demand"
                stays.set()
