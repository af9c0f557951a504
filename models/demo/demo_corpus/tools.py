"""Two kinds of tools that the model may call, the weather of a place and a calculator, and the exchanges with them.

Names, parameters and descriptions vary, and other tools stand among them, so that the model reads what is offered.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from . import arithmetic, unknown
from .capitals import COUNTRIES, invented
from .chat_format import to_json
from .text import Call, Exchange, ask, expand


@dataclass(frozen=True)
class Tool:
    """A tool as it is offered. `main`: the parameter that a call gives; there may be others, which it leaves out."""

    name: str
    description: str
    parameters: tuple[str, ...]
    main: str = ""

    def described(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        properties = {name: {"type": "string"} for name in self.parameters}
        parameters = {"type": "object", "properties": properties, "required": [self.main] if self.main else []}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Offer:
    """The tools of a chat in their order; `weather` and `calculator` are among `tools`, where they are offered."""

    tools: tuple[Tool, ...]
    weather: Tool | None
    calculator: Tool | None

    def described(self) -> list[dict[str, Any]]:
        return [tool.described() for tool in self.tools]


_WEATHER_NAMES = ["get_current_weather", "weather", "current_weather", "get_forecast", "fetch_weather", "look_up_weather", "getWeather", "weather_now", "weather_of", "read_weather", "city_weather"]  # fmt: skip
_WEATHER_PARAMETERS = ["city", "location", "town", "where", "name", "place_name", "city_name", "address", "country", "region"]  # fmt: skip
_WEATHER_DESCRIPTIONS = [
    "The weather of a place.", "[Get|Returns|Gets|Get me|Fetch|Look up|Tells|Says] the [current |present |]weather [in|of|for|at] [a|the|a given|the given] [place|city|location|town][.|]", "The weather in a place[ now| at present|, and its temperature| and how warm it is there][.|]",
    "What the weather is like[ now| today|][.|]", "[Get|Returns] the [current |]temperature and weather [in|of|for] a [city|place|location][, in degrees Celsius|][.|]", "Current weather[.|]", "[Weather|Forecast] [service|lookup|report][.|]",
    "[Call this|Use this|Useful] [to learn|to know|when you need|for] the weather[ of a city| somewhere|][.|]", "", "[查询|获取|返回][一个地方|某地|城市|指定城市|][现在|当前|]的天气[。|]", "天气[查询|预报|]", "Made-up weather, to try tools with.",
]  # fmt: skip
_WEATHER_OPTIONS = ["unit", "days", "language", "date", "format", "units"]

_CALCULATOR_NAMES = ["calculator", "calc", "compute", "evaluate", "eval_expression", "do_math", "math", "solve", "arithmetic", "calculate_expression"]  # fmt: skip
_CALCULATOR_PARAMETERS = ["expr", "formula", "input", "calculation", "problem", "term", "query", "text", "math", "sum"]
_CALCULATOR_DESCRIPTIONS = [
    "The value of an arithmetic expression.", "[Calculate|Calculates|Compute|Computes|Evaluate|Evaluates|Works out|Solve] [an arithmetic|a mathematical|a math|an|the given] expression[.|, such as 2 + 3 * 4.|]", "[Does|Do] [sums|arithmetic|calculations|maths][ of any size| with large numbers|][.|]",
    "[A|The] calculator[ for sums| for large numbers|][.|]", "[The|Returns the] [result|value] of [a sum|a calculation|an expression][, for example 12 * 7|][.|]", "[Call this|Use this|Useful] [to calculate|for arithmetic|to do sums|for any calculation][.|]", "",
    "[计算|求][一个|][算式|表达式|数学表达式]的[值|结果][。|]", "计算器", "做[加减乘除|算术][。|]", "Calculates sums with +, -, *, / and brackets.",
]  # fmt: skip
_CALCULATOR_OPTIONS = ["precision", "digits", "base", "unit"]

_OTHERS = [
    Tool("get_time", "The time of day in a place.", ("place",)), Tool("search", "Search the web.", ("query",)), Tool("send_mail", "Send an e-mail.", ("to", "text")),
    Tool("translate", "Translate a text to another language.", ("text", "language")), Tool("get_news", "The latest news on a topic.", ("topic",)), Tool("play_music", "Play a song.", ("song",)),
    Tool("set_alarm", "Set an alarm.", ("time",)), Tool("convert_currency", "Convert an amount of money.", ("amount", "source", "target")), Tool("get_stock_price", "The price of a share.", ("symbol",)),
    Tool("book_flight", "Book a flight.", ("origin", "destination")), Tool("read_file", "Read a file.", ("path",)), Tool("list_files", "", ("folder",)), Tool("remember", "Keep a note.", ("note",)),
    Tool("random_number", "A random number.", ()), Tool("get_user", "Who the user is.", ("id",)), Tool("run_sql", "Run a query on the database.", ("query", "limit")), Tool("发邮件", "发送一封邮件。", ("收件人", "内容")), Tool("now", "当前时间", ()),
]  # fmt: skip


def _tool(
    usual: str,
    names: list[str],
    parameter: str,
    parameters: list[str],
    descriptions: list[str],
    options: list[str],
    rng: random.Random,
) -> Tool:
    """One guise of a kind of tool; in about half of the cases the usual name and parameter."""
    name = usual if rng.random() < 0.7 else rng.choice(names)
    main = parameter if rng.random() < 0.65 else rng.choice(parameters)
    every = [main]
    if rng.random() < 0.12:
        every.insert(rng.randint(0, 1), rng.choice(options))
    return Tool(name, expand(rng.choice(descriptions), rng) if rng.random() < 0.6 else "", tuple(every), main)


def weather_tool(rng: random.Random) -> Tool:
    return _tool("get_weather", _WEATHER_NAMES, "place", _WEATHER_PARAMETERS, _WEATHER_DESCRIPTIONS, _WEATHER_OPTIONS, rng)  # fmt: skip


def calculator_tool(rng: random.Random) -> Tool:
    return _tool("calculate", _CALCULATOR_NAMES, "expression", _CALCULATOR_PARAMETERS, _CALCULATOR_DESCRIPTIONS, _CALCULATOR_OPTIONS, rng)  # fmt: skip


def offer(rng: random.Random) -> Offer:
    """Both tools, one of them, or neither, among up to two others."""
    kind = rng.random()
    weather = weather_tool(rng) if kind < 0.64 else None
    calculator = calculator_tool(rng) if kind < 0.34 or 0.64 < kind < 0.94 else None
    tools = [tool for tool in (weather, calculator) if tool]
    tools += rng.sample(_OTHERS, rng.choices((0, 1, 2), weights=(84, 11, 5))[0] if tools else rng.randint(1, 2))
    rng.shuffle(tools)
    return Offer(tuple(tools), weather, calculator)


_TOWNS = ["Munich", "Hamburg", "Milan", "Barcelona", "Lyon", "Porto", "Zurich", "Geneva", "Antwerp", "Gothenburg", "Bergen", "Manchester", "Liverpool", "Boston", "Chicago", "Seattle", "Miami", "Denver", "Toronto", "Montreal", "Sydney", "Melbourne", "Auckland", "Osaka", "Kyoto", "Shanghai", "Shenzhen", "Mumbai", "Dubai", "Istanbul", "Cape Town", "Lagos", "Casablanca", "Rio", "Medellin", "Cancun", "Krakow", "Salzburg", "Naples", "Seville", "Texas", "California", "Bavaria", "Scotland", "Hawaii", "New York", "Los Angeles", "San Francisco", "Hong Kong", "Las Vegas"]  # fmt: skip
_TOWNS_ZH = ["上海", "广州", "深圳", "杭州", "南京", "成都", "重庆", "武汉", "西安", "苏州", "天津", "青岛", "大连", "厦门", "昆明", "哈尔滨", "拉萨", "台北", "香港", "澳门", "纽约", "洛杉矶", "悉尼", "大阪", "京都", "慕尼黑", "米兰", "巴塞罗那", "迪拜", "孟买", "海南", "新疆", "四川", "长沙", "福州", "桂林"]  # fmt: skip


def place(language: str, rng: random.Random) -> str:
    """A capital, a country, another town, or a name that does not exist."""
    kind = rng.random()
    if kind < 0.55:
        row = rng.choice(COUNTRIES)
        column = (0 if language == "en" else 2) + (rng.random() < 0.7)
        return row[column].removeprefix("the ")
    if kind < 0.8:
        return rng.choice(_TOWNS if language == "en" else _TOWNS_ZH)
    return invented(language, rng)


_WEATHER_EN = [
    "what is the weather [like |]in {p}[ today| now| right now| at the moment|]?", "what's the weather [like |]in {p}[ today| now|]?", "how is the weather in {p}[ today| now|]?", "how's the weather in {p}?", "weather in {p}[ now| today|][?|]", "{p} weather[ today| now|]", "the weather [of|for|in] {p}[, please|]?",
    "[tell|give|show] me the [current |]weather [in|of|for] {p}.", "is it [raining|cold|sunny|snowing|hot|warm|windy|dry|cloudy|wet|foggy|freezing] in {p}[ now| today| right now|]?", "[can|could|would] you [tell me|check|look up|find out|see] the weather [in|of|for] {p}?",
    "how [warm|cold|hot] is it in {p}[ now| today|]?", "what's the temperature in {p}[ now| today|]?", "what is the temperature [in|of] {p}?", "temperature in {p}?", "how many degrees [is it|does it have|are there] in {p}?", "does it [rain|snow] in {p}[ now| today|]?",
    "do I need [an umbrella|a coat|sunglasses|a jacket|boots] in {p}[ today|]?", "[check|look up|find|get] the weather [in|of|for] {p}.", "I [am|will be] in {p}[ today| now|]. [How is|What is] the weather[ there|]?", "I [travel|fly|go|drive] to {p} [today|now]. What is the weather [there|like]?",
    "weather report for {p}", "[say|report] the weather of {p}.", "{p}: weather?", "what does the sky over {p} look like?", "is the weather [good|nice|bad|fine] in {p}[ today|]?", "the temperature of {p}, please.", "[please|] call the weather tool for {p}.", "use the tool for the weather in {p}.",
    "I [want|need|would like] to know the weather [in|of] {p}.", "do you know the weather in {p}[ now|]?", "what weather [does {p} have|is it in {p}|do they have in {p}][ today| now|]?", "how are the conditions in {p}[ now|]?", "will I need [an umbrella|a coat] in {p}[ today|]?", "is {p} [warm|cold|sunny|rainy] [now|today|at the moment]?",
]  # fmt: skip
_WEATHER_ZH = [
    "[今天|现在|此刻|]{p}[今天|现在|]的天气[怎么样|如何|好吗|是什么|好不好]？", "{p}[今天|现在|]天气[怎么样|如何|好吗|呢]？", "{p}天气", "{p}的天气", "{p}[今天|现在|][下雨|下雪|冷|热|刮风|出太阳]吗？", "{p}[在|有没有]下[雨|雪][吗|]？", "{p}[今天|现在|][多少度|几度|气温多少|温度是多少|有多冷|有多热]？", "{p}的[气温|温度]是多少？",
    "[查一下|查查|看看|帮我查|请查一下|告诉我]{p}的天气。", "[能|可以][告诉我|查一下|看看]{p}的天气吗？", "我[在|要去|今天去|想去]{p}，[那里|那边|那儿]天气[怎么样|如何|好吗]？", "去{p}要带[伞|外套|大衣]吗？", "{p}[要带伞|要穿外套|冷不冷|热不热|是晴天|是阴天]吗？", "我想知道{p}的天气。", "{p}天气[报告|情况]", "用工具查{p}的天气。", "{p}那边天气好吗？",
    "[请|]说说{p}[今天|现在|]的天气。", "你知道{p}[现在|今天|]的天气吗？", "{p}外面冷吗？", "{p}的气温", "{p}今天是什么天气？", "{p}这会儿天气如何？", "帮我看看{p}[冷|热|下雨|下雪]不[冷|热|下雨]。",
]  # fmt: skip
_WEATHER_NEXT_EN = ["and in {p}?", "and {p}?", "what about {p}?", "how about {p}?", "and how is it in {p}?", "the same for {p}.", "[also|now] {p}[, please|]?", "{p}?", "and the weather in {p}?", "and for {p}?"]  # fmt: skip
_WEATHER_NEXT_ZH = ["那{p}呢？", "{p}呢？", "那么{p}呢？", "还有{p}呢？", "{p}的天气呢？", "再查{p}。", "换{p}呢？"]
_TWO_PLACES_EN = [
    "what is the weather [like |]in {p} and [in |]{q}?", "how is the weather in {p} and [in |]{q}[ today| now|]?", "weather in {p} and {q}[?|]", "compare the weather [in|of] {p} and {q}.", "is it [warm|cold|raining|sunny] in {p} and [in |]{q}?", "[tell|give] me the weather [in|of|for] {p} and [in |of |for |]{q}.",
    "what's the temperature in {p} and in {q}?", "[check|look up] the weather for {p} and for {q}.", "where is it [warmer|colder], in {p} or in {q}?", "the weather of {p} and {q}[, please|].", "how [warm|cold] is it in {p} and in {q}?",
]  # fmt: skip
_TWO_PLACES_ZH = ["{p}和{q}的天气怎么样？", "{p}和{q}[今天|现在|]天气如何？", "{p}与{q}的天气", "查一下{p}和{q}的天气。", "{p}和{q}[分别|各]多少度？", "{p}和{q}哪里[冷|热|暖和]？", "告诉我{p}和{q}的天气。", "比较{p}和{q}的天气。"]  # fmt: skip
_NO_PLACE_EN = ["what is the weather[ like|][ now| today|]?", "how is the weather[ today|]?", "is it [raining|cold|sunny|warm|snowing][ now| outside| today|]?", "what's the weather?", "tell me the weather.", "do I need [an umbrella|a coat] today?", "weather?", "what's the temperature[ outside|]?", "check the weather[ for me|]."]  # fmt: skip
_NO_PLACE_ZH = [
    "[今天|现在|外面|]天气[怎么样|如何|好吗]？",
    "[今天|现在|外面]下雨吗？",
    "今天多少度？",
    "查一下天气。",
    "天气",
    "外面冷吗？",
    "要带伞吗？",
]
WHICH_PLACE_EN = "For which place would you like to know the weather?"
WHICH_PLACE_ZH = "你想知道哪个地方的天气？"
_JUST_PLACE_EN = [
    "{p}",
    "{p}.",
    "in {p}.",
    "for {p}[, please|].",
    "of {p}",
    "I mean {p}.",
    "{p}, please.",
    "I am in {p}.",
]
_JUST_PLACE_ZH = ["{p}", "{p}。", "{p}的。", "我在{p}。", "我说的是{p}。", "查{p}的。"]

# As tools say it, and in Chinese
_SKIES = {"rain": "下雨", "rainy": "下雨", "light rain": "小雨", "heavy rain": "大雨", "showers": "阵雨", "drizzle": "毛毛雨", "snow": "下雪", "snowy": "下雪", "light snow": "小雪", "sunny": "晴", "sun": "晴", "clear": "晴朗", "clear sky": "晴朗", "cloudy": "多云", "clouds": "多云", "partly cloudy": "局部多云", "overcast": "阴", "wind": "有风", "windy": "有风", "fog": "有雾", "foggy": "有雾", "mist": "薄雾", "storm": "暴风雨", "stormy": "暴风雨", "thunderstorm": "雷雨", "hail": "冰雹", "dry": "干燥", "hot": "炎热", "cold": "寒冷", "warm": "温暖", "mild": "温和", "freezing": "冰冻", "humid": "潮湿"}  # fmt: skip
_PLACE_KEYS = ["place", "city", "location", "name", "town"]
_SKY_KEYS = ["weather", "condition", "conditions", "sky", "description", "summary", "forecast"]
_DEGREE_KEYS = ["temperature", "temp", "temperature_c", "degrees", "celsius", "temp_c"]
_SKY_TEXTS = ["{w}, {t} degrees", "{w}, {t}°C", "{t}°C, {w}", "{w} and {t} degrees", "{w}, {t}", "It is {w} and {t} degrees.", "{p}: {w}, {t} degrees", "{w} {t}C"]  # fmt: skip

FAILED_EN = "Sorry, I could not find that out: the tool reported an error."
FAILED_ZH = "抱歉，我没有查到：工具报告了错误。"
_WEATHER_ERRORS = ["no such place", "unknown place", "place not found", "city not found", "service unavailable", "timeout", "no data", "network error", "not found", "rate limit exceeded", "invalid API key", "I do not know {p}", "no weather for {p}", "{p} not found"]  # fmt: skip
_CALCULATOR_ERRORS = ["division by zero", "invalid syntax", "invalid expression", "overflow", "number too large", "timeout", "not supported", "syntax error", "bad expression"]  # fmt: skip
_ERROR_TEXTS = ["error: ValueError: {e}", "error: {e}", "error: LookupError: {e}", "error: TimeoutError: {e}", "Error: {e}", "error: ZeroDivisionError: {e}"]  # fmt: skip


def _error(errors: list[str], rng: random.Random, **slots: object) -> str:
    text = expand(rng.choice(errors), rng, **slots)
    return to_json({rng.choice(["error", "error", "error", "message"]): text}) if rng.random() < 0.6 else rng.choice(_ERROR_TEXTS).replace("{e}", text)  # fmt: skip


def _weather(name: str, language: str, rng: random.Random) -> tuple[str, str]:
    """What the tool returns for a place, and how the model says it."""
    english = language == "en"
    if rng.random() < 0.07:
        # A message alone says that something is wrong by what it says.
        return _error(_WEATHER_ERRORS, rng, p=name), FAILED_EN if english else FAILED_ZH
    sky = rng.choice(list(_SKIES))
    degrees = str(rng.choice([rng.randint(-15, 40), rng.randint(0, 30), rng.randint(-99, 399) / 10]))
    said = sky if english else _SKIES[sky]
    if not english and rng.random() < 0.3:
        sky = said  # the tool speaks Chinese
    kind = rng.random()
    both = (
        f"The weather in {name} is {said}, at {degrees} degrees."
        if english
        else f"{name}的天气是{said}，气温{degrees}度。"
    )
    if kind < 0.72:
        fields: list[tuple[str, object]] = [
            (_key("weather", _SKY_KEYS, rng), sky),
            (_key("temperature", _DEGREE_KEYS, rng), float(degrees) if "." in degrees else int(degrees)),
        ]
        if rng.random() < 0.75:
            fields.insert(0, (_key("place", _PLACE_KEYS, rng), name))
        if rng.random() < 0.12:
            fields.append(
                rng.choice(
                    [
                        ("humidity", rng.randint(10, 99)),
                        ("wind", rng.randint(0, 90)),
                        ("unit", "C"),
                        ("unit", "celsius"),
                    ]
                )
            )
        if rng.random() < 0.3:
            rng.shuffle(fields)
        return to_json(dict(fields)), both
    if kind < 0.9:
        return expand(rng.choice(_SKY_TEXTS), rng, w=sky, t=degrees, p=name), both
    if kind < 0.95:
        only = f"The weather in {name} is {said}." if english else f"{name}的天气是{said}。"
        return rng.choice([sky, to_json({_key("weather", _SKY_KEYS, rng): sky})]), only
    only = f"The temperature in {name} is {degrees} degrees." if english else f"{name}的气温是{degrees}度。"
    value = float(degrees) if "." in degrees else int(degrees)
    return rng.choice(
        [f"{degrees} degrees", f"{degrees}°C", to_json({_key("temperature", _DEGREE_KEYS, rng): value})]
    ), only


def _key(usual: str, others: list[str], rng: random.Random) -> str:
    return usual if rng.random() < 0.6 else rng.choice(others)


def weather(
    tool: Tool | None, language: str, rng: random.Random, *, next: bool = False, alone: bool = False
) -> Exchange:
    """Asks for the weather of a place. next: after another such question; alone: names the place and no more. Without a
    tool the model does not know."""
    name = place(language, rng)
    english = language == "en"
    frames = _WEATHER_EN if english else _WEATHER_ZH
    if next:
        frames = _WEATHER_NEXT_EN if english else _WEATHER_NEXT_ZH
    if alone:
        frames = _JUST_PLACE_EN if english else _JUST_PLACE_ZH
    question = ask(frames, rng, p=name)
    if tool is None:
        return Exchange(question, unknown.NOW_EN if english else unknown.NOW_ZH, language)
    return _with_weather(tool, question, [name], language, rng)


def _with_weather(tool: Tool, question: str, names: list[str], language: str, rng: random.Random) -> Exchange:
    calls, said = [], []
    for name in names:
        result, sentence = _weather(name, language, rng)
        calls.append(Call(tool.name, {tool.main: name}, result))
        said.append(sentence)
    return Exchange(question, _joined(said, language), language, tuple(calls))


def _joined(sentences: list[str], language: str) -> str:
    return (" " if language == "en" else "").join(sentences)


def no_place(language: str, rng: random.Random) -> Exchange:
    """Asks for the weather of nowhere, where a tool is offered: the model asks back."""
    if language == "en":
        return Exchange(ask(_NO_PLACE_EN, rng), WHICH_PLACE_EN, "en")
    return Exchange(ask(_NO_PLACE_ZH, rng), WHICH_PLACE_ZH, "zh")


@dataclass(frozen=True)
class Sum:
    """A sum that the model cannot do by itself: how it is asked, how the tool gets it, how the model says it."""

    question: str
    expression: str
    said: str  # "{r}" is the result


def _operands(op: str, rng: random.Random) -> tuple[int, int]:
    """Two operands, one of them at least beyond what the model learned."""

    def large(digits: tuple[int, ...]) -> int:
        count = rng.choice(digits)
        return rng.randint(10 ** (count - 1), 10**count - 1)

    if op == "/":
        b = rng.choice([rng.randint(11, 99), rng.randint(2, 99)])
        return (b * rng.randint(11, 300), b) if rng.random() < 0.7 else (large((2, 3, 4)) + 100, b)
    a = max(large((2, 3, 3, 4, 4, 5) if op in "+-" else (2, 3, 3, 4)), 22)
    b = large((1, 2, 2, 3, 3, 4) if op in "+-" else (1, 2, 2, 3))
    if op in "+*" and rng.random() < 0.4:
        a, b = b, a
    if op == "-" and a < b and rng.random() < 0.8:
        a, b = b, a
    return a, b


def value_of(expression: str) -> str:
    """As a calculator says it: whole numbers without a point, others to four places."""
    value = eval(expression, {"__builtins__": {}})
    return str(int(value) if value == int(value) else round(value, 4))


_SIGNS = {"+": ["+", "+", " plus "], "-": ["-", "-", " minus "], "*": ["*", "x", "×", " times "], "/": ["/", "÷", " divided by "]}  # fmt: skip
_SIGNS_ZH = {"+": ["+", "加"], "-": ["-", "减"], "*": ["*", "×", "乘以"], "/": ["/", "÷", "除以"]}


def _chain(language: str, rng: random.Random) -> tuple[str, str]:
    """An expression of three numbers, as it is asked and as the tool gets it."""
    ops = rng.choices("+-*", k=2)
    numbers = [str(rng.choice([rng.randint(2, 20), rng.randint(2, 99), rng.randint(100, 999)])) for _ in range(3)]
    signs = _SIGNS if language == "en" else _SIGNS_ZH
    space = rng.choice([" ", " ", ""])
    pairs = [f"{space}{rng.choice(signs[op][:2])}{space}" for op in ops]
    bracket = rng.random()
    if bracket < 0.3:
        return (f"({numbers[0]}{pairs[0]}{numbers[1]}){pairs[1]}{numbers[2]}", f"({numbers[0]} {ops[0]} {numbers[1]}) {ops[1]} {numbers[2]}")  # fmt: skip
    if bracket < 0.45:
        return (f"{numbers[0]}{pairs[0]}({numbers[1]}{pairs[1]}{numbers[2]})", f"{numbers[0]} {ops[0]} ({numbers[1]} {ops[1]} {numbers[2]})")  # fmt: skip
    return f"{numbers[0]}{pairs[0]}{numbers[1]}{pairs[1]}{numbers[2]}", f"{numbers[0]} {ops[0]} {numbers[1]} {ops[1]} {numbers[2]}"  # fmt: skip


def _decimals(rng: random.Random) -> tuple[str, str]:
    a, b = f"{rng.randint(1, 99)}.{rng.randint(1, 9)}", str(rng.randint(2, 99))
    op = rng.choice("+-*")
    sign = rng.choice(_SIGNS[op])
    spaced = sign if sign.startswith(" ") else rng.choice([f" {sign} ", sign])
    return f"{a}{spaced}{b}", f"{a} {op} {b}"


def _sum(language: str, rng: random.Random) -> Sum:
    kind = rng.random()
    if kind < 0.8:
        op = rng.choices("+-*/", weights=(28, 22, 38, 12))[0]
        a, b = _operands(op, rng)
        say = arithmetic.english_answer if language == "en" else arithmetic.chinese_answer
        return Sum(arithmetic.question(a, op, b, language, rng), f"{a} {op} {b}", say(a, op, b, "{r}"))
    asked, expression = _chain(language, rng) if kind < 0.93 else _decimals(rng)
    said = f"{expression} is {{r}}." if language == "en" else f"{expression}等于{{r}}。"
    return Sum(arithmetic.frame(asked, language, rng), expression, said)


def _calculated(one: Sum, language: str, rng: random.Random) -> tuple[str, str]:
    """What the tool returns for a sum, and how the model says it."""
    if rng.random() < 0.06:
        return _error(_CALCULATOR_ERRORS, rng), FAILED_EN if language == "en" else FAILED_ZH
    value = value_of(one.expression)
    number = float(value) if "." in value else int(value)
    kind = rng.random()
    if kind < 0.5:
        result = to_json({"result": number})
    elif kind < 0.75:
        result = value
    elif kind < 0.87:
        result = to_json({rng.choice(["value", "answer", "output", "sum"]): number})
    else:
        result = to_json({"expression": one.expression, "result": number})
    return result, one.said.replace("{r}", value)


def calculation(tool: Tool | None, language: str, rng: random.Random, *, next: bool = False) -> Exchange:
    """Asks for a sum beyond what the model can do. next: after another one. Without a tool it says so."""
    english = language == "en"
    if tool is None:
        op = rng.choice("+-*")
        a, b = _operands(op, rng)
        asked = arithmetic.question(a + 20, op, b + 20, language, rng)
        return Exchange(asked, arithmetic.TOO_LARGE_EN if english else arithmetic.TOO_LARGE_ZH, language)
    one = _sum(language, rng)
    question = one.question
    if next:
        question = ask(["and {e}?", "what about {e}?", "how about {e}?", "then {e}?"] if english else ["那{e}呢？", "{e}呢？", "再算{e}。"], rng, e=one.expression)  # fmt: skip
        one = Sum(question, one.expression, one.said)
    result, said = _calculated(one, language, rng)
    return Exchange(question, said, language, (Call(tool.name, {tool.main: one.expression}, result),))


def two_calls(offered: Offer, language: str, rng: random.Random) -> Exchange:
    """One question that needs two calls, of one tool or of both."""
    english = language == "en"
    if offered.weather and (offered.calculator is None or rng.random() < 0.6):
        names = [place(language, rng), place(language, rng)]
        question = ask(_TWO_PLACES_EN if english else _TWO_PLACES_ZH, rng, p=names[0], q=names[1])
        return _with_weather(offered.weather, question, names, language, rng)
    assert offered.calculator is not None
    sums = [_sum(language, rng) for _ in range(2)]
    calls, said = [], []
    for one in sums:
        result, sentence = _calculated(one, language, rng)
        calls.append(Call(offered.calculator.name, {offered.calculator.main: one.expression}, result))
        said.append(sentence)
    if offered.weather and rng.random() < 0.4:
        name = place(language, rng)
        frames = ["what is the weather in {p}, and what is {e}?", "[tell me the|the] weather of {p} and the result of {e}[, please|]."] if english else ["{p}的天气怎么样，{e}等于多少？", "查{p}的天气，再算{e}。"]  # fmt: skip
        question = ask(frames, rng, p=name, e=sums[0].expression)
        both = _with_weather(offered.weather, question, [name], language, rng)
        return Exchange(question, _joined([both.answer, said[0]], language), language, (*both.calls, calls[0]))
    frames = ["what is {e} and [what is |]{f}?", "[calculate|compute] {e} and {f}.", "how much is {e}, and [how much is |]{f}?", "{e} and {f}?", "I need {e} and {f}."] if english else ["{e}和{f}等于多少？", "计算{e}和{f}。", "{e}是多少，{f}呢？", "算一下{e}和{f}。"]  # fmt: skip
    return Exchange(ask(frames, rng, e=sums[0].expression, f=sums[1].expression), _joined(said, language), language, tuple(calls))  # fmt: skip
