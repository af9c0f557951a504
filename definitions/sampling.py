"""Generates sampling parameters: C++ structs, checks and visitor, the dataclass of the Python API, and the stub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from definitions.text import comment, head, literal, whole, with_region
from definitions.toml_files import entries

_SOURCE = "sampling_parameters.toml"
_VALUES = {"int": "int", "float": "float", "bool": "bool", "uint64": "std::uint64_t"}
_LISTS = {
    "strings": "std::vector<std::string>",
    "token_ids": "std::vector<std::int32_t>",
    "token_lists": "std::vector<std::vector<std::int32_t>>",
    "token_biases": "std::vector<std::pair<std::int32_t, float>>",
}
_PYTHON = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "uint64": "int",
    "strings": "list[str | bytes]",
    "token_ids": "list[int]",
    "token_lists": "list[list[int]]",
    "token_biases": "list[tuple[int, float]]",
}
_TRITON = {"int": "INT32", "float": "FP32", "bool": "BOOL", "uint64": "UINT64"}
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "True or False",
    "uint64": "a whole number from 0 to 2^64 - 1,",
}


@dataclass(frozen=True)
class SamplingParameter:
    """An entry of sampling_parameters.toml. The head of the file explains the keys."""

    name: str
    type: str
    help: str
    default: Any = None
    optional: bool = False
    none: int | None = None
    min: float | None = None
    max: float | None = None
    above: float | None = None
    values: str = ""
    row: bool = False
    model: bool = False
    counts: bool = False
    tensor: str = ""
    reader: str = ""
    validator: str = ""
    expected: str = ""
    python: str = ""

    def __post_init__(self) -> None:
        if self.type not in _PYTHON:
            raise ValueError(f"[{self.name}] is of type {self.type!r}; expected one of {', '.join(_PYTHON)}")
        if self.is_value != (self.default is not None) + self.optional + (self.none is not None):
            raise ValueError(f"[{self.name}] needs one of default, optional and none if it is one value, otherwise 0")
        if not self.is_value and not (self.python and self.expected):
            raise ValueError(f"[{self.name}] needs python and expected, because it is not one value")
        if self.row and self.type not in ("int", "float"):
            raise ValueError(f"[{self.name}] cannot have row, because it is not a number")
        if self.model and (not self.row or self.default is None):
            raise ValueError(f"[{self.name}] cannot have a model's default: it needs row and a default")
        if self.counts and (not self.row or self.type != "float" or self.default is None):
            raise ValueError(f"[{self.name}] cannot have tokens counted: it needs row, the type float and a default")

    @property
    def is_value(self) -> bool:
        """Whether it is one number or flag."""
        return self.type in _VALUES

    @property
    def triton_name(self) -> str:
        """Return the name of its tensor; "" if it has no tensor of its own."""
        return self.tensor or (self.name if self.is_value and not self.reader else "")

    @property
    def triton_type(self) -> str:
        return _TRITON[self.type]

    @property
    def unset(self) -> bool:
        """Whether None is a valid value in Python."""
        return self.optional or self.none is not None or self.model

    @property
    def range(self) -> str:
        """Return the range for people and errors; "" if the type implies it."""
        if self.values:
            return self.values
        if self.max is not None:
            begin = f"[{self.min}" if self.min is not None else f"({self.above}"
            return f"in {begin}, {self.max}]"
        return f">= {self.min}" if self.min is not None else ""

    @property
    def described(self) -> str:
        return self.help + whole(f"; {self.range}" if self.range else "")

    @property
    def described_for_requests(self) -> str:
        """Return the description with the default of a request, if the model may have one."""
        return self.described + (f"; unset: the model's default, else {self.default:g}" if self.model else "")


@cache
def parameters() -> tuple[SamplingParameter, ...]:
    return tuple(entries(_SOURCE, SamplingParameter))


# --- C++


def _member(one: SamplingParameter) -> str:
    kind = _VALUES.get(one.type) or _LISTS[one.type]
    default = one.none if one.default is None else one.default
    value = ""
    if one.optional:
        kind = f"std::optional<{kind}>"
    elif one.type == "float":
        value = f" = {default!r}F"
    elif one.type == "bool":
        value = f" = {str(default).lower()}"
    elif one.is_value:
        value = f" = {default}"
    return comment("//", one.described, 2) + f"  {kind} {one.name}{value};\n"


def cpp_structs() -> str:
    row = "".join(_member(one) for one in parameters() if one.row)
    rest = "".join(_member(one) for one in parameters() if not one.row)
    limits = "".join(
        f"  static constexpr int {one.name} = {one.max};\n"
        for one in parameters()
        if one.type == "int" and one.max is not None
    )
    visits = "".join(
        f"  visit({literal(one.name)}, {literal(tensor)}, &SamplingParams::{one.name});\n"
        for one in parameters()
        for tensor in ("" if one.reader else one.triton_name,)
    )
    return (
        head("//", _SOURCE)
        + """#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace charonia {

// The parameters of a row's request that kernels need in a step.
struct RowSampling {
"""
        + row
        + """};

// Names and meanings are OpenAI's if OpenAI has the parameter. validate() checks every range given here.
struct SamplingParams : RowSampling {
"""
        + rest
        + """
  // Throws Error(invalid_argument) naming the field, its value and the range. vocab_size bounds token ids.
  void validate(int vocab_size) const;
};

// The maximum of each parameter that has one and is an integer.
struct SamplingMaximum {
"""
        + limits
        + """};

// Calls visit(name, tensor, member) for every parameter. tensor: the Triton input of shape [1] with its value; "" if
// other code reads it.
template <class Visitor>
void visit_sampling(Visitor&& visit) {
"""
        + visits
        + "}\n\n}  // namespace charonia\n"
    )


def _check(one: SamplingParameter) -> str:
    value = f"*{one.name}" if one.optional else "bias" if one.type == "token_biases" else one.name
    suffix = "F" if one.type in ("float", "token_biases") else ""

    def number(bound: float) -> str:
        return f"{float(bound)}{suffix}" if suffix else f"{bound}"

    holds = [f"{value} >= {number(one.min)}"] if one.min is not None else []
    holds += [f"{value} > {number(one.above)}"] if one.above is not None else []
    holds += [f"{value} <= {number(one.max)}"] if one.max is not None else []
    if one.type == "float" and one.max is None:
        holds.append(f"std::isfinite({value})")
    condition = " && ".join(holds)
    if one.none is not None:
        condition = f"{value} == {one.none} || ({condition})"
    unless_unset = f"if ({one.name}) " if one.optional else ""
    if one.type == "token_biases":
        unless_unset = f"for (const auto& [id, {value}] : {one.name})\n  "
    return f"{unless_unset}require({condition},\n        {literal(one.name)}, {value}, {literal(one.range)});\n"


def cpp_checks() -> str:
    checked = [one for one in parameters() if one.range and one.validator != "own"]
    checks = "".join(_check(one) for one in checked)
    return head("//", _SOURCE) + "// Statements of SamplingParams::validate().\n" + checks


def cpp_counts() -> str:
    asked = " || ".join(f"row.{one.name} != {one.default!r}F" for one in parameters() if one.counts)
    return (
        head("//", _SOURCE)
        + """#pragma once

#include "charonia/generated/sampling.h"

namespace charonia {

// Whether the tokens of the row's sequence have to be counted.
inline bool has_penalties(const RowSampling& row) {
  return """
        + asked
        + """;
}

}  // namespace charonia
"""
    )


def cpp_model_defaults() -> str:
    return (
        head("//", _SOURCE)
        + "// Sets `sampling` to the defaults of `model`.\n"
        + "".join(f"sampling.{one.name} = model.default_{one.name};\n" for one in parameters() if one.model)
    )


# --- Python


def stub() -> str:
    """Return the members of SamplingParams in _engine.pyi."""
    members = ""
    for one in parameters():
        members += f"    {one.name}: {_PYTHON[one.type]}{' | None' if one.optional else ''}\n"
    return with_region("charonia/_engine.pyi", "sampling parameters", members)


def _python_field(one: SamplingParameter) -> str:
    kind = _PYTHON[one.type] + (" | None" if one.unset else "")
    default = None if one.unset else one.default
    field = one.python or f"{one.name}: {kind} = {default!r}"
    return comment("#", one.described_for_requests, 4) + f"    {field}\n"


def python_fields() -> str:
    values = "".join(f"    {literal(one.name)}: {one.unset},\n" for one in parameters() if one.is_value)
    expected = "".join(
        f"    {literal(one.name)}: "
        + literal(f"expected {one.expected or _EXPECTED[one.type]}" + (" or None" if one.unset else ""))
        + ",\n"
        for one in parameters()
    )
    return (
        head("#", _SOURCE)
        + '''"""The fields of charonia.SamplingParams, and how they are passed to the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingFields:
    """Names and meanings are OpenAI's if OpenAI has the parameter. The engine checks ranges."""

'''
        + "".join(_python_field(one) for one in parameters())
        + "\n\n# Fields with one value, passed to the engine unchanged. True: None leaves the field unset.\n"
        + f"VALUES: dict[str, bool] = {{\n{values}}}\n\n"
        + "# The expected values in the error for a wrong type, by the engine's field name.\n"
        + f"EXPECTED: dict[str, str] = {{\n{expected}}}\n"
    )


FILES: dict[str, Callable[[], str]] = {
    "engine/include/charonia/generated/sampling.h": cpp_structs,
    "engine/src/base/generated/sampling_checks.inc": cpp_checks,
    "engine/src/runtime/generated/sampling_defaults.inc": cpp_model_defaults,
    "engine/src/ops/generated/penalties.h": cpp_counts,
    "charonia/_engine.pyi": stub,
    "charonia/api/sampling_fields.py": python_fields,
}
