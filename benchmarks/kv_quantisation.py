"""What a KV cache of integers changes in a model's answers: quant_policy 0, 8 and 4 on the demo model.

Perplexity: chats of the demo model's own corpus, drawn anew from a seed, 200 texts of up to 1,000 tokens; every token
but a text's first counts. Differences are those of single tokens' log probabilities from quant_policy 0. Questions: the
held-out ones of models/demo/evaluate.py, greedily answered. Everything runs through the engine, in the model's type.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from charonia import Engine, SamplingParams
from charonia.bench.records import Record

_DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
_TEXTS, _LONGEST, _SEED = 200, 1000, 20


@dataclass(frozen=True)
class Figures:
    """Of one quant_policy."""

    bytes_per_token: float
    logprobs: list[float]
    right: int
    asked: int

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


def texts(engine: Engine) -> list[list[int]]:
    """Token ids of whole chats of the corpus, as many to a text as it holds."""
    from demo_corpus.conversation import sample_without_tools  # type: ignore[import-not-found]  # beside the demo model

    rng = random.Random(_SEED)
    out: list[list[int]] = []
    while len(out) < _TEXTS:
        ids: list[int] = []
        while True:
            more = engine.encode("".join(segment for segment, _ in sample_without_tools(rng)))
            if len(ids) + len(more) > _LONGEST:
                break
            ids += more
        out.append(ids)
    return out


def measure(policy: int, threads: int) -> Figures:
    from evaluate import MAX_NEW_TOKENS, Chat, Reply, evaluate  # type: ignore[import-not-found]  # beside the demo model

    with Engine.from_pretrained(_DEMO / "model", device="cpu", threads=threads, quant_policy=policy) as engine:
        rows = engine.generate(texts(engine), SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
        greedy = SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=0)

        def answer(chats: Sequence[Chat]) -> list[Reply]:
            outputs = engine.generate([chat.messages for chat in chats], greedy)
            return [Reply(output.text, output.finish_reason == "stop") for output in outputs]

        report = evaluate(answer)
        info = engine.info
        return Figures(
            bytes_per_token=info.kv_cache_bytes / (info.num_blocks * info.cache_block_seq_len),
            logprobs=[value for row in rows for value in row.prompt_logprobs],
            right=sum(report.right.values()),
            asked=sum(report.asked.values()),
        )


def run_kv_quantisation(threads: int) -> list[Record]:
    """threads: of the engine; 0: as many as there are processors."""
    sys.path.insert(0, str(_DEMO))
    plain: Figures | None = None
    found: list[Record] = []
    for policy in (0, 8, 4):
        got = measure(policy, threads)
        plain = plain or got
        differences = [abs(a - b) for a, b in zip(got.logprobs, plain.logprobs, strict=True)]
        found += [
            Record.of("kv_quantisation", name, unit, value, case={"quant_policy": policy})
            for name, unit, value in (
                ("KV of a token", "bytes", got.bytes_per_token),
                ("perplexity", "", got.perplexity),
                ("mean difference", "", sum(differences) / len(differences)),
                ("greatest difference", "", max(differences)),
                ("right answers", f"of {got.asked}", got.right),
                ("tokens", "", len(got.logprobs)),
            )
        ]
    return found
