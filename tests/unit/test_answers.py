"""client/charonia_answers: formats of calls and reasoning, and the parser."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
import tracemalloc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from charonia_answers.content_tokens import ContentTokens
from charonia_answers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from charonia_answers.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    find_call_format,
    find_reasoning_format,
    is_open,
)
from charonia_answers.harmony import HarmonyParser
from charonia_answers.parser import MAX_HELD, AnswerParser, special_marks
from charonia_answers.scanners import MAX_DEPTH, GemmaScanner, JsonScanner, PythonScanner
from hypothesis import given, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("CHARONIA_TEST_ANSWERS", "1000"))
NAMES = ("get_weather", "add", "search")


@dataclass
class Joined:
    """A response, joined from its events."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, bool]] = field(default_factory=list)  # name, arguments, complete


def join(events: Iterable[Event]) -> Joined:
    """Join events. Checks their order too: one call at a time, with indices from 0."""
    found = Joined()
    running = False
    for event in events:
        if isinstance(event, Content | Reasoning):
            assert event.text and not running
            if isinstance(event, Content):
                found.content += event.text
            else:
                found.reasoning += event.text
        elif isinstance(event, CallBegin):
            assert not running and event.index == len(found.calls) and event.id
            running = True
            found.calls.append((event.name, "", False))
        elif isinstance(event, CallArguments):
            assert running and event.index == len(found.calls) - 1 and event.text
            name, arguments, _ = found.calls[-1]
            found.calls[-1] = (name, arguments + event.text, False)
        else:
            assert running and event.index == len(found.calls) - 1
            name, arguments, _ = found.calls[-1]
            found.calls[-1] = (name, arguments, event.complete)
            running = False
    assert not running
    return found


def parser_of(format: str | None) -> type[AnswerParser]:
    return HarmonyParser if format == "harmony" else AnswerParser


def read(
    pieces: Sequence[str], format: str | None, reasoning: str | None = None, cut_off: bool = False, **more: Any
) -> Joined:
    calls = CALL_FORMATS[format] if format else None
    thoughts = REASONING_FORMATS[reasoning] if reasoning else None
    parser = parser_of(format)(calls, thoughts, names=NAMES, **more)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return join([*events, *parser.finish(cut_off=cut_off)])


def calls_of(found: Joined) -> list[tuple[str, Any]]:
    assert all(complete for _, _, complete in found.calls)
    return [(name, json.loads(arguments)) for name, arguments, _ in found.calls]


@dataclass(frozen=True)
class Case:
    """A response of answers.json and what the parser makes of it. Arguments of a call are JSON if the call is complete,
    and the text of the model with `false` after it if not."""

    text: str
    case: str = ""
    format: str | None = None
    reasoning_format: str | None = None
    options: dict[str, bool] = field(default_factory=dict)
    content: str = ""
    reasoning: str = ""
    calls: list[list[Any]] = field(default_factory=list)

    def read(self, pieces: Sequence[str]) -> Joined:
        return read(pieces, self.format, self.reasoning_format, **self.options)


RECORDED = [Case(**one) for one in json.loads(Path(__file__).with_name("answers.json").read_text("utf-8"))]
recorded = pytest.mark.parametrize(
    "case", RECORDED, ids=[f"{one.format}-{one.reasoning_format}-{one.case}" for one in RECORDED]
)


@recorded
def test_recorded_response_is_parsed_equally_in_any_pieces(case: Case) -> None:
    whole = case.read([case.text])
    calls = [[name, json.loads(shown)] if complete else [name, shown, False] for name, shown, complete in whole.calls]
    assert (whole.content, whole.reasoning, calls) == (case.content, case.reasoning, case.calls)
    for at in range(len(case.text) + 1):
        assert case.read([case.text[:at], case.text[at:]]) == whole
    assert case.read(list(case.text)) == whole


@recorded
def test_content_tokens_of_a_recorded_response_are_its_content(case: Case) -> None:
    calls = CALL_FORMATS[case.format] if case.format else None
    thoughts = REASONING_FORMATS[case.reasoning_format] if case.reasoning_format else None
    for pieces in (list(case.text), re.findall(r"\s*\w+|\s*\W", case.text)):
        options = {name: value for name, value in case.options.items() if name != "cut_off"}
        parser = parser_of(case.format)(calls, thoughts, names=NAMES, **options)
        tokens = ContentTokens()
        for piece in pieces:
            before, events = parser.in_reasoning, parser.feed(piece)
            tokens.add(piece.encode(), events, mark=False, reasons=(before, parser.in_reasoning))
        tokens.resolve(parser.finish(cut_off=case.options.get("cut_off", False)))
        found = "".join(pieces[index] for index in tokens.found)
        if pieces == list(case.text):
            # Without white space: the parser moves it, and Harmony adds empty lines.
            assert "".join(found.split()) == "".join(case.content.split())
        left = iter(found)
        assert all(character in left for character in "".join(case.content.split()))


@recorded
def test_truncated_recorded_response_has_no_markup_after_its_calls(case: Case) -> None:
    format, answer = case.format, case.text
    end = (CALL_FORMATS[format].each[1] or CALL_FORMATS[format].end) if format else ""
    begins = CALL_FORMATS[format].begin if format else ()
    # All of a call that has not begun is text. An end mark after text is text until it is complete.
    marks = [end[:size] for size in range(1, len(end)) if not any(begin.startswith(end[:size]) for begin in begins)]
    for at in range(len(answer) + 1):
        found = case.read([answer[:at]])
        if found.calls and not any(text in found.content for text in ("indeed", "</tool_b", *begins)):
            assert not found.content.endswith(tuple(marks))
            assert case.read(list(answer[:at])) == found
    # Immediately after the arguments, every beginning of the end mark is dropped, and nothing else.
    for match in re.finditer(rf"(?<=[}}\]>\n]){re.escape(end)}", answer) if end else ():
        before = case.read([answer[: match.start()]])
        for at in range(match.start(), match.end()):
            same = case.read([answer[:at]]).content == before.content
            assert same or not before.calls or any(text in before.content for text in begins)


@pytest.mark.parametrize("format", CALL_FORMATS)
def test_response_cut_in_an_end_mark_has_no_markup_in_its_content(format: str) -> None:
    text = CALL_FORMATS[format].write([("get_weather", {"city": "Paris", "days": 3})])
    begun = [found for at in range(len(text) + 1) if (found := read([text[:at]], format)).calls]
    assert len(begun) > 10
    assert [found.content for found in begun if found.content] == []
    assert begun[-1] == read([text], format)


@pytest.mark.parametrize("format", CALL_FORMATS)
def test_every_format_parses_its_own_calls(format: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "a <b> c", "n": [1, {"x": None}]}), ("add", {})]
    assert calls_of(read([CALL_FORMATS[format].write(calls)], format)) == calls
    assert calls_of(read([CALL_FORMATS[format].write(calls[:1])], format)) == calls[:1]


def test_response_cut_in_the_end_mark_of_reasoning_has_no_markup() -> None:
    assert read(list("<think>hm</thi"), None, "think", cut_off=True).reasoning == "hm"


@pytest.mark.parametrize("format", [name for name in CALL_FORMATS if name != "harmony"])  # its headers are never text
def test_unfinished_call_is_content_only_if_the_model_ended_there(format: str) -> None:
    """It is no content if the answer was cut off, if a grammar makes the calls, or if calls are forced."""
    one = CALL_FORMATS[format]
    begin = one.begin[0]
    calls = [("get_weather", {"city": "Paris", "n": [1]}), ("add", {"a": 1})]
    text = f"So: {begin}" + one.write(calls).removeprefix("" if one.bare else begin)
    heads = 0
    for size in range(len(f"So: {begin}"), len(text)):
        ended, cut_off, certain, forced = (
            read([text[:size]], format, **{option: True} if option else {})
            for option in ("", "cut_off", "certain", "forced")
        )
        if not any(complete for _, _, complete in ended.calls):  # within the first call
            assert (cut_off.content, certain.content) == ("So:", "So:")
        assert forced.content == "" and ended.calls == cut_off.calls == certain.calls == forced.calls
        heads += ended.content == text[:size]
        whole = [(name, json.loads(shown)) for name, shown, complete in ended.calls if complete]
        assert whole == calls[: len(whole)] and len(ended.calls) <= len(whole) + 1
        assert all(complete or shown not in map(json.dumps, dict(calls).values()) for _, shown, complete in ended.calls)
    assert heads > 3


def test_cut_off_second_call_without_marks_is_not_content() -> None:
    text = CALL_FORMATS["llama3_json"].write([("add", {"a": 1}), ("search", {"q": "x"})])
    for size in range(text.index("}}") + 2, text.index("search")):
        assert read([text[:size]], "llama3_json", cut_off=True) == Joined(calls=[("add", '{"a": 1}', True)])


def test_no_mark_of_a_format_is_a_prefix_of_another_mark() -> None:
    """Otherwise the result would depend on the length of the available text."""
    for one in CALL_FORMATS.values():
        ends = {mark for mark in (one.end, one.each[1]) if mark}
        for first, second in itertools.permutations([*one.begin, *ends], 2):
            assert not second.startswith(first)


@pytest.mark.parametrize("format", CALL_FORMATS)
def test_arguments_are_returned_as_they_arrive_after_the_name(format: str) -> None:
    text = CALL_FORMATS[format].write([("search", {"q": "x" * 1000})])
    parser = parser_of(format)(CALL_FORMATS[format], names=NAMES, texts={"search": {"q": False}})
    events = [event for char in text for event in parser.feed(char)]
    assert isinstance(events[0], CallBegin) and events[0].name == "search"
    assert sum(isinstance(event, CallArguments) for event in events) > 1000
    assert parser.finish() in ([], [CallEnd(0, True)])


LISTS = {
    "hermes": ("<tool_call>[", "]</tool_call> Done."),
    "phi4_mini": ("<|tool_call|>[", "]<|/tool_call|> Done."),
    "mistral": ("[TOOL_CALLS][", ""),
}


@pytest.mark.parametrize("format", LISTS)
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    "debris",
    [
        ', {"name": "g", "argu',
        ", oops",
        " oops",
        ', {"type": "x"}',
        ', {"name": "g", "city": 1}, {"name": "add", "arguments": {}}',
        ",",
        ', [{"name": "add"}',
    ],
)
def test_broken_list_after_a_call_is_not_content(format: str, parallel: bool, debris: str) -> None:
    begin, end = LISTS[format]
    for call in ('{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "arguments": {"a": 1}, "x"}'):
        text = f"{begin}{call}{debris}{end}"
        found = read([text], format, parallel=parallel)
        assert found == Joined("Done." if end else "", calls=[("add", '{"a": 1}', True)]), text
        assert read(list(text), format, parallel=parallel) == found
        for size in range(len(begin) + len(call), len(text) - len(" Done.")):
            assert read([text[:size]], format, parallel=parallel).content == "", text[:size]


def test_a_prompt_begins_reasoning_only_if_it_ends_with_the_mark() -> None:
    assert is_open("<|Assistant|><think>\n", REASONING_FORMATS["think"])
    assert not is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n", REASONING_FORMATS["think"])


def test_special_tokens_are_markup_and_never_text() -> None:
    one = CALL_FORMATS["mistral"]
    marks = special_marks(one.markup, ["<s>", "[TOOL_CALLS]", "[INST]"])
    assert list(marks) == ["[TOOL_CALLS]"]
    mark = marks["[TOOL_CALLS]"]
    call = '[{"name": "add", "arguments": {}}]'
    assert calls_of(read([f"{mark}{call}"], "mistral", marks=marks)) == [("add", {})]
    assert read([f"{mark} none {mark}"], "mistral", marks=marks) == Joined(" none ")
    # A text that spells the token is a text.
    assert read([f"[TOOL_CALLS]{call}"], "mistral", marks=marks).content == f"[TOOL_CALLS]{call}"
    # Arguments contain no special token.
    broken = read([f'{mark}[{{"name": "add", "arguments": {{"a": "{mark} b'], "mistral", marks=marks)
    assert broken == Joined("b", calls=[("add", '{"a": "', False)])


def test_special_tokens_within_longer_markup() -> None:
    one = CALL_FORMATS["internlm2"]
    marks = special_marks(one.markup, ["<|action_start|>", "<|plugin|>", "<|action_end|>", "<|interpreter|>"])
    assert len(marks) == 3
    text = one.write([("add", {"a": 1})])
    for token, mark in marks.items():
        text = text.replace(token, mark)
    assert calls_of(read([f"a{text}"], "internlm2", marks=marks)) == [("add", {"a": 1})]


def test_calls_have_the_ids_that_the_model_writes() -> None:
    call = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    calls = "".join(call.format(id) for id in ("add:0", "search:1", "add:0", "a:b:2", "search"))
    parser = AnswerParser(CALL_FORMATS["kimi_k2"], new_id=lambda: "new")
    events = parser.feed(f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>")
    found = [(event.name, event.id) for event in events if isinstance(event, CallBegin)]
    ids = ["functions.add:0", "functions.search:1", "new", "functions.a:b:2", "new"]
    assert found == list(zip(("add", "search", "add", "a:b", "search"), ids, strict=True))


@pytest.mark.parametrize("format", [one.name for one in CALL_FORMATS.values() if one.each[0]])
def test_call_after_a_broken_call_is_parsed(format: str) -> None:
    one = CALL_FORMATS[format]
    first, second = (one.write([("add", {"a": number})]) for number in (1, 2))
    frame = one.frame("add")
    good = second.removeprefix(frame.opening)
    first = first.removesuffix(frame.closing).removesuffix(frame.after)
    broken = f"{first}{{oops{frame.after}\n" if not one.xml else f"{first}<oops{frame.after}\n"
    broken = broken if one.xml else broken.replace('"a": 1}', '"a": 1,')
    text = f"{broken}{good} Done."
    found = read([text], format)
    assert (found.content, [(name, complete) for name, _, complete in found.calls]) == (
        "Done.",
        [("add", False), ("add", True)],
    )
    assert found.calls[1][1] == '{"a": 2}' and read(list(text), format) == found


TEMPLATES = {
    '{% if tools %}<tools>{% endif %}<tool_call>\n{"name": <function-name>': ("hermes", None),
    "<tool_call>\n</tool_call>{{ '<think>' }}</think>": ("hermes", "think"),
    "<tool_call>\n<function=example>": ("qwen3_coder", None),
    "<tool_call>{function-name}<arg_key>{key}</arg_key>": ("glm45", None),
    '<|start_header_id|>{ Respond in the format {"name": ..., "parameters": ...}': ("llama3_json", None),
    "[AVAILABLE_TOOLS][TOOL_CALLS] [": ("mistral", None),
    "[TOOL_CALLS]{{ name }}[ARGS] [THINK]": ("mistral_named", "mistral"),
    "<|action_start|><|plugin|>": ("internlm2", None),
    "<|tool|>{{ tools }}<|/tool|><|end|>": ("phi4_mini", None),
    "<start_function_call>call:": ("functiongemma", None),
    "<|tool_call>call:<tool_call|><|channel>thought": ("gemma4", "gemma4"),
    "{% set content = content.split('</think>')[-1] %}": (None, "think"),
    # The packages that test_chat_templates.py downloads do not have the templates of these models.
    "<functions></functions> <function_calls>": ("olmo3", None),
    "<tools></tools> <tool_calls>For each: <tool_call>f\n```json\nargs\n```</tool_call></tool_calls><think><answer>": (
        "hunyuan",
        "think_answer",
    ),
    "<tool_calls>[{...},...]</tool_calls><think>": ("hunyuan_a13b", "think"),
    "<tool_calls><tool_call>f<tool_sep><arg_key>k</arg_key></tool_calls>": ("hunyuan_v3", None),
    "Use exact format: [func_name1(param1=value1), func_name2(...)]": ("pythonic", None),
    "<|start_of_role|>Write your thoughts after 'Here is my thought process:' <|tool_call|>": ("granite3", "granite32"),
    "<|start_header_id|><AVAILABLE_TOOLS>[]<TOOLCALL>[]</TOOLCALL><think>": ("nemotron", "think"),
    "<tool_call>{}</tool_call><think>\n<response>\\n</response>": ("hermes", "think_response"),
    "<|im_start|>{{ message.content }}<|im_end|>": (None, None),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_formats_are_found_in_chat_templates(template: str) -> None:
    calls, reasoning = find_call_format(template), find_reasoning_format(template)
    assert (calls and calls.name, reasoning and reasoning.name) == TEMPLATES[template]


def cut(data: st.DataObject, text: str) -> list[str]:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    return [text[begin:end] for begin, end in itertools.pairwise([0, *sorted(places), len(text)])]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(st.text(max_size=8), JSON, max_size=4)
PIECES = st.sampled_from(
    [
        *sorted({mark for one in (*CALL_FORMATS.values(), *REASONING_FORMATS.values()) for mark in one.markup}),
        *("{", "}", "[", "]", '"', ",", ":", "\\", " ", "\n", ";", "call:", "add", "1", "true", '{"name": "add", '),
        *("(", ")", "=", "'", "'''", "a=", "add(", "[add(a=", "\\u", ", add(b="),
        *('"arguments": {', '"parameters": {', '"name": "add"', "}}", '{"a": "', "\ud800", "\u00e9", "<", "|"),
    ]
)


@pytest.mark.slow
@settings(max_examples=3 * CASES // 10, deadline=None)
@given(
    st.data(), st.sampled_from(sorted(CALL_FORMATS)), st.lists(st.tuples(st.sampled_from(NAMES), OBJECT), max_size=3)
)
def test_calls_survive_any_cut(data: st.DataObject, format: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    one = CALL_FORMATS[format]
    if one.syntax == "gemma":  # its keys and strings have no escapes
        calls = json.loads(json.dumps(calls, ensure_ascii=False).replace("<", "("))
        calls = [(name, _with_plain_keys(arguments)) for name, arguments in calls]
    if one.syntax == "pythonic":
        calls = [(name, {f"k{at}": entry for at, entry in enumerate(values.values())}) for name, values in calls]
    if one.xml:  # its strings have no quotes
        calls = json.loads(json.dumps(calls, ensure_ascii=False).replace("<", "("))
        calls = [(name, _by_kind(arguments)) for name, arguments in calls]
    text = one.write(calls) if calls else ""
    before = "" if one.bare else data.draw(st.sampled_from(["", "Well, ", "{"]))
    texts = {f"s{at}": False for at in range(20)}
    found = read(cut(data, before + text), format, texts={name: texts for name in NAMES})
    assert calls_of(found) == calls
    assert found.content == (before.rstrip() if calls else before)


def _by_kind(arguments: dict[str, Any]) -> dict[str, Any]:
    values = enumerate(arguments.values())
    return {f"s{at}" if isinstance(value, str) else f"j{at}": value for at, value in values}


def _with_plain_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {f"k{at}": _with_plain_keys(entry) for at, entry in enumerate(value.values())}
    return [_with_plain_keys(entry) for entry in value] if isinstance(value, list) else value


@settings(max_examples=3 * CASES // 10, deadline=None)
@given(st.data(), OBJECT, st.text(max_size=3), st.lists(PIECES, max_size=6))
def test_json_scanner_accepts_exactly_json(
    data: st.DataObject, value: dict[str, Any], more: str, pieces: list[str]
) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1])))
    at = data.draw(st.integers(0, len(text)))
    for candidate in (text + more, text[:at] + "".join(pieces) + text[at:]):
        scanner = JsonScanner()
        end, out = scanner.feed(candidate, 0)
        begin = len(candidate) - len(candidate.lstrip(" \t\r\n"))  # the decoder does not skip white space
        try:
            expected, expected_end = json.JSONDecoder(strict=False).raw_decode(candidate, begin)
        except ValueError:
            assert not scanner.done
            continue
        if "\ud800" in candidate[:end] or "\ud800" in candidate[:expected_end]:
            assert scanner.broken
            continue
        assert (scanner.done, end) == (True, expected_end)
        assert json.loads(out) == expected


@settings(max_examples=3 * CASES // 10, deadline=None)
@given(st.data(), JSON, st.lists(st.sampled_from(["'", '"', "\\", ",", "[", "(", "}", "x", "\ud800"]), max_size=4))
def test_python_scanner_accepts_python_literals(data: st.DataObject, value: Any, pieces: list[str]) -> None:
    text = repr(value)
    for shown in (text, text.replace("True", "true").replace("None", "null")):
        scanner = PythonScanner()
        out = feed_in_pieces(scanner, cut(data, shown + ","))
        same = shown == text or "True" in str(value) or "None" in str(value)
        assert scanner.done and (not same or json.loads(out) == value or shown != text)
    at = data.draw(st.integers(0, len(text)))
    hostile = text[:at] + "".join(pieces) + text[at:] + ", "
    whole, cut_up = PythonScanner(), PythonScanner()
    out = feed_in_pieces(whole, [hostile])
    assert feed_in_pieces(cut_up, list(hostile)) == out or whole.broken
    assert (whole.done, whole.broken) == (cut_up.done, cut_up.broken)
    if whole.done:
        json.loads(out)


def feed_in_pieces(scanner: Any, pieces: Sequence[str]) -> str:
    out, left = "", ""
    for piece in pieces:
        left += piece
        end, shown = scanner.feed(left, 0)
        out, left = out + shown, left[end:]
        if scanner.done or scanner.broken:
            break
    return out


@pytest.mark.parametrize("value", ["x", "1 + 2", "f(1)", "0x10", "1e", "nan", "{1, 2}", "[1", "{1: 2", "(1"])
def test_value_that_is_not_a_python_literal_ends_the_call(value: str) -> None:
    found = read([f"<|tool_call_start|>[add(a={value})]<|tool_call_end|> So."], "lfm2")
    assert [complete for _, _, complete in found.calls] == [False] and found.content == "So."


KIMI_CALL = "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
SYNTAXES = {"XML": "qwen3_coder", "Python": "lfm2", "mark": "kimi_k2"}
HOSTILE = {
    "nested lists": '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 200_000,
    "nested in what is no call": '<tool_call>{"x": ' + '{"x": ' * 40_000,
    "an unclosed text": '<tool_call>{"name": "add", "arguments": {"a": "' + "x" * 200_000,
    "many beginnings": "<tool_call>" * 20_000,
    "many ends": '<tool_call>{"name": "add", "arguments": {}}' + "</tool_call>" * 20_000,
    "beginnings of tags": "<tool_" * 40_000,
    "white space": " \n" * 100_000,
    "white space in a call": "<tool_call>" + " " * 200_000,
    "a long name": '<tool_call>{"name": "' + "a" * 200_000,
    "many members": '<tool_call>{"name": "add", ' + '"a": 1, ' * 25_000,
    "many calls": '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 4_000,
    "many broken calls": '<tool_call>{"name": "add", "arguments": {]</tool_call>' * 4_000,
    "arguments before the name": '<tool_call>{"arguments": {"a": "' + "x" * 200_000 + '"}, "name": "add"}</tool_call>',
    "escapes": '<tool_call>{"name": "add", "arguments": {"a": "' + "\\u00e9\n" * 30_000,
    "values in XML": "<tool_call><function=add><parameter=a>" + "<parameter </param" * 10_000,
    "parameters in XML": "<tool_call>\n<function=add>\n" + "<parameter=a>\n1\n</parameter>\n" * 6_000,
    "a name in XML": "<tool_call>\n<function=" + "a" * 200_000,
    "nested lists in Python": "<|tool_call_start|>[add(a=" + "[" * 200_000,
    "an unclosed text in Python": "<|tool_call_start|>[add(a='" + "x" * 200_000,
    "quotes in Python": "<|tool_call_start|>[add(a='" + "it's " * 40_000,
    "quotes and white space in Python": "<|tool_call_start|>[add(a='" + "'   \n" * 40_000,
    "escapes in Python": "<|tool_call_start|>[add(a='" + "\\u00e9\\" * 25_000,
    "a number in Python": "<|tool_call_start|>[add(a=" + "1" * 200_000,
    "many calls in Python": "<|tool_call_start|>[" + "add(a=1), " * 20_000,
    "white space in Python": "<|tool_call_start|>[add(a=1" + " " * 200_000,
    "a long name in Python": "<|tool_call_start|>[" + "a" * 200_000,
    "many marked calls": "<|tool_calls_section_begin|>" + KIMI_CALL * 2_500,
    "many broken marked calls": "<|tool_calls_section_begin|>" + KIMI_CALL.replace("{}", "{]") * 2_500,
    "marks without calls": "<|tool_calls_section_begin|><|tool_call_begin|>" * 4_000,
    "unclosed reasoning": "<think>" + "hm </thin " * 20_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("piece", [100, 1 << 20])
def test_hostile_responses_take_linear_time_and_bounded_memory(name: str, piece: int) -> None:
    """200,000 characters. Quadratic time takes minutes of CPU, linear time up to three seconds."""
    text = HOSTILE[name]
    format = next((CALL_FORMATS[one] for word, one in SYNTAXES.items() if word in name), CALL_FORMATS["hermes"])
    parser = AnswerParser(format, REASONING_FORMATS["think"], names=NAMES)
    began = time.process_time()
    tracemalloc.start()
    for at in range(0, len(text), piece):
        parser.feed(text[at : at + piece])
        if at + piece < len(text) and at % (100 * piece) == 0:
            assert tracemalloc.get_traced_memory()[0] < 20 * MAX_HELD
    tracemalloc.stop()
    parser.finish()
    assert time.process_time() - began < 120


def test_quote_within_a_key_ends_the_call_immediately() -> None:
    """The parser returns the text after it without waiting for the end of the response."""
    scanner = GemmaScanner("<escape>")
    scanner.feed("{abc<escape>", 0)
    assert scanner.broken


@pytest.mark.parametrize("number", ["1" * 300, "-0." + "01" * 300, "1" * 300 + "." + "1" * 300 + "e+" + "1" * 300])
@pytest.mark.parametrize("new", [JsonScanner, lambda: GemmaScanner("<escape>"), PythonScanner])
def test_a_long_number_is_scanned(number: str, new: Any) -> None:
    key = "a" if isinstance(new(), GemmaScanner) else '"a"'
    text = "{" + key + ":[" + number + "]}"
    for pieces in ([text], list(text)):
        scanner = new()
        out = feed_in_pieces(scanner, pieces)
        assert scanner.done and out.replace(" ", "") == '{"a":[' + number + "]}"
    for wrong in ("0" + number, number + "-1", number + "..1", number + "e", "x" * 300, "{" + number):
        whole, cut_up = new(), new()
        shown = {feed_in_pieces(whole, ["[" + wrong + "]"]), feed_in_pieces(cut_up, list("[" + wrong + "]"))}
        assert whole.broken and cut_up.broken and len(shown) == 1, wrong


def test_scanners_bound_the_depth() -> None:
    for scanner, opening in ((JsonScanner(), "["), (GemmaScanner("<escape>"), "["), (PythonScanner(), "[")):
        assert scanner.feed("[" * MAX_DEPTH, 0)[0] == MAX_DEPTH and not scanner.broken
        scanner.feed(opening, 0)
        assert scanner.broken
