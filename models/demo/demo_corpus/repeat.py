"""Texts to be repeated, as they are or in JSON under a key that the question names. What a call of a tool and an answer in
JSON take from a question is copied like this, and short questions teach it best."""

from __future__ import annotations

import random

from .capitals import COUNTRIES, invented
from .chat_format import to_json
from .text import Exchange, expand

_EN_FRAMES = ["[Repeat|Say|Echo|Write|Copy|Type]: {x}", "[Please |]repeat [after me|this][:|] {x}", "Repeat the text {x}", 'Say "{x}".', "[Write|Say] {x} and nothing else."]  # fmt: skip
_ZH_FRAMES = [
    "[重复|复述|说|写|照抄|照写][：|一遍：|一下：]{x}",
    "请[重复|跟我说|照着写]：{x}",
    "[重复|说]“{x}”。",
    "跟我念：{x}",
]
_EN_JSON = ["[Write|Put|Give me] {x} as JSON with the key {k}[.|]", "JSON with {x} under the key {k}[.|]", "Make a JSON object: the key is {k}, the value {x}[.|]", "{x} in JSON, key {k}[.|]"]  # fmt: skip
_ZH_JSON = ["把{x}写成JSON，键为{k}[。|]", "JSON：键{k}，值{x}[。|]", "用JSON写{x}，键是{k}[。|]"]
_KEYS = ["name", "place", "text", "value", "city", "word", "number", "title", "key", "a", "b", "item", "input", "location", "expression", "query", "country", "capital", "result", "unit", "answer", "user", "id", "topic", "color", "名字", "地点", "值"]  # fmt: skip
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ZH_LETTERS = "的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去之过家学对可她里后小么心多天而能好都然没日于起还发成事只作当想看文无开手十用主行方又如前所本见经头面"


def _word(language: str, rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.3:
        row = rng.choice(COUNTRIES)
        return rng.choice(row[:2] if language == "en" else row[2:]).removeprefix("the ")
    if kind < 0.55:
        return invented(language, rng)
    if kind < 0.8:
        return str(rng.randint(0, 10 ** rng.randint(1, 6)))
    if language == "zh":
        return "".join(rng.choices(_ZH_LETTERS, k=rng.randint(2, 4)))
    return "".join(rng.choices(_LETTERS, k=rng.randint(2, 7)))


def _text(language: str, rng: random.Random) -> str:
    if rng.random() < 0.25:
        numbers = [str(rng.randint(0, 10 ** rng.randint(1, 5))) for _ in range(rng.randint(2, 3))]
        return rng.choice([" + ", " * ", " - ", " / "]).join(numbers)
    return (" " if language == "en" else rng.choice(["", "，"])).join(
        _word(language, rng) for _ in range(rng.choices((1, 2, 3), weights=(60, 25, 15))[0])
    )


def exchange(language: str, rng: random.Random) -> Exchange:
    """One text, or, as often, one in JSON."""
    english, text = language == "en", _text(language, rng)
    if rng.random() < 0.5:
        return Exchange(expand(rng.choice(_EN_FRAMES if english else _ZH_FRAMES), rng, x=text), text, language)
    key = rng.choice(_KEYS) if rng.random() < 0.7 else "".join(rng.choices(_LETTERS, k=rng.randint(2, 6)))
    question = expand(rng.choice(_EN_JSON if english else _ZH_JSON), rng, x=text, k=rng.choice([key, f'"{key}"']))
    return Exchange(question, to_json({key: text}), language)
