"""Generated schemas, tools and conversations as chat completions, streamed and not, with jump_forward and without.
Each request succeeds or fails with a client error. Forced and strict output is valid. No text contains markup of a
strict or forced call. No request hangs or stays in the engine. CHARONIA_TEST_SCHEMAS sets the number of requests."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
        "properties": st.dictionaries(PROPERTIES, SCHEMA, max_size=3),
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
    """A request. schema: the schema of the text; choice: auto, required, none or a function's name."""

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

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "fuzz", "temperature": 2.0, "stream": self.stream, "seed": 1}
        body |= {"max_tokens": self.max_tokens, "messages": []}
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


REQUESTS = st.builds(
    Case,
    turns=st.lists(TURN, max_size=2).map(lambda turns: [*turns, ("user", "x")]),
    schema=st.none() | SCHEMA,
    functions=st.just([]) | FUNCTIONS,
    choice=st.sampled_from(["auto", "auto", "required", "required", "none", "f"]),
    parallel=st.booleans(),
    stop=st.lists(st.sampled_from(['"', "{", "<", "a", "tool", *MARKUP]), max_size=2),
    max_tokens=st.sampled_from([1, 7, 60, 120]),
    stream=st.booleans(),
)


@dataclass
class Answer:
    """A response. reason: length, stop, ...; calls: name, arguments."""

    content: str
    calls: list[tuple[str, str]]
    reason: str


def whole(answer: dict[str, Any]) -> Answer:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return Answer(message["content"] or "", calls, choice["finish_reason"])


def streamed(events: list[Any]) -> Answer:
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

    def one(self, case: Case) -> str:
        """The response to a case."""
        body = {**case.body(), "logit_bias": self.bias}
        answer = self.web.post("/v1/chat/completions", content=json.dumps(body))
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert answer.status_code in (400, 429), (body, answer.text)
            assert len(error["message"]) > 10, body
            return f"{answer.status_code}"
        found = self._streamed(body, answer.text) if case.stream else whole(answer.json())
        if found is None:
            return "400 streamed"
        self._check(case, found, body)
        return "200 streamed" if case.stream else "200"

    def _streamed(self, body: dict[str, Any], text: str) -> Answer | None:
        """The streamed response. None: an error of the request."""
        events = [line[len("data: ") :] for line in text.splitlines() if line.startswith("data: ")]
        assert events, body
        last = events[-1] if events[-1] != "[DONE]" else events[-2]
        parsed = [json.loads(event) for event in events if event != "[DONE]"]
        errors = [one for one in parsed if one.get("error")]
        if not errors:
            return streamed(parsed)
        shown = json.dumps(errors[0])
        assert (last == events[parsed.index(errors[0])] and "invalid" in shown) or "overloaded" in shown, (body, shown)
        return None

    def _check(self, case: Case, answer: Answer, body: dict[str, Any]) -> None:
        tools = case.functions if case.choice != "none" else []
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
    def run(requests: list[Case]) -> None:
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
