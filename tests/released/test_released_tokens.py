"""Greedy tokens and log probabilities of released models equal those of transformers."""

from __future__ import annotations

from pathlib import Path

from missing_tools import needed_module

torch = needed_module("torch")

from released_texts import SENTENCES, long_text  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from charonia import Engine, Output, SamplingParams  # noqa: E402

# A shorter lead of the best token over the second one is a tie, which rounding may decide either way.
TIE = 1e-4
# Around Gemma 3's window of 512 tokens, and more than twice as long.
LENGTHS = (1, 511, 513, 1200)


def prompts(engine: Engine) -> list[list[int]]:
    """Twelve short prompts, one in each language, then one of each length."""
    whole = engine.encode(long_text())
    short = [engine.encode("\n".join(sentences[:2])) for sentences in SENTENCES.values()]
    return [*short, *(whole[:length] for length in LENGTHS)]


def generate(folder: Path, dtype: str, longest: int, new_tokens: int) -> list[Output]:
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, logprobs=0)
    with Engine.from_pretrained(folder, dtype=dtype, threads=1, cache_users=1, cache_user_tokens=8192) as engine:
        return engine.generate([prompt for prompt in prompts(engine) if len(prompt) <= longest], sampling)


def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def logprobs_of(model: PreTrainedModel, output: Output) -> torch.Tensor:
    """[tokens, vocab]: the log probabilities at each token of the response, in double precision."""
    ids = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
    with torch.inference_mode():
        logits = model(ids, logits_to_keep=len(output.token_ids) + 1).logits[0, :-1]
    return torch.log_softmax(logits.double(), dim=-1)


def of_tokens(logprobs: torch.Tensor, output: Output) -> torch.Tensor:
    return logprobs[torch.arange(len(output.token_ids)), torch.tensor(output.token_ids)]


def test_greedy_tokens_of_16_prompts_in_fp32_equal_transformers(folder: Path) -> None:
    outputs = generate(folder, "fp32", LENGTHS[-1], 32)
    assert len(outputs) == 16
    model = load(folder, torch.float32)
    ties, errors = [], []
    for output in outputs:
        expected = logprobs_of(model, output)
        leads = expected.topk(2).values
        differ = expected.argmax(-1) != torch.tensor(output.token_ids)
        assert not (differ & (leads[:, 0] - leads[:, 1] >= TIE)).any(), (len(output.prompt_token_ids), differ)
        ties += [len(output.prompt_token_ids)] * int(differ.sum())
        errors.append((torch.tensor(output.logprobs) - of_tokens(expected, output)).abs().max())
    tokens = {token for output in outputs for token in output.token_ids}
    print(
        f"{folder.name}, fp32: {len(outputs)} prompts equal, {len(tokens)} different tokens, ties in prompts of {ties} "
        f"tokens; largest error of a log probability {max(errors):.2g}"
    )
    assert len(tokens) > 150
    assert max(errors) < 2e-4


def test_logprobs_in_bf16_are_as_exact_as_those_of_transformers(folder: Path) -> None:
    outputs = generate(folder, "bf16", 510, 24)
    assert len(outputs) == 13
    ours = torch.cat([torch.tensor(output.logprobs, dtype=torch.float64) for output in outputs])

    model = load(folder, torch.bfloat16)
    theirs = torch.cat([of_tokens(logprobs_of(model, output), output) for output in outputs])
    model = model.float()  # the same weights, with fp32 arithmetic
    exact = torch.cat([of_tokens(logprobs_of(model, output), output) for output in outputs])
    for name, found in (
        ("from fp32", ours - exact),
        ("of transformers in bf16 from fp32", theirs - exact),
        ("from transformers in bf16", ours - theirs),
    ):
        print(f"{folder.name}, bf16: difference {name}: mean {found.abs().mean():.3g}, max {found.abs().max():.3g}")
    assert (ours - exact).abs().mean() < (theirs - exact).abs().mean()
    assert (ours - exact).abs().max() < 2 * (theirs - exact).abs().max()
