"""Results are reproducible: tokens and log probabilities of a request depend only on the request, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from charonia import Engine, Output, SamplingParams
from charonia.bench.random_model import Shape, write_random_model

# Rows and columns that no tile, vector or number of threads divides evenly.
SHAPE = Shape(layers=2, hidden=120, heads=6, kv_heads=2, intermediate=344, vocab=500, max_positions=1024)
NEW_TOKENS = 40
BLOCK = 16
LENGTHS = (1, 2, 15, 16, 17, 33, 48, 64, 65, 100, 127, 128, 130, 150, 199, 200)

Bits = tuple[list[int], bytes, list[list[tuple[int, bytes]]]]


def sampling_of(index: int) -> SamplingParams:
    """Alternately greedy and sampled, with and without parameters that depend on earlier output."""
    common = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=3, temperature=0.0)
    kinds = (
        common,
        SamplingParams(**{**vars(common), "temperature": 1.0, "seed": index}),
        SamplingParams(**{**vars(common), "temperature": 0.8, "seed": index, "top_k": 40, "top_p": 0.9, "min_p": 0.01}),
        SamplingParams(
            **{**vars(common), "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2}
        ),
    )
    return kinds[index % len(kinds)]


def bits(output: Output) -> Bits:
    def exact(values: list[float]) -> bytes:
        return np.array(values, dtype=np.float64).tobytes()

    return (
        output.token_ids,
        exact(output.logprobs),
        [[(token, exact([value])) for token, value in row] for row in output.top_logprobs],
    )


class Case:
    """A model, the requests, and the result of each request when it runs alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        generator = np.random.default_rng(1)
        self.prompts: list[list[int]] = [generator.integers(3, SHAPE.vocab, length).tolist() for length in LENGTHS]
        self.sampling = [sampling_of(index) for index in range(len(LENGTHS))]
        with self.engine() as engine:
            self.alone = [
                bits(engine.generate([prompt], sampling)[0])
                for prompt, sampling in zip(self.prompts, self.sampling, strict=True)
            ]
        assert len({token for tokens, _, _ in self.alone for token in tokens}) > 100

    def engine(self, **changes: int | float | bool | str) -> Engine:
        settings = {
            "reproducible": True,  # always the case on the CPU
            "threads": 2,
            "token_budget": 512,
            "cache_block_seq_len": BLOCK,
            "cache_max_entry_count": 400,
            "enable_prefix_caching": False,
            "session_len": 256,
        }
        return Engine.from_pretrained(self.folder, **{**settings, **changes})

    def together(self, engine: Engine) -> list[Bits]:
        return [bits(output) for output in engine.generate(self.prompts, self.sampling)]


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp(request.param)
    write_random_model(folder, SHAPE, weight_type=request.param, scale=0.15)
    yield Case(folder)


def test_in_a_batch_of_16(case: Case) -> None:
    with case.engine() as engine:
        assert case.together(engine) == case.alone


@pytest.mark.parametrize("token_budget", [16, 37, 2048])
def test_with_prompts_cut_into_chunks_of_any_size(case: Case, token_budget: int) -> None:
    with case.engine(token_budget=token_budget) as engine:
        before = engine.stats().num_steps
        assert case.together(engine) == case.alone
        if token_budget == 16:
            assert engine.stats().num_steps - before > sum(LENGTHS) / token_budget


@pytest.mark.parametrize("threads", [1, 3])
def test_with_any_number_of_threads(case: Case, threads: int) -> None:
    with case.engine(threads=threads) as engine:
        assert engine.info.threads == threads
        assert case.together(engine) == case.alone


def test_with_a_prefix_hit(case: Case) -> None:
    with case.engine(enable_prefix_caching=True) as engine:
        first = engine.generate(case.prompts, case.sampling)
        again = engine.generate(case.prompts, case.sampling)
        assert [output.num_cached_tokens for output in first] == [0] * len(LENGTHS)
        for output in again:
            # All complete blocks except the last token's, which is computed for sampling.
            assert output.num_cached_tokens == (output.num_input_tokens - 1) // BLOCK * BLOCK
        assert [bits(output) for output in first] == case.alone
        assert [bits(output) for output in again] == case.alone


def test_with_a_prefix_hit_on_another_requests_prompt_and_answer(case: Case) -> None:
    with case.engine(enable_prefix_caching=True) as engine:
        prompt = case.prompts[9]
        answer = engine.generate([prompt], case.sampling[9])[0]
        longer = prompt + answer.token_ids + [5, 6, 7]
        hit = engine.generate([longer], sampling_of(1))[0]
        assert hit.num_cached_tokens > len(prompt)
    with case.engine() as engine:
        assert bits(engine.generate([longer], sampling_of(1))[0]) == bits(hit)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_with_preemptions(case: Case, prefix_caching: bool) -> None:
    # Sixteen sequences need about 120 blocks, but there are 40.
    with case.engine(cache_max_entry_count=40, enable_prefix_caching=prefix_caching) as engine:
        assert case.together(engine) == case.alone
        assert engine.stats().num_preemptions > 0
        engine.check_integrity()


@pytest.mark.usefixtures("all_proposals")
def test_with_speculation(case: Case) -> None:
    """The draft model is the same model, so its proposals are right at every temperature."""
    prompts = [prompt[:60] * 3 for prompt in case.prompts]
    sampling = list(case.sampling)
    # This prompt goes on with its only token, so n-gram matches are right too.
    prompts.append([7] * 60)
    sampling.append(replace(sampling_of(0), logit_bias={7: 100.0}))
    results = []
    methods: list[dict[str, str]] = [{}, {"speculative_method": "ngram"}, {"speculative_model": str(case.folder)}]
    for settings in methods:
        with case.engine(**settings) as engine:
            large = [one for one in engine.info.warnings if "reads 100 % of the bytes that the model reads" in one]
            assert bool(large) == ("speculative_model" in settings)
            results.append([bits(output) for output in engine.generate(prompts, sampling)])
            assert (engine.stats().accepted_tokens > 0) == bool(settings)
    assert results[0] == results[1] == results[2]


def test_with_another_block_size(case: Case) -> None:
    with case.engine(cache_block_seq_len=64, cache_max_entry_count=100) as engine:
        assert case.together(engine) == case.alone


def test_streamed_and_arriving_one_after_the_other(case: Case) -> None:
    with case.engine(stream_interval_ms=0) as engine:
        streams, tokens = [], []
        for prompt, sampling in zip(case.prompts, case.sampling, strict=True):
            streams.append(engine.stream(prompt, sampling))
            # The next request is sent, and prefills, while this one decodes.
            tokens.append(list(next(streams[-1]).token_ids))
        for stream, ids in zip(streams, tokens, strict=True):
            for chunk in stream:
                ids += chunk.token_ids
        assert tokens == [alone for alone, _, _ in case.alone]


def test_a_request_without_a_seed_gets_a_fresh_one(case: Case) -> None:
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, ignore_eos=True)
    with case.engine() as engine:
        outputs = engine.generate([case.prompts[5]] * 4, sampling)
        assert len({tuple(output.token_ids) for output in outputs}) == 4


def test_seed_gives_the_same_response_after_a_restart(case: Case) -> None:
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, seed=2**64 - 2, ignore_eos=True, logprobs=1, n=4)
    answers = []
    for before in (0, 3):
        with case.engine() as engine:
            engine.generate(case.prompts[:before], SamplingParams(max_tokens=3))
            answers.append([bits(output) for output in engine.generate([case.prompts[6]], sampling)])
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens, _, _ in answers[0]}) == 4


def test_arithmetic_changes_only_with_settings_that_change_tokens(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = []

    def arithmetic(**changes: int) -> str:
        with case.engine(**changes) as engine:
            assert engine.info.deterministic
            sets.append(engine.info.instruction_set)
            return engine.info.arithmetic

    first = arithmetic()
    assert first == arithmetic(threads=1, cache_block_seq_len=64, token_budget=16)
    assert first != arithmetic(session_len=128)
    monkeypatch.setenv("CHARONIA_ISA", "portable")
    assert (first != arithmetic()) == (sets[0] != "portable"), "some processors have no other instruction set"


def test_as_one_of_several_answers(case: Case) -> None:
    with case.engine(enable_prefix_caching=True, token_budget=64) as engine:
        for prompt, sampling, alone in zip(case.prompts, case.sampling, case.alone, strict=True):
            several = SamplingParams(**{**vars(sampling), "n": 3})
            assert bits(engine.generate([prompt], several)[0]) == alone


def test_in_a_session(case: Case) -> None:
    with case.engine(enable_prefix_caching=True) as engine:
        for index, (prompt, sampling) in enumerate(zip(case.prompts, case.sampling, strict=True)):
            short = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
            head, tail = prompt[: len(prompt) // 2], prompt[len(prompt) // 2 :]
            if not head:
                continue
            begun = engine.generate([head], short, session_id=str(index))[0]
            answer = engine.generate([tail], sampling, session_id=str(index))[0]
            with case.engine() as other:
                assert bits(other.generate([head + begun.token_ids + tail], sampling)[0]) == bits(answer)
