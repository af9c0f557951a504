"""The content blocks of Anthropic's messages (thinking, text and tool calls in sequence), complete or as events of a
stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from charonia_client import GenerateResponse
from charonia_client.types import ToolCallDelta

from charonia_gateway.answer_deltas import Text, in_order
from charonia_gateway.record import PING_HEARTBEAT
from charonia_gateway.schemas.messages import MessagesRequest
from charonia_gateway.schemas.turns import arguments_object
from charonia_gateway.sse import named_event

# Anthropic signs its thinking, and clients send the signature back. This server neither signs nor checks.
SIGNATURE = "unsigned"


def whole_blocks(body: MessagesRequest, answer: GenerateResponse, *, parsed: bool) -> list[dict[str, Any]]:
    """The blocks of a complete response."""
    blocks: list[dict[str, Any]] = []
    for piece in in_order(answer, parsed=parsed):
        if isinstance(piece, ToolCallDelta):
            block = _tool_use(piece)
            blocks.append({**block, "input": arguments_object(piece.arguments)})
        elif piece.kind == "content":
            blocks.append({"type": "text", "text": piece.text})
        elif body.shows_thinking:
            thinking = "" if body.omits_thinking else piece.text
            blocks.append({"type": "thinking", "thinking": thinking, "signature": SIGNATURE})
    return blocks


def _tool_use(call: ToolCallDelta) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


class Blocks:
    """The events of one response's blocks. `calls`: number of tool calls that have begun."""

    def __init__(self, body: MessagesRequest, *, parsed: bool) -> None:
        self._body = body
        self._parsed = parsed
        self._index = -1  # index of the last block
        self._open = ""  # its type; "": it has ended
        self._pinged = False
        self.calls = 0

    def read(self, part: GenerateResponse) -> bytes:
        """The events for one part of the response."""
        events = b""
        open_call = self.calls - 1 if self._open == "tool_use" else None
        for piece in in_order(part, parsed=self._parsed, open_call=open_call):
            if isinstance(piece, ToolCallDelta):
                events += self._call(piece)
            elif piece.kind == "content":
                events += self._begin_text() + self._delta("text_delta", text=piece.text)
            elif self._body.shows_thinking:
                events += self._thinking(piece)
        return events

    def end(self) -> bytes:
        """The events that end the current block, if there is one."""
        events = b""
        if self._open == "thinking":
            events = self._delta("signature_delta", signature=SIGNATURE)
        if self._open:
            events += named_event({"type": "content_block_stop", "index": self._index})
        self._open = ""
        return events

    def _call(self, call: ToolCallDelta) -> bytes:
        events = b""
        if call.name is not None:
            self.calls += 1
            events = self._begin(_tool_use(call))
        if call.arguments:
            events += self._delta("input_json_delta", partial_json=call.arguments)
        return events

    def _begin_text(self) -> bytes:
        return b"" if self._open == "text" else self._begin({"type": "text", "text": ""})

    def _thinking(self, piece: Text) -> bytes:
        events = b""
        if self._open != "thinking":
            events = self._begin({"type": "thinking", "thinking": "", "signature": ""})
        return events if self._body.omits_thinking else events + self._delta("thinking_delta", thinking=piece.text)

    def _begin(self, block: Mapping[str, Any]) -> bytes:
        events = self.end()
        self._index += 1
        self._open = block["type"]
        events += named_event({"type": "content_block_start", "index": self._index, "content_block": block})
        if not self._pinged:
            self._pinged = True
            events += PING_HEARTBEAT
        return events

    def _delta(self, kind: str, **fields: Any) -> bytes:
        event = {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **fields}}
        return named_event(event)
