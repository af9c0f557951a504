"""Generated schemas, tools and conversations for every route that generates text, streamed and not, with jump_forward
and without. Each request succeeds or fails with a client error. Forced and strict output is valid. No text contains
markup of a strict or forced call. No request hangs or stays in the engine. CHARONIA_TEST_SCHEMAS sets the number of
requests."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from engine_metrics import idle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_up_schemas import SCHEMAS, VALUES, damaged
from stack import HANG_S, Stack, running
from tiny_models import EOS, write_model

CASES = int(os.environ.get("CHARONIA_TEST_SCHEMAS", "160"))
AT_ONCE = 8
FORMATS = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "gemma4": "<|tool_call>",
    "llama3_json": "<|python_tag|>",
}
JUMPING = ("hermes", "gemma4")
MARKUP = [*sorted(set(FORMATS.values())), "</tool_call>", "<tool_call|>", '<|"|>', "<function=", "<think>", "</think>"]
TEMPLATE = (
    "{# <think> #}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ message.content }}{% endfor %}"
)

TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from([*MARKUP, '{"name": "f", "arguments": {}}', "{{ 1 }}", "\x00", ""])
)
NAMES = st.sampled_from(["f", "g", "get_weather", "a.b-c", "f", "", "x y", "<tool_call>", "f" * 65])
SCHEMA = st.one_of(SCHEMAS, SCHEMAS, damaged())
PROPERTIES = st.sampled_from(["a", "b", "é", "a b"])
OBJECT = st.fixed_dictionaries(
    {
        "type": st.just("object"),
        "properties": st.dictionaries(st.sampled_from(["a", "b", "é", "a b"]), SCHEMA, max_size=3),
    },
    optional={"required": st.lists(st.sampled_from(["a", "b"]), max_size=2), "additionalProperties": st.booleans()},
)
FUNCTION = st.fixed_dictionaries(
    {"name": NAMES}, optional={"parameters": OBJECT | SCHEMA, "strict": st.booleans(), "description": TEXTS}
)
FUNCTIONS = st.lists(FUNCTION, min_size=1, max_size=3)
CALL = st.fixed_dictionaries({"name": NAMES, "arguments": TEXTS | VALUES.map(json.dumps)})
TURN = st.one_of(
    st.tuples(st.just("user"), TEXTS), st.tuples(st.just("assistant"), TEXTS), st.tuples(st.just("call"), CALL)
)


@dataclass
class Case:
    """A request, independent of an API. schema: the schema of the text; choice: auto, required, none or a function's
    name."""

    turns: list[tuple[str, Any]]
    schema: Any
    functions: list[dict[str, Any]]
    choice: str
    parallel: bool
    stop: list[str]
    max_tokens: int
    stream: bool

    @property
    def forced(self) -> bool:
        return self.choice not in ("auto", "none")

    def _sampling(self) -> dict[str, Any]:
        return {"model": "fuzz", "temperature": 2.0, "stream": self.stream}

    def chat(self) -> dict[str, Any]:
        body: dict[str, Any] = {**self._sampling(), "max_tokens": self.max_tokens, "messages": [], "seed": 1}
        for number, (role, value) in enumerate(self.turns):
            if role != "call":
                body["messages"].append({"role": role, "content": value})
                continue
            call = {"id": f"c{number}", "type": "function", "function": value}
            body["messages"].append({"role": "assistant", "content": None, "tool_calls": [call]})
            body["messages"].append({"role": "tool", "tool_call_id": f"c{number}", "content": "so"})
        if self.stop:
            body["stop"] = self.stop
        if self.functions:
            body["tools"] = [{"type": "function", "function": one} for one in self.functions]
            named = {"type": "function", "function": {"name": self.choice}}
            body["tool_choice"] = self.choice if self.choice in ("auto", "none", "required") else named
            body["parallel_tool_calls"] = self.parallel
        if self.schema is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": self.schema}}
        return body

    def completions(self) -> dict[str, Any]:
        body: dict[str, Any] = {**self._sampling(), "max_tokens": self.max_tokens, "prompt": "x", "seed": 1}
        if self.schema is not None:
            body["structured_outputs"] = {"json": self.schema}
        return body | ({"stop": self.stop} if self.stop else {})

    def responses(self) -> dict[str, Any]:
        body: dict[str, Any] = {**self._sampling(), "max_output_tokens": self.max_tokens, "input": []}
        for number, (role, value) in enumerate(self.turns):
            if role != "call":
                body["input"].append({"role": role, "content": value})
                continue
            body["input"].append({"type": "function_call", "call_id": f"c{number}", **value})
            body["input"].append({"type": "function_call_output", "call_id": f"c{number}", "output": "so"})
        if self.functions:
            body["tools"] = [{"type": "function", **one} for one in self.functions]
            named = {"type": "function", "name": self.choice}
            body["tool_choice"] = self.choice if self.choice in ("auto", "none", "required") else named
            body["parallel_tool_calls"] = self.parallel
        if self.schema is not None:
            body["text"] = {"format": {"type": "json_schema", "name": "s", "schema": self.schema}}
        return body

    def messages(self) -> dict[str, Any]:
        body: dict[str, Any] = {**self._sampling(), "max_tokens": self.max_tokens, "messages": []}
        for number, (role, value) in enumerate(self.turns):
            if role != "call":
                body["messages"].append({"role": role, "content": value})
                continue
            call = {"type": "tool_use", "id": f"c{number}", "name": value["name"], "input": {"a": value["arguments"]}}
            body["messages"].append({"role": "assistant", "content": [call]})
            result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": "so"}
            body["messages"].append({"role": "user", "content": [result]})
        if self.stop:
            body["stop_sequences"] = self.stop
        if self.functions:
            renamed = {"parameters": "input_schema"}
            body["tools"] = [{renamed.get(name, name): value for name, value in one.items()} for one in self.functions]
            kinds = {"auto": "auto", "none": "none", "required": "any"}
            body["tool_choice"] = {
                "type": kinds.get(self.choice, "tool"),
                "disable_parallel_tool_use": not self.parallel,
            }
            body["tool_choice"] |= {"name": self.choice} if body["tool_choice"]["type"] == "tool" else {}
        if self.schema is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": self.schema}}
        return body


ROUTES = {
    "/v1/chat/completions": Case.chat,
    "/v1/completions": Case.completions,
    "/v1/responses": Case.responses,
    "/v1/messages": Case.messages,
}
REQUESTS = st.tuples(
    st.sampled_from(["/v1/chat/completions", *ROUTES]),
    st.builds(
        Case,
        turns=st.lists(TURN, max_size=2).map(lambda turns: [*turns, ("user", "x")]),
        schema=st.none() | SCHEMA,
        functions=st.just([]) | FUNCTIONS,
        choice=st.sampled_from(["auto", "auto", "required", "required", "none", "f"]),
        parallel=st.booleans(),
        stop=st.lists(st.sampled_from(['"', "{", "<", "a", "tool", *MARKUP]), max_size=2),
        max_tokens=st.sampled_from([1, 7, 60, 120]),
        stream=st.booleans(),
    ),
)


@dataclass
class Answer:
    """A response, independent of an API. reason: length, stop, ...; "" for an error. calls: name, arguments."""

    content: str
    calls: list[tuple[str, str]]
    reason: str


def of_chat(answer: dict[str, Any]) -> Answer:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return Answer(message["content"] or "", calls, choice["finish_reason"])


def of_completion(answer: dict[str, Any]) -> Answer:
    (choice,) = answer["choices"]
    return Answer(choice["text"], [], choice["finish_reason"])


def of_response(answer: dict[str, Any]) -> Answer:
    texts = [part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    calls = [(item["name"], item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
    return Answer("".join(texts), calls, "stop" if answer["status"] == "completed" else "length")


def of_message(answer: dict[str, Any]) -> Answer:
    texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
    calls = [(block["name"], json.dumps(block["input"])) for block in answer["content"] if block["type"] == "tool_use"]
    reason = {"end_turn": "stop", "tool_use": "tool_calls", "stop_sequence": "stop word"}
    return Answer("".join(texts), calls, reason.get(answer["stop_reason"], "length"))


READERS = dict(zip(ROUTES, (of_chat, of_completion, of_response, of_message), strict=True))


# The same responses as streams: their events are joined to a complete response.
def streamed_chat(events: list[Any]) -> Answer:
    content, calls, reason = "", [], ""
    for choice in (choice for event in events for choice in event["choices"]):
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls") or ():
            if "name" in call["function"]:
                assert call["index"] == len(calls) and call["id"] and call["type"] == "function"
                calls.append((call["function"]["name"], ""))
            name, arguments = calls[call["index"]]
            calls[call["index"]] = (name, arguments + call["function"]["arguments"])
        reason = choice["finish_reason"] or reason
    return Answer(content, calls, reason)


def streamed_completion(events: list[Any]) -> Answer:
    choices = [choice for event in events for choice in event["choices"]]
    return Answer("".join(choice["text"] for choice in choices), [], choices[-1]["finish_reason"])


def streamed_response(events: list[Any]) -> Answer:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    answer = of_response(events[-1]["response"])
    pieces: dict[str, str] = {}
    for event in events:
        if event["type"] in ("response.output_text.delta", "response.function_call_arguments.delta"):
            pieces[event["item_id"]] = pieces.get(event["item_id"], "") + event["delta"]
    items = events[-1]["response"]["output"]
    whole = {
        item["id"]: item.get("arguments") or "".join(part["text"] for part in item.get("content") or ())
        for item in items
        if item["type"] != "reasoning"
    }
    assert {id: text for id, text in whole.items() if text} == pieces
    return answer


def streamed_message(events: list[Any]) -> Answer:
    message = next(event["message"] for event in events if event["type"] == "message_start")
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            field = {"text_delta": "text", "input_json_delta": "json"}.get(delta["type"])
            if field:
                blocks[event["index"]][field] += delta.get("text") or delta.get("partial_json") or ""
        elif event["type"] == "message_delta":
            message |= event["delta"]
    calls = [(block["name"], block["json"]) for block in blocks if block["type"] == "tool_use"]
    message["content"] = [block for block in blocks if block["type"] == "text"]
    return replace(of_message(message), calls=calls)


STREAM_READERS = dict(
    zip(ROUTES, (streamed_chat, streamed_completion, streamed_response, streamed_message), strict=True)
)


def is_valid(schema: Any, text: str) -> bool:
    """Whether a value is valid. An invalid schema accepts every value."""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError:
        return True
    return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text, strict=False)))


@dataclass
class Fuzz:
    web: httpx.Client
    begin: str  # number of calls
    bias: dict[str, float]

    def one(self, request: tuple[str, Case]) -> str:
        """The response to a case."""
        route, case = request
        body = ROUTES[route](case)
        if route.endswith("completions"):
            body["logit_bias"] = self.bias
        answer = self.web.post(route, content=json.dumps(body))
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert answer.status_code in (400, 429), (body, answer.text)
            assert len(error["message"]) > 10, body
            return f"{answer.status_code}"
        found = self._streamed(route, body, answer.text) if case.stream else READERS[route](answer.json())
        if found is None:
            return "400 streamed"
        self._check(case, found, body, with_tools=route != "/v1/completions")
        return "200 streamed" if case.stream else "200"

    def _streamed(self, route: str, body: dict[str, Any], text: str) -> Answer | None:
        """The streamed response. None: an error of the request."""
        events = [line[len("data: ") :] for line in text.splitlines() if line.startswith("data: ")]
        assert events, body
        last = events[-1] if events[-1] != "[DONE]" else events[-2]
        parsed = [json.loads(event) for event in events if event != "[DONE]"]
        errors = [one for one in parsed if one.get("error") or one.get("type") == "error"]
        if not errors:
            return STREAM_READERS[route](parsed)
        shown = json.dumps(errors[0])
        assert (last == events[parsed.index(errors[0])] and "invalid" in shown) or "overloaded" in shown, (body, shown)
        return None

    def _check(self, case: Case, answer: Answer, body: dict[str, Any], *, with_tools: bool) -> None:
        tools = case.functions if with_tools and case.choice != "none" else []
        cut_off = answer.reason == "length"
        if tools and case.forced:
            assert not answer.content, (body, answer)
            assert answer.calls or cut_off, (body, answer)
            assert case.choice == "required" or {name for name, _ in answer.calls} <= {case.choice}, (body, answer)
            for _, arguments in answer.calls[: len(answer.calls) - cut_off]:
                assert isinstance(json.loads(arguments, strict=False), dict), (body, answer)
        assert case.parallel or len(answer.calls) <= 1, (body, answer)
        strict = {one["name"]: one.get("parameters") for one in tools if one.get("strict")}
        if strict:
            assert self.begin not in answer.content, (body, answer)
            assert {name for name, _ in answer.calls} <= {one["name"] for one in tools}, (body, answer)
        for name, arguments in answer.calls[: len(answer.calls) - cut_off]:
            parameters = strict.get(name)
            if parameters is not None:
                assert is_valid(parameters, arguments), (body, answer)
        if case.schema is not None and not answer.calls and not (tools and case.forced) and answer.reason == "stop":
            stopped = case.stop and not self._ends_whole(answer.content)  # ended by a stop word
            assert stopped or is_valid(case.schema, answer.content), (body, answer)

    def _ends_whole(self, text: str) -> bool:
        try:
            json.loads(text, strict=False)
        except ValueError:
            return False
        return True


@pytest.fixture(scope="module")
def fuzz_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz_model") / "fuzz"
    write_model(folder, "byte_level", "babbler", hidden=128, chat_template=TEMPLATE, added=MARKUP)
    return folder


@pytest.fixture(scope="module", params=list(FORMATS))
def fuzz(
    request: pytest.FixtureRequest, fuzz_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stack, Fuzz]]:
    environment = {"CHARONIA_TOOL_CALL_PARSER": request.param, "CHARONIA_GUIDE_TIMEOUT_S": "5"}
    environment["CHARONIA_JUMP_FORWARD"] = str(request.param in JUMPING)
    with (
        running(Stack(fuzz_model, tmp_path_factory.mktemp("fuzz"), environment)) as stack,
        httpx.Client(base_url=stack.gateway, timeout=HANG_S, headers={"Content-Type": "application/json"}) as web,
    ):
        closing = [web.post("/tokenize", json={"prompt": text}).json()["tokens"][0] for text in ('"', "}", "]")]
        (end,) = web.post("/tokenize", json={"prompt": EOS}).json()["tokens"]
        bias = dict.fromkeys(map(str, closing), 6.0) | {str(end): 8.0}
        yield stack, Fuzz(web, FORMATS[request.param], bias)


def certain_tokens(stack: Stack) -> float:
    # Without such tokens the metric is missing.
    counter = r"^charonia_jump_forward_tokens_total(?:\{[^}]*\})? (\S+)$"
    found = re.search(counter, httpx.get(stack.metrics, timeout=HANG_S).text, re.M)
    return float(found[1]) if found else 0


def until_tokens_were_certain(stack: Stack, fuzzed: Fuzz) -> None:
    """After few requests, all tokens may have been sampled: a late mask cannot determine a token."""
    body = {
        "model": "fuzz",
        "prompt": "x",
        "max_tokens": 200,
        "structured_outputs": {"choice": ["nothing but this " * 4]},
    }
    for _ in range(100):
        if certain_tokens(stack):
            return
        answer = fuzzed.web.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == "nothing but this " * 4, answer.text
    pytest.fail("no token was certain")


async def test_generated_requests_are_enforced_or_rejected(
    fuzz: tuple[Stack, Fuzz], request: pytest.FixtureRequest
) -> None:
    stack, fuzzed = fuzz
    counts: Counter[str] = Counter()

    @settings(
        max_examples=CASES // len(FORMATS) // AT_ONCE,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(st.lists(REQUESTS, min_size=AT_ONCE, max_size=AT_ONCE))
    def run(requests: list[tuple[str, Case]]) -> None:
        counts.update(pool.map(fuzzed.one, requests))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        run()
    print(dict(counts))
    taken = counts["200"] + counts["200 streamed"]
    assert taken and counts["400"], counts
    await idle(stack.metrics)  # nothing runs, and no block is in use
    if request.node.callspec.params["fuzz"] in JUMPING:
        until_tokens_were_certain(stack, fuzzed)
    else:
        assert certain_tokens(stack) == 0
    assert not re.search(r"Traceback|internal error", stack.log())
