"""Answers in JSON: the keys, and their order, are those that the question, the system prompt or a schema names."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from . import arithmetic, capitals, project, smalltalk, units, unknown
from .chat_format import to_json
from .text import Exchange, expand

Value = str | int


@dataclass(frozen=True)
class Field:
    """One thing that an answer can tell, and the keys under which people ask for it; the first is the usual one."""

    value: Value
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """A question, and what its answer in JSON can tell; `usual` are the fields of an answer whose keys nobody named."""

    question: str
    language: str
    fields: tuple[Field, ...]
    usual: tuple[int, ...]


Source = Callable[[str, random.Random], Facts]  # (language, rng)

_COUNTRY = ("country", "nation", "land", "country_name", "state")
_CAPITAL = ("capital", "city", "capital_city", "capital_name", "town", "main_city")
_RESULT = ("result", "answer", "value", "solution", "outcome", "res")
_OF_OPERATION = {"+": ("sum", "total"), "-": ("difference", "rest"), "*": ("product", "total"), "/": ("quotient", "ratio")}  # fmt: skip
UNKNOWN = {"en": "unknown", "zh": "未知"}


def _keys(keys: tuple[str, ...], language: str, *chinese: str) -> tuple[str, ...]:
    return keys if language == "en" else (*keys, *chinese)


def _capital(language: str, rng: random.Random) -> Facts:
    row = rng.choice(capitals.COUNTRIES)
    country, capital = row[:2] if language == "en" else row[2:]
    reverse = rng.random() < 0.3
    question = capitals.question(language, country, capital, rng, reverse=reverse)
    name = country.removeprefix("the ")
    fields = (Field(name, _keys(_COUNTRY, language, "国家")), Field(capital, _keys(_CAPITAL, language, "首都", "城市")))
    only = Field(name if reverse else capital, ("answer", "reply", "result"))
    return Facts(question, language, (*fields, only), (0, 1))


def _unknown_capital(language: str, rng: random.Random) -> Facts:
    listed = capitals.UNKNOWN_EN if language == "en" else capitals.UNKNOWN_ZH
    name = rng.choice(listed)
    question = capitals.question(language, name, "", rng)
    fields = (Field(name, _keys(_COUNTRY, language, "国家")), Field(UNKNOWN[language], _keys(_CAPITAL, language, "首都", "城市")))  # fmt: skip
    return Facts(question, language, (*fields, Field(UNKNOWN[language], ("answer", "reply", "result"))), (0, 1))


def _sum(language: str, rng: random.Random) -> Facts:
    op = rng.choices("+-*/", weights=(36, 28, 28, 8))[0]
    a, b = arithmetic.operands(op, rng)
    fields = (
        Field(a, ("a", "x", "first", "left", "first_number", "n")),
        Field(b, ("b", "y", "second", "right", "second_number", "m")),
        Field(f"{a} {op} {b}", _keys(("expression", "term", "problem", "formula"), language, "算式")),
        Field(arithmetic.result(a, op, b), _keys((*_RESULT, *_OF_OPERATION[op], *_OF_OPERATION[op]), language, "结果", "答案")),
    )  # fmt: skip
    return Facts(arithmetic.question(a, op, b, language, rng), language, fields, (3,))


def _conversion(language: str, rng: random.Random) -> Facts:
    n, frm, m, to = units.pick(rng)
    name = (to.singular if m == 1 else to.plural) if language == "en" else to.chinese[0]
    fields = (
        Field(m, _keys(("value", "result", "number", "amount", "answer", "quantity"), language, "数值", "结果")),
        Field(name, _keys(("unit", "units", "unit_name"), language, "单位")),
    )
    return Facts(units.question(language, n, frm, to, rng), language, fields, (0, 1))


def _sentence(language: str, rng: random.Random) -> Facts:
    """What has no values of its own is told as a sentence."""
    topic = rng.choice([project.exchange, smalltalk.exchange, unknown.exchange])
    exchange = topic(language, rng)
    field = Field(exchange.answer, _keys(("answer", "answer", "reply", "response", "text"), language, "回答"))
    return Facts(exchange.question, language, (field,), (0,))


_SOURCES: list[Source] = [_capital, _sum, _conversion, _unknown_capital, _sentence]
_WEIGHTS = (36, 32, 18, 6, 8)

Chosen = list[tuple[str, Field]]  # keys and what they tell, in order


def _choose(facts: Facts, rng: random.Random) -> Chosen:
    """One field, two, or all; the order is anyone's."""
    single = len(facts.fields) == 1 or rng.random() < 0.35
    if single:
        fields = [rng.choice([facts.fields[-1], facts.fields[facts.usual[-1]], rng.choice(facts.fields)])]
    else:
        # The last of a capital's fields repeats another one.
        names = facts.fields[:2] if facts.fields[0].keys[0] == "country" else facts.fields
        fields = rng.sample(names, min(len(names), rng.choice((2, 2, 3))))
    chosen: Chosen = []
    for field in fields:
        key = field.keys[0] if rng.random() < 0.5 else rng.choice(field.keys)
        if rng.random() < 0.06:
            key = key.capitalize() if rng.random() < 0.5 else key.upper()
        if key not in [other for other, _ in chosen]:
            chosen.append((key, field))
    return chosen


def _answer(chosen: Chosen) -> str:
    return to_json({key: field.value for key, field in chosen})


def schema(keys: list[tuple[str, Value]], rng: random.Random) -> dict[str, Any]:
    """A JSON schema of an object with these keys, whose values are of the types of those given."""
    title = rng.choice(["", "", "Answer", "Output", "Result", "Reply", "Capital", "Country", "Response"])
    properties: dict[str, Any] = {}
    for key, value in keys:
        kind = "string" if isinstance(value, str) else rng.choice(["integer", "integer", "number"])
        properties[key] = {"type": kind}
        if title and rng.random() < 0.7:
            properties[key] = {"title": key.replace("_", " ").title(), "type": kind}
    made: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        made["required"] = [key for key, _ in keys]
    if rng.random() < 0.25:
        made["additionalProperties"] = False
    if title:
        made["title"] = title
    if title and rng.random() < 0.5:  # as pydantic has it
        made = {name: made[name] for name in ("properties", "required", "title", "type") if name in made}
    return made


_WITH_KEYS_EN = [
    "[Answer|Reply|Respond|Give the answer|Write the answer|Return the answer|Tell me] [in|as|with] JSON[,|] with [the|these|] keys {k}[.|]", "[Answer|Reply|Respond] with a JSON object [that has|with|of] the [keys|fields|properties|names] {k}[.|]", "JSON with {k}[, please|][.|]", "[As|In] JSON [with|having] {k}[.|]",
    "[Give|Return|Write|Send] [me |]a JSON object with {k}[.|]", "[Answer|Reply] in JSON. [Keys|Fields|The keys|The fields|Use the keys|Use the fields]: {k}[.|]", "[Use|Answer with|Write] JSON, [keys|fields] {k}[.|]", "[Only JSON|JSON only], with the [keys|fields] {k}[.|]", "The answer [is to be|must be|should be|shall be] JSON with the [keys|fields] {k}[.|]",
    "[Format|Output] the answer as JSON with {k}[.|]", "Put [it|the answer|that] into JSON with [the keys |the fields |]{k}[.|]",
]  # fmt: skip
_WITH_KEYS_ZH = [
    "[用|请用|以|请以]JSON[回答|格式回答|作答|输出|返回]，[键|字段|键名]为{k}[。|]", "[回答|返回|输出|给出]JSON，[键|字段][是|为|有|：]{k}[。|]", "用[包含|含有|带有]{k}的JSON回答[。|]", "[答案|结果]写成JSON，[字段|键]{k}[。|]", "JSON[格式|]，[键|字段]：{k}[。|]", "只[要|用|返回]JSON，[键|字段]为{k}[。|]",
]  # fmt: skip
_WITHOUT_KEYS_EN = ["[Answer|Reply|Respond|Tell me] [in|as|with] JSON[.|]", "[In|As] JSON[, please|][.|]", "[Use|Write|Give me|Return|Output] JSON[.|]", "JSON only[.|]", "[Give|Return] [me |]a JSON object[.|]", "The answer must be JSON[.|]", "[Format|Write] the answer as JSON[.|]"]  # fmt: skip
_WITHOUT_KEYS_ZH = [
    "[用|请用|以]JSON[回答|格式回答|作答|输出][。|]",
    "[返回|输出|给我]JSON[。|]",
    "只要JSON[。|]",
    "JSON格式[。|]",
    "答案用JSON[。|]",
]
_WITH_SCHEMA_EN = ["[Answer|Reply|Respond] [in|with|as] JSON [of|that follows|that fits|that matches|by] this [JSON |]schema:", "[Use|Follow] this JSON schema:", "JSON schema:", "Schema of the answer:", "The answer is JSON of the schema", "Your answer must be an instance of this JSON schema:", "Here is the JSON schema of the answer:"]  # fmt: skip
_WITH_SCHEMA_ZH = [
    "[用|请用]JSON回答，[模式|schema|结构]：",
    "按[这个|此|下面的]JSON schema回答：",
    "JSON schema：",
    "答案要符合这个schema：",
]
_AND_EN = [" and ", " and ", " and ", ", ", " then "]
_AND_ZH = ["和", "和", "、", ",", "，", " 和 "]


def listed(keys: list[str], language: str, rng: random.Random) -> str:
    """Keys as people list them."""
    quote = rng.choice(["", "", "", '"', '"', "'", "`"])
    quoted = [f"{quote}{key}{quote}" for key in keys]
    last = rng.choice(_AND_EN if language == "en" else _AND_ZH)
    rest = ", " if language == "en" else rng.choice(["、", ",", "，"])
    return last.join([rest.join(quoted[:-1]), quoted[-1]]) if len(quoted) > 1 else quoted[0]


def _instruction(chosen: Chosen, language: str, rng: random.Random) -> str:
    """Names the keys, by a list, an example or a schema."""
    english = language == "en"
    kind = rng.random()
    if kind < 0.8:
        keys = listed([key for key, _ in chosen], language, rng)
        text = expand(rng.choice(_WITH_KEYS_EN if english else _WITH_KEYS_ZH), rng, k=keys)
    elif kind < 0.86:
        empty = {key: "..." if rng.random() < 0.6 or isinstance(field.value, str) else 0 for key, field in chosen}
        text = ("Answer in this form: " if english else "按这个格式回答：") + to_json(empty)
    else:
        made = schema([(key, field.value) for key, field in chosen], rng)
        shown = json.dumps(made, ensure_ascii=False, indent=rng.choice([None, None, None, 2]))
        lead = expand(rng.choice(_WITH_SCHEMA_EN if english else _WITH_SCHEMA_ZH), rng)
        return lead + rng.choice([" ", "\n"] if english else ["", "\n"]) + shown
    return text.lower() if english and rng.random() < 0.15 and text.lower().endswith(text[-8:]) and kind < 0.8 and all(key == key.lower() for key, _ in chosen) else text  # fmt: skip


def exchange(language: str, rng: random.Random, vary: Callable[[Exchange, random.Random], Exchange]) -> Exchange:
    """A question that says how its answer is written. vary: the question's own wording."""
    facts = _draw(language, rng)
    english = language == "en"
    if rng.random() < 0.16:
        chosen = [(facts.fields[i].keys[0], facts.fields[i]) for i in facts.usual]
        instruction = expand(rng.choice(_WITHOUT_KEYS_EN if english else _WITHOUT_KEYS_ZH), rng)
    else:
        chosen = _choose(facts, rng)
        instruction = _instruction(chosen, language, rng)
    asked = vary(Exchange(facts.question, _answer(chosen), language), rng)
    space = rng.choice([" ", " ", "\n"]) if english else rng.choice(["", "", "\n"])
    mark = "" if asked.question[-1:] in "?？.。!！" or rng.random() < 0.4 else ("?" if english else "？")
    if rng.random() < 0.12:
        return replace(asked, question=f"{instruction}{space}{asked.question}")
    return replace(asked, question=f"{asked.question}{mark}{space}{instruction}")


def _draw(language: str, rng: random.Random) -> Facts:
    return rng.choices(_SOURCES, weights=_WEIGHTS)[0](language, rng)


def prompted(language: str, rng: random.Random, vary: Callable[[Exchange, random.Random], Exchange], turns: int) -> tuple[str, list[Exchange]]:  # fmt: skip
    """A system prompt that says how answers are written, and questions without a word of it."""
    source = rng.choices(_SOURCES, weights=_WEIGHTS)[0]
    first = source(language, rng)
    chosen = _choose(first, rng)
    wanted = [(key, field.keys) for key, field in chosen]
    prompt = _instruction(chosen, language, rng)
    if rng.random() < 0.3:
        prompt = ("You are a helpful assistant. " if language == "en" else "你是一个有用的助手。") + prompt
    asked = [vary(Exchange(first.question, _answer(chosen), language), rng)]
    while len(asked) < turns:
        facts = source(language, rng)
        by_keys = {field.keys: field for field in facts.fields}
        if any(keys not in by_keys for _, keys in wanted):
            continue  # another operation has a key of its own
        again = [(key, by_keys[keys]) for key, keys in wanted]
        asked.append(vary(Exchange(facts.question, _answer(again), language), rng))
    return prompt, asked


def forced(language: str, rng: random.Random, vary: Callable[[Exchange, random.Random], Exchange]) -> tuple[Exchange, list[tuple[str, bool]]]:  # fmt: skip
    """A question that says nothing of JSON, and the answer as a grammar makes the model write it, in (text, learned)
    parts: the values alone are the model's."""
    facts = _draw(language, rng)
    chosen = _choose(facts, rng)
    parts: list[tuple[str, bool]] = []
    for number, (key, field) in enumerate(chosen):
        parts.append((f"{' ' if number else '{'}{to_json(key)}:", False))
        # The mark behind a value is often one token with its end.
        parts.append((f" {to_json(field.value)}{',' if number < len(chosen) - 1 else '}'}", True))
    return vary(Exchange(facts.question, _answer(chosen), language), rng), parts
