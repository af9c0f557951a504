"""Phrasings for tools and for JSON that are never used in training. `{p} {q}` are places, `{e}` an expression, `{k}` keys."""

from __future__ import annotations

WEATHER = {
    "en": [
        "What kind of weather does {p} have today?", "Could you find out how the weather is in {p}?", "Is there any rain in {p} at the moment?", "I am packing for {p}. How is the weather over there?", "Let me know the weather in {p}, please.", "Weather conditions for {p}?",
        "How chilly is it in {p} tonight?", "What is it like outside in {p}?", "Please report the current weather in {p}.", "Should I take an umbrella along in {p}?", "My mother lives in {p}. Is it sunny there?", "What does the thermometer show in {p}?",
    ],
    "zh": [
        "请帮忙查一查{p}的天气情况。", "{p}那里现在是什么天气？", "现在{p}外面下雨了没有？", "我妈妈住在{p}，那里天气好不好？", "麻烦看一下{p}的气温。", "{p}此刻多少度呢？", "想问问{p}今天的天气。", "出门去{p}，需要带雨伞吗？", "{p}目前的天气状况如何？", "能查到{p}的天气吗？",
    ],
}  # fmt: skip
# Besides the towns of training, names that it never has
PLACES = {"en": ["Oslo", "Lima", "Sapporo", "Dresden", "Winterfell", "Montpellier", "Kenya", "Bucharest"], "zh": ["奥斯陆", "利马", "札幌", "宁波", "多伦多", "肯尼亚"]}  # fmt: skip
CALCULATE = {
    "en": [
        "What would {e} give?", "I have to know {e} exactly.", "Could you figure out {e} for me?", "How large is {e}?", "Quickly, {e}!", "My calculator is broken, what is {e}?", "Please work out {e} with the tool.", "{e} comes to what?",
    ],
    "zh": ["请问{e}得多少？", "能帮我算{e}吗？", "快速回答：{e}", "{e}的结果到底有多大？", "用计算器算{e}吧。", "麻烦你把{e}算出来。"],
}  # fmt: skip
# As they are asked, and as the tool gets them
SUMS = {
    "en": [("318 * 47", "318 * 47"), ("318 times 47", "318 * 47"), ("2025 - 1987", "2025 - 1987"), ("640 divided by 16", "640 / 16"), ("99 plus 4512", "99 + 4512"), ("73x58", "73 * 58"), ("(12 + 35) * 4", "(12 + 35) * 4"), ("7.5 * 12", "7.5 * 12"), ("1024 minus 77", "1024 - 77"), ("86 + 57", "86 + 57"), ("12345 + 67890", "12345 + 67890")],
    "zh": [("318×47", "318 * 47"), ("2025减1987", "2025 - 1987"), ("640除以16", "640 / 16"), ("99加4512", "99 + 4512"), ("73乘以58", "73 * 58"), ("(12+35)*4", "(12 + 35) * 4"), ("86+57", "86 + 57"), ("1024-77", "1024 - 77")],
}  # fmt: skip
TWO_PLACES = {
    "en": ["How does the weather in {p} differ from that in {q}?", "Weather for {p} as well as {q}, please.", "I want to know the weather both in {p} and in {q}.", "Is it nicer in {p} or in {q} today?"],
    "zh": ["{p}跟{q}今天哪边天气更好？", "请同时查{p}和{q}的天气。", "想了解{p}以及{q}的天气。"],
}  # fmt: skip
TWO_SUMS = {
    "en": ["Work out both {e} and {f}.", "First {e}, then {f}, please."],
    "zh": ["请把{e}和{f}都算出来。", "先算{e}，再算{f}。"],
}
NEXT_PLACE = {
    "en": ["And what of {p}?", "And over in {p}?", "Then {p}, too."],
    "zh": ["换成{p}又怎样？", "{p}那边呢？"],
}
JUST_PLACE = {"en": "For {p}, of course.", "zh": "当然是{p}。"}
NO_WEATHER = {
    "en": ["What kind of weather will we have?", "Could you find out how the weather is?"],
    "zh": ["请问天气情况怎么样？", "能查查天气吗？"],
}

# Tools as others describe them: OpenAI's and Anthropic's documentation, LangChain, and a docstring with its arguments.
WEATHER_TOOLS = [
    ("get_weather", "The weather of a place.", ("place",)), ("get_weather", "Get current temperature for a given location.", ("location",)), ("get_current_weather", "Get the current weather in a given location", ("location", "unit")),
    ("get_weather", "Call to get the current weather.", ("location",)), ("weather", "Weather at a place today.\n\nArgs:\n    city: Name of the city.", ("city",)), ("get_temperature", "Temperature and sky of a town", ("town",)),
]  # fmt: skip
CALCULATOR_TOOLS = [
    ("calculate", "The value of an arithmetic expression.", ("expression",)), ("calculator", "A simple calculator that performs basic arithmetic operations.", ("expression",)), ("calculate", "Evaluate a math expression.\n\nArgs:\n    expr: The expression.", ("expr",)),
    ("compute", "Computes the result of a mathematical expression", ("formula",)),
]  # fmt: skip
OTHER_TOOLS = [("search_web", "Search the internet for pages.", ("query", "pages")), ("create_event", "Put an event into the calendar.", ("title", "start"))]  # fmt: skip

JSON_KEYS = {
    "en": ["Please answer in JSON; the keys are {k}.", "I need JSON with the keys {k}.", "Answer as a JSON object whose keys are {k}.", "Return your answer as JSON with the fields {k}.", "Answer in JSON with the keys {k}, nothing else."],
    "zh": ["请用JSON来回答，键名是{k}。", "我要JSON，字段是{k}。", "以JSON对象回答，包含字段{k}。"],
}  # fmt: skip
JSON_PLAIN = {
    "en": ["Please answer in JSON format.", "I want the answer as JSON."],
    "zh": ["请以JSON的形式回答。", "要JSON形式的答案。"],
}
JSON_SCHEMA = {"en": ["Please answer in JSON by the following schema: {k}", "The answer has to match the JSON schema {k}"], "zh": ["请按照以下JSON schema回答：{k}"]}  # fmt: skip
