"""Conversion of EBNF grammars and structural tags to the engine's grammars."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest
from charonia_answers.ebnf import EbnfError, is_lark, to_lark
from charonia_answers.lark import grammars_of
from charonia_answers.tag_parts import NoTagError

BYTES = llguidance.LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def tag_accepts(format: dict[str, Any], text: str) -> bool:
    grammars = json.loads(grammars_of(format, "tag", {}))["grammars"]
    for one in grammars:
        if "regex" in one:
            one["lark_grammar"] = f"start: /{one.pop('regex')}/"
    return accepts(json.dumps({"grammars": grammars}), text)


@pytest.mark.parametrize(
    ("ebnf", "right", "wrong"),
    [
        ('root ::= "x" y*  # a comment\ny ::= [a-c] | "(" y ")"', ["x", "xa((b))"], ["xd", "x("]),
        (r'root ::= "\x0ab" [\x0ac] ws' + "\nws ::= [ \\n]*", ["\nbc", "\nb\n  "], ["b"]),
        ('root ::= "" | "a" root', ["", "aa"], ["b"]),
        (r"root ::= [^\-a\]-]+" + ' "é" [\\u00e9-]', ["bé-", "béé"], ["-é-"]),
        ('root ::= a{2,3} b{2}\na ::= "x"\nb ::= [0-9]', ["xx12", "xxx12"], ["x12", "xxxx12"]),
        ('root ::= ("a" | "bc")* "d"', ["abcd", "d"], ["ab"]),
        ('root ::= "a"? [b-] .', ["ab\n", "-x"], ["a"]),
    ],
)
def test_ebnf_means_the_same_in_lark(ebnf: str, right: list[str], wrong: list[str]) -> None:
    assert not is_lark(ebnf)
    grammar = llguidance.LLMatcher.grammar_from_lark(to_lark(ebnf))
    assert all(accepts(grammar, text) for text in right)
    assert not any(accepts(grammar, text) for text in wrong)


@pytest.mark.parametrize(
    ("ebnf", "error"),
    [
        ("root ::= other", "refers to other, which is not defined"),
        ('start ::= "a"', "there is no rule root"),
        ('root ::= ("a"', "a bracket is not closed, at line 1, column 10"),
        ('root ::= "a"\nroot ::= "b"', "defined twice, at line 2, column 1"),
        (r'root ::= "\ud83d"', "is not the number of a character, at line 1, column 11"),
        (r'root ::= "\q"', "the escape"),
        ('root ::= (="a") "b"', "is not understood"),
        ("root ::= " + "(" * 65 + '"a"' + ")" * 65, "nested more than 64 deep"),
    ],
)
def test_wrong_ebnf_is_rejected_with_its_place(ebnf: str, error: str) -> None:
    with pytest.raises(EbnfError, match=error.replace("(", r"\(")):
        to_lark(ebnf)


INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TEXT = {"type": "any_text", "excludes": ["<t>"]}


def mark(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        (
            {"type": "sequence", "elements": [TEXT, {"type": "star", "content": {
                "type": "sequence", "elements": [mark("<t>"), INTEGER, mark("</t>"), TEXT]}}]},
            ["abc", "abc<t>1</t>", "<t>1</t><t>2</t>x<"],
            ["a<t>x", "a<t>"],
        ),
        (
            {"type": "sequence", "elements": [TEXT, {"type": "optional", "content": {
                "type": "sequence", "elements": [mark("<t>"), INTEGER]}}]},
            ["abc", "abc<t>1"],
            ["<t>1</t>", "a<t>"],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<f"], "tags": [
                {"begin": "<f=a>", "content": INTEGER, "end": "</f>"}]},
            ["text <f=a>12</f> and more", "no"],
            ["text <f=a>x</f>", "<f=b>"],
        ),
        (
            {"type": "tags_with_separator", "tags": [{"begin": "<a>", "content": INTEGER, "end": ""}], "separator": ",",
             "at_least_one": True, "stop_after_first": False},
            ["<a>1", "<a>1,<a>2"],
            ["", "<a>1,"],
        ),
        (
            {"type": "or", "elements": [mark("ab"), {"type": "choice", "values": ["abc", "é\n"]}]},
            ["ab", "abc", "é\n"],
            ["a"],
        ),
        (
            {"type": "sequence", "elements": [
                {"type": "any_text"}, mark("</think>"), {"type": "regex", "pattern": "[a-c]+"}]},
            ["hm</think>abc"],
            ["hm</think>", "abc"],
        ),
    ],
)  # fmt: skip
def test_structural_tags_accept_their_texts(format: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    assert all(tag_accepts(format, text) for text in right)
    assert not any(tag_accepts(format, text) for text in wrong)


@pytest.mark.parametrize(
    "format",
    [
        {"type": "token_dispatch", "rules": []},
        {"type": "token", "token": "<none>"},
        {"type": "sequence"},
        {"type": "sequence", "elements": [{"type": "any_text"}, INTEGER]},
        {"type": "tag", "begin": "a"},
        {"type": "grammar", "grammar": "root ::= x"},
        {"type": "triggered_tags", "triggers": ["<g"], "tags": [{"begin": "<f>", "content": INTEGER, "end": ""}]},
    ],
)
def test_structural_tags_that_are_not_supported_are_rejected(format: dict[str, Any]) -> None:
    with pytest.raises(NoTagError):
        grammars_of(format, "tag", {})


def nested(inner: dict[str, Any], depth: int) -> dict[str, Any]:
    for _ in range(depth):
        tag = {"begin": "<f>", "content": inner, "end": ""}
        inner = {"type": "tags_with_separator", "tags": [tag], "separator": ",", "at_least_one": True}
    return inner


@pytest.mark.parametrize(
    "format",
    [
        nested(INTEGER, 40),
        {"type": "sequence", "elements": [
            part for name in range(40) for part in (TEXT, {"type": "optional", "content": mark(f"<{name}>")})]},
    ],
)  # fmt: skip
def test_structural_tags_that_grow_exponentially_are_rejected(format: dict[str, Any]) -> None:
    with pytest.raises(NoTagError, match="too large"):
        grammars_of(format, "tag", {})
