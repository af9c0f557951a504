"""How models write calls of tools and reasoning: one description per format.

The parser reads by a description, and the grammar of forced calls (`tags`) is made of it: `CallFormat.frame` has the
text around a call's arguments. Markup is given as the model's vocabulary spells it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Syntax = Literal["json", "named", "gemma", "xml"]


@dataclass(frozen=True)
class Frame:
    """The text of calls is `opening`, the calls with `separator` between them, and `closing`. Each call is `before`,
    `name`, `middle`, the arguments and `after`. There is no markup in `name`, whatever it spells."""

    opening: str
    before: str
    name: str
    middle: str
    after: str
    separator: str
    closing: str


@dataclass(frozen=True)
class Xml:
    """What stands around a call's name, and around each parameter's name and value; `close` is behind the last one.
    Line ends within these are where models write them, and need not be there."""

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    close: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark.strip("\n") for mark in (*self.name, *self.key, *self.value, self.close))


@dataclass(frozen=True)
class CallFormat:
    """A way to write calls.

    begin: what begins calls; the first is what is written, all are read. None is the beginning of another.
    end: what ends them; "" for nothing.
    syntax: of a call. json: {"name": ..., KEY: {...}}, or a list of these. named: NAME, `arguments_mark`, the arguments
      as JSON; a call id may stand between, after `id_mark`. gemma: call:NAME{key:value}, texts between two `quote`.
      xml: each parameter between marks of its own, as `xml` has them; texts as they are, other values as JSON.
    keys: json: what KEY is. The first is written, all are read.
    padding: json: white space between markup and call.
    in_list: json: calls are written as one list.
    bare: json: calls may stand at the beginning of an answer without `begin`, and are written so. The name must be one
      that was offered.
    id_characters: length of call ids, letters and digits alone, where the chat template wants them so; 0: any.
    """

    name: str
    begin: tuple[str, ...]
    end: str = ""
    syntax: Syntax = "json"
    keys: tuple[str, ...] = ("arguments", "parameters")
    padding: str = ""
    separator: str = ""
    in_list: bool = False
    bare: bool = False
    quote: str = ""
    arguments_mark: str = ""
    id_mark: str = ""
    id_characters: int = 0
    xml: Xml | None = None

    @property
    def bare_begin(self) -> tuple[str, ...]:
        """How calls without `begin` begin."""
        return ('{"name"', '{"type"') if self.bare else ()

    @property
    def markup(self) -> tuple[str, ...]:
        """Every mark that may be a token of its own."""
        marks = (
            *self.begin,
            self.end,
            self.quote,
            self.arguments_mark,
            self.id_mark,
            *(self.xml.marks if self.xml else ()),
        )
        return tuple(mark for mark in marks if mark)

    def frame(self, name: str, begin: str | None = None) -> Frame:
        """How a call of `name` is written. begin: in place of the first of `begin`."""
        if begin is None:
            begin = "" if self.bare else self.begin[0]
        if self.syntax == "named":
            return Frame("", begin, name, self.arguments_mark, self.end, self.separator, "")
        if self.syntax == "gemma":
            return Frame("", f"{begin}call:", name, "", self.end, self.separator, "")
        if self.xml:
            before, middle = self.xml.name
            return Frame(
                "", f"{begin}{self.padding}{before}", name, middle, self.xml.close + self.end, self.separator, ""
            )
        shown = json.dumps(name, ensure_ascii=False)
        before, middle = '{"name": ', f", {json.dumps(self.keys[0])}: "
        if self.in_list:
            return Frame(f"{begin}[", before, shown, middle, "}", ", ", f"]{self.end}")
        before, after = f"{begin}{self.padding}{before}", f"}}{self.padding}{self.end}"
        return Frame("", before, shown, middle, after, self.separator, "")

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls (name, arguments) as the model writes them."""
        texts = []
        for name, arguments in calls:
            frame = self.frame(name)
            shown = self._arguments(arguments)
            texts.append(f"{frame.before}{frame.name}{frame.middle}{shown}{frame.after}")
        frame = self.frame("")
        return f"{frame.opening}{frame.separator.join(texts)}{frame.closing}"

    def _arguments(self, arguments: Mapping[str, Any]) -> str:
        if self.syntax == "gemma":
            return _gemma(arguments, self.quote)
        if self.xml:
            key, value = self.xml.key, self.xml.value
            parts = (
                f"{key[0]}{name}{key[1]}{value[0]}{_text_or_json(one)}{value[1]}" for name, one in arguments.items()
            )
            return "".join(parts)
        return json.dumps(arguments, ensure_ascii=False)


def _text_or_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_gemma(entry, quote)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(entry, quote) for entry in value) + "]"
    return json.dumps(value)


@dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning stands between `begin` and `end`, at the beginning of an answer. A chat template may have written
    `begin` itself, as the end of the prompt."""

    name: str
    begin: str
    end: str

    @property
    def markup(self) -> tuple[str, ...]:
        return (self.begin, self.end)


CALL_FORMATS = {
    one.name: one
    for one in (
        # Hermes 2 and 3, Qwen 2.5 and 3
        CallFormat("hermes", ("<tool_call>",), "</tool_call>", padding="\n", separator="\n"),
        # Qwen 3 Coder
        CallFormat(
            "qwen3_coder",
            ("<tool_call>",),
            "</tool_call>",
            syntax="xml",
            padding="\n",
            separator="\n",
            xml=Xml(("<function=", ">\n"), ("<parameter=", ">"), ("\n", "\n</parameter>\n"), "</function>\n"),
        ),
        # GLM 4.5, 4.6 and 4.7
        CallFormat(
            "glm45",
            ("<tool_call>",),
            "</tool_call>",
            syntax="xml",
            separator="\n",
            xml=Xml(("", "\n"), ("<arg_key>", "</arg_key>\n"), ("<arg_value>", "</arg_value>\n")),
        ),
        # Llama 3.1, 3.2 and 3.3
        CallFormat("llama3_json", ("<|python_tag|>",), keys=("parameters", "arguments"), separator="; ", bare=True),
        # Mistral up to tokenizer v7
        CallFormat("mistral", ("[TOOL_CALLS]",), in_list=True, id_characters=9),
        # Mistral from tokenizer v11 on
        CallFormat(
            "mistral_named",
            ("[TOOL_CALLS]",),
            syntax="named",
            arguments_mark="[ARGS]",
            id_mark="[CALL_ID]",
            id_characters=9,
        ),
        # InternLM 2, 2.5 and 3
        CallFormat(
            "internlm2",
            ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
            "<|action_end|>",
            keys=("parameters", "arguments"),
            padding="\n",
        ),
        # Phi-4-mini
        CallFormat("phi4_mini", ("<|tool_call|>", "functools"), "<|/tool_call|>", in_list=True),
        # FunctionGemma
        CallFormat(
            "functiongemma", ("<start_function_call>",), "<end_function_call>", syntax="gemma", quote="<escape>"
        ),
        # Gemma 4
        CallFormat("gemma4", ("<|tool_call>",), "<tool_call|>", syntax="gemma", quote='<|"|>'),
    )
}

REASONING_FORMATS = {
    one.name: one
    for one in (
        ReasoningFormat("think", "<think>", "</think>"),  # Qwen 3, DeepSeek-R1 and its like
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
        ReasoningFormat("thought", "<thought>", "</thought>"),
        ReasoningFormat("thinking", "<thinking>", "</thinking>"),
        ReasoningFormat("reasoning", "<reasoning>", "</reasoning>"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
    )
}

# A format, and texts that a chat template which has it contains, all of them; the first format that fits is taken.
_CALL_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("functiongemma", ("<start_function_call>",)),
    ("phi4_mini", ("<|tool_call|>",)),
    ("phi4_mini", ("functools",)),
    ("phi4_mini", ("<|tool|>", "<|/tool|>")),
    ("internlm2", ("<|action_start|>", "<|plugin|>")),
    ("mistral_named", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
)


def find_call_format(template: str) -> CallFormat | None:
    """The format that a chat template has its model write calls in; None where none is known."""
    for name, signs in _CALL_SIGNS:
        if all(sign in template for sign in signs):
            return CALL_FORMATS[name]
    return None


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """The format that a chat template knows reasoning by; None where there is none."""
    for one in REASONING_FORMATS.values():
        if any(mark in template for mark in one.markup):
            return one
    return None


def is_open(prompt: str, reasoning: ReasoningFormat) -> bool:
    """Whether a prompt ends with the beginning of reasoning, so that the answer goes on with it."""
    return prompt.rstrip().endswith(reasoning.begin)


def is_closed(prompt: str, reasoning: ReasoningFormat) -> bool:
    """Whether a prompt ends with the end of reasoning, so that the answer has none."""
    return prompt.rstrip().endswith(reasoning.end)
