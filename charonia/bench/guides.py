"""The cost of structured output: until the first token, for a decode step, and for one mask."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np

from charonia import _engine
from charonia.api.engine import Engine
from charonia.api.guides import Guide
from charonia.api.results import Output, SamplingParams
from charonia.bench.records import Record
from charonia.errors import InvalidRequestError, ModelError

# The goal for each figure.
_LATER_MS = 20.0
_SLOWER_PERCENT = 3.0
_MASK_MS, _MASK_P99_MS = 1.0, 5.0


def _strings(count: int, **limits: int) -> dict[str, Any]:
    properties = {f"text_{index}": {"type": "string", **limits} for index in range(count)}
    return {"type": "object", "properties": properties, "required": list(properties)}


SCHEMAS: Mapping[str, dict[str, Any]] = {
    "a string": _strings(1),
    "of at most 100 characters": _strings(1, maxLength=100),
    "of at most 280 characters": _strings(1, maxLength=280),
    "of at most 4000 characters": _strings(1, maxLength=4000),
    "six of 10 to 100 characters": _strings(6, minLength=10, maxLength=100),
}


def measure_guides(engine: Engine, *, batch: int, tokens: int, rounds: int) -> list[Record]:
    """Measure guided and free sequences alternately: one sequence, and `batch` together. A guided sequence writes a
    list of objects that does not end within `tokens`. Prompts and sampling are random."""
    if batch < 1 or tokens < 2 or rounds < 1:
        raise InvalidRequestError("the batch and the rounds must be at least 1, the tokens at least 2")
    prompts: list[list[int]] = np.random.default_rng(0).integers(3, engine.info.vocab_size, (batch, 32)).tolist()
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(engine)))
    found = []
    with ThreadPoolExecutor(batch) as pool:

        def run(guide: Guide | None, sequences: int, seed: int) -> _Run:
            def one(index: int) -> Output:
                sampling = SamplingParams(max_tokens=tokens, seed=1000 * seed + index, ignore_eos=guide is None)
                output = engine.generate(prompts[index], sampling, guide=guide)[0]
                if output.num_output_tokens < tokens:
                    raise ModelError(f"a sequence ended after {output.num_output_tokens} of {tokens} tokens")
                return output

            begun = time.process_time()
            outputs = list(pool.map(one, range(sequences)))
            return _Run(outputs, 1e3 * (time.process_time() - begun) / tokens)

        engine.generate(prompts[0], SamplingParams(max_tokens=1), guide=Guide.json())  # waits for the vocabulary
        for name, schema in SCHEMAS.items():
            lists = {"type": "array", "items": schema, "minItems": tokens}
            guide = Guide.json_schema(lists)
            for sequences in sorted({1, batch}):
                runs: dict[bool, list[_Run]] = {False: [], True: []}
                for number in range(rounds):
                    for guided in (False, True)[:: 1 - 2 * (number % 2)]:
                        runs[guided].append(run(guide if guided else None, sequences, 1 + number))
                case = {"schema": name, "sequences": sequences}
                found += _records(runs[False], runs[True], tokens, case)
                masks = [ms for output in runs[True][-1].outputs for ms in _masks(tokenizer, lists, output.token_ids)]
                found += [
                    Record.of("guides", "mask", "ms", float(np.median(masks)), case=case, asked=_MASK_MS, at_most=True),
                    Record.of(
                        "guides", "mask, p99", "ms", float(np.quantile(masks, 0.99)), case=case, asked=_MASK_P99_MS,
                        at_most=True,
                    ),
                ]  # fmt: skip
    return found


@dataclass(frozen=True)
class _Run:
    outputs: list[Output]
    cpu_ms: float  # of this process, for each step: it depends less on other processes than the time of a step


def _records(free: Sequence[_Run], guided: Sequence[_Run], tokens: int, case: dict[str, Any]) -> list[Record]:
    def first(run: _Run) -> float:
        return max(output.timings.first_token_ms for output in run.outputs)

    def step(run: _Run) -> float:
        return (max(output.timings.total_ms for output in run.outputs) - first(run)) / (tokens - 1)

    later = [first(one) - first(other) for one, other in zip(guided, free, strict=True)]
    more = [100 * (step(one) / step(other) - 1) for one, other in zip(guided, free, strict=True)]
    return [
        Record.of("guides", "first token later", "ms", later, case=case, asked=_LATER_MS, at_most=True),
        Record.of("guides", "step", "ms", [step(one) for one in guided], case=case),
        Record.of("guides", "step longer", "%", more, case=case, asked=_SLOWER_PERCENT, at_most=True),
        Record.of(
            "guides", "more CPU", "ms", [b.cpu_ms - a.cpu_ms for a, b in zip(free, guided, strict=True)], case=case
        ),
    ]


def _masks(tokenizer: llguidance.LLTokenizer, schema: dict[str, Any], tokens: Sequence[int]) -> list[float]:
    """Milliseconds of each mask of a response, computed again by the same library."""
    checked = json.loads(_engine.schema_for_llguidance(json.dumps(schema)))
    start = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @schema'}  # as in the engine
    grammar = json.dumps({"grammars": [start, {"name": "schema", "json_schema": checked}]})
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    mask = llguidance.numpy.allocate_token_bitmask(1, tokenizer.vocab_size)
    times = []
    for token in tokens:
        begun = time.perf_counter()
        llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
        times.append(1e3 * (time.perf_counter() - begun))
        if not matcher.consume_token(token):
            raise ModelError(f"token {token} does not follow in the grammar: {matcher.get_error()}")
    return times


class _Tokens:
    """The vocabulary of an engine, as llguidance reads it."""

    def __init__(self, engine: Engine) -> None:
        handle = engine._open()
        self.tokens = [handle.token_bytes(token) for token in range(engine.info.vocab_size)]
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text]
        self.eos_token_id = engine.info.end_ids[0]
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("masks need no tokenizer")
