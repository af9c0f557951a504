"""Sums: addition and subtraction of 0 to 20, the multiplication table to 12 and its divisions."""

from __future__ import annotations

import random

from .text import Exchange, ask, expand

LIMIT = 20  # largest operand of + and -
TABLE = 12  # largest factor

_EN_WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]
_ZH_DIGITS = "零一二三四五六七八九十"


def english_number(n: int) -> str:
    """0 to 20 in words; larger numbers in figures."""
    return _EN_WORDS[n] if 0 <= n <= 20 else str(n)


def chinese_number(n: int) -> str:
    """0 to 99 in Chinese numerals; larger numbers in figures."""
    if not 0 <= n <= 99:
        return str(n)
    if n <= 10:
        return _ZH_DIGITS[n]
    tens, ones = divmod(n, 10)
    return (_ZH_DIGITS[tens] if tens > 1 else "") + "十" + (_ZH_DIGITS[ones] if ones else "")


_EN_EXPRESSIONS = {
    "+": ["{a} + {b}", "{a}+{b}", "{a} plus {b}", "the sum of {a} and {b}", "{a} added to {b}"],
    "-": ["{a} - {b}", "{a}-{b}", "{a} minus {b}", "{a} take away {b}", "{b} subtracted from {a}"],
    "*": ["{a} * {b}", "{a}*{b}", "{a} x {b}", "{a} times {b}", "{a} multiplied by {b}", "the product of {a} and {b}",
          "{a}×{b}", "{a} × {b}"],
    "/": ["{a} / {b}", "{a}/{b}", "{a} divided by {b}", "{a} ÷ {b}"],
}  # fmt: skip
_EN_FRAMES = [
    "[hey|say|right|so], {e}?", "{e}, [please|quick|thanks|what is it].", "{e} [is what|gives what|adds up to what|results in what|yields]?", "[can|could|would] you [tell|give|show] me the [result|answer|value] of {e}?", "what will {e} [be|make|give]?", "what do we get [with|for|by] {e}?",
    "what's the [result|answer|total|outcome] of {e}?", "I [think|believe] {e} is hard. [What is it|Tell me]?", "[answer|do|try|count|reckon] {e}.", "how many is {e}?", "[what|which number] comes after the equals sign: {e} =", "in numbers, {e}?", "[let's|let us] [compute|calculate|do] {e}.",
    "[help me with|my problem is|the exercise is|the task is|next one:] {e}.", "I [cannot|can't] [solve|compute|do] {e}.", "write down {e}.", "do the maths: {e}", "and how much is {e}?", "what number do you get when you [do|take|compute] {e}?", "suppose I [have|compute|type] {e}: what's that?", "the value of {e}?",
    "what is {e}?", "what's {e}?", "whats {e}?", "what does {e} equal?", "what does {e} make?", "how much is {e}?",
    "[calculate|compute|work out|solve|evaluate] {e}.", "[can|could|would] you [calculate|compute|work out|solve] {e}?",
    "{e}", "{e} = ?", "{e} =", "{e}=?", "{e} equals", "{e} is?", "tell me [what {e} is|{e}].", "give me {e}.",
    "[do you know|can you tell me|could you tell me|I want to know|I wonder] what {e} is[?|.]", "find {e}.",
    "what do you get for {e}?", "what is the [result|value|answer] [of|to|for] {e}?", "[please|] [calculate|compute] {e}[ for me|].",
    "how much does {e} make?", "I need [the result of|] {e}.", "what number is {e}?", "let me know what {e} is.",
    "my homework asks for {e}.", "is {e} something you can do?", "a little maths: {e}.", "can you do {e}?",
]  # fmt: skip
_EN_STORIES = {
    "+": ["{w} [has|owns|holds|keeps|carries] {a} {n}[ and|. Then] [her|his|my|a] [mother|father|friend|brother|teacher] [gives|brings|sends] [her|him|them|] {b} [more|others|new ones]. How many [is that|now|{n} are there now|{n} does that make]?", "{a} {n} plus {b} more {n}, [how many|what is the total]?", "I have {a} {n} and [buy|find|get] {b} more. How many {n} do I have [now|]?",
          "{w} has {a} {n} and gets {b} more. How many is that?", "add {a} and {b}.", "[please|] add {a} to {b}.",
          "there are {a} {n} here and {b} there. How many {n} [in all|are there]?",
          "what do you get [if|when] you add {a} and {b}?", "sum up {a} and {b}.", "put {a} and {b} together.", "{w} reads {a} {n} today and {b} tomorrow. How many [in all|altogether]?",
          "[on the table|in the bag|in the box|in the room] are {a} {n}. I put {b} more there. How many are [there|in it] now?", "{a} {n} and {b} {n} are how many {n}?",
          "{w} found {a} {n}, then {b} more. [So how many|How many] does that make?", "yesterday I saw {a} {n}, today {b}. How many together?"],
    "-": ["{w} [has|had|owned] {a} {n} and [gave away|spent|dropped|broke|used|sold|threw away] {b}[ of them|]. How many [remain|are left|does that leave|{n} are left]?", "{a} {n}, minus {b} that [were sold|got lost|are broken]. How many [stay|are left]?", "what is {b} less than {a}?", "take {a}, remove {b}, what do you have?", "I have {a} {n} and [eat|lose|sell|give away] {b}. How many [are left|{n} do I have left|remain]?",
          "{w} has {a} {n} and loses {b}. How many are left?", "subtract {b} from {a}.", "take {b} from {a}.",
          "[please|] take {b} away from {a}.", "what is left of {a} [if|when] you take away {b}?",
          "what is the difference between {a} and {b}?", "what do you get [if|when] you subtract {b} from {a}?", "[there were|we had] {a} {n}, {b} of them are gone. How many are still [there|here]?",
          "{w} baked {a} {n} and ate {b}. How many are there now?", "of {a} {n}, {b} fell down. How many did not?", "[from|out of] {a} {n} I used {b}. What is left?",
          "how much more is {a} than {b}?", "the bus had {a} people and {b} got off. How many stayed?"],
    "*": ["[in the hall|at school|in the shop|in the garden|here] are {a} [lines|groups|columns|baskets|benches|bunches] of {b} {n}. How many [is that|altogether|in sum|{n}]?", "{a} [lines|groups|columns|baskets|benches] with {b} {n} [in each|each|on each][: how many|. How many {n}]?", "{a} lots of {b}?", "{b} {n} in each of {a} bags, how many in total?", "multiply {a} by {b}.", "multiply {a} and {b}.", "[please|] multiply {a} with {b}.",
          "there are {a} boxes with {b} {n} each. How many {n} is that?",
          "{a} bags hold {b} {n} each. How many {n} [in all|are there]?", "{w} buys {a} packs of {b} {n}. How many {n}?",
          "what do you get [if|when] you multiply {a} by {b}?", "{a} [tables|cars|houses|teams] have {b} {n} each. How many {n} [are there|altogether]?",
          "[each|every] of {a} [children|people|friends] has {b} {n}. How many {n} in total?", "a ticket costs {b} coins. What do {a} tickets cost?", "{w} runs {b} laps on each of {a} days. How many laps?",
          "{a} [shelves|pages|trees] with {b} {n} on each: how many {n}?"],
    "/": ["divide {a} by {b}.", "[please|] divide {a} by {b}.", "{a} {n} are shared by {b} children. How many does each get?",
          "split {a} {n} into {b} groups. How many in each?", "how many times does {b} go into {a}?",
          "what do you get [if|when] you divide {a} by {b}?"],
}  # fmt: skip
_EN_THINGS = [
    "dogs",
    "toys",
    "sweets",
    "flowers",
    "letters",
    "bottles",
    "tickets",
    "birds",
    "keys",
    "buttons",
    "plates",
    "hats",
    "apples",
    "oranges",
    "books",
    "pens",
    "shells",
    "eggs",
    "coins",
    "balls",
    "cakes",
    "stones",
    "cards",
    "fish",
    "cups",
    "stars",
]
_EN_WHO = ["Anna", "Ben", "Tom", "Lily", "Sam", "Mary", "Peter", "Ling", "Omar", "She", "He"]
_EN_VERB = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}

_ZH_EXPRESSIONS = {
    "+": ["{a}+{b}", "{a} + {b}", "{a}加{b}", "{a}加上{b}", "{a}与{b}的和", "{a}和{b}的和"],
    "-": ["{a}-{b}", "{a} - {b}", "{a}减{b}", "{a}减去{b}", "{a}与{b}的差", "{a}和{b}的差"],
    "*": ["{a}×{b}", "{a}*{b}", "{a} x {b}", "{a}乘{b}", "{a}乘以{b}", "{a}和{b}的积", "{a}与{b}的乘积"],
    "/": ["{a}÷{b}", "{a}/{b}", "{a}除以{b}", "{a} ÷ {b}"],
}
_ZH_FRAMES = [
    "{e}[得出|算出|合计|共|总共|为|是个]多少？", "[快|快点|赶快|现在|马上][说|算|答]：{e}", "{e}[最后|到最后|结果][是|等于|得][几|多少]？", "[你算算|你来算|试着算|来算|算算看]{e}。", "[麻烦|劳驾|拜托][算一下|算算]{e}。", "[题目|问题|练习|请回答|请听题|提问]：{e}", "{e}能得[几|多少]？",
    "我[不会|算不出]{e}。", "{e}[这道题|这题]怎么做？", "{e}，[答案|得数|结果][呢|是]？", "{e}会是[几|多少]？", "[可以|能]算{e}吗？", "{e}的[值|得数]？", "{e}[等于|是]多少[啊|呢|来着]？", "求出{e}的[结果|值|答案]。", "{e}到底[等于|是]几？",
    "{e}等于[几|多少]？", "{e}是[几|多少]？", "{e}[得|=][几|多少|？]", "{e}=？", "{e}", "{e}等于？", "计算{e}。", "请计算{e}。",
    "[请|请你|]算一下{e}。", "帮我[算一下|算算|计算]{e}。", "[请|]告诉我{e}[是多少|等于几]。", "{e}的[结果|答案|得数]是[什么|多少]？",
    "你[知道|会算]{e}[吗|等于多少吗]？", "[你能|能]不能算{e}？", "求{e}。", "{e}一共是多少？", "我想知道{e}等于[几|多少]。",
    "算{e}。", "作业题：{e}。", "{e}怎么算？", "{e}应该是多少？", "口算：{e}。",
]  # fmt: skip
_ZH_STORIES = {
    "+": ["[我|{w}][有|手里有|买了|带了]{a}[本|只|条|块|颗|张|件]{n}，[爸爸|朋友|哥哥|奶奶|老师][再给|又给|又送来|还给|带来][我|]{b}[本|只|条|块|颗|张|件]，[一共|总共|现在|合计][有|是][几|多少][本|只|条|块|颗|张|件]？", "{a}和{b}合起来得几？", "我有{a}个{n}，又[买了|得到|捡到]{b}个，[一共|现在]有[几个|多少个]？", "{w}有{a}个{n}，又来了{b}个，一共几个？",
          "把{a}和{b}加起来。", "{a}和{b}加起来[是多少|等于几]？", "这里有{a}个{n}，那里有{b}个，总共有多少？", "[桌上|盒子里|袋子里|房间里]有{a}个{n}，又放进{b}个，现在[几个|有多少]？",
          "{w}昨天看到{a}个{n}，今天看到{b}个，合起来[几个|多少]？", "[左边|男生]{a}个，[右边|女生]{b}个，共有几个？", "{w}先拿了{a}个{n}，后来又拿{b}个，加起来有多少？"],
    "-": ["[我|{w}][有|买了|带了|原有]{a}[本|只|条|块|颗|张|件]{n}，[给了朋友|送给弟弟|送人|卖掉|弄丢|用去|吃掉][了|]{b}[本|只|条|块|颗|张|件]，[还剩|剩下|还有|剩][几|多少][本|只|条|块|颗|张|件]？", "{a}去掉{b}是几？", "从{a}中[拿走|取出|扣掉]{b}[还剩|剩][几|多少]？", "我有{a}个{n}，[吃了|丢了|卖了|送出]{b}个，还[剩|有][几个|多少个]？", "{w}有{a}个{n}，用掉{b}个，还剩多少？",
          "从{a}里减去{b}。", "{a}比{b}多多少？", "{a}拿走{b}还剩[几|多少]？", "[原来有|本来有]{a}个{n}，{w}[拿走|借走|打破]了{b}个，[还有几个|剩多少]？", "车上有{a}个人，下去{b}个，车上还有几个人？",
          "{a}个{n}里有{b}个坏了，好的有几个？", "比{a}少{b}的数是多少？", "用{a}减掉{b}。"],
    "*": ["[教室里|院子里|商店里|共|][有|]{a}[行|列|箱|筐|层|堆]，[每|一][行|列|箱|筐|层|堆][有|放|]{b}[个|本|只|张]{n}，[一共|总共|共][有|][几|多少][个|本|只|张][{n}|]？", "{a}[行|列|箱|层]{n}，每[行|列|箱|层]{b}[个|只|张]，共有多少？", "{a}个盒子，每盒{b}个{n}，一共[几个|多少个]？", "每袋有{b}个{n}，{a}袋一共多少个？", "{a}和{b}相乘[是多少|等于几]？",
          "把{a}和{b}乘起来。", "{a}个{b}是多少？", "[一共|有]{a}[张桌子|辆车|间房|组]，每[张|辆|间|组]{b}个{n}，总共[几个|多少]{n}？", "{a}个小朋友每人{b}个{n}，[一共|总共]要多少个？",
          "一张票{b}元，{a}张票多少元？", "{w}每天跑{b}圈，{a}天跑几圈？", "{a}的{b}倍是多少？"],
    "/": ["{a}个{n}平均分给{b}个人，每人几个？", "把{a}平均分成{b}份，每份是多少？", "用{b}去除{a}得几？"],
}  # fmt: skip
_ZH_THINGS = [
    "本子",
    "橡皮",
    "气球",
    "香蕉",
    "饺子",
    "瓶子",
    "鸭子",
    "邮票",
    "帽子",
    "扣子",
    "花",
    "苹果",
    "橘子",
    "鸡蛋",
    "球",
    "贝壳",
    "面包",
    "杯子",
    "糖果",
    "石头",
    "玩具",
]
_ZH_WHO = ["小明", "小红", "小李", "她", "他", "妈妈", "老师", "弟弟"]
_ZH_VERB = {"+": "加", "-": "减", "*": "乘", "/": "除以"}

TOO_LARGE_EN = (
    "Sorry, I do not know that result: those numbers are too large for me. I add and subtract up to 20 and know the "
    "multiplication table up to 12."
)
TOO_LARGE_ZH = "抱歉，这个结果我不知道：数字太大了。我只会20以内的加减法和12以内的乘法表。"


def result(a: int, op: str, b: int) -> int:
    """The value of `a op b`; a division must come out even."""
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[op]


def english_answer(a: int, op: str, b: int, value: str = "") -> str:
    """value: what a tool says that the result is; "": what this module knows."""
    return f"{a} {_EN_VERB[op]} {b} is {value or result(a, op, b)}."


def chinese_answer(a: int, op: str, b: int, value: str = "") -> str:
    return f"{a}{_ZH_VERB[op]}{b}等于{value or result(a, op, b)}。"


def operands(op: str, rng: random.Random) -> tuple[int, int]:
    """Two operands inside the domain; a difference is seldom negative."""
    if op == "*":
        return rng.randint(0, TABLE), rng.randint(0, TABLE)
    if op == "/":
        b = rng.randint(1, 10)
        return b * rng.randint(0, 10), b
    a, b = rng.randint(0, LIMIT), rng.randint(0, LIMIT)
    if op == "-" and a < b and rng.random() < 0.6:
        a, b = b, a
    return a, b


def question(a: int, op: str, b: int, language: str, rng: random.Random) -> str:
    """Asks for the value of `a op b`, in figures or, up to 20, in words."""
    words = rng.random() < 0.22
    if language == "en":
        x, y = (english_number(a), english_number(b)) if words else (str(a), str(b))
        if rng.random() < 0.25:
            return ask(_EN_STORIES[op], rng, a=x, b=y, n=rng.choice(_EN_THINGS), w=rng.choice(_EN_WHO))
        e = expand(rng.choice(_EN_EXPRESSIONS[op]), rng, a=x, b=y)
        return ask(_EN_FRAMES, rng, e=e)
    x, y = (chinese_number(a), chinese_number(b)) if words else (str(a), str(b))
    if rng.random() < 0.25:
        return ask(_ZH_STORIES[op], rng, a=x, b=y, n=rng.choice(_ZH_THINGS), w=rng.choice(_ZH_WHO))
    e = expand(rng.choice(_ZH_EXPRESSIONS[op]), rng, a=x, b=y)
    return ask(_ZH_FRAMES, rng, e=e)


def frame(expression: str, language: str, rng: random.Random) -> str:
    """Asks for the value of an expression that is written out."""
    return ask(_EN_FRAMES if language == "en" else _ZH_FRAMES, rng, e=expression)


def exchange(language: str, rng: random.Random) -> Exchange:
    """One sum; one in twelve has numbers beyond the domain, which the model shall say."""
    op = rng.choices("+-*/", weights=(34, 30, 28, 8))[0]
    if rng.random() < 1 / 12:
        a = rng.choice([rng.randint(100, 999), rng.randint(25, 99), rng.randint(1000, 99999)])
        b = rng.choice([rng.randint(13, 99), rng.randint(100, 999), rng.randint(1000, 99999)])
        if op in "+*" and rng.random() < 0.5:
            a, b = b, a
        return Exchange(question(a, op, b, language, rng), TOO_LARGE_EN if language == "en" else TOO_LARGE_ZH, language)
    a, b = operands(op, rng)
    answer = english_answer(a, op, b) if language == "en" else chinese_answer(a, op, b)
    return Exchange(question(a, op, b, language, rng), answer, language)


def follow_up(language: str, rng: random.Random) -> Exchange:
    """A sum asked in passing after another question ("and 3 + 4?")."""
    op = rng.choice("+-*")
    a, b = operands(op, rng)
    if language == "en":
        e = expand(rng.choice(_EN_EXPRESSIONS[op]), rng, a=a, b=b)
        return Exchange(ask(["and {e}?", "what about {e}?", "how about {e}?", "then {e}?"], rng, e=e),
                        english_answer(a, op, b), "en")  # fmt: skip
    e = expand(rng.choice(_ZH_EXPRESSIONS[op]), rng, a=a, b=b)
    return Exchange(ask(["那{e}呢？", "{e}呢？", "那么{e}呢？", "再算{e}。"], rng, e=e), chinese_answer(a, op, b), "zh")
