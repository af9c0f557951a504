"""The requests of a benchmark: prompts from a file, or lengths and arrival times from a recorded trace."""

from __future__ import annotations

import csv
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charonia.errors import InvalidRequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Prompt = str | list[dict[str, Any]]  # a text to continue, or messages of a chat
_TRACE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# fmt: off
_WORDS = (
    "the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he",
    "his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they", "which", "one", "you", "were", "all",
)
# fmt: on


@dataclass(frozen=True)
class Job:
    """One request, whose response has exactly `max_tokens` tokens. arrival_s: seconds after the benchmark's start."""

    prompt: Prompt
    max_tokens: int
    arrival_s: float = 0.0


def jobs_from_prompts(file: Path, count: int, max_tokens: int) -> list[Job]:
    """Make `count` requests from a file with one prompt per line, or with JSON. Empty lines are skipped; the file is
    repeated."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"the prompts file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{file} is not UTF-8 text") from None
    if text.lstrip().startswith("["):
        entries = list(enumerate(_parsed(text, str(file)), start=1))
        prompts = [_prompt_of(entry, f"{file}, entry {number}") for number, entry in entries]
    else:
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
        is_json = bool(lines) and lines[0][1].startswith("{")
        prompts = [
            _prompt_of(_parsed(line, f"{file}, line {number}"), f"{file}, line {number}") if is_json else line
            for number, line in lines
        ]
    if not prompts:
        raise InvalidRequestError(f"{file} has no prompts: expected one per line")
    return [Job(prompt, max_tokens) for prompt in itertools.islice(itertools.cycle(prompts), count)]


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(f"{place}: it begins like JSON and is not valid JSON: {error}") from None


def _prompt_of(entry: Any, place: str) -> Prompt:
    """The prompt of a JSON entry: its text, its messages, or the first turn of a ShareGPT conversation."""
    if isinstance(entry, str) and entry:
        return entry
    found = entry if isinstance(entry, dict) else {}
    for name in ("prompt", "text"):
        if isinstance(found.get(name), str) and found[name]:
            return str(found[name])
    messages = found.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(one, dict) and "role" in one for one in messages):
        while messages and messages[-1]["role"] == "assistant":  # the response
            messages = messages[:-1]
        if messages:
            return list(messages)
    turns = found.get("conversations")
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict) and turn.get("from") in ("human", "user") and turn.get("value"):
            return [{"role": "user", "content": str(turn["value"])}]
    raise InvalidRequestError(
        f"{place} has no prompt: expected a text, or an object with prompt, text, messages or ShareGPT's conversations"
    )


def jobs_from_trace(
    file: Path, count: int, tokenizer: PreTrainedTokenizerFast, session_len: int, seed: int
) -> list[Job]:
    """Make the first `count` requests of a CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens.

    Prompts are random words of about ContextTokens tokens. Requests longer than session_len are shortened.
    """
    rows: list[tuple[datetime, int, int]] = []
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            if not set(_TRACE_COLUMNS) <= set(reader.fieldnames or ()):
                raise InvalidRequestError(
                    f"{file} has columns {reader.fieldnames}; expected {', '.join(_TRACE_COLUMNS)}"
                )
            for row in itertools.islice(reader, count):
                # datetime supports six digits of a second, and traces have seven.
                moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
                rows.append((moment, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
    except OSError as error:
        raise InvalidRequestError(f"the trace {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidRequestError(f"{file}, request {len(rows) + 1}: {error}") from error
    if not rows:
        raise InvalidRequestError(f"{file} has no requests")
    generator = random.Random(seed)
    jobs = []
    for moment, context, generated in rows:
        generated = max(1, min(generated, session_len // 2))
        context = max(1, min(context, session_len - generated - 8))
        text = random_text(tokenizer, context, generator)
        jobs.append(Job(text, generated, (moment - rows[0][0]).total_seconds()))
    return jobs


def random_jobs(
    tokenizer: PreTrainedTokenizerFast, count: int, tokens: int, max_tokens: int, seed: int, *, spread: float = 0.0
) -> list[Job]:
    """Make `count` requests of random words, each of about `tokens` tokens. spread: by how much the lengths of prompts
    and responses vary; 0.5: from half to one and a half of them."""
    generator = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, round(mean * generator.uniform(1 - spread, 1 + spread)))

    return [Job(random_text(tokenizer, length(tokens), generator), length(max_tokens)) for _ in range(count)]


def random_text(tokenizer: PreTrainedTokenizerFast, tokens: int, generator: random.Random) -> str:
    """Make a text of random words with about `tokens` tokens, and not more."""
    words: list[str] = []
    ids: list[int] = []
    while len(ids) < tokens:
        words += generator.choices(_WORDS, k=max(8, tokens - len(ids)))
        ids = tokenizer(" ".join(words), add_special_tokens=False)["input_ids"]
    text = str(tokenizer.decode(ids[: max(1, tokens - 1)]))
    return text or _WORDS[0]


def arrive_at_rate(jobs: Sequence[Job], requests_per_s: float, seed: int) -> list[Job]:
    """Return the jobs with Poisson arrivals: independent, exponentially distributed gaps."""
    generator = random.Random(seed)
    moments = itertools.accumulate(generator.expovariate(requests_per_s) for _ in jobs)
    return [replace(job, arrival_s=moment) for job, moment in zip(jobs, moments, strict=True)]
