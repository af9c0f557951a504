"""Random regular expressions: the engine's grammars accept the same texts as Python's re."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import llguidance
import pytest

from charonia import InvalidRequestError, _engine

ALPHABET = 'abcz019 -_.é日\\"/{'
BYTES = llguidance.LLTokenizer("byte")
# Classes, with the characters of the alphabet that they match.
CLASSES = [r"\d", r"\w", r"\s", r"\S", ".", "[a-c]", "[^a-c]", "[^é]", r"[\w.]", r"[-_0]", r"[^\d日]", r"[\"\\]"]


@dataclass
class Piece:
    """A part of an expression. sample: returns a random text that it matches."""

    text: str
    sample: Callable[[random.Random], str]


class Pattern:
    """A random regular expression."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        made = self._alternatives(2)
        self.text, self._sample = made.text, made.sample

    def matches(self, text: str, *, of_schema: bool) -> bool:
        """Classes such as \\w are ASCII in patterns of schemas, and Unicode in other expressions."""
        return re.fullmatch(self.text, text, re.ASCII if of_schema else re.UNICODE) is not None

    def is_decided(self, text: str) -> bool:
        """Whether all engines agree about the classes of the characters."""
        return all(" " <= one <= "~" or one in ALPHABET for one in text) or not re.search(r"\\[dwsS]", self.text)

    def texts(self, count: int) -> list[str]:
        """Return random texts: some match, the others are changed in one place."""
        out = []
        for index in range(count):
            text = self._sample(self._chance)
            if index % 2:
                at = self._chance.randrange(len(text) + 1)
                kept = at + self._chance.randrange(2)
                text = text[:at] + self._chance.choice(["", *ALPHABET]) + text[kept:]
            out.append(text)
        return out

    def _character(self) -> Piece:
        if self._chance.random() < 0.4:
            name = self._chance.choice(CLASSES)
            matching = [one for one in ALPHABET if re.fullmatch(name, one, re.ASCII)]
            return Piece(name, lambda chance: chance.choice(matching))
        one = self._chance.choice(ALPHABET)
        return Piece(re.escape(one), lambda chance: one)

    def _repeated(self, depth: int) -> Piece:
        if depth and self._chance.random() < 0.35:
            group = self._alternatives(depth - 1)
            one = Piece(self._chance.choice(["(", "(?:"]) + group.text + ")", group.sample)
        else:
            one = self._character()
        least = self._chance.randrange(3)
        counts = [("", 1, 1)] * 5 + [("?", 0, 1), ("??", 0, 1), (f"{{{least}}}", least, least)]
        counts.append((f"{{{least},{least + 2}}}", least, least + 2))
        if not re.search(r"[*+?{]", one.text[1:]):  # Python needs exponential time for repetitions of repetitions
            counts += [("*", 0, 3), ("+", 1, 3), ("*?", 0, 3), (f"{{{least},}}", least, least + 2)]
        name, low, high = self._chance.choice(counts)
        return Piece(
            one.text + name,
            lambda chance: "".join(one.sample(chance) for _ in range(chance.randint(low, high))),
        )

    def _alternatives(self, depth: int) -> Piece:
        options = []
        for _ in range(self._chance.choice([1, 1, 2, 3])):
            options.append([self._repeated(depth) for _ in range(self._chance.randrange(0 if depth < 2 else 1, 5))])
        text = "|".join("".join(piece.text for piece in pieces) for pieces in options)
        return Piece(text, lambda chance: "".join(piece.sample(chance) for piece in chance.choice(options)))


def matcher(pattern: Pattern, *, of_schema: bool) -> llguidance.LLMatcher:
    if of_schema:
        schema = {"type": "string", "pattern": f"^(?:{pattern.text})$"}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(_engine.schema_for_llguidance(json.dumps(schema)))
    else:
        grammar = llguidance.LLMatcher.grammar_from_lark(_engine.regex_for_llguidance(pattern.text))
    made = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def accepts(made: llguidance.LLMatcher, text: str) -> bool:
    made.reset()
    tokens = list(text.encode())
    return bool(made.try_consume_tokens(tokens) == len(tokens) and made.is_accepting())


def walk(made: llguidance.LLMatcher, chance: random.Random) -> str | None:
    """Follow the mask at random. Returns None if the text becomes too long."""
    made.reset()
    out = bytearray()
    for _ in range(40):
        mask = made.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if made.is_accepting() and (not allowed or chance.random() < 0.3):
            return out.decode()
        assert allowed
        likely = [byte for byte in allowed if byte < 128 or chance.random() < 0.1] or allowed
        out.append(34 if 34 in allowed and chance.random() < 0.2 else chance.choice(likely))
        made.consume_token(out[-1])
    return None


@pytest.mark.parametrize("of_schema", [False, True], ids=["regex", "schema"])
def test_random_patterns_match_as_in_python(of_schema: bool) -> None:
    counts: Counter[str] = Counter()
    for seed in range(200):
        pattern = Pattern(seed)
        try:
            made = matcher(pattern, of_schema=of_schema)
        except InvalidRequestError:
            counts["rejected"] += 1
            continue
        for text in pattern.texts(12):
            written = json.dumps(text, ensure_ascii=False) if of_schema else text
            assert accepts(made, written) is pattern.matches(text, of_schema=of_schema), (pattern.text, text)
            counts[str(pattern.matches(text, of_schema=of_schema))] += 1
        for index in range(3):
            found = walk(made, random.Random(1000 * seed + index))
            value = json.loads(found) if of_schema and found is not None else found
            if value is not None and pattern.is_decided(value):
                assert pattern.matches(value, of_schema=of_schema), (pattern.text, value)
                counts["walked"] += 1
    assert counts["True"] > 1000 and counts["False"] > 500 and counts["walked"] > 300, counts
    assert counts["rejected"] < 40, counts
