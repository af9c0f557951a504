"""Determines the formats of a model's tool calls and reasoning, from its chat template or from the settings.

`charonia convert` copies the package `charonia_answers` next to this file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from charonia_answers import reading
from charonia_answers.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    CallFormat,
    ReasoningFormat,
    find_call_format,
    find_reasoning_format,
    is_open,
)
from charonia_answers.harmony_tags import NEXT
from charonia_answers.parser import special_marks
from prompt_ids import PromptError, encode_inner

CALLS_VARIABLE = "CHARONIA_TOOL_CALL_PARSER"
REASONING_VARIABLE = "CHARONIA_REASONING_PARSER"
GENERIC_VARIABLE = "CHARONIA_GENERIC_TOOLS"
# The format of calls of a model whose chat template does not show tools.
GENERIC = CALL_FORMATS["hermes"]


def is_generic(environment: Mapping[str, str]) -> bool:
    """Whether tools that a chat template does not show are described in the system message."""
    return environment.get(GENERIC_VARIABLE, "").strip().lower() not in ("0", "false", "no", "off")


class AnswerFormats:
    """The formats of a model. Raises ValueError for a setting with an unknown format."""

    def __init__(
        self,
        template: Any,
        environment: Mapping[str, str],
        special_tokens: Mapping[str, int] | None = None,
        default: CallFormat | None = None,
    ) -> None:
        """template: the tokenizer's chat template, a dictionary of named templates, or None. special_tokens: ids by
        text. default: the format of calls if the template has none."""
        text = "\n".join(template.values()) if isinstance(template, dict) else template or ""
        found = find_call_format(text) or default
        self.calls: CallFormat | None = _chosen(environment, CALLS_VARIABLE, CALL_FORMATS, found)
        self.reasoning: ReasoningFormat | None = _chosen(
            environment, REASONING_VARIABLE, REASONING_FORMATS, find_reasoning_format(text)
        )
        if (self.calls is CALL_FORMATS["harmony"]) != (self.reasoning is REASONING_FORMATS["harmony"]):
            raise ValueError(
                f"harmony is a format of calls and reasoning together, but {CALLS_VARIABLE} is {_name(self.calls)} "
                f"and {REASONING_VARIABLE} is {_name(self.reasoning)}: set both to harmony or neither"
            )
        special_tokens = special_tokens or {}
        marks = special_marks(reading.markup_of(self.calls, self.reasoning), special_tokens)
        self._special = {token: special_tokens[token] for token in marks}

    def describe(self) -> dict[str, Any]:
        """The formats for charonia_answers.reading.Reader and for the output `answer_formats`."""
        return {
            "tool_calls": self.calls and self.calls.name,
            "reasoning": self.reasoning and self.reasoning.name,
            "special": self._special,
        }

    def in_reasoning(self, prompt: str | None) -> bool:
        """Whether a prompt ends within the reasoning. `None` as the prompt: the request is not a chat."""
        return prompt is not None and self.reasoning is not None and is_open(prompt, self.reasoning)

    def stops(
        self,
        prompt: str | None,
        functions: Sequence[Mapping[str, Any]] | None,
        words: Sequence[str],
        forced: bool,
        *,
        num_begun: int = 0,
    ) -> tuple[Sequence[str], Sequence[str]]:
        """Returns the effective stop words, and the texts that begin a call: stop words have an effect only before a
        call.

        prompt: the rendered chat; None: the request is not a chat. functions: the functions that may be called, or
        None. forced: the response must consist of calls. num_begun: number of characters at the prompt's end that
        belong to a begun message.
        """
        if prompt is None or functions is None or self.calls is None or not words:
            return words, ()
        bare = (
            () if is_continued(prompt, num_begun) else self.calls.bare_begins(list(reading.named_functions(functions)))
        )
        return ((), ()) if forced else (words, (*self.calls.begin, *bare))


def thinking_marks(tokenizer: Any, reasoning: ReasoningFormat | None) -> tuple[list[int], list[int]]:
    """The token ids of the marks that begin and end the reasoning. In harmony the reasoning is a message, and the
    second mark also begins the next message. Both are empty if the vocabulary cannot spell them."""
    if reasoning is None:
        return [], []
    marks = (reasoning.begin, NEXT if reasoning is REASONING_FORMATS["harmony"] else reasoning.end)
    try:
        begin, end = (encode_inner(tokenizer, "thinking_budget", mark) for mark in marks)
    except PromptError:
        return [], []
    return begin, end


def call_marks(tokenizer: Any, calls: CallFormat | None, special: Collection[str]) -> list[list[int]]:
    """The token ids of the marks that begin and end calls, and of the marks around texts in calls that may spell the
    end mark. Empty if the end of a call cannot be found in this way: the format has no end mark, or texts in Python,
    whose quotes may be missing a backslash. special: the special tokens, which no text spells."""
    if calls is None or calls.syntax == "harmony" or not calls.end:
        return []
    marks: tuple[str, ...] = (calls.begin[0], calls.end)
    if calls.end in special:
        pass
    elif calls.syntax == "pythonic":
        return []
    elif calls.xml:
        marks += (calls.xml.key[0], calls.xml.value[1].strip("\n"))
    else:
        marks += (calls.quote or '"',) * 2
    try:
        return [encode_inner(tokenizer, "thinking_budget", mark) for mark in marks]
    except PromptError:
        return []


def is_continued(prompt: str, num_begun: int) -> bool:
    """Whether the last `num_begun` characters of a prompt are a begun message with text. A call after it has a mark."""
    return bool(prompt[len(prompt) - num_begun :].strip())


def functions_of(tools: str | None) -> list[Mapping[str, Any]]:
    """The functions of checked tools in JSON."""
    return [] if tools is None else reading.functions_of(json.loads(tools))


def _name(format: CallFormat | ReasoningFormat | None) -> str:
    return format.name if format else "none"


def _chosen(environment: Mapping[str, str], variable: str, formats: Mapping[str, Any], found: Any) -> Any:
    name = environment.get(variable) or "auto"
    if name == "auto":
        return found
    if name != "none" and name not in formats:
        raise ValueError(f"{variable}={name!r}: expected auto, none, {', '.join(formats)}")
    return formats.get(name)
