"""Prepares all fields of a request for the engine. Independent of Triton: model.py converts tensors for these
functions, and `charonia web` calls them directly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import prompt
from answer_formats import GENERIC, AnswerFormats, call_marks, functions_of, is_generic, thinking_marks
from answer_guide import AnswerGuides, Guide, read_tool_choice
from model_fingerprint import TEMPLATE_VARIABLE
from prompt_ids import Encoded, PromptError, encode_bad_words, set_chat_template, shown_time, shows_tools


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The values of the tensors with these names (docs/contracts.md). None or empty: not sent."""

    text_input: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    messages: str | None = None
    tools: str | None = None
    tool_choice: str | None = None
    parallel_tool_calls: bool = True
    any_arguments: bool = False
    chat_template_kwargs: str | None = None
    continue_final_message: bool = False
    prompt_time: str | None = None
    add_special_tokens: bool | None = None
    stop_words: Sequence[str] = ()
    bad_words: Sequence[str] = ()
    logit_bias: str | None = None
    exclude_input_in_output: bool = True
    guide: Guide = field(default_factory=Guide)  # the engine checks it
    session_id: str = ""
    interactive: bool = False
    pooling: str = ""


@dataclass(frozen=True)
class Prepared:
    """A prepared request. in_reasoning: whether the prompt ends within the reasoning. thinking: the token ids of the
    marks that begin and end the reasoning; empty ones if the engine cannot end it. thinking_calls: the token ids of the
    marks of calls, after which reasoning may follow (see `call_marks`). bad_words: token ids. echo: the prompt's text,
    if it precedes the response."""

    chat: Encoded
    in_reasoning: bool
    thinking: tuple[Sequence[int], Sequence[int]]
    thinking_calls: Sequence[Sequence[int]]
    guide: Guide
    stop_words: Sequence[str]
    stop_until: Sequence[str]
    bad_words: Sequence[Sequence[int]]
    bias_ids: Sequence[int]
    bias_values: Sequence[float]
    echo: str


def _without_fields(chat: Encoded) -> Prepared:
    return Prepared(
        chat=chat, in_reasoning=False, thinking=((), ()), thinking_calls=(), guide=Guide(), stop_words=(),
        stop_until=(), bad_words=(), bias_ids=(), bias_values=(), echo="",
    )  # fmt: skip


class Preparation:
    """Prepares requests to one model. Raises ValueError if a setting in `environment` names an unknown format, or an
    unusable chat template. limit: tokens of the longest sequence; None: unknown. guide_max_bytes: as in AnswerGuides.
    task: what the model gives (model_task in config.ini); "": unknown."""

    def __init__(
        self,
        tokenizer: Any,
        environment: Mapping[str, str],
        limit: int | None,
        guide_max_bytes: int,
        task: str = "",
    ) -> None:
        self._task = task
        self.tokenizer = tokenizer
        self.limit = limit
        if template := environment.get(TEMPLATE_VARIABLE):
            set_chat_template(tokenizer, Path(template))
        special = special_tokens(tokenizer)
        on = tokenizer.chat_template is not None and is_generic(environment)
        default = GENERIC if on and not shows_tools(tokenizer) else None
        self.formats = AnswerFormats(tokenizer.chat_template, environment, special, default)
        self._write_calls = self.formats.calls.write if on and self.formats.calls else None
        self._marks = thinking_marks(tokenizer, self.formats.reasoning)
        self._call_marks = call_marks(tokenizer, self.formats.calls, special)
        self._guides = AnswerGuides(self.formats, special, guide_max_bytes)

    def prepare(self, fields: Fields) -> Prepared:
        """Raises PromptError for a wrong field."""
        if fields.interactive and not fields.session_id:
            raise PromptError("interactive", "true without a session", "send the session's session_id")
        if self._task and (fields.pooling or "generate") not in (self._task, "any"):
            # The engine rejects the request, and its error names the model's task. Its text may have no template here.
            return _without_fields(Encoded([0]))
        if fields.pooling:
            given = fields.text_input, fields.messages, fields.prompt_token_ids
            return _without_fields(prompt.build_pooled(self.tokenizer, *given, self.limit))
        choice = read_tool_choice(fields.tool_choice)
        tools = None if choice.kind == "none" else fields.tools
        shown = not fields.exclude_input_in_output
        with shown_time(fields.prompt_time):
            chat = prompt.build_prompt(
                self.tokenizer,
                fields.text_input,
                fields.messages,
                tools,
                fields.chat_template_kwargs,
                token_ids=fields.prompt_token_ids,
                special=fields.add_special_tokens,
                with_text=shown,
                interactive=fields.interactive,
                limit=self.limit,
                continues=fields.continue_final_message,
                unseen_tools=choice.forced,
                write_calls=self._write_calls,
            )
        parallel = fields.parallel_tool_calls
        prompted = None if fields.messages is None else chat.text
        functions = functions_of(tools)
        offered = None if tools is None else functions
        guide = self._guides.make(
            prompted,
            functions,
            choice,
            parallel,
            fields.guide,
            num_begun=chat.num_begun,
            any_arguments=fields.any_arguments,
        )
        stop_words, stop_until = self.formats.stops(
            prompted, offered, fields.stop_words, choice.forced, num_begun=chat.num_begun
        )
        bad_words = encode_bad_words(self.tokenizer, fields.bad_words)
        ids, values = ([], []) if fields.logit_bias is None else prompt.parse_logit_bias(fields.logit_bias)
        echo = chat.text if shown else ""
        in_reasoning = self.formats.in_reasoning(prompted) and not chat.num_begun
        # A begun message is content, so no reasoning follows.
        thinking = self._marks if prompted is not None and not chat.num_begun else ([], [])
        marks = (thinking, self._call_marks if tools is not None else [])
        return Prepared(chat, in_reasoning, *marks, guide, stop_words, stop_until, bad_words, ids, values, echo)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The ids of special tokens, which are not part of a text, as in the token table of `charonia convert`."""
    return {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
