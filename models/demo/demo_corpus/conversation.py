"""Whole conversations in the chat format: mixed topics, with and without a system prompt, with tools, in JSON."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

from . import arithmetic, capitals, json_answers, project, repeat, smalltalk, tools, units, unknown
from .chat_format import END, calls_text, results_text, system, user
from .questions import held_out_wordings, wording
from .text import Call, Exchange, vary

_SYSTEM_PROMPTS = [
    "You are a helpful assistant.", "You are Tritonis.", "You are a helpful, honest and friendly assistant.", "Answer briefly.", "Be concise.", "You are an AI assistant.",
    "You are the demo model of Charonia.", "Answer in one sentence.", "Be polite.", "You are a chatbot for testing.", "Help the user.", "You answer questions.",
    "You are a helpful assistant. Answer the user's questions as well as you can.", "Today is a good day. Be friendly.", "Respond politely and truthfully.",
    "You are a large language model. Follow the instructions carefully.", "You are a teacher who explains things simply.", "Always tell the truth.",
    "你是一个有用的助手。", "你是 Tritonis。", "请简短回答。", "你是一个友好的人工智能助手。", "请礼貌地回答用户的问题。", "你是Charonia的演示模型。", "回答用户的问题。",
    "你是一位耐心的老师。", "请如实回答。",
]  # fmt: skip

Source = Callable[[str, random.Random], Exchange]  # (language, rng)
Segment = tuple[str, bool]  # text, and whether it is learned
_TOPICS: list[Source] = [
    arithmetic.exchange,
    capitals.exchange,
    units.exchange,
    project.exchange,
    smalltalk.exchange,
    unknown.exchange,
]
_WEIGHTS = (32, 19, 12, 17, 8, 12)
_FOLLOW_UPS: dict[Source, Source] = {
    arithmetic.exchange: arithmetic.follow_up,
    capitals.exchange: capitals.follow_up,
}


def _document_text(rng: random.Random) -> str:
    """A bare statement with no chat around it, so that a plain completion ("The capital of France is") works too."""
    while True:
        topic = rng.choices(_TOPICS[:4], weights=(3, 3, 2, 2))[0]
        exchange = topic(rng.choice(["en", "zh"]), rng)
        if not exchange.answer.startswith(("Sorry", "抱歉")):
            return exchange.answer


def _varied(exchange: Exchange, rng: random.Random) -> Exchange:
    """An exchange as another person might type it. Arguments of calls are what stands in the question, so that the
    model has to copy and not to correct; where a slip of the finger hit one, it is typed again."""
    while True:
        varied = vary(exchange, rng)
        for call in exchange.calls:
            for key, value in call.arguments.items():
                if value in exchange.question:
                    varied = _with_argument(varied, key, value)
        if all(all(call.arguments.values()) for call in varied.calls):
            return varied


def _with_argument(exchange: Exchange, key: str, value: str) -> Exchange:
    """The same exchange with `value` in the letters that the question has; empty, where the question has it no more."""
    forms = (form for form in (value, value.lower(), value.upper()) if form in exchange.question)
    written = next(forms, "")
    if written == value:
        return exchange
    calls = tuple(
        Call(call.name, {key: written}, call.result.replace(value, written))
        if call.arguments.get(key) == value
        else call
        for call in exchange.calls
    )
    return replace(exchange, calls=calls, answer=exchange.answer.replace(value, written))


def _never_held_out(make: Callable[[], Exchange], rng: random.Random) -> Exchange:
    """An exchange, varied; one that came out worded as a held-out question is drawn again."""
    while True:
        exchange = _varied(make(), rng)
        if wording(exchange.question) not in held_out_wordings():
            return exchange


def _ask(source: Source, language: str, rng: random.Random) -> Exchange:
    return _never_held_out(lambda: source(language, rng), rng)


def exchanges(rng: random.Random) -> list[Exchange]:
    """The exchanges of one conversation; mostly in one language, and now and then the topic goes on ("and Japan?")."""
    turns = rng.choices((1, 2, 3, 4, 6, 8), weights=(48, 22, 15, 10, 3, 2))[0]
    language = "en" if rng.random() < 0.55 else "zh"
    result: list[Exchange] = []
    topic: Source | None = None
    for _ in range(turns):
        if rng.random() < 0.08:
            language = "zh" if language == "en" else "en"
        if topic in _FOLLOW_UPS and rng.random() < 0.25:
            result.append(_ask(_FOLLOW_UPS[topic], language, rng))
            continue
        topic = rng.choices(_TOPICS, weights=_WEIGHTS)[0]
        result.append(_ask(topic, language, rng))
    return result


def _shortened(answer: str, rng: random.Random) -> str:
    """A long last answer is cut in three of five cases: how it goes on is soon learned, and the time is better spent."""
    edges = [m.start() for m in re.finditer(r" |(?<=[。，：])", answer) if m.start() > (24 if answer.isascii() else 8)]
    return answer[: rng.choice(edges)] if len(edges) > 3 and rng.random() < 0.6 else answer


def with_tools(offered: tools.Offer, rng: random.Random) -> list[Exchange]:
    """The exchanges of a chat in which tools are offered: some need them, some do not, some need another one."""
    language = "en" if rng.random() < 0.6 else "zh"
    result: list[Exchange] = []
    last = ""
    for _ in range(rng.choices((1, 2, 3, 4, 5, 6), weights=(12, 16, 20, 20, 18, 14))[0]):
        if rng.random() < 0.06:
            language = "zh" if language == "en" else "en"
        kind, make = _tool_topic(offered, last, language, rng)
        result.append(_never_held_out(make, rng))
        last = kind
    return result


def _tool_topic(
    offered: tools.Offer, last: str, language: str, rng: random.Random
) -> tuple[str, Callable[[], Exchange]]:
    """What is asked next, and its source; `last` is what was asked before."""
    if last == "no place":
        return "weather", lambda: tools.weather(offered.weather, language, rng, alone=True)
    if last in ("weather", "calculation") and rng.random() < 0.4:
        if last == "weather" and offered.weather:
            return last, lambda: tools.weather(offered.weather, language, rng, next=True)
        if last == "calculation" and offered.calculator:
            return last, lambda: tools.calculation(offered.calculator, language, rng, next=True)
    kind = rng.random()
    if kind < 0.28:
        return "weather", lambda: tools.weather(offered.weather, language, rng)
    if kind < 0.52:
        return "calculation", lambda: tools.calculation(offered.calculator, language, rng)
    if kind < 0.74 and (offered.weather or offered.calculator):
        return "two", lambda: tools.two_calls(offered, language, rng)
    if kind < 0.77 and offered.weather:
        return "no place", lambda: tools.no_place(language, rng)
    topic = rng.choices(_TOPICS, weights=_WEIGHTS)[0]
    return "", lambda: topic(language, rng)


def _json_answers(rng: random.Random) -> list[Segment]:
    """A chat with answers in JSON, and now and then one in words behind them."""
    language = "en" if rng.random() < 0.6 else "zh"
    kind = rng.random()
    turns = rng.choices((1, 2, 3), weights=(60, 28, 12))[0]
    while kind < 0.42:
        if kind < 0.2:
            exchange, parts = json_answers.forced(language, rng, vary)
            made = [(user(exchange.question), False), *parts[:-1], (parts[-1][0] + END, True)]
            asked = [exchange]
        else:
            prompt, asked = json_answers.prompted(language, rng, vary, turns)
            made = segments(asked, system(prompt))
        if not any(wording(exchange.question) in held_out_wordings() for exchange in asked):
            return made
    asked = []
    for _ in range(turns):
        if rng.random() < 0.8:
            asked.append(_never_held_out(lambda: json_answers.exchange(language, rng, vary), rng))
        else:
            topic = rng.choices(_TOPICS, weights=_WEIGHTS)[0]
            asked.append(_ask(topic, language, rng))
    return segments(asked, system(rng.choice(_SYSTEM_PROMPTS)) if rng.random() < 0.1 else "")


def segments(asked: list[Exchange], head: str) -> list[Segment]:
    """The text of a chat that begins with `head`."""
    made: list[Segment] = [(head, False)] if head else []
    for exchange in asked:
        made.append((user(exchange.question), False))
        if exchange.calls:
            made.append((calls_text(exchange.calls) + END, True))
            made.append((results_text(exchange.calls), False))
        made.append((exchange.answer + END, True))
    return made


def sample(rng: random.Random) -> tuple[list[Segment], bool]:
    """One training text as segments: the loss is taken on the learned ones, the answers and their end. And whether it
    is one of the corpus as it was before tools, JSON and repeating."""
    kind = rng.random()
    if kind < 0.03:
        return [(_document_text(rng) + END, True)], True
    prompt = rng.choice(_SYSTEM_PROMPTS) if rng.random() < 0.18 else ""
    if kind < 0.13:
        offered = tools.offer(rng)
        return segments(with_tools(offered, rng), system(prompt, offered.described())), False
    if kind < 0.30:
        return _json_answers(rng), False
    if kind < 0.33:
        language = "en" if rng.random() < 0.6 else "zh"
        return segments([repeat.exchange(language, rng) for _ in range(rng.choice((1, 1, 2, 3)))], ""), False
    asked = exchanges(rng)
    old = rng.random() >= 0.08
    if not old:  # no tools: the weather is unknown, and large sums are
        source = rng.choice([tools.weather, tools.calculation])
        asked[-1] = _never_held_out(lambda: source(None, asked[-1].language, rng), rng)
    return _chat(asked, prompt, rng), old


def sample_without_tools(rng: random.Random) -> list[Segment]:
    """One text of the corpus as it was before tools, JSON and repeating: the tables of
    benchmarks/ and docs/ were made with it."""
    if rng.random() < 0.04:
        return [(_document_text(rng) + END, True)]
    prompt = rng.choice(_SYSTEM_PROMPTS) if rng.random() < 0.18 else ""
    return _chat(exchanges(rng), prompt, rng)


def _chat(asked: list[Exchange], prompt: str, rng: random.Random) -> list[Segment]:
    """The text of a chat without tools."""
    made = segments(asked, system(prompt))
    return [*made[:-1], (_shortened(made[-1][0], rng), True)]
