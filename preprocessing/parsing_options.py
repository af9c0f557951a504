"""What is to be known of an answer's calls and reasoning: how they are parsed, which preprocessing tells the Triton
model `parsing` by way of the engine.

The formats are those of the chat template, or what the settings name. charonia convert puts the package
`charonia_answers` beside this file.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from charonia_answers import fingerprint
from charonia_answers.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    CallFormat,
    ReasoningFormat,
    find_call_format,
    find_reasoning_format,
    is_open,
)
from charonia_answers.parser import special_marks
from charonia_answers.reading import markup_of
from charonia_answers.xml import text_parameters

CALLS_VARIABLE = "CHARONIA_TOOL_CALL_PARSER"
REASONING_VARIABLE = "CHARONIA_REASONING_PARSER"


class AnswerFormats:
    """The formats of a model. Raises ValueError for a setting that names none."""

    def __init__(
        self, template: Any, environment: Mapping[str, str], special_tokens: Mapping[str, int] | None = None
    ) -> None:
        """template: the tokenizer's, a text or texts by name; None: it has none. special_tokens: their ids, by how they
        are written; None: the options are for a reader that knows them."""
        text = "\n".join(template.values()) if isinstance(template, dict) else template or ""
        self.calls: CallFormat | None = _chosen(environment, CALLS_VARIABLE, CALL_FORMATS, find_call_format(text))
        self.reasoning: ReasoningFormat | None = _chosen(
            environment, REASONING_VARIABLE, REASONING_FORMATS, find_reasoning_format(text)
        )
        self._reader: dict[str, Any] = {}  # what a reader elsewhere has to know, too
        if special_tokens is not None:
            marks = special_marks(markup_of(self.calls, self.reasoning), special_tokens)
            self._reader = {"parser": fingerprint(), "special": {token: special_tokens[token] for token in marks}}

    def to_json(self) -> str:
        return json.dumps(
            {
                "tool_calls": self.calls and self.calls.name,
                "reasoning": self.reasoning and self.reasoning.name,
                "parser": fingerprint(),
            }
        )

    def stops(
        self,
        prompt: str | None,
        functions: Sequence[Mapping[str, Any]] | None,
        words: Sequence[str],
        forced: bool,
        *,
        num_begun: int = 0,
    ) -> tuple[Sequence[str], Sequence[str]]:
        """The stop words that count, and the texts from the first of which on they do not: they are for what comes
        before calls, and an answer that is forced to be calls has nothing there. Arguments as of `options`."""
        if prompt is None or functions is None or self.calls is None or not words:
            return words, ()
        bare = () if is_continued(prompt, num_begun) else self.calls.bare_begins(names_of(functions))
        return ((), ()) if forced else (words, (*self.calls.begin, *bare))

    def options(
        self,
        prompt: str | None,
        functions: Sequence[Mapping[str, Any]] | None,
        parallel: bool,
        *,
        forced: bool = False,
        num_begun: int = 0,
    ) -> str:
        """Of a request. prompt: what the chat template made; None: no chat. functions: those that may be called; None:
        none may. forced: the answer is calls. num_begun: characters at the prompt's end that are a begun answer, which
        has no reasoning any more."""
        options: dict[str, Any] = {"key": uuid.uuid4().hex, **self._reader}
        if prompt is not None and self.reasoning and not num_begun:
            options |= {"reasoning": self.reasoning.name, "in_reasoning": is_open(prompt, self.reasoning)}
        if prompt is not None and self.calls and functions is not None:
            # They go out with every response: only where they decide.
            options |= {"calls": self.calls.name, "parallel": parallel}
            if forced:
                options["forced"] = True
            elif any(one.get("strict") for one in functions):
                options["certain"] = True
            if self.calls.bare:
                options["names"] = names_of(functions)
                if is_continued(prompt, num_begun):
                    options["continued"] = True
            if self.calls.xml:
                texts = {name: text_parameters(one.get("parameters")) for name, one in _by_name(functions)}
                options["texts"] = {name: found for name, found in texts.items() if found}
        return json.dumps(options)


def is_continued(prompt: str, num_begun: int) -> bool:
    """Whether the last `num_begun` characters of a prompt are a begun answer with text: a call behind it has a mark."""
    return bool(prompt[len(prompt) - num_begun :].strip())


def functions_of(tools: str | None) -> list[Mapping[str, Any]]:
    """The functions of checked tools."""
    if tools is None:
        return []
    functions = [tool.get("function", tool) for tool in json.loads(tools)]
    return [function for function in functions if isinstance(function, dict)]


def names_of(functions: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for name, _ in _by_name(functions)]


def _by_name(functions: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(one["name"], one) for one in functions if isinstance(one.get("name"), str)]


def _chosen(environment: Mapping[str, str], variable: str, formats: Mapping[str, Any], found: Any) -> Any:
    name = environment.get(variable) or "auto"
    if name == "auto":
        return found
    if name != "none" and name not in formats:
        raise ValueError(f"{variable}={name!r}: expected auto, none, {', '.join(formats)}")
    return formats.get(name)
