"""preprocessing/answer_formats.py, and the parsing of responses by charonia_answers.reading and the client library."""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from charonia_answers import harmony
from charonia_answers.formats import CALL_FORMATS, REASONING_FORMATS
from charonia_answers.reading import Part, Reader, functions_of, named_functions
from charonia_client import GenerateRequest, GenerateResponse
from charonia_client.parsing import ResponseParser
from hypothesis import given, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("CHARONIA_TEST_ANSWERS", "1000"))
ROOT = Path(__file__).resolve().parents[2]
# A workspace has these modules in one folder.
sys.path += [str(ROOT / folder) for folder in ("charonia/text", "preprocessing")]

import answer_formats  # noqa: E402

HERMES = "<tool_call>{{ tools }}"
ADD = [{"type": "function", "function": {"name": "add"}}]
Tokens = Sequence[tuple[int, bytes]]


def tokens_of(*texts: str | bytes, special: Mapping[str, int] | None = None) -> list[tuple[int, bytes]]:
    """Tokens of these texts. A special token has an id and no bytes."""
    special = special or {}
    spelled = [(text, text.encode() if isinstance(text, str) else text) for text in texts]
    return [(special[str(text)], b"") if text in special else (-1, raw) for text, raw in spelled]


def read_all(reader: Reader, chunks: Sequence[Tokens]) -> list[Part]:
    last = len(chunks) - 1
    return [reader.read(tokens, (0, 10**6), last=at == last) for at, tokens in enumerate(chunks)]


def formats_of(template: Any = "", **more: Any) -> dict[str, Any]:
    described: dict[str, Any] = answer_formats.AnswerFormats(template, {}, **more).describe()
    return described


def test_reader_special_token_is_markup_and_not_text() -> None:
    special = {"[TOOL_CALLS]": 7, "</s>": 2}
    formats = formats_of("[TOOL_CALLS]", special_tokens=special)
    assert formats["special"] == {"[TOOL_CALLS]": 7}
    texts = ("Look. ", "[TOOL_CALLS]", '[{"name": "add", "arg', 'uments": {"a": 1}}]', "</s>")
    first, mark, *rest = tokens_of(*texts, special=special)
    parts = read_all(Reader(formats, ADD), [[first], [mark, rest[0]], [rest[1]], [rest[2]]])
    assert [part.content for part in parts] == ["Look.", "", "", ""]
    calls = [delta for part in parts for delta in part.calls]
    assert [delta["name"] for delta in calls] == ["add"]
    assert re.fullmatch(r"[a-z0-9]{9}", calls[0]["id"])  # Mistral's chat templates accept such ids
    assert (calls[0]["arguments"], calls[0]["complete"]) == ('{"a": 1}', True)


def test_reader_without_tools_a_call_is_text() -> None:
    (part,) = read_all(Reader(formats_of(HERMES)), [tokens_of('<tool_call>{"name": "add"}')])
    assert (part.content, part.calls) == ('<tool_call>{"name": "add"}', [])


def test_reader_counts_the_tokens_of_reasoning() -> None:
    formats = formats_of("<think>")
    parts = read_all(Reader(formats), [tokens_of("<think>", "a"), tokens_of(" b", "</think>", "c")])
    assert [part.num_reasoning_tokens for part in parts] == [2, 4]
    assert [part.reasoning for part in parts] == ["a", " b"]
    assert [part.content for part in parts] == ["", "c"]
    (part,) = read_all(Reader(formats, in_reasoning=True), [tokens_of("a", "</think>", "c")])
    assert (part.num_reasoning_tokens, part.reasoning, part.content) == (2, "a", "c")
    (part,) = read_all(Reader(formats, begun="So"), [tokens_of("<think>")])
    assert (part.reasoning, part.content) == ("", "<think>")


def test_reader_drops_a_call_that_was_cut_off() -> None:
    tokens = tokens_of("Look. ", '<tool_call>\n{"name": "ad')
    for cut_off, content in ((True, "Look."), (False, 'Look. <tool_call>\n{"name": "ad')):
        part = Reader(formats_of(HERMES), ADD).read(tokens, (0, 99), last=True, cut_off=cut_off)
        assert (part.content, part.calls) == (content, [])


def test_reader_character_in_two_tokens_and_bytes_outside_the_span() -> None:
    snail = "🐚".encode()
    part = Reader({}).read(tokens_of(" a", snail[:2], snail[2:], "stop"), (1, 6), last=True)
    assert part.content == "a🐚"


def test_reader_mark_after_a_stop_word_is_not_read() -> None:
    special = {"[TOOL_CALLS]": 7}
    formats = formats_of("[TOOL_CALLS]", special_tokens=special)
    tokens = tokens_of("a ", "STOP", "[TOOL_CALLS]", "[]", special=special)
    strict = [{"name": "add", "strict": True}]  # the space before an unfinished call would be dropped
    assert Reader(formats, strict).read(tokens, (0, 2), last=True).content == "a "


def test_reader_mark_before_a_dropped_leading_space_counts() -> None:
    special = {"[TOOL_CALLS]": 7, "</s>": 2}
    formats = formats_of("[TOOL_CALLS]", special_tokens=special)
    call = ' [{"name": "add", "arguments": {}}]'
    tokens = tokens_of("[TOOL_CALLS]", call, "</s>", special=special)
    whole = Reader(formats, ADD).read(tokens, (1, len(call)), last=True)
    reader = Reader(formats, ADD)
    streamed = [reader.read(tokens[:1], (0, 0), last=False), reader.read(tokens[1:], (1, len(call)), last=True)]
    assert [call["name"] for call in whole.calls] == ["add"]
    assert [call["name"] for part in streamed for call in part.calls] == ["add"]
    assert whole.content == "".join(part.content for part in streamed) == ""


def test_reader_unknown_format_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not know the format 'x'; it knows hermes"):
        Reader({"tool_calls": "x"}, ADD)
    Reader({"tool_calls": "x"})


def test_functions_of_takes_both_forms_of_tools() -> None:
    tools = [*ADD, {"name": "g"}, {"function": 3}, 5]
    assert list(named_functions(functions_of(tools))) == ["add", "g"]
    assert list(named_functions(answer_formats.functions_of(json.dumps(tools)))) == ["add", "g"]


def test_formats_settings_win_over_the_chat_template() -> None:
    templates = {"default": "<think>", "tool_use": HERMES}
    names = {"CHARONIA_TOOL_CALL_PARSER": "mistral", "CHARONIA_REASONING_PARSER": "none"}
    chosen = answer_formats.AnswerFormats(templates, names).describe()
    assert chosen == {"tool_calls": "mistral", "reasoning": None, "special": {}}
    assert formats_of(templates) == {"tool_calls": "hermes", "reasoning": "think", "special": {}}
    with pytest.raises(ValueError, match="CHARONIA_TOOL_CALL_PARSER='x': expected auto, none, hermes"):
        answer_formats.AnswerFormats(None, {"CHARONIA_TOOL_CALL_PARSER": "x"})


def test_formats_calls_or_reasoning_alone_cannot_be_harmony() -> None:
    oss = "<|channel|>analysis<|message|>"
    assert formats_of(oss) == {"tool_calls": "harmony", "reasoning": "harmony", "special": {}}
    says = "CHARONIA_TOOL_CALL_PARSER is none and CHARONIA_REASONING_PARSER is harmony: set both to harmony or neither"
    with pytest.raises(ValueError, match=says):
        answer_formats.AnswerFormats(oss, {"CHARONIA_TOOL_CALL_PARSER": "none"})
    both = {"CHARONIA_TOOL_CALL_PARSER": "none", "CHARONIA_REASONING_PARSER": "none"}
    assert answer_formats.AnswerFormats(oss, both).describe()["reasoning"] is None


def test_formats_are_all_named_by_the_settings() -> None:
    from charonia.settings import ServeSettings

    fields = ServeSettings.model_fields
    assert fields["tool_call_parser"].annotation.__args__ == ("auto", "none", *CALL_FORMATS)  # type: ignore[union-attr]
    assert fields["reasoning_parser"].annotation.__args__ == ("auto", "none", *REASONING_FORMATS)  # type: ignore[union-attr]


def test_formats_tell_whether_a_prompt_ends_within_the_reasoning() -> None:
    formats = answer_formats.AnswerFormats("<think>", {})
    assert formats.in_reasoning("<|assistant|><think>\n")
    assert not formats.in_reasoning("<|assistant|>") and not formats.in_reasoning(None)
    assert not answer_formats.AnswerFormats("", {}).in_reasoning("<think>")


def test_stop_words_count_only_before_calls() -> None:
    words, add = ["\n", "x"], [{"name": "add"}]
    hermes = answer_formats.AnswerFormats(HERMES, {})
    assert hermes.stops("p", add, words, forced=True) == ((), ())
    assert hermes.stops("p", add, words, forced=False) == (words, ("<tool_call>",))
    assert hermes.stops("p", None, words, forced=False) == hermes.stops(None, add, words, forced=False) == (words, ())
    llama = answer_formats.AnswerFormats(None, {"CHARONIA_TOOL_CALL_PARSER": "llama3_json"})
    assert llama.stops("p", add, words, forced=False)[1] == ("<|python_tag|>", '{"name"', '{"type"')
    assert answer_formats.AnswerFormats("", {}).stops("p", add, words, forced=False) == (words, ())
    python = answer_formats.AnswerFormats(None, {"CHARONIA_TOOL_CALL_PARSER": "pythonic"})
    marks = ("<|python_start|>", "<|python_tag|>")
    assert python.stops("p", add, words, forced=False)[1] == (*marks, "[add(")
    many = [{"name": f"f{number}"} for number in range(1000)]  # more than the engine accepts
    assert python.stops("p", many, words, forced=False)[1] == (*marks, "[")
    # A begun message is a text, so a call without a mark cannot follow it. White space is not a text.
    assert llama.stops("p So", add, words, forced=False, num_begun=3)[1] == ("<|python_tag|>",)
    assert llama.stops("p \n", add, words, forced=False, num_begun=2) == llama.stops("p", add, words, forced=False)


# --- charonia_client.parsing.ResponseParser


def response(text: str, reason: Any = "stop") -> GenerateResponse:
    raw = text.encode()
    return GenerateResponse(text, (5,), reason, token_bytes=(raw,), text_span=(0, len(raw)))


CALL = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("fields", "content", "calls"),
    [
        ({}, CALL, []),
        ({"tools": ADD}, "", ["add"]),
        ({"tools": [{"type": "function", "function": {"name": "other"}}]}, CALL, []),
        ({"tools": ADD, "tool_choice": "none"}, CALL, []),
        ({"tools": ADD, "tool_choice": "required"}, "", ["add"]),
        ({"tools": ADD, "continue_final_message": True}, CALL, []),
    ],
)
def test_parser_knows_the_request(fields: dict[str, Any], content: str, calls: list[str]) -> None:
    messages = [{"role": "user", "content": "?"}]
    if fields.get("continue_final_message"):
        messages.append({"role": "assistant", "content": [{"type": "text", "text": "So "}]})  # type: ignore[dict-item]
    parser = ResponseParser(GenerateRequest(messages=messages, **fields), {"tool_calls": "llama3_json"})
    part = response(CALL)
    parser.parse(part, in_reasoning=False)
    assert (part.content, [call.name for call in part.tool_calls]) == (content, calls)


def test_parser_of_a_text_finds_no_calls_and_no_reasoning() -> None:
    parser = ResponseParser(GenerateRequest(text="a"), {"tool_calls": "hermes", "reasoning": "think"})
    part = response("<think>a")
    parser.parse(part, in_reasoning=False)
    assert (part.content, part.reasoning) == ("<think>a", "")


FUNCTIONS = [
    {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
    {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
]
MARKED = (*CALL_FORMATS.values(), *REASONING_FORMATS.values())
MARKUP = sorted({*(mark for one in MARKED for mark in one.markup if mark), *harmony.MARKS})
TEXTS = (
    *('{"name": "add", ', '"arguments": {"a": 1}}', '{"city": "Par', 'is"}', "add", "weather", "\n", " ", "{", "}"),
    *("[", "]", "Look", " here.", "<", "<tool", "_call>", "think>", "</", '"', "\\", "1", "a=1", "é", "色"),
)
# Whole texts, single bytes, and bytes that are not UTF-8.
PIECES = [*(text.encode() for text in (*MARKUP, *TEXTS)), *(bytes([one]) for one in "é色".encode()), b"\xff"]


def together(parts: Sequence[GenerateResponse]) -> tuple[Any, ...]:
    """The content, reasoning and calls of all parts. Ids of calls are random."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in [delta for part in parts for delta in part.tool_calls]:
        call = calls.setdefault(delta.index, {"arguments": ""})
        call["arguments"] += delta.arguments
        call |= {name: value for name, value in asdict(delta).items() if value is not None and name != "arguments"}
    return "".join(part.content for part in parts), "".join(part.reasoning for part in parts), calls


@settings(max_examples=4 * CASES // 10, deadline=None)
@given(st.data())
def test_parser_result_does_not_depend_on_the_chunks(data: st.DataObject) -> None:
    draw = data.draw
    special = draw(st.frozensets(st.sampled_from(MARKUP), max_size=8), label="special")
    names = {
        answer_formats.CALLS_VARIABLE: draw(st.sampled_from(["none", *CALL_FORMATS]), label="calls"),
        answer_formats.REASONING_VARIABLE: draw(st.sampled_from(["none", *REASONING_FORMATS]), label="reasoning"),
    }
    if "harmony" in names.values():
        names = dict.fromkeys(names, "harmony")
    ids = {mark: MARKUP.index(mark) for mark in special}
    formats = answer_formats.AnswerFormats(None, names, ids).describe()
    chosen = draw(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=40), label="ids")
    tokens = [(at, b"" if at in ids.values() else PIECES[at]) for at in chosen]
    cuts = draw(st.sets(st.integers(0, len(chosen))), label="cuts")
    reason = draw(st.sampled_from(["stop", "length"]))
    request = GenerateRequest(
        messages=[{"role": "user", "content": "?"}],
        tools=draw(st.sampled_from([None, FUNCTIONS])),
        tool_choice=draw(st.sampled_from([None, "required"])),
        parallel_tool_calls=draw(st.booleans()),
    )
    in_reasoning = draw(st.booleans())

    def parsed(chunks: Sequence[Tokens]) -> tuple[Any, ...]:
        parser, parts = ResponseParser(request, formats), []
        for at, chunk in enumerate(chunks):
            raw = b"".join(piece for _, piece in chunk)
            part = GenerateResponse(raw.decode(errors="replace"), tuple(token for token, _ in chunk))
            part.token_bytes, part.text_span = tuple(piece for _, piece in chunk), (0, len(raw))
            part.finish_reason = reason if at == len(chunks) - 1 else None
            parser.parse(part, in_reasoning=in_reasoning)
            parts.append(part)
        content, reasoning, calls = together(parts)
        for call in calls.values():
            call.pop("id", None)
        return content, reasoning, calls, parts[-1].num_reasoning_tokens

    # The engine ends a chunk where a character ends.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    chunks: list[list[tuple[int, bytes]]] = [[]]
    for number, token in enumerate(tokens):
        decoder.decode(token[1])
        chunks[-1].append(token)
        if number in cuts and not decoder.getstate()[0] and number + 1 < len(tokens):
            chunks.append([])
    whole = parsed([tokens])
    assert parsed(chunks) == whole
    content, reasoning, calls, _ = whole
    assert not re.search("[\ud800-\udfff]", content + reasoning + json.dumps(list(calls.values()), ensure_ascii=False))
    assert all(isinstance(json.loads(call["arguments"]), dict) for call in calls.values() if call.get("complete"))
    if not calls and not reasoning and formats["reasoning"] is None and not (request.tool_choice or reason == "length"):
        assert content == b"".join(piece for _, piece in tokens).decode(errors="replace")
