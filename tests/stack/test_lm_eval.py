"""EleutherAI's lm-eval, unchanged and with its defaults, uses the gateway with its own API client.

The package is installed without the dependencies of its tasks (data sets, scorers), which take hundreds of megabytes.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from stack import DEMO_MODEL, HANG_S, Stack

CONTEXT = "Question: What is the capital of France?\nAnswer:"
CHOICES = [" Paris", " London", " Berlin is a city"]


@pytest.fixture(scope="module")
def evaluated(stack: Stack) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    name = httpx.get(f"{stack.gateway}/v1/models", timeout=HANG_S).json()["data"][0]["id"]
    return LocalCompletionsAPI(base_url=f"{stack.gateway}/v1/completions", model=name)


@pytest.fixture(scope="module")
def reference() -> Any:
    """(context, continuation) -> the log probability in transformers, and whether the continuation is greedy."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)

    def of(context: str, continuation: str) -> tuple[float, bool]:
        before = len(tokenizer(context, add_special_tokens=False)["input_ids"])
        ids = tokenizer(context + continuation, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            rows = torch.log_softmax(model(ids).logits[0].double(), -1)[before - 1 : -1]
        chosen = ids[0, before:]
        return float(rows.gather(1, chosen[:, None]).sum()), bool((rows.argmax(-1) == chosen).all())

    return of


def instances(kind: Any, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


def test_default_uses_tokenizer_of_server_and_token_ids(evaluated: Any) -> None:
    assert evaluated.tokenizer_backend == "remote" and evaluated.tokenized_requests
    assert evaluated.tok_encode(CONTEXT) and evaluated.decode_batch([evaluated.tok_encode(CONTEXT)]) == [CONTEXT]


def test_log_likelihoods_equal_transformers(evaluated: Any, reference: Any) -> None:
    found = evaluated.loglikelihood(instances("loglikelihood", *((CONTEXT, choice) for choice in CHOICES)))
    for choice, (logprob, greedy) in zip(CHOICES, found, strict=True):
        expected, is_greedy = reference(CONTEXT, choice)
        assert logprob == pytest.approx(expected, abs=0.1)
        assert greedy is is_greedy


def test_perplexity_equals_transformers(evaluated: Any, reference: Any) -> None:
    text = "One, two, three, four."
    (logprob,) = evaluated.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
    prefix = evaluated.tokenizer.decode([evaluated.prefix_token_id])
    assert logprob == pytest.approx(reference(prefix, text)[0], abs=0.2)


def test_generated_texts_end_at_stop_words(stack: Stack, evaluated: Any) -> None:
    context, words = "The capital of", ["\n", "i"]
    asked = [(context, {"until": [word], "max_gen_toks": 24}) for word in words]
    found = evaluated.generate_until(instances("generate_until", *asked))
    for word, text in zip(words, found, strict=True):
        fields = {"model": evaluated.model, "prompt": context, "max_tokens": 24, "temperature": 0, "stop": [word]}
        answer = httpx.post(f"{stack.gateway}/v1/completions", json=fields, timeout=HANG_S).json()
        assert text == answer["choices"][0]["text"] and word not in text
    assert any(found)
