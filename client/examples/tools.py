"""Two functions that a model may call: `triton_client --tools client/examples/tools.py`."""

from __future__ import annotations

import ast
import operator
import zlib
from collections.abc import Callable
from typing import Any

_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SKIES = ("sunny", "cloudy", "rain", "windy", "fog", "clear")
_LONGEST = 200  # characters of an expression


def get_weather(place: str) -> dict[str, Any]:
    """The weather of a place."""
    # An example should not call a service. So the weather is computed from the name and never changes.
    number = zlib.crc32(place.lower().encode())
    return {"place": place, "weather": _SKIES[number % len(_SKIES)], "temperature": number // 7 % 30}


def calculate(expression: str) -> dict[str, int | float]:
    """The value of an arithmetic expression."""
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters, more than {_LONGEST}")
    value = _value(ast.parse(expression, mode="eval").body)
    return {"result": int(value) if value == int(value) else round(value, 4)}


def _value(node: ast.expr) -> int | float:
    """Compute sums, differences, products and quotients of numbers. Other Python expressions are not evaluated."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            result: int | float = _OPERATIONS[type(op)](_value(left), _value(right))
            return result
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
    raise ValueError(f"{ast.unparse(node)} is no sum, difference, product or quotient of numbers")
