"""The held-out questions that need tools, or an answer in JSON."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from . import arithmetic, capitals, heldout_en, heldout_tools, heldout_zh, tools, units
from .chat_format import to_json
from .dialogue import Dialogue, Turn, alone
from .text import Call

Pools = dict[str, list[Turn]]  # questions that need no tool, by language

# What tools say, and in Chinese
_SKIES = (
    ("rain", "下雨"),
    ("sunny", "晴"),
    ("cloudy", "多云"),
    ("light snow", "小雪"),
    ("fog", "有雾"),
    ("windy", "有风"),
)


def _offered(kinds: str, rng: random.Random) -> tuple[tools.Tool | None, tools.Tool | None, tuple[dict[str, Any], ...]]:
    """A tool for the weather (w), one that calculates (c) and others (o), as `kinds` says."""

    def guise(kind: str, listed: list[tuple[str, str, tuple[str, ...]]]) -> tools.Tool | None:
        return tools.Tool(*(chosen := rng.choice(listed)), main=chosen[2][0]) if kind in kinds else None

    weather, calculator = guise("w", heldout_tools.WEATHER_TOOLS), guise("c", heldout_tools.CALCULATOR_TOOLS)
    found = [tool for tool in (weather, calculator, guise("o", heldout_tools.OTHER_TOOLS)) if tool]
    rng.shuffle(found)
    return weather, calculator, tuple(tool.described() for tool in found)


def _weather(tool: tools.Tool, name: str, language: str, rng: random.Random) -> tuple[Call, tuple[str, ...]]:
    """The call for a place, and what the answer must hold."""
    sky, chinese = rng.choice(_SKIES)
    degrees = rng.randint(-9, 35)
    value: Any = {"place": name, "weather": sky, "temperature": degrees}
    result = to_json(value) if rng.random() < 0.75 else f"{sky}, {degrees} degrees"
    holds = (re.escape(name), sky if language == "en" else chinese, alone(degrees))
    return Call(tool.name, {tool.main: name}, result), holds


def _sum(tool: tools.Tool, expression: str, rng: random.Random) -> tuple[Call, tuple[str, ...]]:
    value = tools.value_of(expression)
    result = to_json({"result": float(value) if "." in value else int(value)}) if rng.random() < 0.7 else value
    return Call(tool.name, {tool.main: expression}, result), (alone(value),)


def _weather_turn(frame: str, tool: tools.Tool, language: str, rng: random.Random, count: int = 1) -> Turn:
    names = rng.sample(heldout_tools.PLACES[language], count)
    found = [_weather(tool, name, language, rng) for name in names]
    return _turn(frame.format(p=names[0], q=names[-1]), found, language)


def _sum_turn(frame: str, tool: tools.Tool, language: str, rng: random.Random, count: int = 1) -> Turn:
    asked = rng.sample(heldout_tools.SUMS[language], count)
    found = [_sum(tool, expression, rng) for _, expression in asked]
    return _turn(frame.format(e=asked[0][0], f=asked[-1][0]), found, language)


def _turn(text: str, found: list[tuple[Call, tuple[str, ...]]], language: str) -> Turn:
    """A question, the calls that it needs, and what the answer tells of each, one after the other."""
    holds = tuple("[\\s\\S]*".join(patterns) for patterns in zip(*(holds for _, holds in found), strict=True))
    return Turn(text, holds, language, calls=tuple(call for call, _ in found))


def _calls(language: str, rng: random.Random) -> list[Dialogue]:
    result = []
    for frame in heldout_tools.WEATHER[language] * 2:
        weather, _, offered = _offered(rng.choice(["w", "wc", "wco", "wo"]), rng)
        assert weather
        result.append(Dialogue("weather tool", (_weather_turn(frame, weather, language, rng),), tools=offered))
    for frame in heldout_tools.CALCULATE[language] * 3:
        _, calculator, offered = _offered(rng.choice(["c", "wc", "wco", "co"]), rng)
        assert calculator
        result.append(Dialogue("calculator tool", (_sum_turn(frame, calculator, language, rng),), tools=offered))
    for frame in heldout_tools.TWO_PLACES[language] * 2:
        weather, _, offered = _offered(rng.choice(["w", "wc"]), rng)
        assert weather
        result.append(Dialogue("two calls", (_weather_turn(frame, weather, language, rng, 2),), tools=offered))
    for frame in heldout_tools.TWO_SUMS[language] * 2:
        _, calculator, offered = _offered(rng.choice(["c", "wc"]), rng)
        assert calculator
        result.append(Dialogue("two calls", (_sum_turn(frame, calculator, language, rng, 2),), tools=offered))
    return result


def _chats(language: str, rng: random.Random) -> list[Dialogue]:
    """Follow-ups, a question without a place, and tools that fail."""
    result = []
    first = heldout_tools.WEATHER[language]
    for frame in heldout_tools.NEXT_PLACE[language] * 2:
        weather, calculator, offered = _offered("wc", rng)
        assert weather and calculator
        turns = [_weather_turn(rng.choice(first), weather, language, rng), _weather_turn(frame, weather, language, rng)]
        turns.append(_sum_turn(rng.choice(heldout_tools.CALCULATE[language]), calculator, language, rng))
        result.append(Dialogue("chat with tools", tuple(turns), tools=offered))
    for frame in heldout_tools.NO_WEATHER[language]:
        weather, _, offered = _offered("wc", rng)
        assert weather
        back = Turn(frame, ("place",) if language == "en" else ("地方",), language)
        turns = [back, _weather_turn(heldout_tools.JUST_PLACE[language], weather, language, rng)]
        result.append(Dialogue("chat with tools", tuple(turns), tools=offered))
    failed = ("could not",) if language == "en" else ("没有查到",)
    for frame in first[:4]:
        weather, _, offered = _offered("w", rng)
        assert weather
        name = rng.choice(heldout_tools.PLACES[language])
        result_text = rng.choice([to_json({"error": "the weather station is offline"}), f"error: KeyError: '{name}'"])
        call = Call(weather.name, {weather.main: name}, result_text)
        turn = Turn(frame.format(p=name), failed, language, calls=(call,))
        result.append(Dialogue("tool errors", (turn,), tools=offered))
    for frame in heldout_tools.CALCULATE[language][:3]:
        _, calculator, offered = _offered("c", rng)
        assert calculator
        asked, expression = rng.choice(heldout_tools.SUMS[language])
        call = Call(calculator.name, {calculator.main: expression}, to_json({"error": "the calculator is broken"}))
        result.append(
            Dialogue("tool errors", (Turn(frame.format(e=asked), failed, language, calls=(call,)),), tools=offered)
        )
    return result


def _no_calls(language: str, pool: list[Turn], rng: random.Random) -> list[Dialogue]:
    """Tools that are not needed, and questions that need a tool which is not offered."""
    needless = [turn for turn in pool if not turn.declines]
    result = [
        Dialogue("tools not needed", (turn,), tools=_offered(rng.choice(["w", "c", "wc", "wco"]), rng)[2])
        for turn in rng.sample(needless, 20)
    ]
    for kinds in ("", "o", "c"):
        for frame in rng.sample(heldout_tools.WEATHER[language], 4):
            text = frame.format(p=rng.choice(heldout_tools.PLACES[language]))
            turn = Turn(text, (), language, declines=True)
            result.append(Dialogue("tools not offered", (turn,), tools=_offered(kinds, rng)[2]))
    for kinds in ("", "o", "w"):
        for frame in rng.sample(heldout_tools.CALCULATE[language][:4], 2):
            text = frame.format(e=rng.choice(heldout_tools.SUMS[language][:6])[0])
            turn = Turn(text, (), language, declines=True, any_language=True)
            result.append(Dialogue("tools not offered", (turn,), tools=_offered(kinds, rng)[2]))
    return result


def _told(language: str, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A question, and what its answer in JSON tells, by the usual keys; what is usual comes last."""
    module = heldout_en if language == "en" else heldout_zh
    kind = rng.random()
    if kind < 0.4:
        row = rng.choice(capitals.COUNTRIES)
        country, capital = row[:2] if language == "en" else row[2:]
        return rng.choice(module.CAPITALS).format(c=country), {
            "country": country.removeprefix("the "),
            "capital": capital,
        }
    if kind < 0.75:
        op = rng.choice("+-*")
        a, b = sorted(arithmetic.operands(op, rng), reverse=True)
        return rng.choice(module.ARITHMETIC[op]).format(a=a, b=b), {
            "a": a,
            "b": b,
            "result": arithmetic.result(a, op, b),
        }
    n, u, m, v = units.pick(rng)
    english = language == "en"
    fr, to = (u.singular if n == 1 else u.plural, v.plural) if english else (u.chinese[0], v.chinese[0])
    unit = (v.singular if m == 1 else v.plural) if english else v.chinese[0]
    return rng.choice(module.UNITS).format(n=n, fr=fr, to=to), {"value": m, "unit": unit}


def _chosen(told: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Some of what is told, in any order."""
    if "a" in told and rng.random() < 0.5:
        return {rng.choice(["result", "answer", "solution"]): told["result"]}
    if "capital" in told and rng.random() < 0.3:
        return {"capital": told["capital"]}
    names = list(told)
    rng.shuffle(names)
    return {name: told[name] for name in names}


def _schema(wanted: dict[str, Any]) -> str:
    kinds = {key: {"type": "string" if isinstance(value, str) else "integer"} for key, value in wanted.items()}
    return json.dumps({"type": "object", "properties": kinds, "required": list(wanted)})


def _in_json(language: str, rng: random.Random) -> list[Dialogue]:
    result = []
    space, also = (" ", " and ") if language == "en" else ("", "和")
    for frame in heldout_tools.JSON_KEYS[language] * 5:
        question, told = _told(language, rng)
        wanted = _chosen(told, rng)
        keys = also.join([", ".join(list(wanted)[:-1]), list(wanted)[-1]]) if len(wanted) > 1 else next(iter(wanted))
        text = f"{question}{space}{frame.format(k=keys)}"
        result.append(Dialogue("JSON with keys", (Turn(text, (), language, json=to_json(wanted)),)))
    for frame in heldout_tools.JSON_PLAIN[language] * 5:
        question, told = _told(language, rng)
        wanted = {"result": told["result"]} if "result" in told else told
        result.append(Dialogue("JSON", (Turn(f"{question}{space}{frame}", (), language, json=to_json(wanted)),)))
    for frame in heldout_tools.JSON_SCHEMA[language] * 6:
        question, told = _told(language, rng)
        wanted = _chosen(told, rng)
        shown = frame.replace("{k}", _schema(wanted))
        inside = rng.random() < 0.5
        turn = Turn(question if inside else f"{question}{space}{shown}", (), language, json=to_json(wanted))
        result.append(Dialogue("JSON by a schema", (turn,), shown if inside else None))
    return result


def dialogues(pools: Pools, rng: random.Random) -> list[Dialogue]:
    """All of them; `pools` are the questions of the other groups, some of which come again where tools are offered."""
    result: list[Dialogue] = []
    for language, pool in pools.items():
        result += _calls(language, rng) + _chats(language, rng) + _no_calls(language, pool, rng)
        result += _in_json(language, rng)
    return result
