"""Templates and the ways in which people write the same sentence differently."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

_ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Call:
    """A call of a tool as the model shall write it, and what the tool returns."""

    name: str
    arguments: Mapping[str, str]
    result: str


@dataclass(frozen=True)
class Exchange:
    """One question of a user with the answer that the model shall give, after the calls of tools that it shall make;
    `language` is "en" or "zh"."""

    question: str
    answer: str
    language: str
    calls: tuple[Call, ...] = ()


def expand(template: str, rng: random.Random, **slots: object) -> str:
    """Fills one template: `[a|b|]` becomes one of its alternatives (they may nest), then `{name}` the slot's value."""
    while (match := _ALTERNATIVES.search(template)) is not None:
        choice = rng.choice(match.group(1).split("|"))
        template = template[: match.start()] + choice + template[match.end() :]
    for name, value in slots.items():
        template = template.replace("{" + name + "}", str(value))
    return re.sub(r"  +", " ", template).strip()


def ask(templates: Sequence[str], rng: random.Random, **slots: object) -> str:
    """Expands one of `templates` and gives it a capital letter at its start, as English has it."""
    text = expand(rng.choice(templates), rng, **slots)
    return text[:1].upper() + text[1:]


def _typo(text: str, rng: random.Random) -> str:
    """One slip of the finger inside one word of five letters or more; numbers and names of ports stay as they are."""
    words = [m for m in re.finditer(r"[A-Za-z]{5,}", text)]
    if not words:
        return text
    word = rng.choice(words)
    at = rng.randrange(word.start() + 1, word.end() - 1)
    kind = rng.randrange(3)
    if kind == 0:
        return text[:at] + text[at + 1 :]
    if kind == 1:
        return text[:at] + text[at] + text[at:]
    return text[:at] + text[at + 1] + text[at] + text[at + 2 :]


_EN_OPENERS = [
    "Hi, ", "Hello, ", "Hey, ", "Please ", "Excuse me, ", "Quick question: ", "So, ", "Ok, ", "Okay, ", "And ", "Now ",
    "Well, ", "One more: ", "I have a question. ", "I'd like to know: ", "Sorry, ", "Thanks. ", "Hmm, ", "Say, ",
    "Next question: ", "Question: ", "Also, ", "Then ", "Great. ", "Good. ", "My next question is ", "Actually, ",
]  # fmt: skip
_EN_CLOSERS = [
    " please", ", please", " Thanks!", " Thank you.", " thx", ", can you tell me", " exactly", " again", ", do you know",
    " then", " I forgot.", " by the way", ", my friend", " now", " I need it for work.", " in one sentence",
]  # fmt: skip
_ZH_OPENERS = [
    "请问", "你好，", "你好，请问", "嗨，", "那么，", "那", "我想知道", "麻烦问一下，", "再问一个，", "好的，", "请告诉我，",
    "不好意思，", "谢谢，", "嗯，", "对了，", "我想问一下，", "顺便问一下，", "还有，", "下一个问题：", "能不能告诉我",
]  # fmt: skip
_ZH_CLOSERS = ["呢", "呀", "啊", "，谢谢", "，请告诉我", "，你知道吗", "，我忘了", "，麻烦你了"]


_EN_BEFORE = [
    "I have an exam tomorrow.", "My friend wants to know this.", "We are doing a quiz.", "Let me ask you something.", "I am new here.", "I am curious.", "This is for my son.",
    "Just checking.", "Listen.", "One thing I always forget.", "I was asked this at school.", "Here is a question for you.", "Help me out here.", "Test number three.", "I read about it.",
    "My sister asked me.", "We talked about it yesterday.", "I am writing a report.", "It's for a game.", "Sorry to bother you.", "Let's go on.", "Fine.", "Nice to know.", "Interesting!",
]  # fmt: skip
_ZH_BEFORE = [
    "我明天要考试。", "我朋友想知道。", "我们在做测验。", "问你一件事。", "我是新来的。", "我很好奇。", "这是给孩子问的。", "随便问问。", "听好了。", "这个我总记不住。", "学校里有人问我。",
    "考你一题。", "帮帮忙。", "第三题。", "我在书上看到过。", "妹妹问我的。", "昨天我们聊到这个。", "我在写报告。", "做游戏用的。", "打扰一下。", "继续。", "好。", "有意思！", "再来一个。",
]  # fmt: skip
_EN_FILLERS = [
    "really",
    "actually",
    "just",
    "maybe",
    "now",
    "then",
    "exactly",
    "simply",
    "ever",
    "right",
    "still",
    "also",
    "kindly",
    "usually",
    "well",
]
_EN_DROPPED = {"the", "is", "of", "a", "me", "do", "does", "in", "to", "what", "are", "for", "you", "can", "there"}
_ZH_FILLERS = [
    "到底",
    "具体",
    "其实",
    "大概",
    "真的",
    "就",
    "一般",
    "现在",
    "又",
    "应该",
    "可能",
    "具体来说",
    "嘛",
    "这个",
    "那个",
]
_ZH_DROPPED = "的是了吗我你一下请个"
_NOISE_EN = [
    "blue",
    "table",
    "river",
    "seven",
    "window",
    "lamp",
    "quickly",
    "paper",
    "tomorrow",
    "green",
    "silver",
    "stone",
    "walks",
    "garden",
    "little",
    "morning",
]
_NOISE_ZH = "蓝桌河窗灯快纸绿银石走园小晨里面上边东西时候事情"


def _reword(text: str, rng: random.Random) -> str:
    """English with a word too much or too few: a filler, a word that does not belong there, a small word left out."""
    words = text.split(" ")
    kind = rng.random()
    if kind < 0.45:
        words.insert(rng.randint(1, len(words)), rng.choice(_EN_FILLERS))
    elif kind < 0.65:
        strange = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8)))
        words.insert(rng.randint(0, len(words)), rng.choice([rng.choice(_NOISE_EN), strange]))
    else:
        small = [i for i, word in enumerate(words) if word.lower() in _EN_DROPPED]
        if small and len(words) > 3:
            del words[rng.choice(small)]
    return " ".join(words)


def _reword_chinese(text: str, rng: random.Random) -> str:
    """The same for Chinese; what is put in never splits a number or a Latin word."""
    kind = rng.random()
    if kind < 0.65:
        inside = [i for i in range(1, len(text)) if not (text[i - 1].isascii() and text[i].isascii())]
        at = rng.choice(inside) if inside else len(text)
        strange = "".join(chr(rng.randint(0x4E00, 0x9FA5)) for _ in range(rng.randint(1, 2)))
        new = rng.choice(_ZH_FILLERS) if kind < 0.3 else rng.choice(["".join(rng.choices(_NOISE_ZH, k=2)), strange])
        return text[:at] + new + text[at:]
    small = [i for i, mark in enumerate(text) if mark in _ZH_DROPPED]
    if not small or len(text) < 5:
        return text
    at = rng.choice(small)
    return text[:at] + text[at + 1 :]


def vary(exchange: Exchange, rng: random.Random) -> Exchange:
    """The same exchange as another person might type it: openers, case, missing marks, slips of the finger."""
    text = exchange.question
    mark = text[-1] if text and text[-1] in "?？.。!！" else ""
    body = text[: len(text) - len(mark)]
    if exchange.language == "en":
        if rng.random() < 0.16:
            body = _reword(body, rng)
        if rng.random() < 0.07:
            body = rng.choice(_EN_BEFORE) + " " + body
        elif rng.random() < 0.14:
            body = rng.choice(_EN_OPENERS) + (body[:1].lower() + body[1:] if rng.random() < 0.8 else body)
        if rng.random() < 0.08:
            closer = rng.choice(_EN_CLOSERS)
            body, mark = (body + (mark or "?") + closer, "") if closer[1].isupper() else (body + closer, mark)
        if rng.random() < 0.10:
            body = _typo(body, rng)
        case = rng.random()
        if case < 0.30:
            body = body.lower()
        elif case < 0.32:
            body = body.upper()
        end = rng.random()
        if end < 0.30:
            mark = ""
        elif end < 0.36:
            mark = rng.choice(["?", ".", "!", "??", " ?", "...", "?!"])
        return replace(exchange, question=body + mark)
    if rng.random() < 0.16:
        body = _reword_chinese(body, rng)
    if rng.random() < 0.07:
        body = rng.choice(_ZH_BEFORE) + body
    elif rng.random() < 0.14:
        body = rng.choice(_ZH_OPENERS) + body
    if rng.random() < 0.08:
        body += rng.choice(_ZH_CLOSERS)
    end = rng.random()
    if end < 0.30:
        mark = ""
    elif end < 0.50:
        mark = {"？": "?", "。": ".", "！": "!"}.get(mark, mark)
    elif end < 0.55:
        mark = rng.choice(["？", "。", "！", "？？", "?"])
    return replace(exchange, question=body + mark)
