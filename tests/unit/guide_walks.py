"""Random responses that follow a guide, for tests: some seed produces each text that a grammar allows."""

from __future__ import annotations

import random
import re

from charonia import Engine, SamplingParams


class Walks:
    """For each seed, other tokens are more probable. Tokens that end or close something are more probable too, to a
    different degree, so that responses have different lengths."""

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
