"""Generates the Triton tensors: config.pbtxt, the engine's outputs in C++, tables of the client and the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from definitions import sampling
from definitions.text import cell, comment, head, literal, with_region
from definitions.toml_files import entries

_SOURCES = ("tensors.toml", "sampling_parameters.toml")
STEPS = ("preprocessing", "engine", "postprocessing")
MODELS = ("ensemble", *STEPS)
_PYTHON = {"INT32": "int", "UINT64": "int", "FP32": "float", "BOOL": "bool"}


@dataclass(frozen=True)
class Tensor:
    """An entry of tensors.toml, whose head explains the keys; or the tensor of a sampling parameter."""

    name: str
    type: str
    dims: tuple[int, ...]
    help: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    client: str = ""

    def __post_init__(self) -> None:
        if self.type not in ("BYTES", *_PYTHON):
            raise ValueError(f"[{self.name}] is of type {self.type!r}; expected BYTES, {', '.join(_PYTHON)}")
        unknown = {*self.inputs, *self.outputs, *self.required} - set(MODELS)
        if unknown or not (self.inputs or self.outputs):
            raise ValueError(f"[{self.name}] needs inputs or outputs, of {', '.join(MODELS)}; not {sorted(unknown)}")
        if not set(self.required) <= set(self.inputs):
            raise ValueError(f"[{self.name}] is required in a model that does not take it")

    @property
    def steps(self) -> tuple[str, ...]:
        """Return the ensemble's steps that output it."""
        return tuple(model for model in self.outputs if model != "ensemble")

    def between(self, step: str) -> str:
        """Return its name in the ensemble as an output of `step`."""
        alone = len(self.steps) == 1 and "ensemble" not in self.inputs
        return self.name if alone else f"{step}_{self.name}"

    def source(self, step: str) -> str:
        """Return its name in the ensemble as an input of `step`: an earlier output, or an input; "" for neither."""
        before = [model for model in self.steps if STEPS.index(model) < STEPS.index(step)]
        if before:
            return self.between(before[-1])
        return self.name if "ensemble" in self.inputs else ""


@cache
def tensors() -> tuple[Tensor, ...]:
    """Return all tensors. Tensors of sampling parameters come after the other inputs."""
    others = tuple(entries("tensors.toml", Tensor))
    own = tuple(
        Tensor(
            one.triton_name,
            one.triton_type,
            (1,),
            one.described_for_requests,
            ("ensemble", "engine"),
            client=one.name,
        )
        for one in sampling.parameters()
        if one.triton_name
    )
    twice = {one.name for one in others} & {one.name for one in own}
    if twice:
        raise ValueError(f"tensors.toml has {', '.join(sorted(twice))}, which sampling_parameters.toml defines")
    count = max(at for at, one in enumerate(others) if not one.outputs) + 1
    return others[:count] + own + others[count:]


def inputs(model: str) -> list[Tensor]:
    return [one for one in tensors() if model in one.inputs]


def outputs(model: str) -> list[Tensor]:
    return [one for one in tensors() if model in one.outputs]


# --- config.pbtxt


def _config_entry(one: Tensor, more: str) -> str:
    kind = "STRING" if one.type == "BYTES" else one.type
    dims = ", ".join(str(dim) for dim in one.dims)
    return f'  {{ name: "{one.name}" data_type: TYPE_{kind} dims: [ {dims} ]{more} }}'


def _input(one: Tensor, model: str) -> str:
    optional = "" if model in one.required else " optional: true"
    return _config_entry(one, optional)


def _config_list(name: str, rows: list[str]) -> str:
    return f"{name} [\n" + ",\n".join(rows) + "\n]\n"


def _step(step: str) -> str:
    maps = [("input", one.name, one.source(step)) for one in inputs(step) if one.source(step)]
    wanted = {one.source(later) for later in STEPS for one in inputs(later)} | {one.name for one in outputs("ensemble")}
    maps += [("output", one.name, one.between(step)) for one in outputs(step) if one.between(step) in wanted]
    rows = "".join(f'      {kind}_map {{ key: "{key}" value: "{value}" }}\n' for kind, key, value in maps)
    return f'    {{\n      model_name: "{step}"\n      model_version: -1\n{rows}    }}'


def _config_path(model: str) -> str:
    return f"model_repository/{model}/config.pbtxt"


def config(model: str) -> str:
    lists = _config_list("input", [_input(one, model) for one in inputs(model)]) + "\n"
    lists += _config_list("output", [_config_entry(one, "") for one in outputs(model)])
    text = with_region(_config_path(model), "tensors", lists)
    if model == "ensemble":
        steps = ",\n".join(_step(step) for step in STEPS)
        text = with_region(_config_path(model), "steps", f"ensemble_scheduling {{\n  step [\n{steps}\n  ]\n}}\n", text)
    return text


# --- C++


def cpp_outputs() -> str:
    rows = outputs("engine")
    members = "".join(
        comment("//", f"{one.type} {list(one.dims)}: {one.help}".replace("[-1]", "[n]"), 2) + f"  {one.name},\n"
        for one in rows
    )
    names = "".join(f"    {literal(one.name)},\n" for one in rows)
    return (
        head("//", _SOURCES[0])
        + "#pragma once\n\n#include <array>\n#include <cstddef>\n\nnamespace charonia::triton {\n\n"
        + f"// The engine model's output tensors.\nenum class Output : std::size_t {{\n{members}}};\n\n"
        + f"inline constexpr std::array<const char*, {len(rows)}> kOutputNames = {{\n{names}}};\n\n"
        + "}  // namespace charonia::triton\n"
    )


# --- the client


def client() -> str:
    sent = [one for one in tensors() if one.client]
    members = "".join(
        comment("#", one.help, 4) + f"    {one.client}: {_PYTHON[one.type]} | None = None\n" for one in sent
    )
    scalars = "".join(f"    {literal(one.client)}: ({literal(one.name)}, {literal(one.type)}),\n" for one in sent)
    return (
        head("#", *_SOURCES)
        + '"""The fields of a request that are one value, and their tensors."""\n\n'
        + "from __future__ import annotations\n\nfrom dataclasses import dataclass\n\n\n"
        + "@dataclass(slots=True, kw_only=True)\nclass ScalarFields:\n"
        + '    """None is not sent: the server\'s default holds."""\n\n'
        + members
        + "\n\n# Field -> its tensor of shape [1] and its Triton type.\n"
        + f"SCALARS: dict[str, tuple[str, str]] = {{\n{scalars}}}\n"
    )


# --- the contract


def contract() -> str:
    text: str | None = None
    for name, rows in (("ensemble inputs", inputs("ensemble")), ("ensemble outputs", outputs("ensemble"))):
        table = "\n| tensor | type | meaning |\n|---|---|---|\n"
        for one in rows:
            table += f"| `{one.name}` | {one.type} {list(one.dims)} | {cell(one.help)} |\n"
        text = with_region("docs/contracts.md", name, table + "\n", text)
    assert text is not None
    return text


FILES: dict[str, Callable[[], str]] = {
    **{_config_path(model): partial(config, model) for model in MODELS},
    "engine/triton/generated/outputs.h": cpp_outputs,
    "client/charonia_client/contract.py": client,
    "docs/contracts.md": contract,
}
