"""Perplexity over a text, and how far a model's predictions are from those of another one."""

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

_MOST_NATS = 700.0  # e to more is no double
_ROWS_AT_ONCE = 64  # of the vocabulary's width, in work that makes copies of them


@dataclass(frozen=True)
class Window:
    """Tokens [begin, end) of a text, computed together; the last `scored` of them are what counts."""

    begin: int
    end: int
    scored: int

    @property
    def rows(self) -> int:
        """Predictions of scored tokens: the first token of a text is predicted by none."""
        return min(self.scored, self.end - self.begin - 1)


def windows(tokens: int, length: int, stride: int) -> list[Window]:
    """Overlapping windows, each `stride` tokens after the one before, in which each token is scored once.

    They are those of transformers' documentation ("Perplexity of fixed-length models").
    """
    if length < 2:
        raise InvalidRequestError(f"window = {length} is out of range: it must be at least 2 tokens")
    if not 2 <= stride <= length:  # with 1, all windows but the first would weigh nothing
        raise InvalidRequestError(f"stride = {stride} is out of range: it must be 2 to the window's {length} tokens")
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
    """e to the mean over windows of their tokens' mean negative log probability.

    A window weighs one less than its scored tokens, as in transformers' documentation, so that figures compare.
    """

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0

    def add(self, window: Window, log_probabilities: NDArray[Any]) -> None:
        """log_probabilities: of the window's scored tokens, [window.rows]."""
        weight = window.scored - 1
        if not weight:  # of a text's last token alone
            return
        self._sum -= weight * float(np.mean(log_probabilities, dtype=np.float64))
        self._weight += weight

    @property
    def value(self) -> float:
        """Raises ModelError where it is no number."""
        mean = self._sum / self._weight
        if not mean < _MOST_NATS:
            raise ModelError(
                f"the mean negative log probability of the text's tokens is {mean:g}: the model computes nothing of "
                "use. Are its files whole, and made for each other?"
            )
        return math.exp(mean)


def perplexity(
    engine: Engine,
    token_ids: Sequence[int],
    length: int,
    stride: int,
    advance: Callable[[int], None] = lambda _: None,
) -> float:
    """Of the text's tokens. advance: gets the number of tokens of each window that is done."""
    out = Perplexity()
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for window in windows(len(token_ids), length, stride):
        answer = engine.generate(list(token_ids[window.begin : window.end]), sampling)[0]
        out.add(window, np.array(answer.prompt_logprobs[-window.rows :]))
        advance(window.scored)
    return out.value


@dataclass(frozen=True)
class Comparison:
    """Two models over one text. Divergences are D(reference || model) in nats, at each scored token."""

    perplexity: float
    reference_perplexity: float
    kl_mean: float
    kl_p99: float  # 99 of 100 places have at most this
    kl_max: float
    top1_agreement: float  # share of the places where both have the same most likely token


def compare(
    engine: Engine,
    reference: Engine,
    token_ids: Sequence[int],
    length: int,
    stride: int,
    advance: Callable[[int], None] = lambda _: None,
) -> Comparison:
    """The model in `engine` held against `reference`, by whole distributions.

    Memory: the reference's distributions of a window's scored tokens, and what one window's logits take.
    """
    if engine.info.vocab_size != reference.info.vocab_size:
        raise InvalidRequestError(
            f"{engine.info.model_name} has a vocabulary of {engine.info.vocab_size} tokens and "
            f"{reference.info.model_name} one of {reference.info.vocab_size}: only models with the same one can be "
            "compared"
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
        raise ModelError("the models' predictions have divergences that are no numbers: their logits are infinite")
    return Comparison(
        perplexity=own.value,
        reference_perplexity=others.value,
        kl_mean=float(all_of_them.mean()),
        kl_p99=float(np.quantile(all_of_them, 0.99)),
        kl_max=float(all_of_them.max()),
        top1_agreement=agreements / len(all_of_them),
    )


def _scored(engine: Engine, ids: list[int], window: Window) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Log probabilities [n, vocab] of the predictions of scored tokens: (number of the first among them, rows)."""
    skipped = len(ids) - 1 - window.rows
    for position, rows in engine.prompt_logits(ids):
        kept = rows[max(0, skipped - position) :]
        first = max(position, skipped) - skipped
        for at in range(0, len(kept), _ROWS_AT_ONCE):
            yield first + at, log_softmax(kept[at : at + _ROWS_AT_ONCE])


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Along the last dimension; the sum is taken in double precision."""
    shifted: NDArray[np.float32] = logits - logits.max(axis=-1, keepdims=True)
    total = np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True, dtype=np.float64))
    shifted -= total.astype(np.float32)
    return shifted
