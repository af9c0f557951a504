"""Whole conversations: one to eight turns of mixed topics, with and without a system prompt, in the chat format."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from . import arithmetic, capitals, project, smalltalk, units, unknown
from .questions import held_out_wordings, wording
from .text import Exchange, vary

END = "<|end|>"
ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = [END, *ROLE_TOKENS.values(), "<|pad|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_SYSTEM_PROMPTS = [
    "You are a helpful assistant.", "You are Tritonis.", "You are a helpful, honest and friendly assistant.", "Answer briefly.", "Be concise.", "You are an AI assistant.",
    "You are the demo model of Charonia.", "Answer in one sentence.", "Be polite.", "You are a chatbot for testing.", "Help the user.", "You answer questions.",
    "You are a helpful assistant. Answer the user's questions as well as you can.", "Today is a good day. Be friendly.", "Respond politely and truthfully.",
    "You are a large language model. Follow the instructions carefully.", "You are a teacher who explains things simply.", "Always tell the truth.",
    "你是一个有用的助手。", "你是 Tritonis。", "请简短回答。", "你是一个友好的人工智能助手。", "请礼貌地回答用户的问题。", "你是Charonia的演示模型。", "回答用户的问题。",
    "你是一位耐心的老师。", "请如实回答。",
]  # fmt: skip

Source = Callable[[str, random.Random], Exchange]  # (language, rng)
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


def _never_held_out(source: Source, language: str, rng: random.Random) -> Exchange:
    """An exchange of `source`, varied; one that came out worded as a held-out question is drawn again."""
    while True:
        exchange = vary(source(language, rng), rng)
        if wording(exchange.question) not in held_out_wordings():
            return exchange


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
            result.append(_never_held_out(_FOLLOW_UPS[topic], language, rng))
            continue
        topic = rng.choices(_TOPICS, weights=_WEIGHTS)[0]
        result.append(_never_held_out(topic, language, rng))
    return result


def _shortened(answer: str, rng: random.Random) -> str:
    """A long last answer is cut in three of five cases: how it goes on is soon learned, and the time is better spent."""
    edges = [m.start() for m in re.finditer(r" |(?<=[。，：])", answer) if m.start() > (24 if answer.isascii() else 8)]
    return answer[: rng.choice(edges)] if len(edges) > 3 and rng.random() < 0.6 else answer


def sample(rng: random.Random) -> list[tuple[str, bool]]:
    """One training text as (text, learned) segments: the loss is taken on the learned ones, the answers and their end."""
    if rng.random() < 0.04:
        return [(_document_text(rng) + END, True)]
    segments: list[tuple[str, bool]] = []
    if rng.random() < 0.18:
        segments.append((ROLE_TOKENS["system"] + rng.choice(_SYSTEM_PROMPTS) + END, False))
    for exchange in exchanges(rng):
        segments.append((f"{ROLE_TOKENS['user']}{exchange.question.strip()}{END}{ROLE_TOKENS['assistant']}", False))
        segments.append((exchange.answer + END, True))
    return [*segments[:-1], (_shortened(segments[-1][0], rng), True)]
