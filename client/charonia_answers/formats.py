"""Descriptions of the formats in which models write tool calls and reasoning, one per format.

The parser and the grammar of forced calls (`tags`) use the same description: `CallFormat.frame` returns the text around
the arguments of a call. Markup is spelled as in the vocabulary of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Syntax = Literal["json", "named", "gemma", "xml", "pythonic", "harmony"]


@dataclass(frozen=True)
class Frame:
    """The text of calls is `opening`, the calls with `separator` between them, and `closing`. Each call is `before`,
    `name`, `middle`, the arguments and `after`. `name` is never parsed as markup, even if it spells a mark. numbered: a
    colon and the number of the call stand between `name` and `middle`."""

    opening: str
    before: str
    name: str
    middle: str
    after: str
    separator: str
    closing: str
    numbered: bool = False


@dataclass(frozen=True)
class Xml:
    """The texts around the name of a call, and around the name and the value of each parameter. `close` follows the
    last parameter. These texts have the line ends that models write; the parser does not require them."""

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    close: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark.strip("\n") for mark in (*self.name, *self.key, *self.value, self.close))


@dataclass(frozen=True)
class CallFormat:
    """A format of tool calls.

    begin: the marks that begin calls. The first is written, all are parsed. No mark is a prefix of another mark.
    end: the mark that ends calls; "": none.
    syntax: the syntax of a call. json: {"name": ..., KEY: {...}}, or a list of such objects. named: NAME,
      `arguments_mark`, the arguments as JSON; `id_mark` and a call id may stand before `arguments_mark`.
      gemma: call:NAME{key:value}, strings between two `quote`. xml: each parameter between the marks in `xml`; strings
      without quotes, other values as JSON. pythonic: NAME(key=value, ...), values as in Python or JSON. harmony: the
      format of whole responses in `harmony.py`, for calls and reasoning together.
    keys: json: the names of KEY. The first is written, all are parsed.
    padding: json, xml: white space between markup and call.
    each: named, xml: the marks around each call, if `begin` and `end` stand around all calls. Calls are also parsed
      without the outer mark, so `begin` also has the first of these marks.
    in_list: json, pythonic: calls are written as one list.
    bare: json, pythonic: calls at the beginning of a response may have no `begin`, and are written without it. The name
      must then be the name of a function in the request.
    name_mark: named: may stand before NAME.
    arguments_end: named: may stand after the arguments.
    numbered: named: a colon and the number of the call follow NAME. `name_mark`, NAME, the colon and the number
      together are the id of the call.
    id_characters: length of call ids, if the chat template requires a length and only letters and digits; 0: any id.
    """

    name: str
    begin: tuple[str, ...]
    end: str = ""
    syntax: Syntax = "json"
    keys: tuple[str, ...] = ("arguments", "parameters")
    padding: str = ""
    separator: str = ""
    each: tuple[str, str] = ("", "")
    in_list: bool = False
    bare: bool = False
    quote: str = ""
    name_mark: str = ""
    arguments_mark: str = ""
    arguments_end: str = ""
    numbered: bool = False
    id_mark: str = ""
    id_characters: int = 0
    xml: Xml | None = None

    def bare_begins(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the texts that begin calls without `begin`. names: the functions of the request."""
        if not self.bare:
            return ()
        if self.syntax == "json":
            return ('{"name"', '{"type"')
        # If there are many names, one text replaces them, because the engine accepts only a few texts.
        return tuple(f"[{name}(" for name in names) if len(names) <= _MAX_BARE_BEGINS else ("[",)

    @property
    def bracket(self) -> str:
        """The first character of calls without `begin`."""
        return "[" if self.syntax == "pythonic" else "{"

    @property
    def markup(self) -> tuple[str, ...]:
        """All marks that may be tokens."""
        marks = (
            *self.begin,
            self.end,
            *self.each,
            self.quote,
            self.name_mark,
            self.arguments_mark.strip("\n"),
            self.arguments_end.strip("\n"),
            self.id_mark,
            *(self.xml.marks if self.xml else ()),
        )
        return tuple(mark for mark in marks if mark)

    def frame(self, name: str, begin: str | None = None) -> Frame:
        """Return the text around the arguments of a call of `name`. begin: replaces the first of `begin`."""
        if begin is None:
            begin = "" if self.bare else self.begin[0]
        end = self.end if begin else ""
        if self.syntax == "pythonic":
            opening, closing = ("[", "]") if self.in_list else ("", "")
            return Frame(f"{begin}{opening}", "", name, "(", ")", self.separator, f"{closing}{end}")
        if self.syntax == "json":
            shown = json.dumps(name, ensure_ascii=False)
            before, middle = '{"name": ', f", {json.dumps(self.keys[0])}: "
            if self.in_list:
                return Frame(f"{begin}[", before, shown, middle, "}", ", ", f"]{end}")
            before, after = f"{begin}{self.padding}{before}", f"}}{self.padding}{end}"
            return Frame("", before, shown, middle, after, self.separator, "")
        opening = closing = ""
        if self.each[0]:
            opening, closing = f"{begin}{self.padding}", f"{self.padding}{end}"
            begin, end = self.each
        if self.xml:
            before, middle = self.xml.name
            before, after = f"{'' if opening else self.padding}{before}", self.xml.close
        else:
            before = "call:" if self.syntax == "gemma" else self.name_mark
            middle, after = self.arguments_mark, self.arguments_end
        return Frame(opening, f"{begin}{before}", name, middle, f"{after}{end}", self.separator, closing, self.numbered)

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Write calls (name, arguments) as the model does."""
        texts = []
        for number, (name, arguments) in enumerate(calls):
            frame = self.frame(name)
            shown = f"{frame.name}:{number}" if frame.numbered else frame.name
            texts.append(f"{frame.before}{shown}{frame.middle}{self._arguments(arguments)}{frame.after}")
        frame = self.frame("")
        return f"{frame.opening}{frame.separator.join(texts)}{frame.closing}"

    def _arguments(self, arguments: Mapping[str, Any]) -> str:
        if self.syntax == "gemma":
            return _gemma(arguments, self.quote)
        if self.syntax == "pythonic":
            return ", ".join(f"{name}={_python(value)}" for name, value in arguments.items())
        if self.xml:
            key, value = self.xml.key, self.xml.value
            parts = (
                f"{key[0]}{name}{key[1]}{value[0]}{_text_or_json(one)}{value[1]}" for name, one in arguments.items()
            )
            return "".join(parts)
        return json.dumps(arguments, ensure_ascii=False)


def _text_or_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _python(value: Any) -> str:
    """Write a value as a Python literal. Strings have the escapes of JSON, which are also valid in Python."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {_python(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


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
    """Reasoning stands between `begin` and `end`, at the beginning of a response. If the chat template writes `begin`,
    it is at the end of the prompt instead. content: marks that may stand around the text after the reasoning."""

    name: str
    begin: str
    end: str
    content: tuple[str, str] = ("", "")

    @property
    def markup(self) -> tuple[str, ...]:
        return (self.begin, self.end, *(mark for mark in self.content if mark))


_MAX_BARE_BEGINS = 32


def _deepseek(name: str, name_mark: str, arguments: tuple[str, str]) -> CallFormat:
    return CallFormat(
        name,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        "<｜tool▁calls▁end｜>",
        syntax="named",
        separator="\n" if name_mark else "",
        each=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        name_mark=name_mark,
        arguments_mark=arguments[0],
        arguments_end=arguments[1],
    )


def _hunyuan_v3(name: str, suffix: str) -> CallFormat:
    """suffix: the end of every mark, before ">"."""

    def mark(word: str) -> str:
        return f"<{word}{suffix}>"

    return CallFormat(
        name,
        (mark("tool_calls"), mark("tool_call")),
        mark("/tool_calls"),
        syntax="xml",
        padding="\n",
        separator="\n",
        each=(mark("tool_call"), mark("/tool_call")),
        xml=Xml(
            ("", mark("tool_sep") + "\n"),
            (mark("arg_key"), mark("/arg_key") + "\n"),
            (mark("arg_value"), mark("/arg_value") + "\n"),
        ),
    )


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
        # DeepSeek V3, R1 and the models distilled from R1
        _deepseek("deepseek_v3", "function<｜tool▁sep｜>", ("\n```json\n", "\n```")),
        # DeepSeek V3.1
        _deepseek("deepseek_v31", "", ("<｜tool▁sep｜>", "")),
        # Kimi K2
        CallFormat(
            "kimi_k2",
            ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
            "<|tool_calls_section_end|>",
            syntax="named",
            each=("<|tool_call_begin|>", "<|tool_call_end|>"),
            name_mark="functions.",
            arguments_mark="<|tool_call_argument_begin|>",
            numbered=True,
        ),
        # Llama 4 with its own chat template
        CallFormat(
            "llama4_json",
            ("<|python_start|>",),
            "<|python_end|>",
            keys=("parameters", "arguments"),
            separator="; ",
            bare=True,
        ),
        # Llama 3.2 and 4, and ToolACE, with chat templates that ask for Python
        CallFormat(
            "pythonic",
            ("<|python_start|>", "<|python_tag|>"),
            "<|python_end|>",
            syntax="pythonic",
            separator=", ",
            in_list=True,
            bare=True,
        ),
        # LFM2 and LFM2.5
        CallFormat(
            "lfm2", ("<|tool_call_start|>",), "<|tool_call_end|>", syntax="pythonic", separator=", ", in_list=True
        ),
        # OLMo 3
        CallFormat("olmo3", ("<function_calls>",), "</function_calls>", syntax="pythonic", separator="\n"),
        # Llama-Nemotron and Nemotron Nano v2
        CallFormat("nemotron", ("<TOOLCALL>",), "</TOOLCALL>", in_list=True),
        # Seed-OSS
        CallFormat(
            "seed_oss",
            ("<seed:tool_call>",),
            "</seed:tool_call>",
            syntax="xml",
            padding="\n",
            separator="\n",
            xml=Xml(("<function=", ">\n"), ("<parameter=", ">"), ("", "</parameter>\n"), "</function>\n"),
        ),
        # Granite 3.0 to 3.3; 3.1 writes the second mark
        CallFormat("granite3", ("<|tool_call|>", "<tool_call>"), in_list=True),
        # Hunyuan A13B
        CallFormat("hunyuan_a13b", ("<tool_calls>",), "</tool_calls>", in_list=True),
        # Hunyuan 0.5B to 7B
        CallFormat(
            "hunyuan",
            ("<tool_calls>", "<tool_call>"),
            "</tool_calls>",
            syntax="named",
            padding="\n",
            separator="\n",
            each=("<tool_call>", "</tool_call>"),
            arguments_mark="\n```json\n",
            arguments_end="\n```",
        ),
        # Hunyuan 3, and its released models
        _hunyuan_v3("hunyuan_v3", ""),
        _hunyuan_v3("hunyuan_v3_open", ":opensource"),
        # Phi-4-mini
        CallFormat("phi4_mini", ("<|tool_call|>", "functools"), "<|/tool_call|>", in_list=True),
        # FunctionGemma
        CallFormat(
            "functiongemma", ("<start_function_call>",), "<end_function_call>", syntax="gemma", quote="<escape>"
        ),
        # Gemma 4
        CallFormat("gemma4", ("<|tool_call>",), "<tool_call|>", syntax="gemma", quote='<|"|>'),
        # GPT-OSS; the last two marks follow a recipient that stands before the first channel
        CallFormat(
            "harmony",
            (
                "<|channel|>commentary to=",
                "<|start|>assistant to=",
                "<|channel|>commentary <|constrain|>",
                "<|channel|>commentary json",
            ),
            "<|call|>",
            syntax="harmony",
            separator="<|start|>assistant",
            name_mark="functions.",
            arguments_mark=" <|constrain|>json<|message|>",
        ),
    )
}

REASONING_FORMATS = {
    one.name: one
    for one in (
        ReasoningFormat("think", "<think>", "</think>"),  # Qwen 3, DeepSeek-R1, EXAONE 4, SmolLM3 and similar models
        ReasoningFormat("think_response", "<think>", "</think>", ("<response>", "</response>")),  # ERNIE, Granite 3.3
        ReasoningFormat("think_answer", "<think>", "</think>", ("<answer>", "</answer>")),  # Hunyuan
        ReasoningFormat("hunyuan_v3_open", "<think:opensource>", "</think:opensource>"),
        ReasoningFormat("granite32", "Here is my thought process:", "Here is my response:"),  # Granite 3.2
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
        ReasoningFormat("thought", "<thought>", "</thought>"),
        ReasoningFormat("thinking", "<thinking>", "</thinking>"),
        ReasoningFormat("reasoning", "<reasoning>", "</reasoning>"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
        ReasoningFormat(
            "harmony", "<|channel|>analysis<|message|>", "<|end|>", ("<|channel|>final<|message|>", "<|return|>")
        ),
    )
}

# Formats, each with texts. If a chat template contains all of these texts, it has the format. The first match wins.
_Signs = tuple[tuple[str, tuple[str, ...]], ...]
_CALL_SIGNS: _Signs = (
    ("harmony", ("<|channel|>analysis<|message|>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("functiongemma", ("<start_function_call>",)),
    ("granite3", ("<|tool_call|>", "<|start_of_role|>")),
    ("phi4_mini", ("<|tool_call|>",)),
    ("phi4_mini", ("functools",)),
    ("phi4_mini", ("<|tool|>", "<|/tool|>")),
    ("internlm2", ("<|action_start|>", "<|plugin|>")),
    ("mistral_named", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("nemotron", ("<TOOLCALL>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("hunyuan_v3_open", ("<tool_calls{}>", "<tool_sep{}>", ":opensource")),
    ("hunyuan_v3", ("<tool_calls>", "<tool_sep>")),
    ("hunyuan", ("<tool_calls>", "<tool_call>", "```json")),
    ("hunyuan_a13b", ("<tool_calls>[",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("List of tools: ", "<|im_start|>")),  # the older templates contain no call
    ("olmo3", ("<function_calls>",)),
    ("", ("]<]minimax[>[",)),  # MiniMax M3; its calls are not parsed
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama4_json", ("<|header_start|>", '"parameters"')),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
)
_REASONING_SIGNS: _Signs = (
    ("think_response", ("<think>", "<response></response>")),
    ("think_response", ("<think>", "<response>\\n")),
    ("think_response", ("<think>", "<response>\n")),
    ("think_answer", ("<think>", "<answer>")),
    ("hunyuan_v3_open", ("<think{}>", ":opensource")),
    *((one.name, (one.begin,)) for one in REASONING_FORMATS.values()),
    *((one.name, (one.end,)) for one in REASONING_FORMATS.values() if one.end != "<|end|>"),  # Phi's templates have it
)


def find_call_format(template: str) -> CallFormat | None:
    """Return the format of calls in a chat template; None if it is not known."""
    name = _first(_CALL_SIGNS, template)
    return CALL_FORMATS[name] if name else None


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """Return the format of reasoning in a chat template; None if it has none."""
    name = _first(_REASONING_SIGNS, template)
    return REASONING_FORMATS[name] if name else None


def _first(signs: _Signs, template: str) -> str:
    return next((name for name, texts in signs if all(text in template for text in texts)), "")


def is_open(prompt: str, reasoning: ReasoningFormat) -> bool:
    """Whether a prompt ends with the beginning of reasoning, so that the response continues the reasoning."""
    return prompt.rstrip().endswith(reasoning.begin)


def is_closed(prompt: str, reasoning: ReasoningFormat) -> bool:
    """Whether a prompt ends with the end of reasoning, so that the response has no reasoning."""
    return prompt.rstrip().endswith(reasoning.end)
