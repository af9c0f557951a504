"""The output items of OpenAI's responses (reasoning, messages and function calls in sequence), complete or as events of
a stream."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from charonia_client import GenerateResponse
from charonia_client.types import ToolCallDelta

from charonia_gateway.answer_deltas import in_order
from charonia_gateway.logprobs import ContentLogprobs
from charonia_gateway.schemas.turns import Turns, arguments_object

_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


class _Item:
    """One item. `texts`: its text so far. name, shown, call_id: only for a call. shown: the fields that name its
    function for the client."""

    def __init__(
        self, kind: str, index: int, name: str = "", shown: Mapping[str, str] | None = None, call_id: str = ""
    ) -> None:
        self.kind = kind
        self.id = f"{_PREFIXES[kind]}{uuid.uuid4().hex}"
        self.index = index
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.name = name
        self.shown = shown or {}
        self.call_id = call_id

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self, text: str) -> dict[str, Any]:
        """The part that contains the text; None for calls."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs if text else []}

    def to_json(self, status: str) -> dict[str, Any]:
        head = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**head, "call_id": self.call_id, **self.shown, "arguments": self.text}
        content = [] if status == "in_progress" else [self.part(self.text)]
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}


class Items:
    """The items of one response. event: creates an event of a stream from its type and fields. functions: the offered
    functions by the names that the model sees, each with its namespace. logprobs: whether texts of messages have log
    probabilities."""

    def __init__(
        self,
        event: Callable[..., bytes],
        functions: Mapping[str, tuple[str, Mapping[str, Any]]],
        *,
        parsed: bool,
        logprobs: bool = False,
    ) -> None:
        self._event = event
        self._functions = functions
        self._parsed = parsed
        self._made: list[_Item] = []
        self._open: _Item | None = None
        self._calls = 0
        self._logprobs = ContentLogprobs(parsed=parsed) if logprobs else None
        self._held: list[dict[str, Any]] = []  # log probabilities of text that is not yet sent

    def read(self, part: GenerateResponse) -> bytes:
        """The events for one part of the response."""
        events = b""
        if self._logprobs:
            self._held += self._logprobs.of(part)
        in_call = self._open is not None and self._open.kind == "function_call"
        for piece in in_order(part, parsed=self._parsed, open_call=self._calls - 1 if in_call else None):
            if isinstance(piece, ToolCallDelta):
                if piece.name is not None:
                    self._calls += 1
                    events += self._begin("function_call", piece.name, piece.id or "")
                events += self._add(piece.arguments, "response.function_call_arguments.delta")
            elif piece.kind == "reasoning":
                events += self._begin_once("reasoning") + self._add(piece.text, "response.reasoning_text.delta")
            else:
                events += self._begin_once("message")
                events += self._add(piece.text, "response.output_text.delta", logprobs=self._take_logprobs())
        return events

    def end(self, status: str) -> bytes:
        """End the response. status: status of the last item; the other items are complete."""
        events = b"" if self._made else self._begin("message")
        return events + self._end(status)

    def to_json(self, status: str) -> list[dict[str, Any]]:
        return [item.to_json(status if item is self._made[-1] else "completed") for item in self._made]

    def messages(self) -> list[dict[str, Any]]:
        """The response as messages of a conversation, for the chat template."""
        turns = Turns()
        for item in self._made:
            if item.kind == "function_call":
                turns.call(item.call_id, item.name, arguments_object(item.text))
            elif item.kind == "reasoning":
                turns.think(item.text)
            else:
                turns.say("assistant", item.text)
        return turns.messages()

    def _take_logprobs(self) -> list[dict[str, Any]]:
        """The log probabilities of the open message's next text."""
        taken, self._held = self._held, []
        if self._open:
            self._open.logprobs += taken
        return taken

    def _begin_once(self, kind: str) -> bytes:
        return b"" if self._open is not None and self._open.kind == kind else self._begin(kind)

    def _begin(self, kind: str, name: str = "", call_id: str = "") -> bytes:
        events = self._end("completed")
        space, function = self._functions.get(name, ("", {"name": name}))
        shown = {"name": str(function["name"]), **({"namespace": space} if space else {})}
        item = self._open = _Item(kind, len(self._made), name, shown, call_id)
        self._made.append(item)
        begun = item.to_json("in_progress")
        events += self._event("response.output_item.added", output_index=item.index, item=begun)
        if kind != "function_call":
            events += self._event("response.content_part.added", **self._place(item), part=item.part(""))
        return events

    def _add(self, text: str, kind: str, **more: Any) -> bytes:
        if not text or self._open is None:
            return b""
        self._open.texts.append(text)
        return self._event(kind, **self._place(self._open), delta=text, **more)

    def _end(self, status: str) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        place, text = self._place(item), item.text
        if item.kind == "function_call":
            events = self._event("response.function_call_arguments.done", **place, arguments=text)
        elif item.kind == "reasoning":
            events = self._event("response.reasoning_text.done", **place, text=text)
        else:
            item.logprobs += self._held
            self._held = []
            events = self._event("response.output_text.done", **place, text=text, logprobs=item.logprobs)
        if item.kind != "function_call":
            events += self._event("response.content_part.done", **place, part=item.part(text))
        return events + self._event("response.output_item.done", output_index=item.index, item=item.to_json(status))

    @staticmethod
    def _place(item: _Item) -> dict[str, Any]:
        place = {"item_id": item.id, "output_index": item.index}
        return place if item.kind == "function_call" else {**place, "content_index": 0}
