"""A parrot of tiny_models.py that calls functions and reasons. It responds to `<|text0|>` with TEXTS[0], and so on. A
grammar can force other text."""

from __future__ import annotations

from typing import Any

MODEL = "caller"
TEXTS = [
    "<think>\nThey want the weather of Paris.\n</think>\n\nI look.\n\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "It is sunny.",
    '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>',
    '{"a": 7}',
    '<tool_call>{"name": "add", "arguments": {"a": 1, oh',
    "They have thought.</think>It is so.",
]
REASONING, CONTENT = "They want the weather of Paris.", "I look."
CALLS = [("get_weather", {"city": "Paris", "days": 3}), ("add", {"a": 1})]
# The marks of the formats, and all inputs of the model before the start token of the response.
TEMPLATE = (
    "{# <think> <tool_call> #}{% if tools %}tools:{{ tools | tojson }}{% endif %}"
    "{% if reasoning_effort %}effort:{{ reasoning_effort }}{% endif %}"
    "{% for message in messages %}{% for call in message.tool_calls or [] %}"
    "call:{{ call.function.name }}={{ call.function.arguments.city }}{% endfor %}{{ message.content }}{% endfor %}"
    "{% if thinks %}<think>\n<|text5|>{% endif %}"
    "{% if thinks is false %}<think>\n\n</think>\n\n{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SCHEMAS = {"get_weather": CITY, "add": A}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
