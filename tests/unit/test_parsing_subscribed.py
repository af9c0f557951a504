"""Answers that come by subscription and are read for calls and reasoning by the client: they are what the Triton model
`parsing` makes of them."""

from __future__ import annotations

import codecs
import json
import struct
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from charonia_answers import fingerprint
from charonia_answers.formats import CALL_FORMATS, REASONING_FORMATS
from charonia_client import ServerError, ToolCallDelta, Unavailable
from charonia_client.subscription import ParsingOptions, PartReader, TokenPart, _Joined, unpack
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
# A workspace has these beside each other.
sys.path += [str(ROOT / folder) for folder in ("charonia/text", "postprocessing", "preprocessing", "parsing")]

import parse  # noqa: E402
import parsing_options  # noqa: E402
from detokenize import TokenTable  # noqa: E402
from special_tokens import read_special_tokens  # noqa: E402

HEAD = struct.Struct("<QIIiiiiiiiiffff")  # as docs/contracts.md has it
REASONS = {"": 0, "stop": 1, "length": 2, "cancelled": 3}
TOKENS, OPTIONS = 16, 5
FUNCTIONS = [
    {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
    {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
]
MARKUP = sorted({mark for one in (*CALL_FORMATS.values(), *REASONING_FORMATS.values()) for mark in one.markup if mark})
TEXTS = (
    *(
        '{"name": "add", ',
        '"arguments": {"a": 1}}',
        '{"city": "Par',
        'is"}',
        "add",
        "weather",
        "\n",
        " ",
        "{",
        "}",
        "[",
        "]",
    ),
    *("Look", " here.", "<", "<tool", "_call>", "think>", "</", '"', "\\", "1", "a=1", "(", ")", "é", "色", "🎨"),
)
# Whole and in bytes, and what is no character.
PIECES = [
    *(text.encode() for text in (*MARKUP, *TEXTS)),
    *(bytes([one]) for one in "é色🎨".encode()),
    b"\xff",
    b"\xe8\x89",
]


@dataclass
class Response:
    ids: list[int]
    span: tuple[int, int]
    reason: str = ""


@dataclass
class Vocabulary:
    special: frozenset[int]

    @property
    def table(self) -> Any:
        return TokenTable(*self.tensors.values())

    @property
    def tensors(self) -> dict[str, Any]:
        return {
            "offsets": np.array([0, *accumulate(map(len, PIECES))], np.int64),
            "bytes": np.frombuffer(b"".join(PIECES), np.uint8),
            "special": np.array([token in self.special for token in range(len(PIECES))], np.uint8),
        }

    def piece(self, token: int) -> bytes:
        return b"" if token in self.special else PIECES[token]


def responses_of(
    vocabulary: Vocabulary, ids: Sequence[int], cuts: set[int], ending: str, cut_text: int
) -> list[Response]:
    """As the engine cuts them: at ends of characters. cut_text: bytes at the end that are no text, as a stop word's."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found: list[Response] = []
    begun: list[int] = []
    for number, token in enumerate(ids):
        decoder.decode(vocabulary.piece(token))
        begun.append(token)
        if number in cuts and not decoder.getstate()[0] and number + 1 < len(ids):
            found.append(Response(begun, (0, sum(len(vocabulary.piece(one)) for one in begun))))
            begun = []
    size = sum(len(vocabulary.piece(one)) for one in begun)
    return [*found, Response(begun, (0, max(0, size - cut_text)), ending)]


def chunk(vocabulary: Vocabulary, response: Response, before: bytes = b"") -> bytes:
    pieces = [vocabulary.piece(token) for token in response.ids]
    text = before + b"".join(pieces)
    reason = REASONS[response.reason] + TOKENS
    head = HEAD.pack(7, len(text), len(pieces), 0, reason, *response.span, 0, 0, 0, 0, 0, 0, 0, 0)
    return (
        head
        + struct.pack(f"<{len(pieces)}i", *response.ids)
        + struct.pack(f"<{len(pieces)}I", *map(len, pieces))
        + text
    )


def options_chunk(options: str) -> bytes:
    return HEAD.pack(7, len(options.encode()), 0, 0, OPTIONS, *[0] * 6, 0, 0, 0, 0) + options.encode()


def same_ids() -> Any:
    """The ids of calls are new in each answer: here they are the same in each."""
    return mock.patch("charonia_answers.parser.uuid.uuid4", side_effect=(uuid.UUID(int=one << 64) for one in count()))


def shown(part: Any, calls: Sequence[ToolCallDelta]) -> tuple[str, str, list[ToolCallDelta], int]:
    return part.content, part.reasoning, list(calls), part.num_reasoning_tokens


def by_call(
    vocabulary: Vocabulary, options: str, responses: Sequence[Response]
) -> list[tuple[str, str, list[ToolCallDelta], int]]:
    answers = parse.Answers(vocabulary.table)
    found = []
    with same_ids():
        for one in responses:
            last = bool(one.reason)
            cut_off = last and one.reason != "stop"
            part = answers.read(options, 0, one.ids, one.span, last=last, cut_off=cut_off)
            found.append(shown(part, [ToolCallDelta(**call) for call in json.loads(json.dumps(part.calls))]))
    assert len(answers) == 0
    return found


def read(options: str, parts: Sequence[TokenPart]) -> list[tuple[str, str, list[ToolCallDelta], int]]:
    found = []
    with same_ids():
        reader = PartReader(ParsingOptions(options))
        for part in parts:
            reader.read(part)
            found.append(shown(part, part.tool_calls))
    return found


def together(parts: list[tuple[str, str, list[ToolCallDelta], int]]) -> tuple[Any, ...]:
    """What several parts come to."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        for delta in part[2]:
            call = calls.setdefault(delta.index, {"arguments": ""})
            call |= {name: value for name, value in asdict(delta).items() if value is not None and name != "arguments"}
            call["arguments"] += delta.arguments
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts), calls, parts[-1][3]


@given(st.data())
def test_what_a_client_reads_is_what_the_model_parsing_reads(data: st.DataObject) -> None:
    draw = data.draw
    vocabulary = Vocabulary(draw(st.frozensets(st.integers(0, len(MARKUP) - 1)), label="special"))
    environment = {
        parsing_options.CALLS_VARIABLE: draw(st.sampled_from(["none", *CALL_FORMATS]), label="calls"),
        parsing_options.REASONING_VARIABLE: draw(st.sampled_from(["none", *REASONING_FORMATS]), label="reasoning"),
    }
    formats = parsing_options.AnswerFormats(None, environment, vocabulary.table.special_tokens)
    functions = draw(st.sampled_from([None, FUNCTIONS]), label="functions")
    options = formats.options(
        "prompt", functions, draw(st.booleans()), forced=functions is not None and draw(st.booleans())
    )
    # Mostly what the formats that were drawn are made of.
    marks = [at for at, mark in enumerate(MARKUP) if mark in "\n".join(parse_markup(formats))]
    tokens = st.one_of(
        st.sampled_from(marks or [0]), st.integers(len(MARKUP), len(PIECES) - 1), st.integers(0, len(PIECES) - 1)
    )
    ids = draw(st.lists(tokens, min_size=1, max_size=40), label="ids")
    cuts = draw(st.sets(st.integers(0, len(ids))), label="cuts")
    ending = draw(st.sampled_from(["stop", "length", "cancelled"]))
    responses = responses_of(vocabulary, ids, cuts, ending, draw(st.integers(0, 3)))

    number, found = unpack(
        struct.pack("<Q", 3) + options_chunk(options) + b"".join(chunk(vocabulary, one) for one in responses)
    )
    (_, sent), *rest = found
    parts = [part for _, part in rest if isinstance(part, TokenPart)]
    assert number == 3 and sent == ParsingOptions(options) and len(parts) == len(responses)
    expected = by_call(vocabulary, options, responses)
    for part, response in zip(parts, responses, strict=True):
        assert part.token_ids == tuple(response.ids) and (part.finish_reason or "") == response.reason
        joined = b"".join(map(vocabulary.piece, response.ids))
        assert part.text == joined[slice(*response.span)].decode(errors="replace")
    assert read(options, parts) == expected

    # Of a slow reader parts become one, which says the same.
    at = draw(st.integers(0, len(parts) - 1), label="joined from")
    one = _Joined(parts[at])
    for part in parts[at + 1 :]:
        one.add(part)
    whole = one.whole()
    assert isinstance(whole, TokenPart)
    assert together(read(options, [*parts[:at], whole])) == together(expected)


def parse_markup(formats: Any) -> tuple[str, ...]:
    return parsing_options.markup_of(formats.calls, formats.reasoning)


def test_the_input_text_before_an_answer_is_not_read() -> None:
    vocabulary = Vocabulary(frozenset())
    token = PIECES.index("é".encode())
    packed = struct.pack("<Q", 1) + chunk(vocabulary, Response([token, token], (0, 4), "stop"), "Grüß dich ".encode())
    ((_, part),) = unpack(packed)[1]
    assert isinstance(part, TokenPart)
    assert part.text == "Grüß dich éé"
    assert list(part.pieces()) == [(token, "é".encode())] * 2


def test_options_of_another_parser_are_refused() -> None:
    made = {"key": "k", "special": {}}
    with pytest.raises(Unavailable, match="another parser"):
        PartReader(ParsingOptions(json.dumps({**made, "parser": "other"})))
    for text in ("", "[]", json.dumps({"parser": fingerprint()}), '{"parser": ' + "[" * 100_000):
        with pytest.raises(ServerError, match="no options"):
            PartReader(ParsingOptions(text))


def test_the_special_tokens_are_those_of_the_table(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    vocabulary = Vocabulary(frozenset({0, 2, len(PIECES) - 1}))
    save_file(vocabulary.tensors, tmp_path / "table.safetensors")
    assert read_special_tokens(tmp_path / "table.safetensors") == vocabulary.table.special_tokens
