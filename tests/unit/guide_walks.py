"""Random answers that follow a guide, for tests: what a grammar allows, some seed comes to."""

from __future__ import annotations

import random
import re

from charonia import Engine, SamplingParams


class Walks:
    """Every seed has tokens of its own that are likelier. What ends or closes something is too, more or less, so that
    some answers end at once and others go on."""

    def __init__(self, engine: Engine) -> None:
        handle = engine._open()
        self._tokens = [handle.token_bytes(token) for token in range(engine.info.vocab_size)]
        self._end_ids = engine.info.end_ids

    def params(self, seed: int, *, max_tokens: int, closing: float = 6.0) -> SamplingParams:
        chance = random.Random(seed)
        bias: dict[int, float] = {}
        for token, text in enumerate(self._tokens):
            bias[token] = chance.uniform(0, 8)
            if re.search(rb'["}\]]', text):
                bias[token] += closing * chance.uniform(0, 2)
            elif len(text) <= 2:
                bias[token] += 3
        bias |= {token: chance.uniform(0, 9 + closing) for token in self._end_ids}
        return SamplingParams(max_tokens=max_tokens, temperature=1.5, seed=seed, logit_bias=bias)
