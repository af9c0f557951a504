"""client/charonia_answers with chat templates of released models: the formats of the templates, and the parsing of
calls that a template writes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_requests import engine_request, read, recorded
from charonia_answers.events import CallArguments, CallBegin, CallEnd
from charonia_answers.formats import CALL_FORMATS, find_call_format, find_reasoning_format
from charonia_answers.harmony import HarmonyParser
from charonia_answers.parser import AnswerParser
from jinja2 import TemplateError
from jinja2.sandbox import SandboxedEnvironment
from released_templates import released_templates
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from charonia.text import prompt_ids
from charonia.text.prompt_ids import PromptError, encode_chat

# The templates of each format of calls and of reasoning, and those that do not write the `tool_calls` of messages.
# Other templates have no format of calls.
FORMATS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "chat_template_formats.json").read_text())
CALLS: dict[str, list[str]] = FORMATS["calls"]
ONE_CALL = ("llama3_json", "harmony")  # templates of these formats accept or show one call in a message


def by_template(formats: dict[str, list[str]]) -> dict[str, str]:
    return {template: name for name, templates in formats.items() for template in templates}


@pytest.fixture(scope="module")
def templates() -> dict[str, str]:
    return released_templates()


@pytest.mark.slow  # downloads packages
def test_formats_of_released_templates(templates: dict[str, str]) -> None:
    calls, reasoning = by_template(CALLS), by_template(FORMATS["reasoning"])
    assert calls.keys() | reasoning.keys() <= templates.keys()
    found_calls = {name: find_call_format(text) for name, text in templates.items()}
    assert {name: found.name for name, found in found_calls.items() if found} == calls
    found_reasoning = {name: find_reasoning_format(text) for name, text in templates.items()}
    assert {name: found.name for name, found in found_reasoning.items() if found} == reasoning


ARGUMENTS = {"city": "Paris", "note": 'a "b" it\'s <x> [1] {é}'}
PARAMETERS = {"type": "object", "properties": {name: {"type": "string", "description": "d"} for name in ARGUMENTS}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": {**PARAMETERS, "required": []}}}
]


def written(template: str, count: int) -> str:
    """Render a response with calls, and return the text after the prompt."""
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals |= {"strftime_now": lambda format: "today", "raise_exception": refuse}
    made = environment.from_string(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template))
    asked = [{"role": "user", "content": "hi"}]
    errors = []
    for as_text, content in ((False, ""), (False, None), (True, None), (True, "")):  # templates accept some of these
        arguments: Any = json.dumps(ARGUMENTS) if as_text else ARGUMENTS
        functions = [
            {"id": f"abcdef{number:03}", "type": "function", "function": {"name": "f", "arguments": arguments}}
            for number in range(count)
        ]
        answer = {"role": "assistant", "content": content, "tool_calls": functions}
        values = {"tools": TOOLS, "bos_token": "", "eos_token": "", "enable_thinking": False}
        try:
            prompts = [made.render(messages=asked, add_generation_prompt=begun, **values) for begun in (True, False)]
            whole = made.render(messages=[*asked, answer], add_generation_prompt=False, **values)
        except (TemplateError, TypeError) as error:
            errors.append(repr(error))
            continue
        # The prompt for a new response may begin reasoning that a response in the history does not have.
        text = whole.removeprefix(next((one for one in prompts if whole.startswith(one)), ""))
        if "Paris" in text:
            return text
    raise AssertionError(errors or "the template writes no call")


def refuse(message: str) -> None:
    raise TemplateError(message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        (name, count)
        for name, format in by_template(CALLS).items()
        for count in ((1,) if format in ONE_CALL else (1, 2))
        if name not in FORMATS["without_history"]
    ],
)
def test_calls_as_a_released_template_writes_them_are_read(templates: dict[str, str], name: str, count: int) -> None:
    text = written(templates[name], count)
    for pieces in ([text], list(text)):
        parser = (HarmonyParser if by_template(CALLS)[name] == "harmony" else AnswerParser)(
            CALL_FORMATS[by_template(CALLS)[name]],
            find_reasoning_format(templates[name]),
            names=["f"],
            texts={"f": dict.fromkeys(ARGUMENTS, False)},
        )
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
        assert [event.name for event in events if isinstance(event, CallBegin)] == ["f"] * count, text
        assert all(event.complete for event in events if isinstance(event, CallEnd))
        for number in range(count):
            shown = (event.text for event in events if isinstance(event, CallArguments) and event.index == number)
            assert json.loads("".join(shown)) == ARGUMENTS, text


# --- conversations that agents send


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def with_call(arguments: Any) -> list[dict[str, Any]]:
    """A conversation with one call in its history."""
    call = {"id": "call12345", "type": "function", "function": {"name": "get", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "call12345", "name": "get", "content": "5"}
    history = [message("user", "a"), {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    return [*history, message("assistant", "b"), message("user", "c")]


GET_FUNCTION = {
    "name": "get",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
}
GET_TOOLS = [{"type": "function", "function": GET_FUNCTION}]
PLAIN = [message("user", "a"), message("assistant", "b"), message("user", "c")]
ODD_ARGUMENTS = ['{"a": ', "", "null", "[1]", '"x"', "5", None, [1], 5, {"a": "x"}, json.dumps('{"a": "x"}')]
EMPTY = {"tool_calls": [], "refusal": None, "annotations": [], "audio": None, "function_call": None}
SYSTEMS = [
    [message("system", "FIRST"), *PLAIN],
    [message("system", "FIRST"), message("system", "SECOND"), message("user", "a")],
    [message("system", "FIRST"), *PLAIN[:2], message("system", "SECOND"), PLAIN[2]],
    [*PLAIN, message("system", "SECOND")],
]


# These expect the parts of a message, and show no text.
NO_TEXTS = ("trl/idefics3", "trl/smolvlm")


def two_calls() -> list[dict[str, Any]]:
    """A conversation that ends with the results of two calls."""
    functions = [{"name": "get", "arguments": {"a": f"argument{number}"}} for number in (1, 2)]
    calls = [{"id": f"call1234{at}", "type": "function", "function": one} for at, one in enumerate(functions)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"result of {call['id']}"} for call in calls]
    return [message("user", "a"), {"role": "assistant", "content": None, "tool_calls": calls}, *results]


def odd_messages_that_fail(tokenizer: Any) -> list[str]:
    """Return what fails of the conversations that become odd by one message. A template may reject all calls."""

    def prompt(messages: list[dict[str, Any]], tools: Any = None) -> str:
        try:
            return encode_chat(tokenizer, messages, tools, unseen_tools=True).text
        except PromptError:
            return ""

    failed = []
    if plain := prompt(PLAIN):
        if prompt([PLAIN[0], {**PLAIN[1], **EMPTY}, PLAIN[2]]) != plain:
            failed.append("empty lists and nulls")
        for messages in SYSTEMS:
            text = prompt(messages)
            if not all(one["content"] in text for one in messages):
                failed.append(f"system messages of {messages}")
    if usual := prompt(with_call({"a": "x"}), GET_TOOLS):
        failed += [f"arguments {one!r}" for one in ODD_ARGUMENTS if not prompt(with_call(one), GET_TOOLS)]
        if prompt(with_call(json.dumps('{"a": "x"}')), GET_TOOLS) != usual:
            failed.append("arguments that are encoded twice")
        if usual != prompt(with_call({"a": "y"}), GET_TOOLS) and "INVALID_JSON" not in prompt(
            with_call('{"a": '), GET_TOOLS
        ):
            failed.append("arguments that are cut off are not shown")
    if two := prompt(two_calls(), GET_TOOLS):
        shown = [text in two for text in ("argument1", "argument2", "result of call12340", "result of call12341")]
        if shown not in ([True] * 4, [False, False, True, True]):  # some templates show no calls of the history
            failed.append(f"two calls and their results: {shown}")
    return failed


def tokenizers(templates: dict[str, str], without: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the name and a tokenizer of each template."""
    model = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token=" "))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # every character is a token
    for name in sorted({*templates} - {*without}):
        template = templates[name]
        yield (
            name,
            PreTrainedTokenizerFast(tokenizer_object=model, chat_template=template, bos_token="<s>", eos_token="</s>"),
        )


@pytest.mark.slow
def test_an_odd_message_in_the_history_does_not_end_the_conversation(templates: dict[str, str]) -> None:
    found = {name: odd_messages_that_fail(tokenizer) for name, tokenizer in tokenizers(templates, NO_TEXTS)}
    assert not {name: failed for name, failed in found.items() if failed}


# These fail for every request with tools, or with some of their schemas.
NO_TOOLS = (
    *("llama.cpp/fireworks-ai-llama-3-firefunction-v2", "llama.cpp/llama-cpp-deepseek-r1", "trl/llava_next"),
    *(f"llama.cpp/NousResearch-Hermes-{name}-tool_use" for name in ("2-Pro-Llama-3-8B", "3-Llama-3.1-8B")),
    "llama.cpp/CohereForAI-c4ai-command-r-plus-tool_use",
)


@pytest.mark.slow
def test_templates_accept_recorded_requests_of_agents(templates: dict[str, str]) -> None:
    requests = {name: engine_request(read(path, body)) for name, path, body in recorded()}
    failed = []
    for template, tokenizer in tokenizers(templates, (*NO_TEXTS, *NO_TOOLS)):
        for name, request in requests.items():
            try:
                messages, variables = request.messages or (), request.chat_template_kwargs
                text = encode_chat(tokenizer, messages, request.tools, variables=variables, unseen_tools=True).text
            except PromptError as error:
                failed.append((template, name, str(error)))
            else:
                users = [message["content"] for message in messages if message["role"] == "user"]
                failed += [(template, name, f"{one!r} is not shown") for one in users if one.strip() not in text]
    assert not failed


@pytest.mark.slow  # downloads packages
@pytest.mark.parametrize("name", ["llama.cpp/openai-gpt-oss-120b", "trl/gptoss"])
def test_later_final_responses_are_found_without_a_search(
    name: str, templates: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts equal the prompts of the unchanged template, whose time grows with the square of the calls."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turns: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "x"}],
        [{"role": "assistant", "content": "said"}],
        [
            {"role": "assistant", "content": "", "thinking": "thought", "tool_calls": [{**call, "id": "c"}]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
    ]
    ((_, tokenizer),) = tokenizers({name: templates[name]}, ())
    first = ([], [{"role": "system", "content": "s"}])
    histories = [
        [*system, *turns[0], *(message for turn in order for message in turns[turn])]
        for system in first
        for order in itertools.product(range(3), repeat=4)
    ]
    before = prompt_ids._looking_at_last_final.cache_info().misses
    assert all(prompt_ids._with_last_final(templates[name], history) for history in histories)
    assert prompt_ids._looking_at_last_final.cache_info().misses <= before + 1, "the template is changed once"
    assert prompt_ids._with_last_final({"default": templates[name]}, histories[0]) == {}
    found = [prompt_ids.render_chat(tokenizer, history) for history in histories]
    monkeypatch.setattr(prompt_ids, "_with_last_final", lambda *_: {})
    assert found == [prompt_ids.render_chat(tokenizer, history) for history in histories]
    assert 0 < sum("thought" in text for text in found) < len(found)
