"""Parses responses into content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from charonia_answers.reading import Reader

from charonia_client.errors import ServerError
from charonia_client.types import GenerateRequest, GenerateResponse, ToolCallDelta


class ResponseParser:
    """Parses the responses of a request into content, reasoning and tool calls. `formats`: as Client.answer_formats()
    returns them."""

    def __init__(self, request: GenerateRequest, formats: Mapping[str, Any] | None = None) -> None:
        self.formats = formats or {}
        self._request = request
        self._readers: dict[int, Reader] = {}  # by index of the response

    def is_new(self, part: GenerateResponse) -> bool:
        """Whether the part is the first part of its response."""
        return part.index not in self._readers

    def parse(self, part: GenerateResponse, *, in_reasoning: bool) -> None:
        """Sets content, reasoning and tool_calls of the next part of a response. in_reasoning: the prompt ends within
        the reasoning; it counts for the first part. Raises ServerError."""
        reason = part.finish_reason
        try:
            if self.is_new(part):
                self._readers[part.index] = self._reader(in_reasoning)
            found = self._readers[part.index].read(
                list(zip(part.token_ids, part.token_bytes, strict=True)),
                part.text_span,
                last=reason is not None,
                cut_off=reason not in (None, "stop"),
            )
        except Exception as error:
            raise ServerError(f"the response could not be parsed for tool calls and reasoning: {error!r}") from error
        part.content, part.reasoning = found.content, found.reasoning
        part.tool_calls = [ToolCallDelta(**call) for call in found.calls]
        part.num_reasoning_tokens = found.num_reasoning_tokens
        part.content_tokens = found.content_tokens

    def _reader(self, in_reasoning: bool) -> Reader:
        request = self._request
        if request.messages is None:
            return Reader({})
        return Reader(
            self.formats,
            None if request.tool_choice == "none" else request.tools or None,
            forced=request.forces_calls,
            parallel=request.parallel_tool_calls is not False,
            begun=_text_of(request.messages[-1]) if request.continue_final_message else None,
            in_reasoning=in_reasoning,
            find_content_tokens=request.logprobs is not None,
        )


def _text_of(message: Mapping[str, Any]) -> str:
    """The text of a chat message, which has one text or a list of text parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text") or "") for part in content)
