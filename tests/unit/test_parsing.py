"""parsing/parse.py and preprocessing/parsing_options.py. The Triton models around them are tested in tests/stack."""

from __future__ import annotations

import json
import re
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
# A workspace has these beside each other.
sys.path += [str(ROOT / folder) for folder in ("charonia/text", "postprocessing", "preprocessing", "parsing")]

import parse  # noqa: E402
import parsing_options  # noqa: E402
from charonia_answers import fingerprint  # noqa: E402
from charonia_answers.formats import CALL_FORMATS, REASONING_FORMATS  # noqa: E402
from detokenize import TextTokens, TokenTable  # noqa: E402

HERMES = "<tool_call>{{ tools }}"


def table(tokens: list[str | bytes], special: set[str]) -> Any:
    spelled = [token.encode() if isinstance(token, str) else token for token in tokens]
    offsets = np.array([0, *accumulate(map(len, spelled))], np.int64)
    marks = np.array([token in special for token in tokens], np.uint8)
    return TokenTable(offsets, np.frombuffer(b"".join(spelled), np.uint8), marks)


def options(template: str, prompt: str | None = "p", names: list[str] | None = None, parallel: bool = True) -> str:
    functions = None if names is None else [{"name": name} for name in names]
    return parsing_options.AnswerFormats(template, {}).options(prompt, functions, parallel)


def read_all(answers: Any, given: str, responses: list[list[int]], size: int = 10**6) -> list[Any]:
    last = len(responses) - 1
    return [answers.read(given, 0, ids, (0, size), last=at == last) for at, ids in enumerate(responses)]


def test_a_special_token_is_markup_and_no_text() -> None:
    tokens: list[str | bytes] = ["Look. ", "[TOOL_CALLS]", '[{"name": "add", "arg', 'uments": {"a": 1}}]', "</s>"]
    answers = parse.Answers(table(tokens, {"[TOOL_CALLS]", "</s>"}))
    parts = read_all(answers, options("[TOOL_CALLS]", names=["add"]), [[0], [1, 2], [3], [4]])
    assert [part.content for part in parts] == ["Look.", "", "", ""]
    calls = [delta for part in parts for delta in part.calls]
    assert [delta["name"] for delta in calls] == ["add"]
    assert re.fullmatch(r"[a-z0-9]{9}", calls[0]["id"])  # what Mistral's chat templates take
    assert (calls[0]["arguments"], calls[0]["complete"]) == ('{"a": 1}', True)
    assert len(answers) == 0


def test_without_tools_a_call_is_text() -> None:
    answers = parse.Answers(table(['<tool_call>{"name": "add"}'], set()))
    for given in (options(HERMES), options(HERMES, prompt=None, names=["add"]), ""):
        (part,) = read_all(answers, given, [[0]])
        assert (part.content, part.calls) == ('<tool_call>{"name": "add"}', [])


def test_tokens_of_reasoning_are_counted() -> None:
    tokens: list[str | bytes] = ["<think>", "a", " b", "</think>", "c"]
    given = options("<think>")
    parts = read_all(parse.Answers(table(tokens, set())), given, [[0, 1], [2, 3, 4]])
    assert [part.num_reasoning_tokens for part in parts] == [2, 4]
    assert [part.reasoning for part in parts] == ["a", " b"]
    assert [part.content for part in parts] == ["", "c"]
    opened = options("<think>", prompt="<|assistant|><think>\n")
    (part,) = read_all(parse.Answers(table(tokens, set())), opened, [[1, 3, 4]])
    assert (part.num_reasoning_tokens, part.reasoning, part.content) == (2, "a", "c")


def test_an_answer_that_was_cut_off_within_a_call_shows_nothing_of_it() -> None:
    answers = parse.Answers(table(["Look. ", '<tool_call>\n{"name": "ad'], set()))
    for cut_off, content in ((True, "Look."), (False, 'Look. <tool_call>\n{"name": "ad')):
        part = answers.read(options(HERMES, names=["add"]), 0, [0, 1], (0, 99), last=True, cut_off=cut_off)
        assert (part.content, part.calls) == (content, [])


def test_the_last_response_says_whether_the_answer_was_cut_off() -> None:
    for last, said in ((0, (False, False)), (1, (True, False)), (2, (True, True))):
        tokens = TextTokens.of(np.array([0, 3, 1, last, 7], np.int32))
        assert (tokens.last, tokens.cut_off) == said and tokens.ids.tolist() == [7]


def test_a_character_in_two_tokens_and_what_is_outside_the_span() -> None:
    snail = "🐚".encode()
    answers = parse.Answers(table([" a", snail[:2], snail[2:], "stop"], set()))
    part = answers.read("", 0, [0, 1, 2, 3], (1, 6), last=True)
    assert part.content == "a🐚"


def test_a_mark_behind_a_stop_word_is_none() -> None:
    tokens: list[str | bytes] = ["a", "STOP", "[TOOL_CALLS]", "[]"]
    given = options("[TOOL_CALLS]", names=["add"])
    answers = parse.Answers(table(tokens, {"[TOOL_CALLS]"}))
    assert answers.read(given, 0, [0, 1, 2, 3], (0, 1), last=True).content == "a"


def test_a_mark_before_the_leading_space_that_is_left_out_counts() -> None:
    tokens: list[str | bytes] = ["[TOOL_CALLS]", ' [{"name": "add", "arguments": {}}]', "</s>"]
    given = options("[TOOL_CALLS]", names=["add"])
    size = len(tokens[1])
    answers = parse.Answers(table(tokens, {"[TOOL_CALLS]", "</s>"}))
    whole = answers.read(given, 0, [0, 1, 2], (1, size), last=True)
    streamed = [answers.read(given, 0, [0], (0, 0), last=False), answers.read(given, 0, [1, 2], (1, size), last=True)]
    assert [call["name"] for call in whole.calls] == ["add"]
    assert [call["name"] for part in streamed for call in part.calls] == ["add"]
    assert whole.content == "".join(part.content for part in streamed) == ""


def test_options_are_read_once_for_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(parse.json, "loads", lambda text: read.append(text) or json.JSONDecoder().decode(text))
    given = options("<think>")
    read_all(parse.Answers(table(["a"], set())), given, [[0], [0], [0]])
    assert read == [given]


def test_answers_are_told_apart_by_request_and_sequence_and_forgotten_at_last() -> None:
    answers = parse.Answers(table(["<think>", "a", "b"], set()))
    first, second = options("<think>"), options("<think>")
    answers.read(first, 0, [0], (0, 9), last=False)
    answers.read(first, 1, [1], (0, 9), last=False)
    answers.read(second, 0, [2], (0, 9), last=False)
    assert answers.read(first, 0, [1], (0, 9), last=True).reasoning == "a"
    assert answers.read(first, 1, [1], (0, 9), last=True).content == "a"
    assert answers.read(second, 0, [1], (0, 9), last=True).content == "a"
    assert len(answers) == 0


def test_answers_that_never_end_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse, "MAX_ANSWERS", 3)
    answers = parse.Answers(table(["a"], set()))
    for _ in range(10):
        answers.read(options(""), 0, [0], (0, 9), last=False)
    assert len(answers) == 3


def test_answers_that_never_end_keep_no_more_than_so_many_names_of_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = parse.Answers(table(["a"], set()))
    given = [options("[TOOL_CALLS]") for _ in range(10)]
    monkeypatch.setattr(parse, "MAX_OPTIONS", 3 * len(given[0]))
    for one in given:
        answers.read(one, 0, [0], (0, 9), last=False)
    assert len(answers) == 3
    for one in given[-3:]:
        answers.read(one, 0, [0], (0, 9), last=True)
    assert len(answers) == answers._options == 0
    monkeypatch.setattr(parse, "MAX_OPTIONS", 1)
    answers.read(given[0], 0, [0], (0, 9), last=False)
    assert answers.read(given[0], 0, [0], (0, 9), last=True).content == "a"


def test_settings_win_over_the_chat_template() -> None:
    formats = parsing_options.AnswerFormats(
        {"default": "<think>", "tool_use": HERMES},
        {"CHARONIA_TOOL_CALL_PARSER": "mistral", "CHARONIA_REASONING_PARSER": "none"},
    )
    assert json.loads(formats.to_json()) == {"tool_calls": "mistral", "reasoning": None, "parser": fingerprint()}
    formats = parsing_options.AnswerFormats({"default": "<think>", "tool_use": HERMES}, {})
    assert json.loads(formats.to_json()) == {"tool_calls": "hermes", "reasoning": "think", "parser": fingerprint()}
    with pytest.raises(ValueError, match="CHARONIA_TOOL_CALL_PARSER='x': expected auto, none, hermes"):
        parsing_options.AnswerFormats(None, {"CHARONIA_TOOL_CALL_PARSER": "x"})


def test_the_settings_have_all_formats() -> None:
    from charonia.settings import ServeSettings

    fields = ServeSettings.model_fields
    assert fields["tool_call_parser"].annotation.__args__ == ("auto", "none", *CALL_FORMATS)  # type: ignore[union-attr]
    assert fields["reasoning_parser"].annotation.__args__ == ("auto", "none", *REASONING_FORMATS)  # type: ignore[union-attr]


def test_names_go_along_only_where_they_decide() -> None:
    assert json.loads(options('<|start_header_id|>"parameters"', names=["f"]))["names"] == ["f"]
    assert json.loads(options(HERMES, names=["f"])).get("names") is None
    tools = [{"type": "function", "function": {"name": "f"}}, {"name": "g"}, {"function": 3}]
    assert parsing_options.names_of(parsing_options.functions_of(json.dumps(tools))) == ["f", "g"]


def test_stop_words_are_for_content() -> None:
    words, add = ["\n", "x"], [{"name": "add"}]
    hermes = parsing_options.AnswerFormats(HERMES, {})
    assert hermes.stops("p", add, words, forced=True) == ((), ())
    assert hermes.stops("p", add, words, forced=False) == (words, ("<tool_call>",))
    assert hermes.stops("p", None, words, forced=False) == hermes.stops(None, add, words, forced=False) == (words, ())
    llama = parsing_options.AnswerFormats(None, {"CHARONIA_TOOL_CALL_PARSER": "llama3_json"})
    assert llama.stops("p", add, words, forced=False)[1] == ("<|python_tag|>", '{"name"', '{"type"')
    assert parsing_options.AnswerFormats("", {}).stops("p", add, words, forced=False) == (words, ())
    python = parsing_options.AnswerFormats(None, {"CHARONIA_TOOL_CALL_PARSER": "pythonic"})
    marks = ("<|python_start|>", "<|python_tag|>")
    assert python.stops("p", add, words, forced=False)[1] == (*marks, "[add(")
    many = [{"name": f"f{number}"} for number in range(1000)]  # more than the engine takes
    assert python.stops("p", many, words, forced=False)[1] == (*marks, "[")
    # A begun answer is a text, so no call without a mark follows. One of white space is none.
    assert llama.stops("p So", add, words, forced=False, num_begun=3)[1] == ("<|python_tag|>",)
    assert llama.stops("p \n", add, words, forced=False, num_begun=2) == llama.stops("p", add, words, forced=False)
    for prompt, num_begun, continued in (("p So", 3, True), ("p {", 1, True), ("p \n", 2, None), ("p", 0, None)):
        made = json.loads(llama.options(prompt, add, True, num_begun=num_begun))
        assert made["names"] == ["add"] and made.get("continued") is continued


def test_options_say_what_a_grammar_sees_to() -> None:
    hermes = parsing_options.AnswerFormats(HERMES, {})
    add = {"name": "add"}
    for functions, forced, said in (
        ([add], True, {"forced": True}),
        ([{**add, "strict": True}], False, {"certain": True}),
        ([add], False, {}),
    ):
        made = json.loads(hermes.options("p", functions, True, forced=forced))
        assert {name: value for name, value in made.items() if name in ("forced", "certain")} == said
