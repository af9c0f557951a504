"""The chat format: the template of the tokenizer, and the same in Python for the training text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .text import Call

END = "<|end|>"
ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = [END, *ROLE_TOKENS.values(), "<|pad|>"]

# Tools stand below the system prompt, one JSON object a line: name, names of the parameters, and the first line of the
# description. Types are left out, for the model reads none. Calls are those of Hermes; what a tool returns is said by
# the user's side.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|system|>' }}"
    "{% if messages[0]['role'] == 'system' %}{{ (messages[0]['content'] or '') | trim + '\\n' }}{% endif %}"
    "{{ 'Tools:' }}{% for tool in tools %}{% set function = tool['function'] or tool %}"
    "{{ '\\n{\"name\": ' + (function['name'] or '') | tojson + ', \"parameters\": '"
    " + ((function['parameters'] or {})['properties'] or {}) | list | tojson + ', \"description\": '"
    " + ((function['description'] or '') | trim).split('\\n')[0] | trim | tojson + '}' }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}"
    "{% for message in messages %}{% set content = (message['content'] or '') | trim %}"
    "{% if tools and loop.first and message['role'] == 'system' %}"
    "{% elif message['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>\\n' + content + '\\n</tool_response><|end|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + content }}"
    "{% for call in message['tool_calls'] or [] %}{% set function = call['function'] or call %}"
    "{{ '\\n' if content or not loop.first else '' }}"
    "{{ '<tool_call>\\n{\"name\": ' + (function['name'] or '') | tojson + ', \"arguments\": '"
    " + (function['arguments'] if function['arguments'] is string else (function['arguments'] or {}) | tojson)"
    " + '}\\n</tool_call>' }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def to_json(value: Any) -> str:
    """On one line, with a space after commas and colons: as calls are written, and as grammars have it."""
    return json.dumps(value, ensure_ascii=False)


def system(prompt: str, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """What begins a chat with a system prompt or with tools, which are OpenAI's; empty for neither."""
    lines = [prompt] if prompt else []
    if tools:
        lines.append("Tools:")
    for tool in tools:
        function = tool["function"]
        described = {
            "name": function["name"],
            "parameters": list(function["parameters"]["properties"]),
            "description": function["description"].strip().split("\n")[0].strip(),
        }
        lines.append(to_json(described))
    return ROLE_TOKENS["system"] + "\n".join(lines) + END if lines else ""


def user(text: str) -> str:
    """A message of the user, up to where the answer begins."""
    return f"{ROLE_TOKENS['user']}{text.strip()}{END}{ROLE_TOKENS['assistant']}"


def calls_text(calls: Sequence[Call]) -> str:
    """Calls as the assistant writes them."""
    return "\n".join(
        f"<tool_call>\n{to_json({'name': call.name, 'arguments': call.arguments})}\n</tool_call>" for call in calls
    )


def results_text(calls: Sequence[Call]) -> str:
    """What the tools return, up to where the answer begins."""
    returned = [f"<tool_response>\n{call.result.strip()}\n</tool_response>" for call in calls]
    return "".join(f"{ROLE_TOKENS['user']}{text}{END}" for text in returned) + ROLE_TOKENS["assistant"]
