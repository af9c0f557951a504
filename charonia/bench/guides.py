"""What structured output costs a decode step: a batch of sequences with as many different schemas, and without any. And
what the setting jump_forward saves under the same schemas."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from charonia.api.engine import Engine
from charonia.api.guides import Guide
from charonia.api.results import Output, SamplingParams
from charonia.bench.records import Record
from charonia.errors import InvalidRequestError, ModelError

_TEXT = {"type": "string", "maxLength": 24}
_PLACE = {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}}}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


# What items of the lists look like that sequences write.
ITEMS: tuple[dict[str, Any], ...] = (
    _object(
        name=_TEXT,
        age={"type": "integer", "minimum": 0, "maximum": 150},
        email={"type": "string", "format": "email"},
    ),
    _object(
        tool={"enum": ["get_weather", "search_files", "send_message"]},
        arguments=_object(query=_TEXT, limit={"type": "integer"}),
    ),
    _object(
        id={"type": "string", "format": "uuid"},
        at={"type": "string", "format": "date-time"},
        level={"enum": ["info", "warning", "error"]},
    ),
    {"anyOf": [_object(kind={"const": "circle"}, r={"type": "number"}), _object(kind={"const": "line"}, to=_PLACE)]},
    _object(
        title=_TEXT,
        tags={"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 5},
        done={"type": "boolean"},
    ),
    {
        "type": "object",
        "properties": {f"option_{letter}": {"type": ["integer", "boolean", "null"]} for letter in "abcdefgh"},
    },
    _object(
        sku={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4,6}$"},
        price={"type": "number", "minimum": 0, "maximum": 1000},
        stock=_object(shop=_TEXT, count={"type": "integer", "minimum": 0}),
    ),
    {"type": "object", "additionalProperties": {"anyOf": [{"type": "number"}, _TEXT, {"type": "boolean"}]}},
)


# With jump_forward these are most of what there is: long names, and little between them.
LONG_NAMES: tuple[dict[str, Any], ...] = (
    _object(
        **{
            name: {"type": "integer", "minimum": 0, "maximum": 999}
            for name in (
                "temperature_celsius",
                "relative_humidity_percent",
                "wind_speed_kilometres_per_hour",
                "wind_direction_degrees",
                "atmospheric_pressure_hectopascal",
                "visibility_kilometres",
                "precipitation_millimetres",
                "cloud_cover_percent",
            )
        }
    ),
)


def schemas(batch: int, tokens: int, items: Sequence[dict[str, Any]] = ITEMS) -> list[dict[str, Any]]:
    """Different ones, none of whose texts ends within so many tokens."""
    found = []
    for index in range(batch):
        least = tokens + index // len(items)
        found.append({"type": "array", "items": items[index % len(items)], "minItems": least})
    return found


def measure_guides(engine: Engine, *, batch: int, tokens: int, rounds: int, at_most: float | None) -> list[Record]:
    """Random prompts and sampling; every other round begins with the guides. at_most: percent that the steps with
    guides may take longer. CPU times are the process's, prompts included: they depend little on what else runs."""
    if batch < 1 or tokens < 2 or rounds < 1:
        raise InvalidRequestError("the batch and the rounds must be at least 1, the tokens at least 2")
    generator = np.random.default_rng(0)
    prompts: list[list[int]] = generator.integers(3, engine.info.vocab_size, (batch, 32)).tolist()
    guides = [Guide.json_schema(schema) for schema in schemas(batch, tokens)]
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with ThreadPoolExecutor(batch) as pool:

        def run(guided: bool, seed: int) -> tuple[float, float]:
            """Milliseconds of a step after the last first token, and of CPU time by the token of a sequence."""

            def one(index: int) -> Output:
                sampling = SamplingParams(max_tokens=tokens, seed=1000 * seed + index, ignore_eos=not guided)
                output = engine.generate(prompts[index], sampling, guide=guides[index] if guided else None)[0]
                if output.num_output_tokens < tokens:
                    raise ModelError(f"a sequence ended after {output.num_output_tokens} of {tokens} tokens")
                return output

            cpu = time.process_time()
            timings = [output.timings for output in pool.map(one, range(batch))]
            begun = max(timing.first_token_ms for timing in timings)
            cpu = time.process_time() - cpu
            return (max(timing.total_ms for timing in timings) - begun) / (tokens - 1), 1e3 * cpu / tokens

        for guided in (True, False):  # compiles the grammars
            run(guided, 0)
        for number in range(rounds):
            for guided in (False, True)[:: 1 - 2 * (number % 2)]:
                times[guided].append(run(guided, 1 + number))
    return _records(times[False], times[True], {"batch": batch, "tokens": tokens}, at_most)


def _records(
    without: Sequence[tuple[float, float]],
    guided: Sequence[tuple[float, float]],
    case: dict[str, Any],
    at_most: float | None,
) -> list[Record]:
    found = []
    for place, name in enumerate(("step", "CPU time")):
        plain, longer = [run[place] for run in without], [run[place] for run in guided]
        more = [100 * (one / other - 1) for one, other in zip(longer, plain, strict=True)]
        found += [
            Record.of("guides", f"{name} without", "ms", plain, case=case),
            Record.of("guides", f"{name} with", "ms", longer, case=case),
            Record.of("guides", f"{name}: more", "%", more, case=case, asked=at_most, at_most=True),
            Record.of("guides", f"{name}: more, best rounds", "%", 100 * (min(longer) / min(plain) - 1), case=case),
        ]
    return found


@dataclass(frozen=True)
class _Round:
    """tokens, characters: of all answers, in a second. steps: in which the answers' tokens were made, for each token of
    one sequence. certain: percent of the tokens that took no step of their own."""

    tokens: float
    characters: float
    steps: float
    certain: float


def measure_jump_forward(engines: Mapping[bool, Engine], *, batch: int, tokens: int, rounds: int) -> list[Record]:
    """Under the same schemas without jump_forward and with it, on the engines [False] and [True]. Every other round
    begins with it. The model spells a text in other tokens without it, so characters per second are compared too."""
    if batch < 1 or tokens < 2 or rounds < 1:
        raise InvalidRequestError("the batch and the rounds must be at least 1, the tokens at least 2")
    if off := [warning for warning in engines[True].info.warnings if "jump_forward" in warning]:
        raise InvalidRequestError(off[0])
    generator = np.random.default_rng(0)
    prompts: list[list[int]] = generator.integers(3, engines[True].info.vocab_size, (batch, 32)).tolist()
    found = []
    with ThreadPoolExecutor(batch) as pool:

        def run(jumps: bool, guides: Sequence[Guide], seed: int) -> _Round:
            engine = engines[jumps]

            def one(index: int) -> Output:
                sampling = SamplingParams(max_tokens=tokens, seed=1000 * seed + index)
                output = engine.generate(prompts[index], sampling, guide=guides[index])[0]
                if output.num_output_tokens < tokens:
                    raise ModelError(f"a sequence ended after {output.num_output_tokens} of {tokens} tokens")
                return output

            before = engine.stats()
            outputs = list(pool.map(one, range(batch)))
            now = engine.stats()
            seconds = max(output.timings.total_ms for output in outputs) / 1e3
            certain = now.jump_forward_tokens - before.jump_forward_tokens
            return _Round(
                batch * tokens / seconds,
                sum(len(output.text) for output in outputs) / seconds,
                (now.num_steps - before.num_steps) / tokens,
                100 * certain / (batch * tokens),
            )

        for name, items in (("of several kinds", ITEMS), ("long names", LONG_NAMES)):
            guides = [Guide.json_schema(schema) for schema in schemas(batch, tokens, items)]
            measured: dict[bool, list[_Round]] = {False: [], True: []}
            for jumps in (False, True):  # compiles the grammars
                run(jumps, guides, 0)
            for number in range(rounds):
                for jumps in (False, True)[:: 1 - 2 * (number % 2)]:
                    measured[jumps].append(run(jumps, guides, 1 + number))
            found += _jump_records(measured[False], measured[True], {"schemas": name, "batch": batch, "tokens": tokens})
    return found


def _jump_records(off: Sequence[_Round], on: Sequence[_Round], case: dict[str, Any]) -> list[Record]:
    def record(name: str, unit: str, values: Sequence[float]) -> Record:
        return Record.of("jump_forward", name, unit, values, case=case)

    found = []
    for name in ("tokens", "characters"):
        without, taken = [getattr(one, name) for one in off], [getattr(one, name) for one in on]
        found += [
            record(f"{name} off", "/s", without),
            record(f"{name} on", "/s", taken),
            record(f"{name}: times as many", "", [a / b for a, b in zip(taken, without, strict=True)]),
        ]
    return [
        *found,
        record("steps by token off", "", [one.steps for one in off]),
        record("steps by token on", "", [one.steps for one in on]),
        record("without a step of their own", "%", [one.certain for one in on]),
    ]
