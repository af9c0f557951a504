"""`charonia evaluate`: measures perplexity, difference from the 16-bit model and correct answers, and records them."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from charonia import __version__
from charonia.api.engine import Engine
from charonia.engine_settings import MEASURED, Setting
from charonia.errors import InvalidRequestError, ModelError
from charonia.progress import Progress
from charonia.quality.perplexity import compare, perplexity, windows
from charonia.quality.questions import Question, answers_right, check_prompts, read_questions
from charonia.weights import workspace
from charonia.weights.quality_record import (
    QualityRecord,
    QuestionScore,
    ReferenceScore,
    TextScore,
    check_can_save,
    fingerprint_of,
    quality_table,
    save_record,
)

DEFAULT_WINDOW = 1024
DEFAULT_STRIDE = 512
# Few sequences run at the same time. A step needs many rows of logits, but few KV blocks, so that two models fit.
_BATCH = 64
_CACHE_TOKENS = 4096
_CACHE_KEYS = ("cache_max_entry_count", "cache_size", "cache_users")


def default_text() -> Path:
    """Return the text that comes with the package."""
    return _data("text.txt")


def default_questions() -> Path:
    """Return the questions that come with the package."""
    return _data("questions.jsonl")


def _data(name: str) -> Path:
    return Path(str(resources.files("charonia.quality").joinpath("data").joinpath(name)))


def evaluate(
    model: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    *,
    text: Path | None = None,
    questions: Path | None = None,
    ask: bool = True,
    window: int = DEFAULT_WINDOW,
    stride: int = DEFAULT_STRIDE,
    dtype: str = "auto",
    settings: Mapping[str, Setting] | None = None,
    save: bool = True,
    command: str = "",
    show_progress: bool = False,
) -> QualityRecord:
    """Measure `model` (a workspace, a Hugging Face folder or a hub id). save: store the record next to the model.

    against: the 16-bit model to compare with; it runs with the same settings, but without quant_policy and
    quantization. text, questions: files; None: the files of the package. ask: whether to ask questions. window, stride:
    tokens. dtype: data type of both models, for Hugging Face folders. Raises CharoniaError with advice for the user.
    """
    if questions is not None and not ask:
        raise InvalidRequestError(f"questions = {questions} and ask = false (--no-ask) contradict each other")
    if (settings or {}).get("lora_adapters"):
        raise InvalidRequestError(
            "lora_adapters has no effect here: evaluate measures a model without adapters. Merge the adapter into the "
            "model (PEFT's merge_and_unload), and evaluate the result"
        )
    file, listed = text or default_text(), questions or default_questions()
    measured = _Text(file, _read_text(file), window, stride)
    asked = _Asked(listed, read_questions(listed)) if ask else None
    settings = dict(settings or {})
    progress = Progress(show_progress)
    location = workspace.locate(model)
    weights = ""
    if save:
        check_can_save(location)
        weights = fingerprint_of(location)  # before loading, so that it belongs to the loaded weights
    with _load(location, dtype, settings, window) as engine:
        for warning in engine.info.warnings:
            progress.warn(warning)
        ids = measured.ids(engine)
        _check(engine, measured, asked)
        # Report errors before another model is loaded and before anything is measured.
        windows(len(ids), window, stride)
        reference: ReferenceScore | None = None
        if against is None:
            with progress.count("perplexity, tokens", len(ids)) as advance:
                own = perplexity(engine, ids, window, stride, advance)
        else:
            # Without the settings whose effect is measured.
            unchanged = {**settings, "quant_policy": 0, "quantization": "none"}
            with _load(workspace.locate(against), dtype, unchanged, window) as other:
                if measured.ids(other) != ids:
                    raise InvalidRequestError(
                        f"{against} has another tokenizer than {model}: models can be compared only if they share one"
                    )
                _check(other, measured, asked)
                own, reference = _compare(engine, other, ids, measured, asked, progress)
        score = asked.score(asked.right_by(engine, "questions", progress)) if asked else None
        record = _record(engine, weights, command, measured.score(len(ids), own), reference, score)
    if save:
        try:
            save_record(location, record)
        except ModelError as error:  # a full disk: the result is still printed
            progress.warn(str(error))
    return record


@dataclass(frozen=True)
class _Text:
    """The text for measuring perplexity, in windows of `window` tokens."""

    file: Path
    content: str
    window: int
    stride: int

    def ids(self, engine: Engine) -> list[int]:
        """Return the token ids. Suppresses transformers' warning about long texts, because windows are short."""
        log = logging.getLogger("transformers")
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            return engine.encode(self.content)
        finally:
            log.setLevel(level)

    def score(self, tokens: int, perplexity: float) -> TextScore:
        return TextScore(
            name=_named(self.file, self.content),
            sha256=_sha256(self.content),
            tokens=tokens,
            window=self.window,
            stride=self.stride,
            perplexity=perplexity,
        )


@dataclass(frozen=True)
class _Asked:
    """The questions of a file."""

    file: Path
    questions: list[Question]

    def right_by(self, engine: Engine, title: str, progress: Progress) -> int:
        with progress.count(title, len(self.questions)) as advance:
            return answers_right(engine, self.questions, advance)

    def score(self, right: int) -> QuestionScore:
        content = _read_text(self.file)
        return QuestionScore(
            name=_named(self.file, content), sha256=_sha256(content), asked=len(self.questions), right=right
        )


def _check(engine: Engine, text: _Text, asked: _Asked | None) -> None:
    """Raises InvalidRequestError if the model cannot be measured with this text and these questions."""
    longest = engine.info.session_len - 1
    if text.window > longest:
        raise InvalidRequestError(
            f"window = {text.window} is out of range: {engine.info.model_name} computes at most {longest} tokens of a "
            f"text together (session_len - 1)"
        )
    if asked:
        check_prompts(engine, asked.questions)


def _compare(
    engine: Engine, reference: Engine, ids: list[int], text: _Text, asked: _Asked | None, progress: Progress
) -> tuple[float, ReferenceScore]:
    """Return the engine's perplexity, and its difference from the reference."""
    with progress.count("comparison, tokens", len(ids)) as advance:
        found = compare(engine, reference, ids, text.window, text.stride, advance)
    right = asked.right_by(reference, "questions to the reference", progress) if asked else None
    return found.perplexity, ReferenceScore(
        model=reference.info.model_name,
        weight_type=reference.info.weight_type,
        perplexity=found.reference_perplexity,
        kl_mean=found.kl_mean,
        kl_p99=found.kl_p99,
        kl_max=found.kl_max,
        top1_agreement=found.top1_agreement,
        questions_right=right,
    )


def _record(
    engine: Engine,
    weights: str,
    command: str,
    text: TextScore,
    reference: ReferenceScore | None,
    questions: QuestionScore | None,
) -> QualityRecord:
    info = engine.info
    return QualityRecord(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        charonia_version=__version__,
        command=command,
        model=info.model_name,
        weight_type=info.weight_type,
        weight_bytes=info.weight_bytes,
        quant_policy=info.quant_policy,
        quantization=None if info.quantization == "none" else info.quantization,
        device=f"{info.device} ({info.instruction_set})",
        weights=weights,
        text=text,
        reference=reference,
        questions=questions,
    )


def _load(location: workspace.Location, dtype: str, settings: Mapping[str, Setting], window: int) -> Engine:
    chosen: dict[str, Any] = {**MEASURED, "max_batch_size": _BATCH, "stream_interval_ms": 0}
    if not any(key in settings or f"CHARONIA_{key.upper()}" in os.environ for key in _CACHE_KEYS):
        chosen |= {"cache_users": 1, "cache_user_tokens": max(_CACHE_TOKENS, window + 1)}
    engine = Engine.from_pretrained(location.path, dtype=dtype, **{**chosen, **settings})
    if engine.info.device == "null":
        engine.close()
        raise InvalidRequestError("device = null computes nothing, so there is nothing to evaluate: set device = auto")
    return engine


def _read_text(file: Path) -> str:
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the text cannot be read from {file}: {error}") from None
    if not content.strip():
        raise InvalidRequestError(f"{file} has no text: name a file with some thousand words like those of your users")
    return content


def _sha256(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def _named(file: Path, content: str) -> str:
    """Return a name that distinguishes files with the same name."""
    return f"{file.name} ({_sha256(content)[:8]})"


def show(record: QualityRecord, console: Console) -> None:
    """Print a record as a table, with the measuring conditions."""
    console.print(quality_table([record]))
    text = record.text
    console.print(
        f"{text.tokens} tokens in windows of {text.window}, stride {text.stride}; {record.device}.",
        highlight=False,
        markup=False,
    )
