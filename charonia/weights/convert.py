"""Makes workspaces: `convert` writes a model's tensors anew, `link_workspace` points into the Hugging Face files."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from charonia.errors import InvalidRequestError, ModelError, UnsupportedError
from charonia.families import ModelSpec, TensorMap, TensorPart, describe, stacked_shape
from charonia.progress import Progress
from charonia.text import prompt_ids
from charonia.text.token_table import build_token_table
from charonia.text.tokenizer import copy_tokenizer, load_tokenizer
from charonia.weights import workspace
from charonia.weights.checkpoint import DTYPES, WEIGHT_TYPES, Array, Checkpoint, TensorInfo, open_checkpoint, read_json
from charonia.weights.safetensors_writer import write_safetensors
from charonia.weights.tensor_parallel import output_rows, rank_of, ranks_of, split

# Values of generation_config.json that leave config.json's as it is. 0 is none of them: it is a token id.
_UNSAID: tuple[Any, ...] = (None, [], "")


@dataclass(frozen=True)
class Source:
    """A Hugging Face folder, understood: what the engine will run, and the tensors that it needs, checked."""

    folder: Path
    spec: ModelSpec
    checkpoint: Checkpoint


def read_source(folder: Path, dtype: str = "auto") -> Source:
    """Reads config.json and the headers of the weights; dtype: auto | bf16 | fp16 | fp32, auto is the model's own.

    Raises UnsupportedError for what the engine does not have, ModelError for tensors that are missing or have another
    shape than config.json says.
    """
    spec = read_config(folder, dtype)
    checkpoint = open_checkpoint(folder)
    return Source(folder, check_spec(folder, spec, checkpoint.tensors, dtype), checkpoint)


def read_config(folder: Path, dtype: str = "auto") -> ModelSpec:
    """What config.json promises, not held against any file: of the type and the names of the tensors it says nothing
    certain."""
    if dtype != "auto" and dtype not in WEIGHT_TYPES:
        raise InvalidRequestError(f"dtype {dtype!r} is not known; expected auto, {', '.join(WEIGHT_TYPES)}")
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        # Where both name them, generation_config.json has the ids that end a chat turn as well; Qwen 1 says there by
        # chat_format whether there are others.
        keys = ("eos_token_id", "chat_format")
        config |= {key: value for key, value in read_json(generation).items() if key in keys and value not in _UNSAID}
    return describe(config, _model_name(folder))


def check_spec(folder: Path, spec: ModelSpec, tensors: Mapping[str, TensorInfo], dtype: str = "auto") -> ModelSpec:
    """The spec with the tensors' own names and weight type; raises as read_source does."""
    spec = _as_named(spec, tensors)
    _check_tensors(folder, spec, tensors)
    weight_type = _own_type(spec, tensors) if dtype == "auto" else dtype
    # The scale is a weight as well: models were trained with its rounded value.
    scale = float(np.array(spec.config.embedding_scale, DTYPES[WEIGHT_TYPES[weight_type]]))
    return replace(spec, config=replace(spec.config, weight_type=weight_type, embedding_scale=scale))


def _as_named(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> ModelSpec:
    """The spec with the names that these files have, where they begin otherwise (ModelSpec.prefixes)."""
    named: dict[str, str] = {}
    for name in tensors:
        for theirs, ours in spec.prefixes:
            if name.startswith(theirs):
                named.setdefault(ours + name.removeprefix(theirs), name)
    if not named:
        return spec
    renamed = {
        canonical: tuple(replace(part, name=named.get(part.name, part.name)) for part in parts)
        for canonical, parts in spec.tensors.items()
    }
    ignored = (*spec.ignored, *(theirs + name for theirs, _ in spec.prefixes for name in spec.ignored))
    return replace(spec, tensors=renamed, ignored=ignored)


def _model_name(folder: Path) -> str:
    # The hub's cache: models--owner--name/snapshots/<commit>
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.split("--")[-1]
    resolved = folder.resolve()
    return resolved.parent.name if resolved.name == "model" else resolved.name


def _check_tensors(folder: Path, spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> None:
    """Every tensor is there, in the promised shape and a float type, and none is left over that would be ignored."""
    output = spec.tensors.get("output.weight")
    if output and output[0].name not in tensors:
        raise ModelError(f"{folder}: tensor {output[0].name} is missing, and config.json does not tie the embeddings")
    wanted = [part for parts in spec.tensors.values() for part in parts]
    missing = [part.name for part in wanted if part.name not in tensors]
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing: {_some(missing)}")
    for part in wanted:
        info = tensors[part.name]
        if info.shape != part.shape:
            raise ModelError(
                f"{folder}: tensor {part.name} has shape {list(info.shape)} where config.json says {list(part.shape)}"
            )
        if info.dtype not in DTYPES:
            raise UnsupportedError(
                f"{folder}: tensor {part.name} is of type {info.dtype}; supported: {', '.join(DTYPES)}"
            )
    known = {part.name for part in wanted}
    # Tables that older versions of transformers saved and that follow from the config.
    unknown = [
        name
        for name in tensors
        if name not in known and not name.startswith(spec.ignored) and not name.endswith(".rotary_emb.inv_freq")
    ]
    if unknown:
        raise UnsupportedError(
            f"{folder}: {len(unknown)} tensors are unknown to family {spec.config.model_family} and results without "
            f"them would be wrong: {_some(unknown)}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _own_type(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> str:
    """The type of most weights; config.json's dtype is often that of another copy."""
    counts: dict[str, int] = {}
    for parts in spec.tensors.values():
        for part in parts:
            dtype = tensors[part.name].dtype
            counts[dtype] = counts.get(dtype, 0) + int(np.prod(part.shape))
    largest = max(counts, key=lambda dtype: counts[dtype])
    return next(name for name, dtype in WEIGHT_TYPES.items() if dtype == largest)


def _write_tensors(file: Path, source: Source, tensors: TensorMap, progress: Progress) -> dict[str, Any]:
    """Writes a rank's file, one tensor in memory at a time; returns its entry for the manifest."""
    dtype_name = WEIGHT_TYPES[source.spec.config.weight_type]
    dtype = DTYPES[dtype_name]
    shapes = {name: stacked_shape(parts) for name, parts in tensors.items()}

    def values(name: str) -> Iterator[Array]:
        for part in tensors[name]:
            values = _read(source.checkpoint, part)
            _check_finite(values, part.name)
            yield _cast(values, dtype, part.name)

    total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    with progress.task(f"writing {file.name}", total) as advance:
        return write_safetensors(file, shapes, dtype_name, values, advance)


def _read(checkpoint: Checkpoint, part: TensorPart) -> Array:
    values = checkpoint.read(part.name)
    if part.rows:
        values = values[part.rows[0] : part.rows[1]]
    if part.cols:
        values = values[:, part.cols[0] : part.cols[1]]
    return values


_PIECE_BYTES = 1 << 24


def _check_finite(values: Array, name: str) -> None:
    """ModelError when a value is NaN or infinite: then all of its exponent's bits are set."""
    mask = {2: 0x7C00 if values.dtype == np.float16 else 0x7F80, 4: 0x7F800000}[values.dtype.itemsize]
    bits = values.view({2: np.uint16, 4: np.uint32}[values.dtype.itemsize])
    for piece in np.array_split(bits, max(1, min(len(bits), values.nbytes // _PIECE_BYTES))):
        if ((piece & mask) == mask).any():
            raise ModelError(
                f"tensor {name} has values that are not finite (NaN or infinity): download the model again"
            )


def _cast(values: Array, dtype: np.dtype[Any], name: str) -> Array:
    """Finite values, rounded to nearest even. Raises UnsupportedError where they are too large for fp16."""
    if values.dtype == dtype:
        return values
    wide = values.astype(np.float32)
    with np.errstate(over="ignore"):
        narrow = wide.astype(dtype)
    if dtype == np.float16 and np.isinf(narrow).any():
        raise UnsupportedError(
            f"tensor {name} has values up to {np.abs(wide).max():.3g}, which fp16 cannot hold (65504 is its largest): "
            "use --dtype bf16"
        )
    return narrow


def write_weights(
    source: Source, weights: Path, *, link: bool, settings: Mapping[str, str], progress: Progress
) -> None:
    """Writes a `weights` folder: config.ini, token table, manifest and, unless linked, the tensors.

    settings: inference parameters for config.ini. tensor_para_size among them is the number of ranks that the weights
    are split over.
    """
    spec = source.spec
    ranks = ranks_of(settings)
    tensors = split(spec.tensors, spec.config, ranks)
    weights.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(source.folder)
    table = weights / workspace.TOKEN_TABLE
    build_token_table(tokenizer, spec.config.vocab_size).save(table)
    workspace.write_config_ini(weights / "config.ini", {**spec.config.settings(), **settings})

    manifest = workspace.Manifest(str(source.folder.resolve()), ranks)
    manifest.files[table.name] = {"bytes": table.stat().st_size, "sha256": workspace.sha256(table)}
    if link:
        _link_tensors(source.checkpoint, tensors, manifest)
    else:
        _copy_tensors(weights, source, tensors, manifest, progress)
    manifest.save(weights)


def _file_of(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _copy_tensors(
    weights: Path, source: Source, tensors: TensorMap, manifest: workspace.Manifest, progress: Progress
) -> None:
    """Writes a file for each rank. An output layer that is tied to the embedding is read from where that is."""
    config = source.spec.config
    dtype = WEIGHT_TYPES[config.weight_type]
    for rank in range(manifest.ranks):
        file, output = _file_of(rank), f"output.{rank}.weight"
        mine = {name: parts for name, parts in tensors.items() if (rank_of(name) or 0) == rank}
        if config.tie_word_embeddings:
            rows = output_rows(config, rank, manifest.ranks)
            place = {"file": _file_of(0), "name": "tok_embeddings.weight", "rows": rows}
            manifest.add(output, dtype, stacked_shape(mine.pop(output)), [place])
        manifest.files[file] = _write_tensors(weights / file, source, mine, progress)
        for name, parts in mine.items():
            manifest.add(name, dtype, stacked_shape(parts), [{"file": file, "name": name}])


def _link_tensors(checkpoint: Checkpoint, tensors: TensorMap, manifest: workspace.Manifest) -> None:
    for name, parts in tensors.items():
        dtype = checkpoint.tensors[parts[0].name].dtype
        places = []
        for part in parts:
            info = checkpoint.tensors[part.name]
            file = info.file.resolve()
            manifest.files[str(file)] = {"bytes": file.stat().st_size}
            place: dict[str, Any] = {"file": str(file), "name": part.name}
            differs = {"dtype": info.dtype if info.dtype != dtype else None, "rows": part.rows, "cols": part.cols}
            places.append(place | {key: value for key, value in differs.items() if value})
        manifest.add(name, dtype, stacked_shape(parts), places)


def write_description(spec: ModelSpec, weights: Path, ranks: int) -> None:
    """Writes config.ini and a manifest without files: what a model takes can be computed from them, not the model."""
    workspace.write_config_ini(weights / "config.ini", spec.config.settings())
    manifest = workspace.Manifest(spec.config.model_name, ranks)
    for name, parts in split(spec.tensors, spec.config, ranks).items():
        manifest.add(name, WEIGHT_TYPES[spec.config.weight_type], stacked_shape(parts))
    manifest.save(weights)


def convert(
    model: str | os.PathLike[str],
    dst_path: str | os.PathLike[str] = "workspace",
    *,
    tp: int | None = None,
    model_format: str = "hf",
    dtype: str = "auto",
    force: bool = False,
    settings: Mapping[str, str] | None = None,
    show_progress: bool = False,
) -> Path:
    """Converts a Hugging Face folder or hub id to a workspace (docs/contracts.md) and returns its path.

    tp: tensor-parallel ranks that the weights are split over, setting tensor_para_size by its short name. dtype: auto |
    bf16 | fp16 | fp32. settings: inference parameters written to config.ini. Nothing is left behind when it fails.
    Raises UnsupportedError, ModelError or InvalidRequestError saying what would be right.
    """
    settings = dict(settings or {})
    if tp is not None and settings.setdefault("tensor_para_size", str(tp)) != str(tp):
        raise InvalidRequestError(
            f"tp = {tp} and tensor_para_size = {settings['tensor_para_size']} contradict each other"
        )
    if model_format != "hf":
        raise UnsupportedError(f"--model-format {model_format!r} is not supported yet; supported: hf")
    return _make(model, Path(dst_path), dtype, force, settings, link=False, show_progress=show_progress)


def link_workspace(
    model: str | os.PathLike[str],
    dst_path: str | os.PathLike[str],
    dtype: str = "auto",
    *,
    force: bool = False,
    settings: Mapping[str, str] | None = None,
    show_progress: bool = False,
) -> Path:
    """A workspace whose manifest points into the model's safetensors files: quick, and good as long as these stay.

    Weights of another type than the files' are converted when the engine loads them, .bin checkpoints are here. For
    several ranks (settings' tensor_para_size) the manifest names the ranges of the tensors that each one holds.
    """
    return _make(model, Path(dst_path), dtype, force, settings or {}, link=True, show_progress=show_progress)


def _make(
    model: str | os.PathLike[str],
    destination: Path,
    dtype: str,
    force: bool,
    settings: Mapping[str, str],
    *,
    link: bool,
    show_progress: bool,
) -> Path:
    location = workspace.locate(model)
    if location.is_workspace:
        raise ModelError(
            f"{location.path} is a workspace already; convert takes a Hugging Face model folder or a hub id"
        )
    source = read_source(location.path, dtype)
    progress = Progress(show_progress)
    with workspace.atomic_folder(destination, force) as root:
        write_weights(
            source,
            root / workspace.WEIGHTS,
            link=link and source.checkpoint.linkable,
            settings=settings,
            progress=progress,
        )
        copy_tokenizer(source.folder, load_tokenizer(source.folder), root / workspace.TOKENIZER)
        _write_models(root)
    return destination.expanduser().absolute()


def _write_models(root: Path) -> None:
    """Triton's side: the models, their links, the repository and the script that serves it from a container."""
    from charonia.triton_models import source_dir

    models, repository = root / "triton_models", root / "model_repository"
    repository.mkdir()
    for name in workspace.TRITON_MODELS:
        (models / name / "1").mkdir(parents=True)
        shutil.copyfile(source_dir() / "model_repository" / name / "config.pbtxt", models / name / "config.pbtxt")
        for file in sorted((source_dir() / name).glob("*.py")):
            shutil.copyfile(file, models / name / "1" / file.name)
        (repository / name).symlink_to(Path("..", "triton_models", name))
    for name in ("preprocessing", "postprocessing"):
        shutil.copyfile(source_dir() / "model_repository" / "model_log.py", models / name / "1" / "model_log.py")
        (models / name / "1" / "tokenizer").symlink_to(Path("..", "..", "tokenizer"))
    shutil.copyfile(Path(prompt_ids.__file__), models / "preprocessing" / "1" / "prompt_ids.py")
    (models / "engine" / "1" / "weights").symlink_to(Path("..", "..", "weights"))
    (models / "tokenizer" / workspace.TOKEN_TABLE).symlink_to(Path("..", "weights", workspace.TOKEN_TABLE))
    script = root / "service_docker_up.sh"
    script.write_bytes(resources.files("charonia").joinpath("service_docker_up.sh").read_bytes())
    script.chmod(0o755)
