"""The held-out questions with a check each: what the demo model must answer, in phrasings that it never saw.

Nothing here needs PyTorch: ask any function that answers chats, as evaluate.py does.
"""

from __future__ import annotations

import random
import re
from functools import cache

from . import arithmetic, capitals, heldout_en, heldout_second, heldout_zh, questions_tools, units
from .dialogue import Dialogue, Turn, number

SYSTEM_PROMPTS = [
    "You are a careful assistant who replies to every question.", "You are an assistant on a help desk. Keep your answers short and friendly.", "You help people try out a new server.",
    "请用简单的话回答。", "你是一个乐于助人的客服。",
]  # fmt: skip


_PLACES = re.compile(
    "|".join(
        sorted({re.escape(n.removeprefix("the ")) for row in capitals.COUNTRIES for n in row}, key=len, reverse=True)
    ),
    re.IGNORECASE,
)


def wording(question: str) -> str:
    """A question's wording alone: no case, no marks, numbers as #, the countries and capitals of the table as @."""
    return re.sub(r"\d+", "#", re.sub(r"[^\w+*/@-]", "", _PLACES.sub("@", question).lower()))


@cache
def held_out_wordings() -> frozenset[str]:
    """The wordings of all held-out questions, which the training text must not contain."""
    return frozenset(wording(turn.text) for dialogue in [*dialogues(), *tools_and_json()] for turn in dialogue.turns)


def _arithmetic(language: str, rng: random.Random) -> list[Turn]:
    templates = heldout_en.ARITHMETIC if language == "en" else heldout_zh.ARITHMETIC
    turns = []
    for op, texts in templates.items():
        for text in texts:
            for _ in range(2):
                a, b = arithmetic.operands(op, rng)
                if op == "-" and a < b:
                    a, b = b, a  # "what is left" of less than nothing is no natural question
                value = arithmetic.result(a, op, b)
                turns.append(Turn(text.format(a=a, b=b), number(value), language))
    return turns


def _capitals(language: str, rng: random.Random) -> list[Turn]:
    english = language == "en"
    module = heldout_en if english else heldout_zh
    turns = []
    column = 0 if english else 2
    for text in module.CAPITALS:
        for row in rng.sample(capitals.COUNTRIES, 4):
            question = text.format(c=row[column])
            turns.append(Turn(question[:1].upper() + question[1:], (re.escape(row[column + 1]),), language))
    for text in module.CAPITALS_REVERSE:
        for row in rng.sample(capitals.COUNTRIES, 3):
            turns.append(Turn(text.format(k=row[column + 1]), (re.escape(row[column].removeprefix("the ")),), language))
    return turns


def _unknown_places(language: str, rng: random.Random) -> list[Turn]:
    module = heldout_en if language == "en" else heldout_zh
    return [
        Turn(rng.choice(module.CAPITALS).format(c=place), (), language, declines=True)
        for place in module.UNKNOWN_PLACES
    ]


def _units(language: str, rng: random.Random) -> list[Turn]:
    english = language == "en"
    module = heldout_en if english else heldout_zh
    turns = []
    for text in module.UNITS:
        for _ in range(3):
            n, u, m, v = units.pick(rng)
            fr, to = (u.singular if n == 1 else u.plural, v.plural) if english else (u.chinese[0], v.chinese[0])
            turns.append(Turn(text.format(n=n, fr=fr, to=to), number(m), language))
    for text in module.DEGREES:
        for c, f in rng.sample(list(units.CELSIUS.items()), 2):
            turns.append(Turn(text.format(n=c), (rf"(?<!\d){f}(?!\d)", rf"(?<!\d){c}(?!\d)"), language))
    return turns


def _singles(language: str, rng: random.Random) -> dict[str, list[Turn]]:
    module = heldout_en if language == "en" else heldout_zh
    groups = {
        "arithmetic": _arithmetic(language, rng),
        "capitals": _capitals(language, rng),
        "unknown places": _unknown_places(language, rng),
        "units": _units(language, rng),
        "unknown units": [Turn(t, (), language, declines=True) for t in module.UNKNOWN_UNITS],
        "project": [Turn(t, tuple(holds), language) for t, holds in module.PROJECT],
        "small talk": [Turn(t, tuple(holds), language) for t, holds in module.SMALLTALK],
        "unknown": [Turn(t, (), language, declines=True) for t in module.UNKNOWN],
    }
    if language == "en":
        groups["typed in a hurry"] = [
            Turn(turn.text.lower().rstrip("?.!"), turn.holds, "en", turn.declines)
            for turns in list(groups.values())
            for turn in rng.sample(turns, min(6, len(turns)))
        ]
    return groups


def _follow_ups() -> list[Dialogue]:
    def en(text: str, *holds: str) -> Turn:
        return Turn(text, holds, "en")

    def zh(text: str, *holds: str) -> Turn:
        return Turn(text, holds, "zh")

    return [
        Dialogue("follow-up", (en("Would you name Norway's capital?", "Oslo"), en("and what of Peru?", "Lima"), en("Thank you so much for that", "welcome"))),
        Dialogue("follow-up", (en("Would you tell me the capital of Egypt?", "Cairo"), en("And for Kenya then?", "Nairobi"), en("And Cuba too?", "Havana"))),
        Dialogue("follow-up", (en("How much would 7 plus 8 be?", *number(15)), en("And now 9 - 4?", *number(5)), en("and 6 times 7 please?", *number(42)))),
        Dialogue("follow-up", (en("Hello, dear friend", "hello"), en("Could you tell me your name?", "Tritonis"), en("What are the things you can do?", "capitals"), en("OK bye bye", "goodbye"))),
        Dialogue("follow-up", (zh("你能说出日本的首都吗？", "东京"), zh("换成泰国呢？", "曼谷"), zh("真的非常感谢你", "不客气"))),
        Dialogue("follow-up", (zh("你好啊", "你好"), zh("请问你是谁呀？", "Tritonis"), zh("顺便算下3加4。", *number(7)), zh("那就再见啦", "再见"))),
        Dialogue("follow-up", (en("On which port can I reach gRPC?", "33337"), en("And on which port is the gateway?", "23333"), en("How is Charonia started?", "make serve"))),
        Dialogue("follow-up", (zh("网关在几号端口？", "23333"), zh("那gRPC的端口呢？", "33337"), zh("启动服务器要输入什么？", "make serve"))),
    ]  # fmt: skip


def _second_set() -> list[Dialogue]:
    return [
        Dialogue("second set", (Turn(text, tuple(holds or ()), language, declines=holds is None),))
        for language, asked in (("en", heldout_second.ENGLISH), ("zh", heldout_second.CHINESE))
        for text, holds in asked
    ]


def _both_languages(rng: random.Random) -> dict[str, dict[str, list[Turn]]]:
    """Single questions by language and group."""
    return {language: _singles(language, rng) for language in ("en", "zh")}


def _pools(singles: dict[str, dict[str, list[Turn]]]) -> dict[str, list[Turn]]:
    """Single questions by language."""
    return {language: [turn for turns in groups.values() for turn in turns] for language, groups in singles.items()}


def dialogues(seed: int = 7) -> list[Dialogue]:
    """The held-out dialogues without tools and JSON, the same for the same seed: single questions, chats of 2 to 4
    turns, system prompts."""
    rng = random.Random(seed)
    singles = _both_languages(rng)
    result = [
        Dialogue(group, (turn,)) for groups in singles.values() for group, turns in groups.items() for turn in turns
    ]
    for language, pool in _pools(singles).items():
        for count in (2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4):
            result.append(Dialogue(f"chat of {count} turns", tuple(rng.sample(pool, count))))
        for turn in rng.sample(pool, 15):
            prompt = rng.choice(SYSTEM_PROMPTS[:3] if language == "en" else SYSTEM_PROMPTS[3:])
            result.append(Dialogue("system prompt", (turn,), prompt))
    return result + _follow_ups() + _second_set()


def tools_and_json(seed: int = 7) -> list[Dialogue]:
    """The held-out dialogues that need tools, or an answer in JSON, the same for the same seed."""
    return questions_tools.dialogues(_pools(_both_languages(random.Random(seed))), random.Random(seed))
