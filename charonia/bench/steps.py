"""What steps take that decode and compute prompts at once.

mixed: one step with both beside the same work in two steps, whose parts it should not take longer than. beside prompts:
how much later tokens of running requests come while long prompts are computed, with `step_time_ms` and without.

Both run in this process. Times between tokens are the engine's own, so how fast this process reads them does not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from charonia.api.engine import Engine
from charonia.api.results import SamplingParams
from charonia.bench.records import Record
from charonia.bench.targets import GREEDY
from charonia.engine_settings import Setting
from charonia.errors import CharoniaError, InvalidRequestError, ModelError

_RUNNING_PROMPT_TOKENS = 64
_PROMPTS = 5  # of a round
_BETWEEN = 8  # steps that only decode, before each prompt
_QUIET_STEPS = 40
_LONG_PROMPTS = 2
_LONGEST_RUNNING = 800  # tokens: some six times those that are waited for, which the readers' polls may miss
_POLL_S = 0.002
_SILENCE_S = 120.0  # after which running requests have stopped


class _Decoding:
    """Requests that decode until the end. made[i]: when the engine made each token of request i, in milliseconds since
    it took the request."""

    def __init__(self, engine: Engine, prompts: Sequence[list[int]]) -> None:
        self.made: list[list[float]] = [[] for _ in prompts]
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        self._readers = [
            threading.Thread(target=self._read, args=(engine, times, prompt), daemon=True)
            for times, prompt in zip(self.made, prompts, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, engine: Engine, times: list[float], prompt: list[int]) -> None:
        room = engine.info.session_len - len(prompt)
        endless = SamplingParams(max_tokens=room, ignore_eos=True, **GREEDY)
        try:
            with engine.stream(prompt, endless) as stream:
                for chunk in stream:
                    times.append(chunk.timings.total_ms)
                    if self._stop.is_set():
                        break
        except CharoniaError as error:
            self._failed = error

    def wait_for(self, tokens: int) -> None:
        """More of each of them. Raises ModelError where they end before."""
        wanted = [len(times) + tokens for times in self.made]
        deadline = time.monotonic() + _SILENCE_S
        while any(len(times) < count for times, count in zip(self.made, wanted, strict=True)):
            if self._failed:
                raise self._failed
            if time.monotonic() > deadline:
                raise ModelError(
                    f"a running request has made no token for {_SILENCE_S:g} s: is max_batch_size too small?"
                )
            if not all(reader.is_alive() for reader in self._readers):
                raise ModelError("the running requests ended before the measurement: give a longer session_len")
            time.sleep(_POLL_S)

    def places(self) -> list[int]:
        return [len(times) for times in self.made]

    def between(self, first: Sequence[int], last: Sequence[int]) -> list[float]:
        """Milliseconds between tokens, from the places `first` to the places `last`."""
        return [float(gap) for gaps in self._gaps(first, last) for gap in gaps]

    def longest_step(self, first: Sequence[int], last: Sequence[int]) -> float:
        """Milliseconds of the longest step from the places `first` to the places `last`. All requests are in it, so
        where they differ, one was held up."""
        return float(np.median([np.max(gaps) for gaps in self._gaps(first, last)]))

    def _gaps(self, first: Sequence[int], last: Sequence[int]) -> Iterator[np.ndarray[Any, Any]]:
        for times, begin, end in zip(self.made, first, last, strict=True):
            yield np.diff(times[max(0, begin - 1) : end])

    def stop(self) -> None:
        self._stop.set()
        for reader in self._readers:
            reader.join(_SILENCE_S)


@contextmanager
def _decoding(engine: Engine, prompts: Sequence[list[int]]) -> Iterator[_Decoding]:
    running = _Decoding(engine, prompts)
    try:
        running.wait_for(5)
        yield running
    finally:
        running.stop()


def _prompt_maker(engine: Engine, seed: int) -> Callable[[int], list[int]]:
    generator = np.random.default_rng(seed)

    def prompt(tokens: int) -> list[int]:
        ids: list[int] = generator.integers(3, engine.info.vocab_size, tokens).tolist()
        return ids

    return prompt


def run_mixed(
    model: str, *, decodes: int, prompt_tokens: int, rounds: int, settings: Mapping[str, Setting]
) -> list[Record]:
    """A step of `decodes` requests alone, one of a prompt alone, and one of both. Raises InvalidRequestError where
    settings cut a prompt into several steps."""
    chosen: dict[str, Setting] = {
        "token_budget": prompt_tokens + decodes,
        "max_batch_size": decodes + 1,
        "session_len": max(prompt_tokens + 1, _LONGEST_RUNNING),
        "enable_prefix_caching": False,
        "stream_interval_ms": 0,
        "step_time_ms": 0,
        **settings,
    }
    if int(chosen["token_budget"]) < prompt_tokens + decodes or chosen["step_time_ms"] != 0:
        raise InvalidRequestError(
            f"token_budget = {chosen['token_budget']} and step_time_ms = {chosen['step_time_ms']} cut a prompt of "
            f"{prompt_tokens} tokens beside {decodes} decodes into several steps: leave both out"
        )
    measured: list[tuple[float, float, float]] = []
    with Engine.from_pretrained(model, **dict[str, Any](chosen)) as engine:
        for number in range(-1, rounds):  # the one before the first warms up
            one = _mixed_round(engine, decodes, prompt_tokens, seed=number + 1)
            if number >= 0:
                measured.append(one)
    case = {"decodes": decodes, "prompt": prompt_tokens}

    def record(name: str, unit: str, values: Sequence[float], **more: Any) -> Record:
        return Record.of("mixed", name, unit, values, case=case, **more)

    return [
        record("decodes alone", "ms", [decode for decode, _, _ in measured]),
        record("prompt alone", "ms", [prefill for _, prefill, _ in measured]),
        record("both in one step", "ms", [mixed for _, _, mixed in measured]),
        record(
            "longer than the parts",
            "%",
            [100 * (mixed / (decode + prefill) - 1) for decode, prefill, mixed in measured],
            asked=10.0,
            at_most=True,
        ),
    ]


def _mixed_round(engine: Engine, decodes: int, prompt_tokens: int, seed: int) -> tuple[float, float, float]:
    """Milliseconds of a step that decodes, of one with a prompt, and of one with both; medians."""
    prompt = _prompt_maker(engine, seed)
    one_token = SamplingParams(max_tokens=1, ignore_eos=True, **GREEDY)

    def compute(ids: list[int]) -> float:
        [output] = engine.generate([ids], one_token)
        return output.timings.first_token_ms - output.timings.queue_ms

    alone = [compute(prompt(prompt_tokens)) for _ in range(_PROMPTS)]
    mixed: list[float] = []
    with _decoding(engine, [prompt(_RUNNING_PROMPT_TOKENS) for _ in range(decodes)]) as running:
        began = running.places()
        running.wait_for(_QUIET_STEPS)
        decoding = running.between(began, running.places())
        for _ in range(_PROMPTS):
            running.wait_for(_BETWEEN)
            before = running.places()
            compute(prompt(prompt_tokens))
            running.wait_for(1)
            mixed.append(running.longest_step(before, running.places()))  # that of the prompt
    return float(np.median(decoding)), float(np.median(alone)), float(np.median(mixed))


def run_beside_prompts(
    model: str, *, streams: int, prompt_tokens: int, rounds: int, settings: Mapping[str, Setting]
) -> list[Record]:
    """Each setting of `step_time_ms` has a fresh engine in every round; every other round is in the other order."""
    alone: dict[int, list[float]] = {0: [], -1: []}
    beside: dict[int, list[float]] = {0: [], -1: []}
    seconds: dict[int, list[float]] = {0: [], -1: []}
    for number in range(rounds):
        for step_time_ms in (0, -1)[:: 1 - 2 * (number % 2)]:
            chosen: dict[str, Setting] = {
                "session_len": prompt_tokens + 200,
                "token_budget": 512,
                "max_batch_size": streams + 1,
                "enable_prefix_caching": False,
                "stream_interval_ms": 0,
                **settings,
                "step_time_ms": step_time_ms,
            }
            with Engine.from_pretrained(model, **dict[str, Any](chosen)) as engine:
                prompt = _prompt_maker(engine, number)
                with _decoding(engine, [prompt(_RUNNING_PROMPT_TOKENS) for _ in range(streams)]) as running:
                    began = running.places()
                    running.wait_for(_QUIET_STEPS)
                    alone[step_time_ms] += running.between(began, running.places())
                    began, at = running.places(), time.monotonic()
                    for _ in range(_LONG_PROMPTS):
                        engine.generate([prompt(prompt_tokens)], SamplingParams(max_tokens=1, **GREEDY))
                    seconds[step_time_ms].append((time.monotonic() - at) / _LONG_PROMPTS)
                    beside[step_time_ms] += running.between(began, running.places())
    return [
        record for setting in (0, -1) for record in _beside(setting, alone[setting], beside[setting], seconds[setting])
    ]


def _beside(
    step_time_ms: int, alone: Sequence[float], beside: Sequence[float], seconds: Sequence[float]
) -> list[Record]:
    case = {"step_time_ms": step_time_ms}
    found = []
    for name, percent in (("median", 50), ("99th", 99)):
        one, other = float(np.percentile(alone, percent)), float(np.percentile(beside, percent))
        found += [
            Record.of("beside prompts", f"between tokens, alone, {name}", "ms", one, case=case),
            Record.of("beside prompts", f"between tokens, beside prompts, {name}", "ms", other, case=case),
            Record.of("beside prompts", f"later, {name}", "times", other / one, case=case),
        ]
    return [*found, Record.of("beside prompts", "a prompt", "s", seconds, case=case)]
