"""Python functions as tools of a model: their description for it, and the loop that calls them."""

from __future__ import annotations

import asyncio
import inspect
import json
import types
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from charonia_client.client import Client
from charonia_client.errors import TooManyRounds
from charonia_client.types import GenerateRequest, GenerateResponse

_SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean"}
_MAX_ROUNDS = 8


@dataclass(frozen=True)
class ToolResult:
    """The result of a call, as the model receives it."""

    call_id: str
    name: str
    arguments: str
    text: str


class Tools:
    """Functions by their names. The model receives the docstring and the annotated parameters of each function. The
    parameters are str, int, float, bool, lists, dicts, Literals of texts, or one of these or None."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        """Raises TypeError for a parameter of another type."""
        self._functions = {function.__name__: function for function in functions}
        self.described = [_described(function) for function in functions]

    async def call(self, call_id: str, name: str, arguments: str) -> ToolResult:
        """Returns the result of one call. An error becomes the result, so that the model can read it. A function that
        is not a coroutine runs in a thread."""
        function = self._functions.get(name)
        try:
            if function is None:
                raise LookupError(f"there is no function {name!r}; there are {', '.join(self._functions)}")
            given = json.loads(arguments)
            if not isinstance(given, dict):
                raise TypeError("the arguments are not a JSON object")
            inspect.signature(function).bind(**given)
            if inspect.iscoroutinefunction(function):
                value = await function(**given)
            else:
                value = await asyncio.to_thread(function, **given)
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except Exception as error:
            text = f"error: {type(error).__name__}: {error}"
        return ToolResult(call_id, name, arguments, text)


def _later_choice(choice: str | Mapping[str, Any] | None) -> str | Mapping[str, Any] | None:
    """Return the tool_choice of a response after the first. It forces no call, and limits calls as before."""
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return {**choice, "allowed_tools": {**choice["allowed_tools"], "mode": "auto"}}
    return choice if choice == "none" else None


async def converse(
    client: Client,
    request: GenerateRequest,
    tools: Tools,
    history: list[dict[str, Any]],
    *,
    max_rounds: int = _MAX_ROUNDS,
    request_id: Callable[[], str] | None = None,
) -> AsyncGenerator[GenerateResponse | ToolResult, None]:
    """Requests responses to `history` and runs the tools that the model calls, until it calls no tool.

    Yields the parts of each response and the results of its calls. Appends messages to `history`: each complete
    response with its reasoning, and the results of its calls. request: all fields except messages and tools, with
    streaming. Its tool_choice forces only the first response, so that a forced call gets a final response.
    request_id: creates the id of each round's request. Raises ValueError if `max_rounds` is less than 1, the client's
    errors, and TooManyRounds after `max_rounds` responses with calls. The results of the last calls are then in
    `history`, so the conversation can continue.
    """
    if max_rounds < 1:
        raise ValueError(f"max_rounds = {max_rounds}; it must be at least 1")
    for number in range(max_rounds):
        choice = request.tool_choice if number == 0 else _later_choice(request.tool_choice)
        round_request = replace(request, messages=history, tools=tools.described, tool_choice=choice, parsed=True)
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        ended: str | None = None
        id = request_id() if request_id else None
        async with aclosing(client.generate(round_request, request_id=id)) as answer:
            async for part in answer:
                content.append(part.content)
                reasoning.append(part.reasoning)
                _join_calls(calls, part)
                ended = part.finish_reason
                yield part
        message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
        if thought := "".join(reasoning):
            message["reasoning_content"] = thought
        # No call of a truncated response is run: its last call may be incomplete.
        if ended != "stop" or not calls:
            if message["content"]:
                history.append(message)
            return
        results = [await tools.call(call["id"], **call["function"]) for call in calls]
        history.append({**message, "tool_calls": [_for_history(call) for call in calls]})
        for result in results:
            answered = {"role": "tool", "tool_call_id": result.call_id, "name": result.name, "content": result.text}
            history.append(answered)
            yield result
    raise TooManyRounds(
        f"the model has called functions in each of {max_rounds} responses; no further response was requested"
    )


def _join_calls(calls: list[dict[str, Any]], part: GenerateResponse) -> None:
    for delta in part.tool_calls:
        if delta.name is not None:
            function = {"name": delta.name, "arguments": ""}
            calls.append({"id": delta.id, "type": "function", "function": function})
        calls[delta.index]["function"]["arguments"] += delta.arguments


def _for_history(call: Mapping[str, Any]) -> dict[str, Any]:
    """Chat templates need arguments as an object. Invalid arguments become an empty object, next to the call's
    error."""
    function = call["function"]
    try:
        valid = isinstance(json.loads(function["arguments"]), dict)
    except ValueError:
        valid = False
    return {**call, "function": {**function, "arguments": function["arguments"] if valid else "{}"}}


def _described(function: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(function)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{function.__name__}({name}): a tool's parameters must be passed by name")
        properties[name] = _schema(hints.get(name, str), f"{function.__name__}({name})")
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    described = {"name": function.__name__, "description": inspect.getdoc(function) or "", "parameters": parameters}
    return {"type": "function", "function": described}


def _schema(kind: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a parameter's type."""
    if kind in _SIMPLE:
        return {"type": _SIMPLE[kind]}
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal and all(isinstance(one, str) for one in inner):
        return {"type": "string", "enum": list(inner)}
    if origin in (Union, types.UnionType):
        rest = [one for one in inner if one is not type(None)]
        if len(rest) == 1:
            return _schema(rest[0], where)
    if kind is list or origin is list:
        return {"type": "array", **({"items": _schema(inner[0], where)} if inner else {})}
    if kind is dict or origin is dict:
        return {"type": "object"}
    raise TypeError(
        f"{where} is of type {kind!r}: annotate it with str, int, float, bool, list, dict or a Literal of texts"
    )
