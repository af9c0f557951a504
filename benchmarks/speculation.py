"""Measures n-gram speculation and plain decoding, alternately in one process.

python benchmarks/speculation.py serving MODEL --text FILE
    Chat, code and summary requests of several clients.
python benchmarks/speculation.py lookup FILE.gguf --text FILE --llama-server PROGRAM
    One request at a time: repeating a text with one word replaced, and new text of random tokens. With --llama-server,
    also llama.cpp with its lookup methods.

--text: a text with paragraphs, such as wikitext. Code is from Python's standard library.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import random
import re
import socket
import statistics
import subprocess
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from charonia import Engine, SamplingParams
from charonia.bench import targets
from charonia.bench.serving import run_serving
from charonia.bench.workload import Job

METHODS = ("off", "ngram")
MODULES = ("argparse", "calendar", "csv", "difflib", "fractions", "heapq", "shutil", "statistics", "textwrap")
QUESTIONS = (
    "What is {}?", "Why is {} important?", "Explain {} to a child.", "What are the risks of {}?",
    "Write a short story about {}.", "How did {} begin?", "List five facts about {}.", "Who should learn about {}?",
)  # fmt: skip
TOPICS = ("the tide", "bread", "gravity", "trade", "chess", "the printing press", "sleep", "volcanoes")
Measure = Callable[[list[int], int, float], float]  # prompt, tokens, temperature -> tokens per second after the first


def chat() -> list[str]:
    return [question.format(topic) for topic in TOPICS for question in QUESTIONS]


def code() -> list[str]:
    sources = [inspect.getsource(import_module(name)) for name in MODULES]
    found = [
        textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and 10 <= (node.end_lineno or 0) - node.lineno <= 30
    ]
    return [f"Rewrite this Python function with type hints:\n\n```python\n{one}\n```" for one in found]


def summary(text: str) -> list[str]:
    paragraphs = [line.strip() for line in text.splitlines() if 80 <= len(line.split()) <= 200]
    if not paragraphs:
        raise SystemExit("--text has no paragraph of 80 to 200 words in one line: use another text")
    return [f"Summarise this text in two sentences:\n\n{one}" for one in paragraphs]


def editing(text: str, count: int) -> list[str]:
    words = text.split()
    if len(words) < count * 500:
        raise SystemExit(f"--text has {len(words)} words. {count} prompts need {count * 500}: use a longer text")
    prompts = []
    for number in range(count):
        passage = words[number * 500 : (number + 1) * 500]
        old = max((word for word in passage if re.fullmatch("[a-z]{4,}", word)), key=passage.count)
        prompts.append(f'Repeat this text, but write "other" instead of "{old}":\n\n{" ".join(passage)}')
    return prompts


def serving(arguments: argparse.Namespace) -> None:
    prompts = {"chat": chat(), "code": code(), "summary": summary(arguments.text.read_text(encoding="utf-8"))}
    settings = {"threads": arguments.threads, "max_batch_size": max(arguments.concurrency)}
    with ExitStack() as stack:
        engines = {
            method: stack.enter_context(
                Engine.from_pretrained(arguments.model, dtype=arguments.dtype, speculative_method=method, **settings)
            )
            for method in METHODS
        }
        for clients, (name, all_of) in itertools.product(arguments.concurrency, prompts.items()):
            chosen = random.Random(clients).sample(all_of, min(max(8, 2 * clients), len(all_of)))
            jobs = [Job([{"role": "user", "content": one}], arguments.tokens) for one in chosen]
            rates: dict[str, list[float]] = {method: [] for method in METHODS}
            for _ in range(arguments.rounds):
                for method, engine in engines.items():
                    target = partial(targets.in_process, engine)
                    figures = run_serving(target, jobs, concurrency=clients, warmup=2, console=Console(quiet=True))
                    assert not figures.errors, figures.errors_text()
                    rates[method].append(figures.output_tokens_per_s)
            ratios = [ngram / off for off, ngram in zip(*rates.values(), strict=True)]
            print(
                f"{name}, {clients} at once, {len(jobs)} requests: {statistics.median(rates['off']):.1f} tokens/s, "
                f"ngram {statistics.median(rates['ngram']):.1f}, {statistics.median(ratios):.2f} times "
                f"({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )


def of_engine(engine: Engine, prompt: list[int], tokens: int, temperature: float) -> float:
    sampling = SamplingParams(
        max_tokens=tokens, temperature=temperature, seed=1, ignore_eos=True, repetition_penalty=1.0, top_k=0, top_p=1.0
    )
    timings = engine.generate([prompt], sampling)[0].timings
    return 1e3 * (tokens - 1) / (timings.total_ms - timings.first_token_ms)


@contextmanager
def llama_server(program: Path, file: Path, method: str, threads: int) -> Iterator[Measure]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--model", file, "--port", port, "--threads", threads, "--ctx-size", 4096, "--parallel", 1]
    command += [] if method == "off" else ["--spec-type", method]
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def measure(prompt: list[int], tokens: int, temperature: float) -> float:
        body = {"prompt": prompt, "n_predict": tokens, "temperature": temperature, "ignore_eos": True, "seed": 1}
        body |= {"cache_prompt": False, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        timings = ask("/completion", body)["timings"]
        assert timings["predicted_n"] == tokens, timings
        return float(1e3 * (tokens - 1) / timings["predicted_ms"])

    try:
        while True:
            try:
                ask("/health")
                break
            except OSError as error:
                if isinstance(error, TimeoutError) or process.poll() is not None:
                    status = "does not answer" if process.returncode is None else f"ended with {process.returncode}"
                    raise SystemExit(f"{program} --spec-type {method} {status}") from None
                time.sleep(0.2)
        yield measure
    finally:
        process.terminate()
        process.wait()


def lookup(arguments: argparse.Namespace) -> None:
    text = arguments.text.read_text(encoding="utf-8")
    with ExitStack() as stack:
        all_of: dict[str, Measure] = {}
        for method in METHODS:
            engine = stack.enter_context(
                Engine.from_pretrained(
                    arguments.model, dtype=arguments.dtype, threads=arguments.threads, speculative_method=method
                )
            )
            all_of[f"charonia {method}"] = partial(of_engine, engine)
        for method in dict.fromkeys(("off", *arguments.llama_methods)) if arguments.llama_server else ():
            opened = llama_server(arguments.llama_server, arguments.model, method, arguments.threads)
            all_of[f"llama.cpp {method}"] = stack.enter_context(opened)
        generator, vocabulary = random.Random(0), range(300, engine.info.vocab_size)
        # The first prompt is a warm-up. No prompt is used twice, because llama.cpp's methods may remember its text.
        count = arguments.prompts + 1
        workloads: dict[str, tuple[Sequence[list[int]], float]] = {
            "editing": ([edited_ids(engine, one) for one in editing(text, count)], 0.0),
            "random text": ([generator.choices(vocabulary, k=500) for _ in range(count)], 1.0),
        }
        for name, (prompts, temperature) in workloads.items():
            rates: dict[str, list[float]] = {one: [] for one in all_of}
            for prompt in prompts:
                for one, measure in all_of.items():
                    rates[one].append(measure(prompt, arguments.tokens, temperature))
            for one, found in rates.items():
                plain = rates[f"{one.split()[0]} off"]
                ratios = [rate / other for rate, other in zip(found, plain, strict=True)][1:]
                print(
                    f"{name}, {one}: {statistics.median(found[1:]):.1f} tokens/s, "
                    f"{statistics.median(ratios):.2f} times off ({min(ratios):.2f} to {max(ratios):.2f})",
                    flush=True,
                )


def edited_ids(engine: Engine, prompt: str) -> list[int]:
    ids = engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    return [int(token) for token in ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for run in (serving, lookup):
        command = commands.add_parser(run.__name__)
        command.set_defaults(run=run)
        command.add_argument("model", type=Path)
        command.add_argument("--text", type=Path, required=True)
        command.add_argument("--threads", type=int, default=2)
        command.add_argument("--dtype", default="auto", help="of Charonia's weights, if they are not quantised")
    commands.choices["serving"].add_argument("--rounds", type=int, default=1)
    commands.choices["serving"].add_argument("--tokens", type=int, default=96)
    commands.choices["serving"].add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    command.add_argument("--tokens", type=int, default=300)
    command.add_argument("--prompts", type=int, default=4)
    command.add_argument("--llama-server", type=Path)
    command.add_argument(
        "--llama-methods", nargs="+", default=["ngram-simple", "ngram-mod", "ngram-cache"], help="besides off"
    )
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
