"""Computes perplexity over a text, and the difference between the predictions of two models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from charonia.api.engine import Engine
from charonia.api.results import SamplingParams
from charonia.errors import InvalidRequestError, ModelError

_MOST_NATS = 700.0  # exp() of more overflows a double
_ROWS_AT_ONCE = 64  # rows of vocabulary size that are copied together


@dataclass(frozen=True)
class Window:
    """Tokens [begin, end) of a text, computed together. The last `scored` of them count."""

    begin: int
    end: int
    scored: int

    @property
    def rows(self) -> int:
        """Return the number of predictions of scored tokens: the first token of a text has no prediction."""
        return min(self.scored, self.end - self.begin - 1)


def windows(tokens: int, length: int, stride: int) -> list[Window]:
    """Return overlapping windows, each `stride` tokens after the previous one. Each token is scored once.

    Same windows as in transformers' documentation ("Perplexity of fixed-length models").
    """
    if length < 2:
        raise InvalidRequestError(f"window = {length} is out of range: it must be at least 2 tokens")
    if not 2 <= stride <= length:  # with 1, all windows except the first would have weight 0
        raise InvalidRequestError(f"stride = {stride} is out of range: it must be 2 to {length}, the window's tokens")
    if tokens < 2:
        raise InvalidRequestError(f"the text has {tokens} tokens: perplexity needs at least 2")
    out: list[Window] = []
    scored_to = 0
    for begin in range(0, tokens, stride):
        end = min(begin + length, tokens)
        out.append(Window(begin, end, end - scored_to))
        scored_to = end
        if end == tokens:
            break
    return out


class Perplexity:
    """exp of the weighted mean, over windows, of the mean negative log probability of their tokens.

    The weight of a window is its number of scored tokens minus one, as in transformers' documentation, so that results
    are comparable.
    """

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0

    def add(self, window: Window, log_probabilities: NDArray[Any]) -> None:
        """log_probabilities: of the window's scored tokens, [window.rows]."""
        weight = window.scored - 1
        if not weight:  # a window that scores only the text's last token
            return
        self._sum -= weight * float(np.mean(log_probabilities, dtype=np.float64))
        self._weight += weight

    @property
    def value(self) -> float:
        """Return the perplexity. Raises ModelError if it is not a finite number."""
        mean = self._sum / self._weight
        if not mean < _MOST_NATS:
            raise ModelError(
                f"the mean negative log probability of the text's tokens is {mean:g}: the model's output is useless. "
                "Are its files complete, and do they belong together?"
            )
        return math.exp(mean)


def perplexity(
    engine: Engine,
    token_ids: Sequence[int],
    length: int,
    stride: int,
    advance: Callable[[int], None] = lambda _: None,
) -> float:
    """Return the perplexity of the tokens. advance: called with the number of scored tokens of each window."""
    out = Perplexity()
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for window in windows(len(token_ids), length, stride):
        answer = engine.generate(list(token_ids[window.begin : window.end]), sampling)[0]
        out.add(window, np.array(answer.prompt_logprobs[-window.rows :]))
        advance(window.scored)
    return out.value


@dataclass(frozen=True)
class Comparison:
    """Comparison of two models on one text. Divergences are D(reference || model) in nats, at each scored token."""

    perplexity: float
    reference_perplexity: float
    kl_mean: float
    kl_p99: float  # 99 % of the positions have at most this
    kl_max: float
    top1_agreement: float  # share of positions with the same most likely token in both models


def compare(
    engine: Engine,
    reference: Engine,
    token_ids: Sequence[int],
    length: int,
    stride: int,
    advance: Callable[[int], None] = lambda _: None,
) -> Comparison:
    """Compare the model in `engine` with `reference`, over complete distributions.

    Memory: the reference's distributions of one window's scored tokens, and the logits of one window.
    """
    if engine.info.vocab_size != reference.info.vocab_size:
        raise InvalidRequestError(
            f"{engine.info.model_name} has a vocabulary of {engine.info.vocab_size} tokens, but "
            f"{reference.info.model_name} has {reference.info.vocab_size}: models can be compared only with the same "
            "vocabulary"
        )
    own, others = Perplexity(), Perplexity()
    divergences: list[NDArray[np.float64]] = []
    agreements = 0
    for window in windows(len(token_ids), length, stride):
        ids = list(token_ids[window.begin : window.end])
        targets = np.array(ids[len(ids) - window.rows :])
        expected = np.empty((window.rows, reference.info.vocab_size), np.float32)
        for at, rows in _scored(reference, ids, window):
            expected[at : at + len(rows)] = rows
        others.add(window, expected[np.arange(window.rows), targets])
        found = np.empty(window.rows)
        for at, rows in _scored(engine, ids, window):
            beside = expected[at : at + len(rows)]
            found[at : at + len(rows)] = rows[np.arange(len(rows)), targets[at : at + len(rows)]]
            divergences.append(np.sum(np.exp(beside) * (beside - rows), axis=1, dtype=np.float64))
            agreements += int(np.sum(np.argmax(rows, axis=1) == np.argmax(beside, axis=1)))
        own.add(window, found)
        advance(window.scored)
    all_of_them = np.concatenate(divergences)
    if not np.isfinite(all_of_them).all():
        raise ModelError("the divergences of the models' predictions are not finite numbers: their logits are infinite")
    return Comparison(
        perplexity=own.value,
        reference_perplexity=others.value,
        kl_mean=float(all_of_them.mean()),
        kl_p99=float(np.quantile(all_of_them, 0.99)),
        kl_max=float(all_of_them.max()),
        top1_agreement=agreements / len(all_of_them),
    )


def _scored(engine: Engine, ids: list[int], window: Window) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield log probabilities [n, vocab] of the predictions of scored tokens: (index of the first one, rows)."""
    skipped = len(ids) - 1 - window.rows
    for position, rows in engine.prompt_logits(ids):
        kept = rows[max(0, skipped - position) :]
        first = max(position, skipped) - skipped
        for at in range(0, len(kept), _ROWS_AT_ONCE):
            yield first + at, log_softmax(kept[at : at + _ROWS_AT_ONCE])


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Log softmax along the last dimension. The sum is computed in double precision."""
    shifted: NDArray[np.float32] = logits - logits.max(axis=-1, keepdims=True)
    total = np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True, dtype=np.float64))
    shifted -= total.astype(np.float32)
    return shifted
