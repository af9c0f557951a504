"""The whole application over HTTP, with a server that a test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from threading import Barrier, BrokenBarrierError, get_ident
from typing import Any

import pytest
from charonia_client.offload import offload
from charonia_gateway import __version__, context
from charonia_gateway.body import parse
from charonia_gateway.endpoints import answer as answer_module
from charonia_gateway.settings import Settings
from gateway_in_process import MODEL, ask, gateway
from triton_double import error, input_text, part, says, with_logprobs
from tritonclient.grpc import service_pb2 as pb

CHAT: dict[str, Any] = {"model": MODEL, "messages": "hi"}


async def test_probes_of_vllm_are_answered() -> None:
    async with gateway() as (web, _):
        ready = await web.get("/health/ready")
        for path in ("/health", "/ping"):
            found = await web.get(path, headers={"Host": "any.example"})
            assert (found.status_code, found.json()) == (ready.status_code, ready.json())
        assert (await web.get("/version")).json() == {"version": __version__}


async def test_of_a_wrong_models_name_the_log_has_the_beginning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "charonia_gateway.access"):
        answer = await ask("/v1/chat/completions", {**CHAT, "model": "m" * 1_000_000}, access_log=True)
    assert answer.status_code == 404
    (line,) = [record for record in caplog.records if record.name == "charonia_gateway.access"]
    assert line.__dict__["model"] == "m" * 100


async def test_a_path_with_a_slash_more_is_no_redirect_to_another_host() -> None:
    answer = await ask("/v1/chat/completions/", CHAT, headers={"Host": "elsewhere"})
    assert answer.status_code == 404 and "location" not in answer.headers


async def test_many_inputs_run_in_groups_of_max_choices_and_keep_their_order() -> None:
    running = most = 0

    async def echo_length(request: pb.ModelInferRequest) -> AsyncIterator[Any]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        chunk = part("", "stop")
        chunk.num_output_tokens = 0
        chunk.pooled.append(len(input_text(request, "text_input")))
        running -= 1
        yield chunk

    body = {"model": MODEL, "input": ["a" * (9 - length) for length in range(9)]}
    answer = await ask("/v1/embeddings", body, echo_length, max_choices=4)
    assert [one["embedding"] for one in answer.json()["data"]] == [[9 - length] for length in range(9)]
    assert answer.json()["usage"] == {"prompt_tokens": 45, "total_tokens": 45} and most <= 4


async def test_inputs_of_a_request_wait_for_a_queue_that_is_full_of_them() -> None:
    running, rejected = 0, 0
    others_rejected = asyncio.Event()

    async def two_at_once(request: pb.ModelInferRequest) -> AsyncIterator[Any]:
        nonlocal running, rejected
        if running == 2:
            rejected += 1
            if rejected == 18:
                others_rejected.set()
            yield error("[429] the queue is full; retry after 1 s")
            return
        running += 1
        await asyncio.wait_for(others_rejected.wait(), 60)
        running -= 1
        chunk = part("", "stop")
        chunk.pooled.append(len(input_text(request, "text_input")))
        yield chunk

    body = {"model": MODEL, "input": ["a" * (20 - length) for length in range(20)]}
    answer = await ask("/v1/embeddings", body, two_at_once)
    assert [one["embedding"] for one in answer.json()["data"]] == [[20 - length] for length in range(20)]
    assert 18 <= rejected <= 60  # the first time all that do not fit, and then a few
    full = await ask("/v1/embeddings", body, says(error("[429] the queue is full; retry after 7 s")))
    assert (full.status_code, full.headers["retry-after"]) == (429, "7")


async def test_an_error_names_the_input() -> None:
    async def refuse(request: pb.ModelInferRequest) -> AsyncIterator[Any]:
        text = input_text(request, "text_input")
        chunk = part("", "stop")
        chunk.pooled.append(1)
        yield error("[400] text_input: it is wrong") if text == "b" else chunk

    body = {"model": MODEL, "input": ["a", "b", "a"]}
    wrong = (await ask("/v1/embeddings", body, refuse)).json()["error"]
    assert (wrong["message"], wrong["param"]) == ("input[1]: it is wrong", "input[1]")


async def test_large_bodies_are_parsed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = Barrier(2)

    def parse_alone(model: type[Any], raw: bytes) -> Any:
        with pytest.raises(BrokenBarrierError):
            meet.wait(0.05)
        return parse(model, raw)

    monkeypatch.setattr(context, "parse", parse_alone)
    async with gateway() as (web, _):
        body = {**CHAT, "messages": "x" * 100_000}
        answers = await asyncio.gather(*(web.post("/v1/chat/completions", json=body) for _ in range(3)))
    assert [one.status_code for one in answers] == [200] * 3


@pytest.mark.parametrize("tokens", [3, 1500])  # the longer ones are tokenized in a thread, and in pieces
async def test_answers_with_log_probabilities_are_whole_however_many_they_are(tokens: int) -> None:
    async with gateway() as (web, server):
        server.behaviour = says(with_logprobs(part("x" * tokens, "stop"), tokens, 2))
        chat = await web.post("/v1/chat/completions", json={**CHAT, "logprobs": True, "top_logprobs": 2})
        text = await web.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "logprobs": 2})
    assert chat.headers["content-type"] == "application/json" and chat.headers["x-request-id"]
    assert chat.json()["object"] == "chat.completion" and chat.json()["usage"]["prompt_tokens"] == 5
    (choice,) = chat.json()["choices"]
    assert choice["message"]["content"] == "x" * tokens and choice["finish_reason"] == "stop"
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["x"] * tokens
    last = [
        {"token": str(top), "logprob": -0.5, "bytes": list(str(top).encode())}
        for top in (tokens * 2 - 2, tokens * 2 - 1)
    ]
    assert entries[-1]["top_logprobs"] == last
    assert choice["logprobs"]["refusal"] is None
    (choice,) = text.json()["choices"]
    assert choice["text"] == "x" * tokens
    assert choice["logprobs"]["tokens"] == ["x"] * tokens
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * tokens
    assert choice["logprobs"]["top_logprobs"][1] == {"2": -0.5, "3": -0.5}
    assert len(choice["logprobs"]["text_offset"]) == tokens


async def test_a_request_to_a_server_that_drains_hears_so_in_no_words_of_tritons() -> None:
    answer = await ask(
        "/v1/chat/completions",
        CHAT,
        behaviour=says(error("Request for unknown model: 'ensemble' has no available versions")),
    )
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["message"] == "the server is shutting down"


async def test_without_log_probabilities_an_answer_has_none() -> None:
    async with gateway() as (web, server):
        answer = (await web.post("/v1/chat/completions", json=CHAT)).json()
        assert answer["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": server.target, "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ]


async def test_work_on_much_is_done_beside_the_event_loop() -> None:
    assert await offload(10, get_ident) == get_ident()
    assert await offload(10_000, get_ident) != get_ident()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"]}),
        ("/v1/completions", {"model": MODEL, "prompt": "a", "best_of": 4}),
    ],
)
async def test_too_many_completions_are_rejected(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHARONIA_GATEWAY_MAX_CHOICES", "3")
    async with gateway() as (web, server):
        rejected = await web.post(path, json={"n": 4, **body})
        assert not server.requests
        fewer = await web.post(path, json={**body, "n": 1, "best_of": 1} if "best_of" in body else {**body, "n": 1})
    assert rejected.status_code == 400 and rejected.json()["error"]["param"] == "n"
    assert "at most 3" in rejected.json()["error"]["message"]
    assert fewer.status_code == 200


MANY: dict[str, Any] = {"logprobs": True, "top_logprobs": 20, "max_tokens": 32768}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, **MANY}),
        ("/v1/chat/completions", {**CHAT, **MANY, "max_tokens": 1024, "n": 20}),
        ("/v1/completions", {"model": MODEL, "prompt": ["a"] * 13, "max_tokens": 1024, "logprobs": 19}),
    ],
)
async def test_more_log_probabilities_than_one_answer_has_are_for_streams(path: str, body: dict[str, Any]) -> None:
    async with gateway() as (web, server):
        server.behaviour = says(with_logprobs(part("x", "stop"), 1, 20))
        refused = await web.post(path, json=body)
        assert not server.requests
        streamed = await web.post(path, json={**body, "n": 1, "stream": True})
        fewer = await web.post(path, json={**body, "n": 1, "max_tokens": 100})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs"
    assert "at most 262144" in refused.json()["error"]["message"]
    assert (streamed.status_code, fewer.status_code) == (200, 200)


async def test_bias_of_an_unknown_token_is_rejected_by_the_gateway() -> None:
    async with gateway(info={"vocab_size": 100}) as (web, server):
        beyond, last = [
            await web.post("/v1/chat/completions", json={**CHAT, "logit_bias": {"5": 1, token: 1}})
            for token in ("100", "99")
        ]
        assert len(server.requests) == 1
    assert (beyond.status_code, last.status_code) == (400, 200)
    assert "no token 100: send token ids from 0 to 99" in beyond.json()["error"]["message"]


@pytest.mark.parametrize("answers", [1, 3])
async def test_an_answer_of_unknown_length_is_held_to_the_same_bound(
    answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(request: pb.ModelInferRequest) -> AsyncIterator[Any]:
        for index in range(answers):
            yield with_logprobs(part("x", "stop", index), 12 // answers, 4)

    async with gateway() as (web, server):
        server.behaviour = answer
        body = {**CHAT, "logprobs": True, "top_logprobs": 4, "n": answers}
        monkeypatch.setattr(answer_module, "MAX_ENTRIES", 60)
        assert (await web.post("/v1/chat/completions", json=body)).status_code == 200
        monkeypatch.setattr(answer_module, "MAX_ENTRIES", 59)
        refused = await web.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs"


async def test_the_bound_of_log_probabilities_counts_all_prompts_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: pb.ModelInferRequest) -> AsyncIterator[Any]:
        yield with_logprobs(part("x", "stop"), 12, 4)

    async with gateway() as (web, server):
        server.behaviour = answer
        body = {"model": MODEL, "prompt": ["a", "b"], "logprobs": 4}
        statuses = []
        for limit in (120, 119):
            monkeypatch.setattr(answer_module, "MAX_ENTRIES", limit)
            statuses.append((await web.post("/v1/completions", json=body)).status_code)
    assert statuses == [200, 400]


@pytest.mark.parametrize(
    ("task", "formats", "accepts"),
    [
        (None, {}, None),
        (None, {"tool_calls": None}, False),
        ("generate", {"tool_calls": "hermes"}, True),
        ("embed", {"tool_calls": "hermes"}, False),
    ],
)
async def test_a_model_says_whether_it_accepts_tools(
    task: str | None, formats: dict[str, Any], accepts: bool | None
) -> None:
    async with gateway(info={"task": task} if task else {}) as (web, server):
        server.formats = formats
        (listed,) = (await web.get("/v1/models")).json()["data"]
        assert listed["accepts_tools"] is accepts


async def test_unloaded_model_is_reported_and_other_models_respond() -> None:
    settings = {"more_models": "other/one=b, third", "endpoint_check_interval_s": 0.05}
    sampling = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.0}
    info = {
        "context_length": 10, "task": "embed", "weight_type": "int4", "data_type": "bf16", "group_size": 128,
    }  # fmt: skip
    async with gateway(info={**info, "default_sampling_parameters": sampling}, **settings) as (web, server):
        server.unloaded = {"ensemble.b", "preprocessing.b"}
        for chunks in server.subscriptions.values():
            chunks.put_nowait(None)  # as the engine ends them

        async def ask(model: str, **more: Any) -> dict[str, Any]:
            answer = await web.post("/v1/chat/completions", json={**CHAT, "model": model, **more})
            return {"status": answer.status_code, **answer.json()}

        assert [(await ask(model))["status"] for model in (MODEL, "other/one", "third")] == [200, 503, 200]
        assert [request.model_name for request in server.requests] == ["ensemble", "ensemble.b", "ensemble.third"]
        refused = (await ask("other/one"))["error"]
        assert (refused["code"], refused["type"]) == ("model_not_loaded", "service_unavailable_error")
        assert "'other/one' is not loaded now" in refused["message"] and server.target not in refused["message"]
        assert (await web.get("/health/ready")).json() == {
            "status": "ready",
            "models": {MODEL: "ready", "other/one": "not ready", "third": "ready"},
        }
        listed = {one["id"]: one for one in (await web.get("/v1/models")).json()["data"]}
        assert [one["status"] for one in listed.values()] == ["ready", "not ready", "ready"]
        assert {
            name: listed["third"][name] for name in ("task", "max_model_len", "weight_type", "data_type", "group_size")
        } == {
            "task": "embed",
            "max_model_len": 10,
            "weight_type": "int4",
            "data_type": "bf16",
            "group_size": 128,
        }
        assert listed["third"]["default_sampling_parameters"] == sampling
        assert isinstance(listed["third"]["default_sampling_parameters"]["top_k"], int)
        assert listed["other/one"]["max_model_len"] is None
        assert listed["other/one"]["default_sampling_parameters"] is None
        server.unloaded = {"ensemble", "ensemble.b", "ensemble.third"}
        assert (await web.get("/health/ready")).status_code == 503
        server.unloaded = set()
        assert (await ask("other/one"))["status"] == 200, "at once"


async def test_two_models_of_a_server_do_not_share_sessions_end_or_fingerprint() -> None:
    async with gateway(more_models="b") as (web, server):
        end = {"session_id": 7, "interactive_mode": False}
        assert (await web.post("/v1/chat/interactive", json={**end, "model": "b"})).status_code == 200
        assert server.actions == [("end_session", "7")]
        prints = [
            (await web.post("/v1/chat/completions", json={**CHAT, "model": model})).json()["system_fingerprint"]
            for model in (MODEL, "b")
        ]
        assert prints[0] != prints[1]


async def test_the_fingerprint_follows_the_server() -> None:
    prints = []
    for fingerprint in ("aa", "aa", "bb"):
        async with gateway(info={"fingerprint": fingerprint}) as (web, _):
            prints.append((await web.post("/v1/chat/completions", json=CHAT)).json()["system_fingerprint"])
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a b", "expected NAME or NAME=LABEL"),
        ("a/b", "expected NAME or NAME=LABEL"),
        ("=b", "expected NAME"),
        ("a,a", "duplicate name"),
        ("a=c,b=c", "duplicate name"),
        (MODEL, "each name once"),
    ],
)
def test_wrong_list_of_models_is_rejected(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings(_env_file=None, model_name=MODEL, more_models=text)


@pytest.mark.parametrize(
    ("fields", "follow"),
    [
        ({}, {"stream": True}),
        ({"n": 2}, {"stream": True}),
        ({"best_of": 2}, {"max_tokens": 1 << 17}),  # only at the end is known which is the best
    ],
)
async def test_the_remedy_for_too_many_log_probabilities_works(fields: dict[str, Any], follow: dict[str, Any]) -> None:
    body = {"model": MODEL, "prompt": "a", "logprobs": 0, "max_tokens": 1 << 19, **fields}
    refused = await ask("/v1/completions", body)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400 and ("send stream = true" in message) == ("stream" in follow)
    assert (await ask("/v1/completions", {**body, **follow})).status_code != 400
