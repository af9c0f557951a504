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
from typing import Any

import pytest
from charonia_answers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from charonia_answers.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    find_call_format,
    find_reasoning_format,
    is_open,
)
from charonia_answers.parser import MAX_HELD, AnswerParser, special_marks
from charonia_answers.scanners import MAX_DEPTH, GemmaScanner, JsonScanner, PythonScanner
from hypothesis import given, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("CHARONIA_TEST_ANSWERS", "1000"))
NAMES = ("get_weather", "add", "search")
PARIS = {"city": "Paris", "days": 3}
SUM = {"a": 1, "b": -2.5e3}


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


def read(pieces: Sequence[str], format: str | None, reasoning: str | None = None, **more: Any) -> Joined:
    calls = CALL_FORMATS[format] if format else None
    thoughts = REASONING_FORMATS[reasoning] if reasoning else None
    parser = AnswerParser(calls, thoughts, names=NAMES, **more)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return join([*events, *parser.finish()])


def calls_of(found: Joined) -> list[tuple[str, Any]]:
    assert all(complete for _, _, complete in found.calls)
    return [(name, json.loads(arguments)) for name, arguments, _ in found.calls]


# Outputs of models: format, reasoning format, text, then its content, reasoning and calls.
WEATHER = ("get_weather", PARIS)
RECORDED: list[tuple[str | None, str | None, str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", None, "The capital is Paris.\n", "The capital is Paris.\n", "", []),
    (
        "hermes",
        None,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        "",
        "",
        [WEATHER],
    ),
    (
        "hermes",
        None,
        "I shall look.\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n<tool_call>\n'
        '{"name": "add", "arguments": {"a": 1, "b": -2.5e3}}\n</tool_call>\n',
        "I shall look.",
        "",
        [WEATHER, ("add", SUM)],
    ),
    (
        "hermes",
        "think",
        "<think>\nThey ask for <weather>.\n</think>\n\nOne moment.\n"
        '<tool_call>\n{"arguments": {"city": "Paris", "days": 3}, "name": "get_weather"}\n</tool_call>',
        "One moment.",
        "They ask for <weather>.",
        [WEATHER],
    ),
    ("hermes", "think", "<think>\n\n</think>\n\nHello.", "Hello.", "", []),
    ("hermes", "think", "<think>never ends\n", "", "never ends", []),
    (  # a list, arguments as a string, a surplus bracket, control characters and markup within a string
        "hermes",
        None,
        '<tool_call>[{"name": "add", "arguments": "{\\"a\\": 1}"}, {"name": "search", "arguments": '
        '{"q": "a\nb </tool_call> \\u00e9"}}]]</tool_call> Done.',
        "Done.",
        "",
        [("add", {"a": 1}), ("search", {"q": "a\nb </tool_call> é"})],
    ),
    ("hermes", None, '<tool_call>{"name": "search"}</tool_call>', "", "", [("search", {})]),
    (  # no arguments, in the forms that models write
        "hermes",
        None,
        '<tool_call>{"name": "search", "arguments": null}</tool_call><tool_call>{"arguments": "", "name": "add"}'
        '</tool_call><tool_call>{"name": "add", "arguments": " "}</tool_call>',
        "",
        "",
        [("search", {}), ("add", {}), ("add", {})],
    ),
    (  # arguments in the wrong place
        "hermes",
        None,
        '<tool_call>{"name": "search", "city": "Paris"}</tool_call>',
        '<tool_call>{"name": "search", "city": "Paris"}</tool_call>',
        "",
        [],
    ),
    (
        "hermes",
        None,
        '<tool_call>{"name": "add", "arguments": nil}</tool_call>',
        '<tool_call>{"name": "add", "arguments": nil}</tool_call>',
        "",
        [],
    ),
    (  # no end mark
        "hermes",
        None,
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": -2.5e3}}',
        "",
        "",
        [("add", SUM)],
    ),
    (  # a late end mark
        "hermes",
        None,
        '<tool_call>{"name": "add", "arguments": {}} indeed </tool_call> yes',
        "indeed  yes",
        "",
        [("add", {})],
    ),
    (  # several calls between two marks
        "hermes",
        None,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
        '{"name": "add", "arguments": {"a": 1, "b": -2.5e3}}}, {"name": "search"}\n</tool_call> Done.',
        "Done.",
        "",
        [WEATHER, ("add", SUM), ("search", {})],
    ),
    (
        "hermes",
        None,
        '<tool_call>{"name": "search"} {"indeed": 1}.</tool_call>, {"name": "search"}',
        '{"indeed": 1}., {"name": "search"}',
        "",
        [("search", {})],
    ),
    (  # a comma after the last call
        "hermes",
        None,
        '<tool_call>{"name": "search"},\n</tool_call> So: <tool_call>{"name": "add"}, <tool_call>[{"name": "search"}\n'
        '{"name": "add"}},]}</tool_call><tool_call>{"name": "search"}, ',
        "So:",
        "",
        [("search", {}), ("add", {}), ("search", {}), ("add", {}), ("search", {})],
    ),
    ("hermes", None, '<tool_call>{"name": "search"}, indeed', ", indeed", "", [("search", {})]),
    (  # members after the arguments
        "hermes",
        None,
        '<tool_call>{"name": "add", "arguments": {}, "name": "x", "parameters": [1]}</tool_call> Done.',
        "Done.",
        "",
        [("add", {})],
    ),
    ("hermes", None, "a <tool_call> is markup", "a <tool_call> is markup", "", []),
    ("hermes", None, "<tool_call>{'name': 1}</tool_call>", "<tool_call>{'name': 1}</tool_call>", "", []),
    ("hermes", None, "1 <tool_", "1 <tool_", "", []),
    (
        "llama3_json",
        None,
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
        "",
        "",
        [WEATHER],
    ),
    (
        "llama3_json",
        None,
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1, "b": -2.5e3}}; '
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
        "",
        "",
        [("add", SUM), WEATHER],
    ),
    (
        "llama3_json",
        None,
        '{"name": "add", "parameters": {"a": 1, "b": -2.5e3}}, {"name": "get_weather", '
        '"parameters": {"city": "Paris", "days": 3}}\n{"name": "search", "parameters": {}}',
        "",
        "",
        [("add", SUM), WEATHER, ("search", {})],
    ),
    (
        "llama3_json",
        None,
        '\n[{"name": "add", "parameters": {"a": 1, "b": -2.5e3}}, {"name": "search", "parameters": {}}]\n',
        "",
        "",
        [("add", SUM), ("search", {})],
    ),
    (  # a list without a mark that breaks off
        "llama3_json",
        None,
        '[{"name": "add", "parameters": {}}, {"name": "Ann", "age": 3}]\n\nLong explanation.',
        ', {"name": "Ann", "age": 3}]\n\nLong explanation.',
        "",
        [("add", {})],
    ),
    (
        "llama3_json",
        None,
        '[{"name": "add", "parameters": {}} is how a call looks. Long text follows.',
        "is how a call looks. Long text follows.",
        "",
        [("add", {})],
    ),
    (
        "llama3_json",
        None,
        '[{"name": "add", "parameters": {}}; {"name": "search", "parameters": {}}\n'
        '{"name": "add", "parameters": {}},];\n<|python_tag|>[{"name": "search"}; {"name": "add"}\n{"name": "search"}]',
        "",
        "",
        [("add", {}), ("search", {}), ("add", {}), ("search", {}), ("add", {}), ("search", {})],
    ),
    (
        "llama3_json",
        None,
        '[{"name": "add", "parameters": {"a": 1, "b": -2.5e3}}, '
        '{"name": "search", "parameters": {}, "description": "x"}]\n\n'
        'These are the two functions that I have: [1] and {"name": "add", "parameters": {}}.',
        'These are the two functions that I have: [1] and {"name": "add", "parameters": {}}.',
        "",
        [("add", SUM), ("search", {})],
    ),
    (
        "llama3_json",
        None,
        '{"name": "add", "parameters": {}, "description": "x"},{"name": "search", "parameters": {}},',
        "",
        "",
        [("add", {}), ("search", {})],
    ),
    ("llama3_json", None, '[{"name": "Ann"}, {"name": "add"}]', '[{"name": "Ann"}, {"name": "add"}]', "", []),
    ("llama3_json", None, "[1] is a source", "[1] is a source", "", []),
    (
        "llama3_json",
        None,
        '{"name": "search", "parameters": {}}, {"name": "Ann"}',
        ', {"name": "Ann"}',
        "",
        [("search", {})],
    ),
    (
        "phi4_mini",
        None,
        '<|tool_call|>{"name": "search"}, {"name": "add", "arguments": {"a": 1, "b": -2.5e3}}<|/tool_call|>',
        "",
        "",
        [("search", {}), ("add", SUM)],
    ),
    ("llama3_json", None, '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', "", []),
    ("llama3_json", None, '{"city": {"name": "add"}}', '{"city": {"name": "add"}}', "", []),
    ("llama3_json", None, "It is {not} a call.", "It is {not} a call.", "", []),
    (
        "qwen3_coder",
        "think",
        "<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"
        "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n"
        "</function>\n</tool_call>",
        "I look.",
        "Hm.",
        [WEATHER, ("add", {})],
    ),
    (  # values with several lines, JSON and other texts; Python's words; a missing end mark
        "qwen3_coder",
        None,
        '<tool_call><function=search><parameter=a>\n\n b\n</x>\n\n</parameter><parameter=b>[1, {"c": null}]</parameter>'
        "<parameter=c>\n[1,\n</parameter><parameter=d>True</parameter><parameter=e>\n</parameter></function> Done.",
        "Done.",
        "",
        [("search", {"a": "\n b\n</x>\n", "b": [1, {"c": None}], "c": "[1,", "d": True, "e": ""})],
    ),
    ("qwen3_coder", None, "a <tool_call> is <function=x", "a <tool_call> is <function=x", "", []),
    (
        "glm45",
        "think",
        "<think>Hm.</think>Look:\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>add</tool_call>",
        "Look:",
        "Hm.",
        [WEATHER, ("add", {})],
    ),
    (
        "glm45",
        None,
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>-2.5e3</arg_value>"
        "</tool_call>",
        "",
        "",
        [("add", SUM)],
    ),
    ("glm45", None, "<tool_call> is markup", "<tool_call> is markup", "", []),
    (
        "mistral",
        None,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "add", "arguments": {"a": 1, "b": -2.5e3}, "id": "VvvODy9mT"}]',
        "",
        "",
        [WEATHER, ("add", SUM)],
    ),
    (  # not a list, and no end mark: the last object is not a call
        "mistral",
        None,
        '[TOOL_CALLS]{"name": "add"}, {"name": "search", "arguments": null}\n\n{"name": "Ann"} is the person',
        '{"name": "Ann"} is the person',
        "",
        [("add", {}), ("search", {})],
    ),
    (
        "mistral",
        None,
        '[TOOL_CALLS][{"name": "add"} {"name": "search"},] These are all.',
        "These are all.",
        "",
        [("add", {}), ("search", {})],
    ),
    (
        "mistral_named",
        "mistral",
        '[THINK]So it is.[/THINK]Look: [TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}'
        '[TOOL_CALLS]add[CALL_ID]VvvODy9mT[ARGS]{"a": 1, "b": -2.5e3}',
        "Look:",
        "So it is.",
        [WEATHER, ("add", SUM)],
    ),
    (
        "internlm2",
        None,
        'I look it up.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}'
        "<|action_end|>\n",
        "I look it up.",
        "",
        [WEATHER],
    ),
    (
        "phi4_mini",
        None,
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "add", '
        '"arguments": {"a": 1, "b": -2.5e3}}]<|/tool_call|>',
        "",
        "",
        [WEATHER, ("add", SUM)],
    ),
    ("phi4_mini", None, 'functools[{"name": "add", "arguments": {"a": 1}}]', "", "", [("add", {"a": 1})]),
    ("phi4_mini", None, "use functools here", "use functools here", "", []),
    ("phi4_mini", None, '<|tool_call|>[{"id": 1}]<|/tool_call|>', '<|tool_call|>[{"id": 1}]<|/tool_call|>', "", []),
    (
        "functiongemma",
        None,
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>",
        "",
        "",
        [WEATHER],
    ),
    (
        "gemma4",
        "gemma4",
        '<|channel>thought\nHm.<channel|><|tool_call>call:search{q:<|"|>a "b"\n<|<|"|>,deep:{list:[1,-2.5e3,true,null,'
        '<|"|>x<|"|>],<|"|>none<|"|>:[]},empty:{}}<tool_call|>',
        "",
        "Hm.",
        [("search", {"q": 'a "b"\n<|', "deep": {"list": [1, -2.5e3, True, None, "x"], "none": []}, "empty": {}})],
    ),
    (
        "deepseek_v3",
        "think",
        "<think>\nHm.\n</think>\n\nLook:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1, "b": -2.5e3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "Look:",
        "Hm.",
        [WEATHER, ("add", SUM)],
    ),
    (  # a fence and markup in a string, no type before the name, no first mark and no end marks
        "deepseek_v3",
        None,
        '<｜tool▁call▁begin｜>search\n```json\n{"q": "```\\n<｜tool▁call▁end｜>"}',
        "",
        "",
        [("search", {"q": "```\n<｜tool▁call▁end｜>"})],
    ),
    (
        "deepseek_v31",
        None,
        'One moment.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris", "days": 3}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜> Done.",
        "One moment. Done.",
        "",
        [WEATHER, ("search", {})],
    ),
    ("deepseek_v31", None, "<｜tool▁calls▁begin｜> is markup", "<｜tool▁calls▁begin｜> is markup", "", []),
    (  # late end marks
        "deepseek_v31",
        None,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{} indeed<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "indeed",
        "",
        [("add", {})],
    ),
    (
        "kimi_k2",
        None,
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>'
        '{"a": 1, "b": -2.5e3}<|tool_call_end|><|tool_calls_section_end|>',
        "I look.",
        "",
        [WEATHER, ("add", SUM)],
    ),
    (  # white space, and a name without prefix
        "kimi_k2",
        None,
        "<|tool_calls_section_begin|>\n<|tool_call_begin|> search <|tool_call_argument_begin|> {} <|tool_call_end|>\n"
        "<|tool_calls_section_end|>\n",
        "",
        "",
        [("search", {})],
    ),
    (
        "llama4_json",
        None,
        '<|python_start|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}<|python_end|>',
        "",
        "",
        [WEATHER],
    ),
    ("llama4_json", None, '{"name": "search", "parameters": {}}<|python_end|> So.', "So.", "", [("search", {})]),
    (
        "llama4_json",
        None,
        '<|python_start|><|python_end|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}'
        '{"name": "search", "parameters": {}}',
        "",
        "",
        [WEATHER, ("search", {})],
    ),
    ("pythonic", None, '[get_weather(city="Paris", days=3), add(a=1, b=-2.5e3)]', "", "", [WEATHER, ("add", SUM)]),
    (
        "pythonic",
        None,
        "<|python_start|>[get_weather(city='Paris', days=3)]<|python_end|> Done.",
        "Done.",
        "",
        [WEATHER],
    ),
    ("pythonic", None, "[search()]", "", "", [("search", {})]),
    ("pythonic", None, "[1] is a source", "[1] is a source", "", []),
    ("pythonic", None, "[other(a=1)]", "[other(a=1)]", "", []),  # not a function of the request
    ("pythonic", None, "[add(1, 2)]", "[add(1, 2)]", "", []),  # without keywords, the arguments have no names
    ("pythonic", None, "Use [add(a=1)].", "Use [add(a=1)].", "", []),
    ("pythonic", None, "[add(a=1), and so on", ", and so on", "", [("add", {"a": 1})]),
    (
        "lfm2",
        None,
        "I look.\n<|tool_call_start|>[search(q='it\\'s \"so\" [, ] ) <|tool_call_end|>\\n', "
        "n=[1, {'a': None}, (True, .5)], x={}), add(a=1,b=-2.5e3,)]<|tool_call_end|>Done.",
        "I look.\nDone.",
        "",
        [
            ("search", {"q": 'it\'s "so" [, ] ) <|tool_call_end|>\n', "n": [1, {"a": None}, [True, 0.5]], "x": {}}),
            ("add", SUM),
        ],
    ),
    (  # quotes within a string, three quotes, escapes
        "lfm2",
        None,
        "<|tool_call_start|>[search(q='it's \U0001f40c', r='''a 'b' ''c''', "
        's="\\u00e9\\ud83d\\udc0c\\x41\\U0001f40c\\d\\/", '
        "t='', n=1_000, o=+007)]<|tool_call_end|>",
        "",
        "",
        [
            (
                "search",
                {
                    **{"q": "it's \U0001f40c", "r": "a 'b' ''c", "s": "é\U0001f40cA\U0001f40c\\d/", "t": ""},
                    **{"n": 1000, "o": 7},
                },
            )
        ],
    ),
    (
        "olmo3",
        None,
        'So: <function_calls>get_weather(city="Paris", days=3)\nadd(a=1, b=-2.5e3)\n'
        "search(q=null, r=true)</function_calls>",
        "So:",
        "",
        [WEATHER, ("add", SUM), ("search", {"q": None, "r": True})],
    ),
    ("olmo3", None, "<function_calls>\nsearch()\n</function_calls>\n", "", "", [("search", {})]),
    ("olmo3", None, "<function_calls> is markup", "<function_calls> is markup", "", []),
    (
        "nemotron",
        "think",
        '<think>\nHm.\n</think>\n\n<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "add", "arguments": {"a": 1, "b": -2.5e3}}]</TOOLCALL>',
        "",
        "Hm.",
        [WEATHER, ("add", SUM)],
    ),
    (
        "seed_oss",
        "seed",
        "<seed:think>Hm.</seed:think>\nLook:\n\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        "Look:",
        "Hm.",
        [WEATHER],
    ),
    (
        "granite3",
        "think_response",
        '<think>Hm.</think><|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]',
        "",
        "Hm.",
        [WEATHER],
    ),
    ("granite3", None, '<tool_call>[{"name": "search", "arguments": {}}]', "", "", [("search", {})]),
    (
        "hunyuan_a13b",
        "think_answer",
        "<think>\nHm.\n</think>\n<answer>\nI look.\n"
        '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]</tool_calls>\n</answer>',
        "I look.",
        "Hm.",
        [WEATHER],
    ),
    (
        "hunyuan",
        None,
        '<tool_calls>\n<tool_call>get_weather\n```json\n{"city": "Paris", "days": 3}\n```</tool_call>\n'
        '<tool_call>add\n```json\n{"a": 1, "b": -2.5e3}\n```</tool_call>\n</tool_calls>',
        "",
        "",
        [WEATHER, ("add", SUM)],
    ),
    (  # a fence without a word, no fence, and a fence without a line end before it
        "hunyuan",
        None,
        '<tool_calls><tool_call>search\n```\n{"q": "x"}\n```</tool_call><tool_call>add\n{"a": 1}</tool_call>'
        "<tool_call>search```json\n{}```</tool_call></tool_calls>",
        "",
        "",
        [("search", {"q": "x"}), ("add", {"a": 1}), ("search", {})],
    ),
    (
        "hunyuan_v3",
        "think",
        "<think>Hm.</think><tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris"
        "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>search<tool_sep>\n"
        "</tool_call>\n</tool_calls>",
        "",
        "Hm.",
        [WEATHER, ("search", {})],
    ),
    (None, "think_response", "<think>\na\n</think>\n\n\n<response>\nb\n</response>\n", "b", "a", []),
    (None, "think_response", "<think>a</think>b <response>", "b <response>", "a", []),
    (None, "think_answer", "<answer>b</answer> c", "b c", "", []),
    (None, "granite32", "Here is my thought process: a\n\nHere is my response: b", "b", "a", []),
    (None, "think", "<think>a</think> b", "b", "a", []),
    (None, None, " \n <think>a</think>\n", " \n <think>a</think>\n", "", []),
]


@pytest.mark.parametrize("format, reasoning, answer, content, thoughts, calls", RECORDED)
def test_a_recorded_answer_is_the_same_at_every_cut(
    format: str | None, reasoning: str | None, answer: str, content: str, thoughts: str, calls: list[tuple[str, Any]]
) -> None:
    whole = read([answer], format, reasoning)
    assert (whole.content, whole.reasoning) == (content, thoughts)
    assert calls_of(whole) == calls
    for at in range(len(answer) + 1):
        assert read([answer[:at], answer[at:]], format, reasoning) == whole
    assert read(list(answer), format, reasoning) == whole


def test_beside_a_strict_function_what_no_grammar_made_is_no_call() -> None:
    call = '{"name": "add", "parameters": {}}'
    for text in (f"[{call}]", f"{call}, {call}"):
        assert read([text], "llama3_json", certain=True).content == text.removeprefix(call)
    assert len(read([f"{call}; {call}"], "llama3_json", certain=True).calls) == 2


@pytest.mark.parametrize("format", CALL_FORMATS)
def test_an_answer_that_ends_within_the_end_of_a_call_has_no_markup_in_its_content(format: str) -> None:
    text = CALL_FORMATS[format].write([WEATHER])
    begun = [found for at in range(len(text) + 1) if (found := read([text[:at]], format)).calls]
    assert len(begun) > 10
    assert [found.content for found in begun if found.content] == []
    assert begun[-1] == read([text], format)


@pytest.mark.parametrize("format, reasoning, answer", [recorded[:3] for recorded in RECORDED])
def test_a_recorded_answer_that_ends_earlier_has_no_markup_after_its_calls(
    format: str | None, reasoning: str | None, answer: str
) -> None:
    end = (CALL_FORMATS[format].each[1] or CALL_FORMATS[format].end) if format else ""
    begins = CALL_FORMATS[format].begin if format else ()
    # All of a call that has not begun is text. An end mark after text is text until it is complete.
    marks = [end[:size] for size in range(1, len(end)) if not any(begin.startswith(end[:size]) for begin in begins)]
    for at in range(len(answer) + 1):
        found = read([answer[:at]], format, reasoning)
        if found.calls and not any(text in found.content for text in ("indeed", *begins)):
            assert not found.content.endswith(tuple(marks))
            assert read(list(answer[:at]), format, reasoning) == found
    # Immediately after the arguments, every beginning of the end mark is dropped, and nothing else.
    for match in re.finditer(rf"(?<=[}}\]>\n]){re.escape(end)}", answer) if end else ():
        before = read([answer[: match.start()]], format, reasoning)
        for at in range(match.start(), match.end()):
            same = read([answer[:at]], format, reasoning).content == before.content
            assert same or not before.calls or any(text in before.content for text in begins)


def test_arguments_that_are_complete_in_a_call_that_is_not() -> None:
    for end in ("</tool_call", "\n</t", ', "id": "x', " "):
        found = read([f'a <tool_call>{{"name": "add", "arguments": {{}}{end}'], "hermes")
        assert (found.content, found.calls) == ("a", [("add", "{}", True)])
    found = read(['<tool_call>{"name": "add", "arguments": {}}</tool_box'], "hermes")
    assert (found.content, found.calls) == ("</tool_box", [("add", "{}", True)])


@pytest.mark.parametrize("format", CALL_FORMATS)
def test_every_format_reads_what_it_writes(format: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "a <b> c", "n": [1, {"x": None}]}), ("add", {})]
    assert calls_of(read([CALL_FORMATS[format].write(calls)], format)) == calls
    assert calls_of(read([CALL_FORMATS[format].write(calls[:1])], format)) == calls[:1]


def test_no_mark_of_a_format_begins_another_one() -> None:
    """Otherwise the result would depend on the length of the available text."""
    for one in CALL_FORMATS.values():
        ends = {mark for mark in (one.end, one.each[1]) if mark}
        for first, second in itertools.permutations([*one.begin, *ends], 2):
            assert not second.startswith(first)


@pytest.mark.parametrize("format", CALL_FORMATS)
def test_arguments_come_as_they_are_read_and_the_name_before(format: str) -> None:
    text = CALL_FORMATS[format].write([("search", {"q": "x" * 1000})])
    parser = AnswerParser(CALL_FORMATS[format], names=NAMES, texts={"search": {"q": False}})
    events = [event for char in text for event in parser.feed(char)]
    assert isinstance(events[0], CallBegin) and events[0].name == "search"
    assert sum(isinstance(event, CallArguments) for event in events) > 1000
    assert parser.finish() in ([], [CallEnd(0, True)])


def test_a_call_that_is_cut_off_within_its_arguments_is_not_completed() -> None:
    found = read(['<tool_call>{"name": "add", "arguments": {"a": 1, "b'], "hermes")
    assert found == Joined(calls=[("add", '{"a": 1, "b', False)])


@pytest.mark.parametrize("format", CALL_FORMATS)
def test_a_call_that_is_cut_off_is_never_complete_and_of_a_forced_one_nothing_is_content(format: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Paris", "n": [1]}), ("add", {"a": 1})]
    text = CALL_FORMATS[format].write(calls)
    arguments = [json.dumps(one) for _, one in calls]
    for size in range(len(text)):
        parser = AnswerParser(CALL_FORMATS[format], names=NAMES, forced=True)
        found = join([*parser.feed(text[:size]), *parser.finish()])
        assert found.content == ""
        whole = [json.loads(shown) for _, shown, complete in found.calls if complete]
        assert whole == [json.loads(one) for one in arguments[: len(whole)]]
        for _, shown, complete in found.calls:
            assert complete or shown not in arguments


@pytest.mark.parametrize("format", CALL_FORMATS)
def test_where_what_begins_like_a_call_is_one_the_text_before_it_alone_is_content(format: str) -> None:
    one = CALL_FORMATS[format]
    begin = one.begin[0]
    text = f"So: {begin}" + one.write([("add", {"a": 1})]).removeprefix("" if one.bare else begin)
    for size in range(text.index(begin) + len(begin), len(text)):
        parser = AnswerParser(one, names=NAMES, certain=True)
        assert join([*parser.feed(text[:size]), *parser.finish()]).content == "So:"


@pytest.mark.parametrize("format", CALL_FORMATS)
def test_of_an_answer_that_was_cut_off_no_head_of_a_call_is_content(format: str) -> None:
    """If the model ended the response, the same beginning of a call is a text."""
    one = CALL_FORMATS[format]
    begin = one.begin[0]
    call = one.write([("add", {"a": 1})]).removeprefix("" if one.bare else begin)
    text = f"So: {begin}{call}"
    heads = 0
    for size in range(text.index(begin) + len(begin), len(text)):
        parsers = [AnswerParser(one, names=NAMES) for _ in range(2)]
        cut, ended = (
            join([*parser.feed(text[:size]), *parser.finish(cut_off=cut_off)])
            for parser, cut_off in zip(parsers, (True, False), strict=True)
        )
        assert cut.content == "So:" and cut.calls == ended.calls
        heads += ended.content == text[:size]
    assert heads > 3
    if one.bare:  # without a mark, JSON may be a text
        parser = AnswerParser(one, names=NAMES)
        assert join([*parser.feed('{"name": "a'), *parser.finish(cut_off=True)]).content == '{"name": "a'


def test_of_calls_that_follow_each_other_the_head_of_a_later_one_is_no_content_either() -> None:
    for format in ("mistral", "llama3_json"):
        text = CALL_FORMATS[format].write([("add", {"a": 1}), ("search", {"q": "x"})])
        for size in range(text.index("}}") + 2, text.index("search")):
            parser = AnswerParser(CALL_FORMATS[format], names=NAMES)
            found = join([*parser.feed(text[:size]), *parser.finish(cut_off=True)])
            assert (found.content, found.calls) == ("", [("add", '{"a": 1}', True)])


def test_behind_a_text_no_call_without_a_mark_begins() -> None:
    text = CALL_FORMATS["llama3_json"].write([("add", {"a": 1})])
    assert read([text], "llama3_json").calls
    assert read([text], "llama3_json", continued=True) == Joined(text)
    assert read([f" and <|python_tag|>{text}"], "llama3_json", continued=True) == Joined(
        " and", calls=[("add", '{"a": 1}', True)]
    )


def test_a_call_that_breaks_off_after_it_began_leaks_nothing_into_the_content() -> None:
    broken = '<tool_call>{"name": "add", "arguments": {"a": 1,]}}</tool_call>'
    good = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    found = read([f"{broken}{good} ok"], "hermes")
    assert found.content == "ok"
    assert found.calls == [("add", '{"a": 1,]}}', False), ("add", '{"a": 2}', True)]
    named = '[TOOL_CALLS]add[ARGS]{"a": x}'
    assert [complete for _, _, complete in read([named * 3], "mistral_named").calls] == [False] * 3


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
def test_of_a_list_that_breaks_off_behind_a_call_nothing_is_content(format: str, parallel: bool, debris: str) -> None:
    begin, end = LISTS[format]
    for call in ('{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "arguments": {"a": 1}, "x"}'):
        text = f"{begin}{call}{debris}{end}"
        found = read([text], format, parallel=parallel)
        assert found == Joined("Done." if end else "", calls=[("add", '{"a": 1}', True)]), text
        assert read(list(text), format, parallel=parallel) == found
        for size in range(len(begin) + len(call), len(text) - len(" Done.")):
            assert read([text[:size]], format, parallel=parallel).content == "", text[:size]


@pytest.mark.parametrize("debris", ["", ",", ", oops"])
def test_a_list_that_breaks_off_takes_no_call_behind_it_away(debris: str) -> None:
    first, second = '{"name": "add", "arguments": {"a": 1}}', '{"name": "search", "arguments": {"q": "x"}}'
    text = f"<tool_call>[{first}{debris}\n<tool_call>{second}</tool_call> Done."
    found = read([text], "hermes")
    assert found == Joined("Done.", calls=[("add", '{"a": 1}', True), ("search", '{"q": "x"}', True)])
    assert read(list(text), "hermes") == found


def test_calls_after_the_first_are_dropped_where_only_one_is_wanted() -> None:
    text = CALL_FORMATS["hermes"].write([("add", {"a": 1}), ("search", {}), ("search", {})])
    assert read([f"{text} end"], "hermes", parallel=False) == Joined(content="end", calls=[("add", '{"a": 1}', True)])


def test_reasoning_that_the_prompt_has_begun() -> None:
    assert read(["I think\n</th", "ink>\n\nYes"], "hermes", "think", in_reasoning=True) == Joined("Yes", "I think")
    assert read(["<think>\nI think</think>Yes"], None, "think", in_reasoning=True) == Joined("Yes", "I think")
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
    text = one.write([("add", SUM)])
    for token, mark in marks.items():
        text = text.replace(token, mark)
    assert calls_of(read([f"a{text}"], "internlm2", marks=marks)) == [("add", SUM)]


def test_the_ids_that_a_model_writes_are_those_of_its_calls() -> None:
    call = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    calls = "".join(call.format(id) for id in ("add:0", "search:1", "add:0", "a:b:2", "search"))
    parser = AnswerParser(CALL_FORMATS["kimi_k2"], new_id=lambda: "new")
    events = parser.feed(f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>")
    found = [(event.name, event.id) for event in events if isinstance(event, CallBegin)]
    ids = ["functions.add:0", "functions.search:1", "new", "functions.a:b:2", "new"]
    assert found == list(zip(("add", "search", "add", "a:b", "search"), ids, strict=True))


@pytest.mark.parametrize("format", [one.name for one in CALL_FORMATS.values() if one.each[0]])
def test_a_broken_call_takes_no_call_after_it_away(format: str) -> None:
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


@settings(max_examples=4 * CASES // 10, deadline=None)
@given(
    st.data(),
    st.sampled_from([None, *sorted(CALL_FORMATS)]),
    st.sampled_from([None, *sorted(REASONING_FORMATS)]),
    st.lists(PIECES, max_size=40),
    st.booleans(),
)
def test_hostile_answers_end_alike_at_any_cut(
    data: st.DataObject, format: str | None, reasoning: str | None, pieces: list[str], opened: bool
) -> None:
    text = "".join(pieces)
    marks = {"<never>": "\ud800"}
    whole = read([text], format, reasoning, in_reasoning=opened, marks=marks)
    assert read(cut(data, text), format, reasoning, in_reasoning=opened, marks=marks) == whole
    assert read(list(text), format, reasoning, in_reasoning=opened, marks=marks) == whole
    shown = whole.content + whole.reasoning + "".join(name + arguments for name, arguments, _ in whole.calls)
    assert "\ud800" not in shown
    for _, arguments, complete in whole.calls:
        assert not complete or isinstance(json.loads(arguments), dict)
    if not whole.calls and reasoning is None:
        assert whole.content == text.replace("\ud800", "")


@settings(max_examples=3 * CASES // 10, deadline=None)
@given(st.data(), OBJECT, st.text(max_size=3), st.lists(PIECES, max_size=6))
def test_the_scanner_takes_what_json_is_and_nothing_else(
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
def test_the_scanner_takes_what_python_is(data: st.DataObject, value: Any, pieces: list[str]) -> None:
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
def test_what_is_no_literal_in_python_is_no_argument(value: str) -> None:
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
def test_hostile_answers_cost_linear_time_and_bounded_memory(name: str, piece: int) -> None:
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


@pytest.mark.parametrize("word", ["tru", "fals", "nul"])
def test_the_beginning_of_a_word_of_json_is_a_text(word: str) -> None:
    answer = f"<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{word}</arg_value>\n</tool_call>"
    assert calls_of(read([answer], "glm45")) == [("add", {"a": word})]


def test_a_quote_behind_the_beginning_of_a_key_ends_a_call_at_once() -> None:
    """The parser returns the text after it without waiting for the end of the response."""
    scanner = GemmaScanner("<escape>")
    scanner.feed("{abc<escape>", 0)
    assert scanner.broken


def test_scanners_bound_the_depth() -> None:
    for scanner, opening in ((JsonScanner(), "["), (GemmaScanner("<escape>"), "["), (PythonScanner(), "[")):
        assert scanner.feed("[" * MAX_DEPTH, 0)[0] == MAX_DEPTH and not scanner.broken
        scanner.feed(opening, 0)
        assert scanner.broken
