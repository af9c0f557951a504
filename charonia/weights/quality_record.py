"""Records of measured model quality. They are stored next to the weights: in the `quality` list of a workspace's
manifest, or in a separate file in a Hugging Face folder. `charonia evaluate` measures them."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.table import Table
from rich.text import Text

from charonia.errors import CharoniaError, ModelError
from charonia.json_files import read_json
from charonia.weights.fingerprint import VERSION, fingerprint
from charonia.weights.workspace import Location

SIDE_FILE = "charonia_quality.json"
log = logging.getLogger("charonia")


class _Part(BaseModel):
    # Fields of newer versions are ignored.
    # JSON has no infinity and no NaN, and the engine rejects a manifest with them.
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class TextScore(_Part):
    """Perplexity over a text with a sliding window. name: the file name with the first digits of its sha256."""

    name: str
    sha256: str
    tokens: int
    window: int
    stride: int
    perplexity: float


class ReferenceScore(_Part):
    """Scores of the reference model. Divergences are D(reference || model) in nats, over the scored tokens."""

    model: str
    weight_type: str
    perplexity: float
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_agreement: float  # share of positions with the same most likely token in both models
    questions_right: int | None = None


class QuestionScore(_Part):
    """Number of correct answers. name: same as in TextScore."""

    name: str
    sha256: str
    asked: int
    right: int


class QualityRecord(_Part):
    """The result of one run of `charonia evaluate`."""

    date: str  # ISO 8601, UTC
    charonia_version: str
    command: str  # not shown by /v1/models
    model: str
    weight_type: str
    weight_bytes: int
    quant_policy: int
    quantization: str | None = None  # the setting, if it is not none
    device: str
    weights: str = ""  # fingerprint of the Hugging Face folder; empty for a converted workspace
    text: TextScore
    reference: ReferenceScore | None = None
    questions: QuestionScore | None = None

    @property
    def rounding(self) -> str:
        """Return the setting quantization."""
        return self.quantization or "none"

    def content(self) -> dict[str, Any]:
        """Return the stored form, which `--json`, the plan and /v1/models also show."""
        return self.model_dump(mode="json", exclude_none=True)


def parse_records(content: object) -> list[QualityRecord]:
    """Return the records in a manifest or a side file that this version can read."""
    records = []
    for entry in content if isinstance(content, Sequence) and not isinstance(content, str) else ():
        try:
            records.append(QualityRecord.model_validate(entry))
        except ValidationError:
            continue
    return records


def _is_of_other_version(weights: object) -> bool:
    """Whether a fingerprint is of an older or a newer version, whose servers may use the same files."""
    return isinstance(weights, str) and weights != "" and not weights.startswith(VERSION)


def _of_other_versions(content: object) -> list[Any]:
    """Return the entries of a manifest or a side file that this version keeps unchanged, and ignores."""
    entries = content if isinstance(content, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and _is_of_other_version(entry.get("weights"))]


def records_of_folder(folder: Path, weights: str | None = None, *, warn: bool = True) -> list[QualityRecord]:
    """Return the records of a Hugging Face folder that belong to its current weights. weights: their fingerprint. warn:
    whether to warn of others."""
    file = folder / SIDE_FILE
    records = parse_records(read_json(file).get("records")) if file.is_file() else []
    return _of_these_weights(records, weights or fingerprint(folder), file, folder, warn=warn) if records else []


def records_of_weights(weights: Path) -> list[QualityRecord]:
    """Return the records of a workspace's weights folder. A linked workspace: only for its current weights."""
    file = weights / "manifest.json"
    manifest = read_json(file)
    records, source = parse_records(manifest.get("quality")), _linked_source(manifest)
    # A converted workspace never changes: its manifest has checksums of its files.
    return records if source is None or not records else _of_these_weights(records, fingerprint(source), file, source)


def fingerprint_of(location: Location) -> str:
    """Return the value of `weights` in records of this location. Raises ModelError."""
    if location.weights is None:
        return fingerprint(location.path)
    source = _linked_source(read_json(location.weights / "manifest.json"))
    return "" if source is None else fingerprint(source)


def update_manifest(weights: Path) -> None:
    """Store the current fingerprint of a linked workspace's source, and remove records of other weights, except records
    of other versions."""
    file = weights / "manifest.json"
    try:
        content = read_json(file)
        source = _linked_source(content)
        if source is None:
            if _linked_files(content):
                log.warning(
                    "%s links to weight files that %s does not have now. If the files have changed, system_fingerprint "
                    "is that of older weights: convert the model again",
                    file,
                    content.get("source"),
                )
            return
        now = fingerprint(source)
        content = read_json(file)  # after a time in which charonia evaluate may have stored a record
        known = parse_records(content.get("quality"))
        kept = _of_these_weights(known, now, file, source)
        wrong = any(one.weights != now and not _is_of_other_version(one.weights) for one in known)
        if wrong or now != content.get("weights"):
            records = [*_of_other_versions(content.get("quality")), *(one.content() for one in kept)]
            # `quality` is not added to a manifest without it.
            quality = {"quality": records} if "quality" in content else {}
            _write(file, {**content, "weights": now, **quality})
    except (OSError, CharoniaError) as error:
        log.warning(
            "%s cannot be updated (%s): /v1/models may show outdated records, and system_fingerprint may be that of "
            "older weights",
            file,
            error,
        )


def _linked_files(manifest: Mapping[str, Any]) -> set[str]:
    files = manifest.get("files")
    return {name for name, entry in files.items() if "sha256" not in entry} if isinstance(files, dict) else set()


def _linked_source(manifest: Mapping[str, Any]) -> Path | None:
    """Return the Hugging Face folder that a manifest refers to; None if the linked files are no longer its weights."""
    linked, source = _linked_files(manifest), Path(str(manifest.get("source")))
    if not linked:
        return None
    from charonia.weights.checkpoint import weight_files  # late: NumPy takes long to import

    try:
        return source if linked <= {str(file.resolve()) for file in weight_files(source)} else None
    except (OSError, CharoniaError):  # it has no weights now
        return None


def _of_these_weights(
    records: list[QualityRecord], now: str, file: Path, folder: Path, *, warn: bool = True
) -> list[QualityRecord]:
    """Return the records of the weights with fingerprint `now`. file, folder: where records and weights are."""
    kept = [record for record in records if record.weights == now]
    # A record of this version needs no warning about one of another version.
    ignored = [one for one in records if one.weights != now and not (kept and _is_of_other_version(one.weights))]
    if ignored and warn:
        log.warning(
            "%d of the quality records in %s belong to other weights than %s has now, or were stored by another "
            "version, and are ignored: measure again with charonia evaluate",
            len(ignored),
            file,
            folder,
        )
    return kept


def check_can_save(location: Location) -> None:
    """Raises ModelError if save_record() could not write the record. Called before hours of work."""
    if not os.access(location.weights or location.path, os.W_OK):
        raise _cannot_write(_file_of(location), "the folder cannot be written")


def _file_of(location: Location) -> Path:
    return location.path / SIDE_FILE if location.weights is None else location.weights / "manifest.json"


def _cannot_write(file: Path, why: object) -> ModelError:
    return ModelError(f"the quality record cannot be written to {file} ({why}): run with --no-save")


def save_record(location: Location, record: QualityRecord) -> Path:
    """Add the record to the model's records, replacing one with the same settings quant_policy and quantization. Return
    the file with the records. Raises ModelError if it cannot be written."""
    file = _file_of(location)
    if location.weights is not None:
        key, content, known = "quality", read_json(file), records_of_weights(location.weights)
    else:
        key, content = "records", read_json(file) if file.is_file() else {}
        known = records_of_folder(location.path, warn=False)  # loading the folder has warned
    kept = [one for one in known if _settings(one) != _settings(record)]
    # Without a fingerprint the weights never change, and `known` has the records of all versions.
    others = _of_other_versions(content.get(key)) if record.weights else []
    records = [*others, *(one.content() for one in (*kept, record))]
    try:
        _write(file, {**content, key: records})
    except OSError as error:
        raise _cannot_write(file, error.strerror or error) from None
    return file


def _settings(record: QualityRecord) -> tuple[int, str]:
    return record.quant_policy, record.rounding


def _write(file: Path, content: Mapping[str, Any]) -> None:
    """Write atomically, so that a reader sees either the old or the new content."""
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    partial = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(content, indent=2 if file.name == SIDE_FILE else None) + "\n")
        partial.chmod(0o644)
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def quality_table(records: Sequence[QualityRecord]) -> Table:
    """Return a table with a column for each record, and a column for its reference before the first record with it."""
    columns: list[tuple[str, list[str]]] = []
    seen: list[ReferenceScore] = []
    for record in records:
        reference, asked = record.reference, record.questions.asked if record.questions else 0
        text = record.text.name
        if reference and not any(_same(reference, one) for one in seen):
            seen.append(reference)
            right = reference.questions_right
            scores = [reference.weight_type, _kv(0), text, f"{reference.perplexity:.4f}", "", "", "", ""]
            columns.append(
                (f"{reference.model} (reference)", [*scores, "" if right is None else f"{right} of {asked}"])
            )
        rounded = f" ({record.quantization})" if record.quantization else ""
        scores = [record.weight_type + rounded, _kv(record.quant_policy), text, f"{record.text.perplexity:.4f}"]
        if reference:
            scores += [f"{value:.6f}" for value in (reference.kl_mean, reference.kl_p99, reference.kl_max)]
            scores.append(f"{reference.top1_agreement:.2%}")
        else:
            scores += [""] * 4
        columns.append((record.model, [*scores, f"{record.questions.right} of {asked}" if record.questions else ""]))
    table = Table(title="Measured quality", title_justify="left")
    table.add_column("")
    for name, _ in columns:
        table.add_column(Text(name), justify="right")  # Text: brackets are not markup
    for number, what in enumerate(_ROWS):
        values = [scores[number] for _, scores in columns]
        if any(values):
            table.add_row(what, *map(Text, values))
    return table


_ROWS = (
    "weights",
    "KV cache",
    "text",
    "perplexity",
    "KL mean",
    "KL 99 %",
    "KL max",
    "same top token",
    "right answers",
)


def _same(one: ReferenceScore, other: ReferenceScore) -> bool:
    """Whether both are scores of the same reference model."""
    return (one.model, one.weight_type, one.perplexity) == (other.model, other.weight_type, other.perplexity)


def _kv(quant_policy: int) -> str:
    return {0: "16 bits", 8: "int8", 4: "int4", 16: "fp8"}.get(quant_policy, str(quant_policy))
