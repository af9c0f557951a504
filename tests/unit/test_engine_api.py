"""The Python API: threads, event loops, abandoned streams, errors, and engines that are closed or deleted."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from missing_tools import missing_tool

from charonia import (
    DeadlineExceededError,
    Engine,
    EngineClosedError,
    InvalidRequestError,
    OverloadedError,
    SamplingParams,
)
from charonia.bench.random_model import SHAPES, write_random_model
from charonia.text.prompt_ids import encode_continuation

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
# Takes at least 15 s.
ENDLESS_TOKENS = 60_000
ENDLESS = SamplingParams(max_tokens=ENDLESS_TOKENS, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_random_model(folder, replace(SHAPES["tiny"], max_positions=ENDLESS_TOKENS + 1000), scale=0.2)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(model, threads=1, stream_interval_ms=0, cache_max_entry_count=2000) as engine:
        yield engine


def wait_until_idle(engine: Engine) -> None:
    """Wait until no request is left, then run the engine's own checks. The test's time limit bounds the wait."""
    # A response to a new request arrives only after earlier requests have left their step.
    while engine.stats().num_running + engine.stats().num_waiting:
        engine.generate([[5]], SamplingParams(max_tokens=1))
    engine.check_integrity()
    assert engine.stats().blocks_active == 0


def test_outputs_come_in_the_order_of_the_prompts(engine: Engine) -> None:
    prompts = [[index + 3] * (1 + index % 7) for index in range(40)]
    alone = [engine.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    together = engine.generate(prompts, GREEDY)
    assert [output.prompt_token_ids for output in together] == prompts
    assert [output.token_ids for output in together] == alone
    assert {output.finish_reason for output in together} == {"length"}
    count = len(together[0].token_ids)
    assert repr(together[0]) == f"Output({together[0].text!r}, {count} tokens, length)"
    assert repr(engine.info).startswith(f"EngineInfo({engine.info.model_name}, bf16 on cpu, session_len=")
    assert repr(engine.info).endswith(" (bf16))") and "num_waiting=0" in repr(engine.stats())


def test_texts_token_ids_and_chats_are_prompts(engine: Engine) -> None:
    chat = [{"role": "user", "content": "hello"}]
    assert engine.generate("hello", GREEDY)[0].prompt_token_ids == engine.encode("hello")
    assert engine.generate([7, 8], GREEDY)[0].prompt_token_ids == [7, 8]
    rendered = "<s>user: hello\nassistant: "
    assert engine.tokenizer.decode(engine.encode(chat)) == rendered
    assert engine.chat(chat, GREEDY).token_ids == engine.generate([engine.encode(chat)], GREEDY)[0].token_ids
    mixed = engine.generate(["hello", [7, 8], chat], GREEDY)
    assert [output.num_input_tokens for output in mixed] == [5, 2, len(engine.encode(chat))]
    assert engine.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_sampling(engine: Engine) -> None:
    each = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (3, 5)]
    outputs = engine.generate(["a", "b"], each)
    assert [output.num_output_tokens for output in outputs] == [3, 5]
    with pytest.raises(InvalidRequestError, match="1 sampling parameters for 2 prompts"):
        engine.generate(["a", "b"], [GREEDY])


@pytest.fixture(scope="module")
def recommended(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with a generation_config.json that samples from one token, so that requests are greedy."""
    folder = tmp_path_factory.mktemp("recommended")
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink(missing_ok=True)
    values = {"temperature": 0.6, "top_k": 1, "top_p": 0.95, "min_p": 0.1}
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_unset_parameters_have_the_models_defaults(engine: Engine, recommended: Path) -> None:
    plain = SamplingParams(max_tokens=24, ignore_eos=True, seed=3)
    settings = {"threads": 1, "cache_max_entry_count": 2000}
    with Engine.from_pretrained(recommended, **settings) as other:
        found = other.info.default_sampling
        assert (found.top_k, found.repetition_penalty) == (1, 1.0)
        assert (found.temperature, found.top_p, found.min_p) == pytest.approx((0.6, 0.95, 0.1))
        assert any("temperature = 0.6, top_k = 1, top_p = 0.95, min_p = 0.1" in text for text in other.info.warnings)
        greedy = other.generate("a", GREEDY)[0].token_ids
        assert other.generate("a", plain)[0].token_ids == greedy
        assert [part for chunk in other.stream("a", plain) for part in chunk.token_ids] == greedy
        free = replace(plain, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
        sampled = other.generate("a", free)[0].token_ids
    assert sampled != greedy
    # A request that sets every field does not change. The setting disables the model's defaults.
    assert engine.generate("a", free)[0].token_ids == sampled
    with Engine.from_pretrained(recommended, generation_config="none", **settings) as other:
        assert other.generate("a", plain)[0].token_ids == sampled
        assert not any("generation_config" in text for text in other.info.warnings)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"default_top_k": 3}, "default_top_k is the model's own"),
        ({"generation_config": "vllm"}, r"generation_config = 'vllm' is not valid: it takes auto \| none"),
        ({"thread": 2}, "did you mean 'threads'"),
        ({"max_batch_size": -1}, "max_batch_size"),
    ],
)
def test_wrong_settings_are_rejected_by_name(model: Path, setting: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        Engine.from_pretrained(model, **setting)  # type: ignore[arg-type]


def test_a_stream_joined_is_the_whole_output(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=60, seed=5, logprobs=2, ignore_eos=True)
    whole = engine.generate("stream me", sampling)[0]
    chunks = list(engine.stream("stream me", sampling))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert [value for chunk in chunks for value in chunk.logprobs] == whole.logprobs
    assert [row for chunk in chunks for row in chunk.top_logprobs] == whole.top_logprobs
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"


def test_thinking_ends_with_its_budget(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, thinking_budget=3, thinking_end_ids=[5, 6])
    free = engine.generate([1, 2], replace(sampling, thinking_budget=None))[0].token_ids
    assert engine.generate([1, 2], sampling)[0].token_ids[:5] == [*free[:3], 5, 6]


def test_stop_words_may_be_text_bytes_or_several(engine: Engine) -> None:
    long = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)
    text = engine.generate("stop", long)[0].text
    found = re.search(r"w\d\d", text[10:])
    assert found
    word = found[0]
    for stop in (word, word.encode(), ["never in any text", word]):
        output = engine.generate("stop", replace(long, stop=stop))[0]
        assert output.finish_reason == "stop"
        assert output.text == text[: text.index(word)]


def leave_by_break(engine: Engine) -> None:
    for _ in engine.stream("leave", ENDLESS):
        break


def leave_by_close(engine: Engine) -> None:
    stream = engine.stream("leave", ENDLESS)
    next(stream)
    stream.close()


def leave_by_exception(engine: Engine) -> None:
    with pytest.raises(ZeroDivisionError), engine.stream("leave", ENDLESS) as stream:
        next(stream)
        raise ZeroDivisionError


def leave_by_dropping(engine: Engine) -> None:
    engine.stream("leave", ENDLESS)


def leave_async_by_break(engine: Engine) -> None:
    async def run() -> None:
        async for _ in engine.astream("leave", ENDLESS):
            break

    asyncio.run(run())


def leave_async_by_cancelled_task(engine: Engine) -> None:
    async def run() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in engine.astream("leave", ENDLESS):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def leave_async_by_closing_the_loop(engine: Engine) -> None:
    loop = asyncio.new_event_loop()

    async def begin() -> object:
        stream = engine.astream("leave", ENDLESS)
        await anext(stream)
        return stream

    stream = loop.run_until_complete(begin())
    loop.close()
    # Results now find no loop, and the engine must ignore this.
    engine.generate("another", GREEDY)
    del stream


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_close,
        leave_by_exception,
        leave_by_dropping,
        leave_async_by_break,
        leave_async_by_cancelled_task,
        leave_async_by_closing_the_loop,
    ],
)
def test_leaving_a_stream_cancels_its_request(engine: Engine, leave: Callable[[Engine], None]) -> None:
    before = engine.stats().generation_tokens
    for _ in range(5):
        leave(engine)
    gc.collect()
    wait_until_idle(engine)
    assert engine.stats().generation_tokens - before < 5 * ENDLESS_TOKENS


def test_cancel_by_id_ends_every_request_of_that_id(engine: Engine) -> None:
    streams = [engine.stream("x", ENDLESS, request_id="twin") for _ in range(2)]
    for stream in streams:
        next(stream)
    assert engine.cancel("twin")
    assert [list(stream)[-1].finish_reason for stream in streams] == ["cancelled", "cancelled"]
    assert not engine.cancel("twin")


def test_a_stream_that_another_thread_closes_ends(engine: Engine) -> None:
    stream = engine.stream("x", ENDLESS)
    next(stream)
    closer = threading.Thread(target=stream.close)
    closer.start()
    assert list(stream)[-1].finish_reason == "cancelled"
    closer.join()


def test_engine_serves_many_threads_and_event_loops(engine: Engine) -> None:
    prompts = [[3 + index, 4, 5] for index in range(32)]
    expected = [output.token_ids for output in engine.generate(prompts, GREEDY)]

    def by_generate(index: int) -> list[int]:
        return engine.generate([prompts[index]], GREEDY)[0].token_ids

    def by_stream(index: int) -> list[int]:
        return [token for chunk in engine.stream(prompts[index], GREEDY) for token in chunk.token_ids]

    def by_loop(index: int) -> list[int]:
        async def run() -> list[int]:
            return [token async for chunk in engine.astream(prompts[index], GREEDY) for token in chunk.token_ids]

        return asyncio.run(run())

    ways = (by_generate, by_stream, by_loop)
    with ThreadPoolExecutor(16) as pool:
        jobs = [(index, pool.submit(ways[(index + turn) % 3], index)) for turn in range(3) for index in range(32)]
        for index, job in jobs:
            assert job.result() == expected[index]
    wait_until_idle(engine)


def test_n_outputs_of_a_prompt_follow_each_other(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=12, seed=7, ignore_eos=True, logprobs=0, n=3)
    outputs = engine.generate(["one", "two"], sampling)
    assert [(output.prompt_token_ids, output.index) for output in outputs] == [
        (engine.encode(text), index) for text in ("one", "two") for index in range(3)
    ]
    for output in outputs:
        alone = engine.generate([output.prompt_token_ids], replace(sampling, n=1, seed=7 + output.index))[0]
        assert output.token_ids == alone.token_ids
        assert output.cumulative_logprob == pytest.approx(sum(alone.logprobs))


def test_a_stream_carries_all_sequences_of_a_request(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=15, seed=3, ignore_eos=True, n=3)
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    reasons = []
    for chunk in engine.stream("stream", sampling):
        tokens[chunk.index] += chunk.token_ids
        reasons += [chunk.finish_reason] if chunk.finish_reason else []
    assert reasons == ["length"] * 3
    assert list(tokens.values()) == [output.token_ids for output in engine.generate("stream", sampling)]


def test_a_session_keeps_the_conversation(engine: Engine) -> None:
    history: list[int] = []
    for turn in range(4):
        said = [5 + turn, 9, 11]
        output = engine.generate([said], GREEDY, session_id="talk")[0]
        history += said
        assert output.token_ids == engine.generate([history], GREEDY)[0].token_ids
        assert output.num_session_tokens == len(history) - 3
        history += output.token_ids
    (session,) = engine.sessions()
    assert (session.id, session.num_tokens, session.num_turns) == ("talk", len(history), 4)
    restarted = engine.generate([[7, 8]], GREEDY, session_id="talk", new_session=True)[0]
    assert restarted.token_ids == engine.generate([[7, 8]], GREEDY)[0].token_ids
    assert engine.end_session("talk")
    assert not engine.end_session("talk")
    assert engine.sessions() == []
    wait_until_idle(engine)


def test_a_stopped_turn_stays_and_a_cancelled_one_goes(engine: Engine) -> None:
    for stops in (True, False):
        stream = engine.stream([5, 6], ENDLESS, session_id="cut")
        tokens = list(next(stream).token_ids)
        if stops:
            stream.stop()
        else:
            stream.close()
        for chunk in stream:
            tokens += chunk.token_ids
        wait_until_idle(engine)
        kept = [session.num_tokens for session in engine.sessions()]
        assert kept == ([2 + len(tokens)] if stops else [])
        engine.end_session("cut")


async def test_a_session_on_an_event_loop(engine: Engine) -> None:
    first = [token async for chunk in engine.astream([5, 6], GREEDY, session_id="loop") for token in chunk.token_ids]
    stream = engine.astream([7], GREEDY, session_id="loop", end_session=True)
    second = [token async for chunk in stream for token in chunk.token_ids]
    assert second == engine.generate([[5, 6, *first, 7]], GREEDY)[0].token_ids
    assert engine.sessions() == []


def test_a_chat_goes_on_with_new_messages_alone(engine: Engine) -> None:
    question = [{"role": "user", "content": "hello"}]
    first = engine.chat(question, GREEDY, session_id="chat")
    second = engine.chat([{"role": "user", "content": "and now"}], GREEDY, session_id="chat")
    added = encode_continuation(engine.tokenizer, [{"role": "user", "content": "and now"}])
    whole = [*engine.encode(question), *first.token_ids, *added]
    assert second.token_ids == engine.generate([whole], GREEDY)[0].token_ids
    assert second.num_session_tokens == len(whole) - len(added)
    assert engine.end_session("chat")


def test_a_timeout_ends_a_request_with_its_error(engine: Engine) -> None:
    with pytest.raises(DeadlineExceededError, match="50 ms"):
        engine.generate("late", ENDLESS, timeout=0.05)
    with pytest.raises(DeadlineExceededError):
        list(engine.stream("late", ENDLESS, timeout=0.05))
    with pytest.raises(InvalidRequestError, match="timeout"):
        engine.generate("late", GREEDY, timeout=0)
    wait_until_idle(engine)


def test_more_prompts_than_the_queue_holds(model: Path) -> None:
    with Engine.from_pretrained(
        model, threads=1, max_queue_size=2, max_batch_size=2, cache_max_entry_count=2000
    ) as engine:
        prompts = [[3 + index] for index in range(30)]
        outputs = engine.generate(prompts, GREEDY)
        assert [output.prompt_token_ids for output in outputs] == prompts
        streams = []
        with pytest.raises(OverloadedError):
            for _ in range(8):
                streams.append(engine.stream([3], ENDLESS))
        assert len(streams) >= 2


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": "hot"}, "temperature = 'hot'"),
        ({"top_p": 0.0}, "top_p"),
        ({"seed": -1}, "seed = -1"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": "\ud800"}, "stop_words"),
        ({"stop": 5}, "stop_words = 5"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [5]}, "bad_words = 5"),
        ({"thinking_call_ids": 5}, "thinking_call_ids = 5"),
        ({"thinking_call_ids": [5, 6]}, "thinking_call_ids = 5"),
        ({"end_ids": 5}, "end_ids = 5"),
        ({"logit_bias": 5}, "logit_bias = 5"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ({"n": 0}, "n = 0"),
        ({"n": 4, "best_of": 3}, "best_of = 3"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"max_tokens": 100_000}, "Lower max_tokens to at most"),
    ],
)
def test_a_wrong_value_is_named(engine: Engine, sampling: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        engine.generate("x", SamplingParams(**sampling))  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [[], [10**6], [-1], [2**31], [1.5], "\ud800", [[]], {"role": "user"}])
def test_a_wrong_prompt_is_refused(engine: Engine, prompt: object) -> None:
    if prompt == []:
        assert engine.generate([]) == []
        return
    with pytest.raises(InvalidRequestError):
        engine.generate(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"priority": 2**31}, "priority = 2147483648"),
        ({"session_id": "\ud800"}, "session_id"),
        ({"session_id": 5}, "session_id = 5"),
        ({"request_id": "\ud800"}, "request_id"),
        ({"cache_salt": 5}, "cache_salt = 5"),
    ],
)
def test_a_wrong_argument_is_named(engine: Engine, arguments: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        engine.stream("x", GREEDY, **arguments)  # type: ignore[arg-type]


def test_an_error_of_one_prompt_cancels_the_others(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError):
        engine.generate([[3], [10**6]], ENDLESS)
    wait_until_idle(engine)


def test_the_environment_stands_between_config_and_arguments(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHARONIA_THREADS", "3")
    with Engine.from_pretrained(model, cache_max_entry_count=1000) as engine:
        assert engine.info.threads == 3
    with Engine.from_pretrained(model, cache_max_entry_count=40, threads=1) as engine:
        assert engine.info.threads == 1


def test_closed_engine_raises_an_error_and_its_streams_end(model: Path) -> None:
    engine = Engine.from_pretrained(model, threads=1, cache_max_entry_count=1000)
    stream = engine.stream("x", ENDLESS)
    next(stream)
    engine.close()
    engine.close()
    assert list(stream)[-1].finish_reason == "cancelled"
    with pytest.raises(EngineClosedError):
        engine.generate("x")


def test_close_lets_running_requests_finish_in_time(model: Path) -> None:
    engine = Engine.from_pretrained(model, threads=1, cache_max_entry_count=1000)
    stream = engine.stream("x", SamplingParams(max_tokens=200, ignore_eos=True))
    engine.close(timeout=600)
    assert list(stream)[-1].finish_reason == "length"


def test_a_stream_keeps_its_engine(model: Path) -> None:
    stream = Engine.from_pretrained(model, threads=1, cache_max_entry_count=1000).stream("x", GREEDY)
    gc.collect()
    assert list(stream)[-1].finish_reason == "length"


def test_an_engine_in_a_cycle_is_collected_while_it_runs(model: Path) -> None:
    engine = Engine.from_pretrained(model, threads=1, cache_max_entry_count=1000, stream_interval_ms=0)
    stream = engine.stream("x", ENDLESS)
    assert next(stream).token_ids
    cycle: dict[str, object] = {"engine": engine, "stream": stream}
    cycle["self"] = cycle
    left = [weakref.ref(engine), weakref.ref(stream)]
    del engine, stream, cycle
    gc.collect()
    assert [reference() for reference in left] == [None, None]


def run_python(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run without PyTorch, whose import takes four seconds, and which users need not have. Engine messages about a GPU
    are removed from stderr."""
    alone = "from charonia.text import prompt_ids\nprompt_ids.tokenizers_alone = True\n"
    command = [sys.executable, "-c", alone + textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **env})
    if os.environ.get("CHARONIA_DEVICE") == "cuda":
        lines = done.stderr.splitlines(keepends=True)
        done.stderr = "".join(line for line in lines if not line.startswith("charonia: info: "))
    return done


def test_the_module_exports_its_entry_point_alone() -> None:
    """Otherwise libstdc++ may be linked with its copies of templates: on Ubuntu 24.04 the next C++ module crashed."""
    from charonia import _engine

    if (nm := shutil.which("nm")) is None:
        missing_tool("nm is not here: install binutils")
    listed = subprocess.run([nm, "-D", "--defined-only", _engine.__file__], capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in listed.stdout.splitlines()] == ["PyInit__engine"]


def ask_with(model: Path, isa: str) -> subprocess.CompletedProcess[str]:
    """Run a process with CHARONIA_ISA=isa that prints the instruction set in use."""
    script = f"""
        from charonia import Engine
        with Engine.from_pretrained({str(model)!r}, threads=1, cache_max_entry_count=20) as engine:
            print(engine.info.instruction_set)
    """
    return run_python(script, CHARONIA_DEVICE="cpu", CHARONIA_ISA=isa)


@pytest.mark.slow
def test_the_environment_chooses_the_instruction_set(model: Path) -> None:
    chosen, own = ask_with(model, "portable"), ask_with(model, "")
    assert chosen.returncode == own.returncode == 0, chosen.stderr + own.stderr
    assert chosen.stdout == "portable\n"
    # Without the variable, the engine uses the processor's instruction set: every current x86 processor has more.
    assert own.stdout != chosen.stdout or platform.machine() != "x86_64"
    unknown = ask_with(model, "sse9")
    assert unknown.returncode != 0
    assert "unknown instruction set 'sse9': CHARONIA_ISA takes one of portable" in unknown.stderr


def test_models_of_transformers_are_found_once() -> None:
    script = """
        prompt_ids.import_models()
        from transformers import models
        from transformers.utils import import_utils
        find = import_utils.define_import_structure
        assert find.cache_info().misses == 1, find.cache_info()
        own = import_utils._LazyModule(models.__name__, models.__file__, find(models.__file__))
        assert len(own._class_to_module) > 1000
        for part in ("_modules", "_class_to_module", "_object_missing_backend"):
            assert getattr(models, part) == getattr(own, part), part
    """
    done = run_python(script)
    assert done.returncode == 0, done.stderr


def test_an_interpreter_that_exits_with_running_requests_exits_cleanly(model: Path) -> None:
    script = f"""
        from charonia import Engine, SamplingParams
        engine = Engine.from_pretrained({str(model)!r}, threads=1, cache_max_entry_count=1000, stream_interval_ms=0)
        streams = [engine.stream([5], SamplingParams(max_tokens={ENDLESS_TOKENS}, ignore_eos=True)) for _ in range(4)]
        next(streams[0])
        print("left")
    """
    done = run_python(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


def run_script(script: str) -> tuple[int, str, str]:
    done = run_python(script)
    return done.returncode, done.stdout, done.stderr


def test_callback_that_owns_its_engine_may_destroy_it(model: Path) -> None:
    script = f"""
        import functools, threading
        from charonia import Engine, _engine
        engine = Engine.from_pretrained({str(model)!r}, threads=1, cache_max_entry_count=1000)
        engine._finalizer.detach()
        native = engine._native
        del engine
        over = threading.Event()
        def callback(owned, result):
            if result.finish_reason:
                over.set()
        native.submit(
            id="", input_ids=[5], sampling=_engine.SamplingParams(), priority=0, stream=True, strip_leading_space=False,
            callback=functools.partial(callback, native),
        )
        del native
        over.wait()
        print("left")
    """
    assert run_script(script) == (0, "left\n", "")


@pytest.mark.slow
def test_forked_child_cannot_use_the_engine_and_exits(model: Path) -> None:
    script = f"""
        import os, signal, sys, time, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of a fork beside threads
        from charonia import Engine, EngineClosedError, SamplingParams
        engine = Engine.from_pretrained({str(model)!r}, device="null", null_step_ms=10, cache_max_entry_count=1000)
        stream = engine.stream("x", SamplingParams(max_tokens={ENDLESS_TOKENS}, ignore_eos=True), request_id="left")
        next(stream)
        child = os.fork()
        if child == 0:
            assert not stream.stop() and not engine.cancel("left") and not engine.stop("left")
            del stream
            try:
                engine.stats()
            except EngineClosedError as error:
                assert f"belongs to process {{os.getppid()}}" in str(error), error
                sys.exit(7)
            sys.exit("the engine of the parent was used")
        for _ in range(600):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            time.sleep(0.1)
        else:
            os.kill(child, signal.SIGKILL)
            sys.exit("the child hangs")
        print(os.waitstatus_to_exitcode(status), engine.stats().num_running)
    """
    assert run_script(script) == (0, "7 1\n", ""), "and the request of the parent goes on"
