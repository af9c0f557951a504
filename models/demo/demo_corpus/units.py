"""Unit conversions with small whole numbers, and units that the model does not know."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .arithmetic import chinese_number, english_number
from .text import Exchange, ask


@dataclass(frozen=True)
class Unit:
    """A unit's English names (the first two are singular and plural of the answers) and Chinese names (first: answers)."""

    singular: str
    plural: str
    others: tuple[str, ...]
    chinese: tuple[str, ...]


def _unit(english: str, chinese: str) -> Unit:
    names = english.split(",")
    return Unit(names[0], names[1], tuple(names[2:]), tuple(chinese.split(",")))


KM = _unit("kilometre,kilometres,km,kilometers", "公里,千米,km")
M = _unit("metre,metres,m,meters", "米,m")
CM = _unit("centimetre,centimetres,cm,centimeters", "厘米,cm,公分")
MM = _unit("millimetre,millimetres,mm,millimeters", "毫米,mm")
KG = _unit("kilogram,kilograms,kg,kilos", "千克,公斤,kg")
G = _unit("gram,grams,g", "克,g")
T = _unit("tonne,tonnes,t,tons", "吨")
L = _unit("litre,litres,l,liters", "升,L")
ML = _unit("millilitre,millilitres,ml,milliliters", "毫升,ml")
HOUR = _unit("hour,hours,h", "小时,个小时,钟头")
MINUTE = _unit("minute,minutes,min", "分钟,分")
SECOND = _unit("second,seconds,s", "秒,秒钟")
DAY = _unit("day,days", "天,日")
WEEK = _unit("week,weeks", "周,星期,个星期")
YEAR = _unit("year,years", "年")
MONTH = _unit("month,months", "个月,月")

# (larger, smaller, factor, largest count of the larger)
CONVERSIONS: list[tuple[Unit, Unit, int, int]] = [
    (KM, M, 1000, 20), (M, CM, 100, 20), (M, MM, 1000, 10), (CM, MM, 10, 20), (KG, G, 1000, 20), (T, KG, 1000, 10),
    (L, ML, 1000, 10), (HOUR, MINUTE, 60, 12), (MINUTE, SECOND, 60, 12), (DAY, HOUR, 24, 10), (WEEK, DAY, 7, 12),
    (YEAR, MONTH, 12, 10),
]  # fmt: skip
CELSIUS = {0: 32, 5: 41, 10: 50, 15: 59, 20: 68, 25: 77, 30: 86, 35: 95, 40: 104, 50: 122, 100: 212}

_EN_FRAMES = [
    "[i want|i need|we need|please give me|can I have|show me] {n} {fr} [in|as|turned into] {to}.", "{n} {fr} [correspond to|are the same as|is the same as|come out as|amount to] how many {to}?", "how many {to} [go into|go in|are inside|belong to|equal|match|correspond to] {n} {fr}?",
    "[say|suppose|imagine|assume|if] [I have|there are|we have|it takes] {n} {fr}[:|,] how many {to} [is that|are that|is it|would it be]?", "{n} {fr}, [how many|what is that in|how much in] {to}?", "the number of {to} in {n} {fr}?", "[could|would|will] you [tell|give|show|say] [me|us] {n} {fr} in {to}?",
    "[calculate|compute|find|get|measure] {n} {fr} in {to}.", "what number of {to} [is|are|makes] {n} {fr}?", "I [want|wish|have] to [convert|change|turn] {n} {fr} [to|into] {to}.", "from {fr} to {to}: {n}", "{n} {fr} would be how many {to}?", "[is|are] {n} {fr} many {to}? How many?", "{to} per {n} {fr}?",
    "how many {to} are [there|] in {n} {fr}?", "how many {to} [in|are|is|make|make up|make up] {n} {fr}?", "convert {n} {fr} [to|into] {to}.",
    "{n} {fr} in {to}?", "{n} {fr} to {to}", "what is {n} {fr} in {to}?", "{n} {fr} [is|are|equals|makes] how many {to}?",
    "[can|could] you convert {n} {fr} [to|into] {to}?", "how many {to} [does {n} {fr} have|do {n} {fr} have]?",
    "[please|] [express|write|give|change] {n} {fr} [in|as|into] {to}.", "{n} {fr} = ? {to}", "{n} {fr} -> {to}",
    "[tell me|I want to know|do you know] how many {to} {n} {fr} [are|is|have|make][.|?]", "turn {n} {fr} into {to}.",
    "how much is {n} {fr} in {to}?", "what do {n} {fr} make in {to}?", "what are {n} {fr} in {to}?",
    "I have {n} {fr}. How many {to} is that?", "unit conversion: {n} {fr} to {to}.", "in {to}, what is {n} {fr}?",
    "how many {to} do I get from {n} {fr}?", "{n} {fr} expressed in {to}?", "[something|it|this] is {n} {fr} long. How many {to}?",
    "how long is {n} {fr} in {to}?", "count {n} {fr} in {to}.", "what's {n} {fr} in {to}?",
]  # fmt: skip
_ZH_FRAMES = [
    "{n}{fr}[到底|一共|总共|大概|应该|全部][是|有|等于|合][多少|几]{to}？", "[我有|假如有|假设有|要是有|这里有]{n}{fr}，[等于|是|换成|那么是][多少|几]{to}？", "[能不能|可不可以|可以|能否|麻烦]把{n}{fr}[换成|变成|换算为|转为|化为]{to}[吗|]？", "{n}{fr}[变成|换为|化成|改成|算成]{to}[是|等于|得|有][多少|几]？",
    "{n}{fr}[是不是|有没有]很多{to}，多少？", "[请问|告诉我|说说|问]{n}{fr}[是|等于|有][多少|几]{to}。", "[换算|算算|求|计算]{n}{fr}[是|等于][多少|几]{to}。", "{n}{fr}[折成|折为|换得|可换成|就是]多少{to}？", "用{to}来算，{n}{fr}是多少？", "{n}{fr}对应多少{to}？",
    "{n}{fr}等于[多少|几]{to}？", "{n}{fr}是[多少|几]{to}？", "{n}{fr}有[多少|几]{to}？", "{n}{fr}[换算成|换成|转换成|折合]{to}[是多少|]？",
    "把{n}{fr}[换算成|换成|转换为|化成]{to}。", "[请|帮我]把{n}{fr}[换算成|换成|转成]{to}。", "{n}{fr}[合|为|=]多少{to}？", "{n}{fr}等于多少个{to}？",
    "[多少|几]{to}等于{n}{fr}？", "{n}{fr}用{to}表示是多少？", "{n}{fr}里有多少{to}？", "{n}{fr}=？{to}", "你知道{n}{fr}[是|等于]多少{to}吗？",
    "单位换算：{n}{fr}等于多少{to}？", "{n}{fr}一共有多少{to}？", "我想知道{n}{fr}是多少{to}。", "{n}{fr}能换多少{to}？",
    "{n}{fr}，换成{to}是多少？", "算一下{n}{fr}是多少{to}。", "{n}{fr}相当于多少{to}？",
]  # fmt: skip
_EN_DEGREES = [
    "what is {n} {fr} in {to}?", "convert {n} {fr} [to|into] {to}.", "{n} {fr} in {to}?", "{n} {fr} to {to}",
    "how many {to} [is|are] {n} {fr}?", "how much is {n} {fr} in {to}?", "[express|give me] {n} {fr} in {to}.",
    "[can you|please] convert {n} {fr} to {to}.", "it is {n} {fr}. What is that in {to}?", "what's {n} {fr} in {to}?",
]  # fmt: skip
_ZH_DEGREES = [
    "{fr}{n}度等于{to}多少度？", "{fr}{n}度是{to}多少度？", "把{fr}{n}度换算成{to}。", "{fr}{n}度换成{to}是多少？", "{fr}{n}度是多少{to}度？",
    "请把{fr}{n}度转换成{to}度。", "{fr}{n}度用{to}表示是多少？",
]  # fmt: skip

NOT_KNOWN_EN = "Sorry, I do not know how to convert that. I convert metric lengths, weights and volumes, times, and Celsius to Fahrenheit."
NOT_KNOWN_ZH = "抱歉，这个换算我不知道。我会换算公制的长度、重量和容量，还有时间和摄氏华氏温度。"
_EN_STRANGE = [
    "miles",
    "inches",
    "feet",
    "yards",
    "pounds",
    "ounces",
    "gallons",
    "acres",
    "watts",
    "dollars",
    "euros",
    "stones",
    "volts",
    "bytes",
    "pixels",
    "pints",
    "hectares",
    "knots",
    "joules",
    "calories",
    "pascals",
    "parsecs",
    "newtons",
    "furlongs",
    "yen",
    "carats",
    "barrels",
    "bushels",
    "amperes",
    "horsepower",
]
_ZH_STRANGE = [
    "英里",
    "英寸",
    "英尺",
    "磅",
    "盎司",
    "加仑",
    "英亩",
    "瓦",
    "美元",
    "欧元",
    "伏特",
    "字节",
    "像素",
    "海里",
    "焦耳",
    "卡路里",
    "亩",
    "尺",
    "光年",
    "日元",
    "帕斯卡",
    "牛顿",
    "马力",
    "克拉",
]


def _number(n: int, language: str, rng: random.Random) -> str:
    if rng.random() > 0.15 or n > 20:
        return str(n)
    if language == "en":
        return english_number(n)
    return "两" if n == 2 else chinese_number(n)


def english_answer(n: int, frm: Unit, m: int, to: Unit) -> str:
    verb = "is" if n == 1 else "are"
    return f"{n} {frm.singular if n == 1 else frm.plural} {verb} {m} {to.singular if m == 1 else to.plural}."


def chinese_answer(n: int, frm: Unit, m: int, to: Unit) -> str:
    return f"{n}{frm.chinese[0]}等于{m}{to.chinese[0]}。"


def pick(rng: random.Random) -> tuple[int, Unit, int, Unit]:
    """(n, unit, m, other unit) with n units = m other units; one in four goes from the smaller to the larger."""
    large, small, factor, top = rng.choice(CONVERSIONS)
    n = rng.randint(1, top)
    if rng.random() < 0.25:
        return n * factor, small, n, large
    return n, large, n * factor, small


def _ask_english(n: int, frm: Unit, to: Unit, rng: random.Random) -> str:
    name = frm.singular if n == 1 else frm.plural
    fr = name if rng.random() < 0.6 or not frm.others else rng.choice(frm.others)
    target = to.plural if rng.random() < 0.6 or not to.others else rng.choice(to.others)
    number = "[a|one]" if n == 1 and rng.random() < 0.3 else _number(n, "en", rng)
    question = ask(_EN_FRAMES, rng, n=ask([number], rng).lower(), fr=fr, to=target)
    return question.replace(" km", "km", 1) if fr == "km" and rng.random() < 0.4 else question


def question(language: str, n: int, frm: Unit, to: Unit, rng: random.Random) -> str:
    """Asks how much `n` of one unit is in another."""
    if language == "en":
        return _ask_english(n, frm, to, rng)
    return ask(_ZH_FRAMES, rng, n=_number(n, "zh", rng), fr=rng.choice(frm.chinese), to=rng.choice(to.chinese))


def _strange(language: str, rng: random.Random) -> Exchange:
    """A conversion with a unit that the model does not know."""
    n = rng.randint(1, 50)
    english = language == "en"
    strange = _EN_STRANGE if english else _ZH_STRANGE
    names = [u.plural if english else u.chinese[0] for pair in CONVERSIONS for u in pair[:2]]
    frm, to = rng.choice(strange), rng.choice(strange + names)
    if rng.random() < 0.4:
        frm, to = rng.choice(names), frm
    asked = ask(_EN_FRAMES if english else _ZH_FRAMES, rng, n=n, fr=frm, to=to)
    return Exchange(asked, NOT_KNOWN_EN if english else NOT_KNOWN_ZH, language)


def _temperature(language: str, rng: random.Random) -> Exchange:
    """Celsius to Fahrenheit, and one time in three back."""
    c, f = rng.choice(list(CELSIUS.items()))
    back = rng.random() < 0.35
    if language == "en":
        sides = [["degrees Celsius", "Celsius", "°C", "degrees C"], ["Fahrenheit", "degrees Fahrenheit", "°F"]]
        if back:
            sides.reverse()
        asked = ask(_EN_DEGREES, rng, n=f if back else c, fr=rng.choice(sides[0]), to=rng.choice(sides[1]))
        ends = [f"{c} degrees Celsius", f"{f} degrees Fahrenheit"]
        return Exchange(asked, f"{ends[back]} are {ends[not back]}.", "en")
    a, b, x, y = ("华氏", "摄氏", f, c) if back else ("摄氏", "华氏", c, f)
    return Exchange(ask(_ZH_DEGREES, rng, n=x, fr=a, to=b), f"{a}{x}度等于{b}{y}度。", "zh")


def exchange(language: str, rng: random.Random) -> Exchange:
    """One conversion; one in six with a unit that the model does not know, one in eight a temperature."""
    kind = rng.random()
    if kind < 0.17:
        return _strange(language, rng)
    if kind < 0.29:
        return _temperature(language, rng)
    n, u, m, v = pick(rng)
    if language == "en":
        return Exchange(question("en", n, u, v, rng), english_answer(n, u, m, v), "en")
    return Exchange(question("zh", n, u, v, rng), chinese_answer(n, u, m, v), "zh")
