"""Creates workspaces. `convert` copies a model's tensors; `link_workspace` refers to the Hugging Face files."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from charonia import _engine, disk
from charonia.errors import InvalidRequestError, ModelError, UnsupportedError, about
from charonia.families import (
    MTP,
    ModelConfig,
    ModelSpec,
    Quantization,
    TensorMap,
    TensorPart,
    describe,
    stacked_shape,
    text_part,
)
from charonia.families.eagle3 import OFFSETS, describe_head, is_head, with_own_embedding
from charonia.generation_config import sampling_defaults
from charonia.gguf.folder_names import model_file
from charonia.json_files import read_json
from charonia.progress import Progress
from charonia.text import prompt_ids
from charonia.text.token_split import build_token_split
from charonia.text.token_table import build_token_table
from charonia.text.tokenizer import (
    copy_tokenizer,
    end_of,
    load_tokenizer,
    prepare_tokenizer,
    replace_chat_template,
    source_notes,
)
from charonia.weights import workspace
from charonia.weights.adapted_modules import module_places
from charonia.weights.cache_warnings import cache_warnings
from charonia.weights.checkpoint import (
    DTYPES,
    NUMPY_TYPES,
    WEIGHT_TYPES,
    Array,
    Checkpoint,
    TensorInfo,
    open_checkpoint,
)
from charonia.weights.draft_model import METHOD, NO_MODEL
from charonia.weights.fingerprint import fingerprint
from charonia.weights.gguf_checkpoint import GgufCheckpoint, as_stored
from charonia.weights.mtp import check_mtp, mtp_of, with_mtp
from charonia.weights.quality_record import records_of_folder
from charonia.weights.quantised_copy import Cut, check_values, cut_parts, names_in_copy
from charonia.weights.quantised_tensors import CACHE_SCALES, CODES, Read, find_quantised, some
from charonia.weights.quantization_config import cache_type, read_quantization
from charonia.weights.quantization_settings import DENSE, FORMATS
from charonia.weights.safetensors_writer import write_safetensors
from charonia.weights.stacked_experts import fused_experts
from charonia.weights.task import setting_of, with_score_rows, with_task
from charonia.weights.tensor_parallel import output_rows, rank_of, ranks_of, split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

AUTO_FORMAT = "auto"
BIN_REFUSAL = "{model}: quantised weights ({method}) in .bin files are not supported: use a copy with safetensors files"
_MODEL_FORMATS = (AUTO_FORMAT, DENSE, *FORMATS)
_TORCH_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_CODE_TYPES = {"U4": "int4", "I8": "int8", "F8_E4M3": "fp8", "F4_E2M1": "mxfp4"}  # weight_type of quantised weights
_NO_HEAD = "is no EAGLE-3 head: speculative_method = eagle3 needs one. For a draft model, choose draft_model"
# Values of generation_config.json that mean "not set", so config.json counts. 0 is not one of them: it is a token id.
_UNSAID: tuple[Any, ...] = (None, [], "")


@dataclass(frozen=True)
class Source:
    """A checked Hugging Face folder: the model's description and its tensors."""

    folder: Path
    spec: ModelSpec
    checkpoint: Checkpoint

    @property
    def linkable(self) -> bool:
        """Whether the engine can map the files directly."""
        parts = (part for parts in self.spec.tensors.values() for part in parts)
        return self.checkpoint.linkable and not any(part.transposed for part in parts)

    @property
    def is_head(self) -> bool:
        """Whether it is an EAGLE-3 head, and not a model."""
        return self.spec.config.target_hidden_units > 0

    @property
    def adaptable(self) -> bool:
        """Whether LoRA adapters of the Hugging Face model fit: the rows of a GGUF file may have another order."""
        return not isinstance(self.checkpoint, GgufCheckpoint) and not self.is_head


def read_source(
    folder: Path, dtype: str = "auto", task: str = "auto", *, mtp: bool = False, head: bool | None = False
) -> Source:
    """Read config.json and the headers of the weights. dtype: auto | bf16 | fp16 | fp32; auto is the model's own type.
    With quantised weights it is the type of activations and of weights that are not quantised. task: the setting. mtp:
    include the MTP layer. head: the folder must have an EAGLE-3 head instead of a model; None: it may have either.

    Raises UnsupportedError if the engine does not support the model, and ModelError if tensors are missing or have
    other shapes than config.json says.
    """
    spec = read_config(folder, dtype, task, mtp=mtp, head=head)
    checkpoint = open_checkpoint(folder)
    if spec.quantization is not None and not checkpoint.linkable:
        raise UnsupportedError(BIN_REFUSAL.format(model=folder, method=spec.quantization.method))
    if isinstance(checkpoint, GgufCheckpoint):
        spec = as_stored(folder, spec, checkpoint)
    spec = check_spec(folder, spec, checkpoint.tensors, dtype, checkpoint.read)
    return Source(folder, replace(spec, notes=(*spec.notes, *checkpoint.notes)), checkpoint)


def read_config(
    folder: Path, dtype: str = "auto", task: str = "auto", *, mtp: bool = False, head: bool | None = False
) -> ModelSpec:
    """Read config.json without checking it against the weight files. The types and names of tensors are provisional.
    mtp, head: see read_source()."""
    if dtype != "auto" and dtype not in WEIGHT_TYPES:
        raise InvalidRequestError(f"dtype {dtype!r} is not known; expected auto, {', '.join(WEIGHT_TYPES)}")
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    generated = read_json(generation) if generation.is_file() else {}
    # Each file and each part may have its own end ids. For Qwen 1, chat_format adds more of them.
    if ends := _end_ids(generated, config, text_part(config)):
        config["eos_token_id"] = ends
    if generated.get("chat_format") not in _UNSAID:
        config["chat_format"] = generated["chat_format"]
    found = model_file(folder) is None and is_head(config)
    if head not in (None, found):
        raise UnsupportedError(f"{folder} {NO_MODEL if found else _NO_HEAD}")
    name = _model_name(folder)
    if found:
        with about(folder):  # the model has a config.json too
            spec = describe_head(config, name)
    else:
        spec = with_task(folder, describe(config, name), config, task)
    if mtp:
        spec = with_mtp(folder, spec)
    try:
        _engine.check_settings(spec.config.settings())
    except InvalidRequestError as error:
        raise ModelError(f"{folder / 'config.json'}: the engine does not support this model: {error}") from error
    quantization = read_quantization(folder, config)
    # No tensor shows the data type if all weights are quantised.
    promised = promised_type(config) if quantization else ""
    return replace(
        spec,
        config=replace(spec.config, data_type=promised, **sampling_defaults(folder)),
        quantization=quantization,
        quantised_cache=cache_type(folder, config),
    )


def _end_ids(*configs: Mapping[str, Any]) -> list[Any]:
    """Return the values of eos_token_id in all of the files, each once."""
    named = (config.get("eos_token_id") for config in configs)
    ids = [end for value in named if value not in _UNSAID for end in (value if isinstance(value, list) else [value])]
    return list({repr(end): end for end in ids}.values())


def _with_end_of_tokenizer(spec: ModelSpec, tokenizer: PreTrainedTokenizerFast, progress: Progress) -> ModelConfig:
    """Add the tokenizer's eos_token and the family's end tokens to the end ids, which end a response. Warns if there
    is no end id at all."""
    config, token_id = spec.config, tokenizer.backend_tokenizer.token_to_id
    for end in (end_of(tokenizer, config.vocab_size), *map(token_id, spec.end_tokens)):
        if end is not None and end not in config.end_id and end < config.vocab_size:
            config = replace(config, end_id=(*config.end_id, end))
    if not config.end_id and config.model_task == "generate":
        progress.warn(
            f"{config.model_name} names no token that ends a response, so responses run to max_tokens: add "
            "eos_token_id to config.json, or send end_id"
        )
    return config


def promised_type(config: Mapping[str, Any]) -> str:
    """Return the weight type that config.json or its text_config names; empty if it names none."""
    for part in (config, text_part(config)):
        for key in ("dtype", "torch_dtype"):
            if weight_type := _TORCH_TYPES.get(str(part.get(key))):
                return weight_type
    return ""


def check_spec(
    folder: Path, spec: ModelSpec, tensors: Mapping[str, TensorInfo], dtype: str = "auto", read: Read | None = None
) -> ModelSpec:
    """Return the spec with the names and types of the actual tensors. Raises the errors of read_source. read: reads the
    values of a tensor, if available."""
    spec = with_score_rows(_as_named(_untied(folder, spec, tensors, read), tensors))
    check_mtp(folder, spec, tensors)
    if spec.config.target_hidden_units:
        with about(folder):
            spec = with_own_embedding(spec, tensors)
    found = find_quantised(folder, spec, tensors, read)
    spec = found.spec
    _check_tensors(folder, spec, tensors, found.known)
    config = spec.config
    data_type = (config.data_type or _own_type(spec, tensors)) if dtype == "auto" else dtype
    weight_type, group_size = _quantised_type(spec) or (data_type, 0)
    # The scale is rounded like a weight, because models were trained with the rounded value.
    scale = float(np.array(config.embedding_scale, DTYPES[WEIGHT_TYPES[data_type]]))
    config = replace(config, weight_type=weight_type, data_type=data_type, group_size=group_size, embedding_scale=scale)
    return replace(spec, config=config)


def _untied(folder: Path, spec: ModelSpec, tensors: Mapping[str, TensorInfo], read: Read | None) -> ModelSpec:
    """Return the spec with the output layer of the files, if config.json ties it to the embedding but the files have a
    different one (transformers 5 does the same). An equal one is ignored."""
    tied = spec.tied_output
    if not tied:
        return spec
    module = tied.removesuffix("weight")
    theirs = ("", *(theirs for theirs, ours in spec.prefixes if not ours))
    output = tuple(before + module for before in theirs)
    found = [name for name in tensors if name.startswith(output)]
    embedding = _as_named(spec, tensors).tensors["tok_embeddings.weight"][0].name
    ignored = replace(spec, ignored=(*spec.ignored, module))
    if not found:
        return ignored
    name = found[0]
    if read is None:
        note = (
            f"{folder}: config.json ties the output layer to the embedding, and the files have {name} as well. If the "
            "two differ, the output layer of the files is used, and this plan does not include its memory"
        )
        return replace(ignored, notes=(*spec.notes, note))
    # A tied layer has no bias.
    if embedding in tensors and all(
        one.endswith(".weight") and _are_equal(one, embedding, tensors, read) for one in found
    ):
        return ignored
    note = (
        f"{folder}: config.json ties the output layer to the embedding, but {name} differs from {embedding}. The "
        "output layer of the files is used. Set tie_word_embeddings to false in config.json if that is right"
    )
    return replace(
        spec,
        config=replace(spec.config, tie_word_embeddings=False),
        tensors={**spec.tensors, "output.weight": (replace(spec.tensors["tok_embeddings.weight"][0], name=tied),)},
        tied_output="",
        notes=(*spec.notes, note),
    )


def _are_equal(name: str, other: str, tensors: Mapping[str, TensorInfo], read: Read) -> bool:
    """Whether two tensors have the same type, shape and bits."""
    a, b = tensors[name], tensors[other]
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.dtype not in DTYPES:
        return False
    x, y = (read(one).reshape(-1).view(np.uint8) for one in (name, other))
    # In pieces, because different layers usually differ in the first piece.
    return all(
        np.array_equal(x[at : at + _PIECE_BYTES], y[at : at + _PIECE_BYTES]) for at in range(0, len(x), _PIECE_BYTES)
    )


def _as_named(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> ModelSpec:
    """Return the spec with the tensor names of these files, if their prefixes differ (ModelSpec.prefixes) or if one
    tensor holds all experts of a layer."""
    named: dict[str, str] = {}
    for found in tensors:
        module, _, kind = found.rpartition(".")
        name = f"{module}.weight" if kind in CODES else found
        for theirs, ours in spec.prefixes:
            if name.startswith(theirs):
                named.setdefault(ours + name.removeprefix(theirs), name)

    def shape_of(name: str) -> tuple[int, ...] | None:
        info = tensors.get(named.get(name, name))
        return info.shape if info else None

    spec = fused_experts(spec, shape_of)
    if not named:
        return spec
    renamed = {
        canonical: tuple(replace(part, name=named.get(part.name, part.name)) for part in parts)
        for canonical, parts in spec.tensors.items()
    }
    ignored = (
        *spec.ignored,
        *(
            theirs + name.removeprefix(ours)
            for theirs, ours in spec.prefixes
            for name in spec.ignored
            if name.startswith(ours)
        ),
    )
    return replace(spec, tensors=renamed, ignored=ignored)


def _model_name(folder: Path) -> str:
    # Folder of the hub's cache: models--owner--name/snapshots/<commit>
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.split("--")[-1]
    resolved = folder.resolve()
    return resolved.parent.name if resolved.name == "model" else resolved.name


def _check_tensors(folder: Path, spec: ModelSpec, tensors: Mapping[str, TensorInfo], beside: set[str]) -> None:
    """Check that every tensor exists with the expected shape and a float type, and that no unknown tensor exists.
    Quantised tensors were checked before. beside: known tensors that are not in `spec.tensors`."""
    output = spec.tensors.get("output.weight")
    if output and output[0].name not in tensors and spec.config.model_task == "generate":
        raise ModelError(f"{folder}: tensor {output[0].name} is missing, and config.json does not tie the embeddings")
    wanted = [part for parts in spec.tensors.values() for part in parts]
    missing = [part.name for part in wanted if part.name not in tensors]
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing: {some(missing)}")
    for part in wanted:
        if part.quantised:
            continue
        info = tensors[part.name]
        if ((math.prod(info.shape),) if part.flat else info.shape) != part.file_shape:
            raise ModelError(
                f"{folder}: tensor {part.name} has shape {list(info.shape)} where config.json says "
                f"{list(part.file_shape)}"
            )
        if info.dtype not in DTYPES:
            raise UnsupportedError(
                f"{folder}: tensor {part.name} is of type {info.dtype}; supported: {', '.join(DTYPES)}, and others "
                "if config.json has a quantization_config"
            )
    known = beside | {part.name for part in wanted}
    # rotary_emb.inv_freq: tables that older versions of transformers saved; they follow from the config.
    unknown = [
        name
        for name in tensors
        if name not in known and not name.startswith(spec.ignored) and not name.endswith(".rotary_emb.inv_freq")
    ]
    if unknown:
        raise UnsupportedError(
            f"{folder}: {len(unknown)} tensors are unknown to family {spec.config.model_family} and results without "
            f"them would be wrong: {some(unknown)}"
        )


def _own_type(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> str:
    """Return the type of most dense weights. The dtype in config.json is often wrong for converted copies."""
    counts: dict[str, int] = {}
    for parts in spec.tensors.values():
        for part in parts:
            if part.quantised:
                continue
            dtype = tensors[part.name].dtype
            counts[dtype] = counts.get(dtype, 0) + math.prod(part.taken)
    largest = max(counts, key=lambda dtype: counts[dtype])
    return next(name for name, dtype in WEIGHT_TYPES.items() if dtype == largest)


def _quantised_type(spec: ModelSpec) -> tuple[str, int] | None:
    """Return weight_type and group_size of most quantised weights; None if there are none."""
    counts: dict[tuple[str, int], int] = {}
    for parts in spec.tensors.values():
        for part in parts:
            if part.quantised:
                kind = (_CODE_TYPES[part.quantised.how.dtype], part.quantised.how.group_size)
                counts[kind] = counts.get(kind, 0) + math.prod(part.taken)
    return max(counts, key=lambda kind: counts[kind]) if counts else None


def _write_tensors(
    file: Path, source: Source, tensors: TensorMap, manifest: workspace.Manifest, progress: Progress
) -> None:
    """Write the file of a rank, with one tensor in memory at a time, and add the file and its tensors to the manifest.
    The parts of dense tensors are joined and cast to the data type. The parts of quantised tensors are copied."""
    dense_type = WEIGHT_TYPES[source.spec.config.data_type]
    writers: dict[str, Callable[[], Iterator[Array]]] = {}
    types: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}

    def dense(parts: tuple[TensorPart, ...], dtype: str) -> Iterator[Array]:
        for part in parts:
            values = _read(source.checkpoint, part)
            _check_finite(values, part.name)
            yield _cast(values, DTYPES[dtype], part.name)

    def type_of(name: str) -> str:
        """Return the type of a tensor. Router biases differ little, so they stay fp32; so do some router weights, and
        the decays of delta nets, whose effect grows with the number of tokens. Scales of keys and values become fp32,
        because they may be too small or too large for fp16."""
        weight = name.endswith(".feed_forward.gate.weight") and source.spec.config.router_fp32
        weight = weight or name.endswith((".delta.a_log.weight", ".delta.dt_bias.weight"))
        wide = weight and source.checkpoint.tensors[tensors[name][0].name].dtype == "F32"
        return "F32" if wide or name.endswith((".feed_forward.gate.bias", *CACHE_SCALES)) else dense_type

    def copied(cut: Cut, kind: str, how: Quantization, name: str) -> Iterator[Array]:
        values = cut.read()
        if cut.dtype in DTYPES:
            _check_finite(values, name)
        check_values(values, kind, how, name)
        yield values

    for name, parts in tensors.items():
        if not parts[0].quantised:
            pieces = {name: parts}
            if name.endswith(".bias") and tensors[f"{name.removesuffix('bias')}weight"][0].quantised:
                # The parts of a quantised weight stay separate, so each needs its own bias.
                pieces = {f"{name}.{index}": (part,) for index, part in enumerate(parts)}
            for piece, some_parts in pieces.items():
                types[piece], shapes[piece] = type_of(name), stacked_shape(some_parts)
                writers[piece] = partial(dense, some_parts, types[piece])
            places: list[dict[str, Any]] = [{"file": file.name, "name": piece} for piece in pieces]
            manifest.add(name, type_of(name), stacked_shape(parts), places)
            continue
        how, cuts = cut_parts(source.checkpoint, parts)
        places = []
        for part, mine, names in zip(parts, cuts, names_in_copy(name, cuts), strict=True):
            assert part.quantised is not None
            stored = {"codes": part.name, **part.quantised.beside}
            for kind, cut in mine.items():
                writers[names[kind]] = partial(copied, cut, kind, how, stored[kind])
                types[names[kind]], shapes[names[kind]] = cut.dtype, cut.shape
            beside = {kind: _place(file.name, names[kind], mine[kind].dtype) for kind in mine if kind != "codes"}
            block = {"type": part.quantised.block} if part.quantised.block else {}
            places.append({"file": file.name, "name": names["codes"], **block, **beside})
        manifest.add(name, how.dtype, stacked_shape(parts), places, how)
    total = sum(math.prod(shape) * NUMPY_TYPES[types[name]].itemsize for name, shape in shapes.items())
    others = manifest.ranks - 1 - len([one for one in manifest.files if one.startswith("rank-")])  # of about this size
    disk.require_space(file.parent, total * (1 + others), f"the workspace of {source.folder}")
    with progress.task(f"writing {file.name}", total) as advance:
        manifest.files[file.name] = write_safetensors(file, shapes, types, lambda name: writers[name](), advance)


def _place(file: str, name: str, dtype: str) -> dict[str, str]:
    return {"file": file, "name": name, "dtype": dtype}


def _read(checkpoint: Checkpoint, part: TensorPart) -> Array:
    values = checkpoint.read(part.name)
    if part.stack and part.transposed:
        assert part.rows is not None
        size = part.shape[0] // part.stack
        index, first = divmod(part.rows[0], size)
        values = values[index].T[first : first + part.rows[1] - part.rows[0] : part.row_step]
    elif part.flat:
        values = values.reshape(part.shape)
    elif part.rows:
        values = values.reshape(part.shape)[part.rows[0] : part.rows[1] : part.row_step]
    if part.cols:
        values = values[:, part.cols[0] : part.cols[1]]
    return values


_PIECE_BYTES = 1 << 24


def _check_finite(values: Array, name: str) -> None:
    """Raises ModelError if a value is NaN or infinite: all bits of its exponent are set."""
    mask = {2: 0x7C00 if values.dtype == np.float16 else 0x7F80, 4: 0x7F800000}[values.dtype.itemsize]
    bits = values.reshape(-1).view({2: np.uint16, 4: np.uint32}[values.dtype.itemsize])
    for piece in np.array_split(bits, max(1, min(len(bits), values.nbytes // _PIECE_BYTES))):
        if ((piece & mask) == mask).any():
            raise ModelError(
                f"tensor {name} has values that are not finite (NaN or infinity): download the model again"
            )


def _cast(values: Array, dtype: np.dtype[Any], name: str) -> Array:
    """Cast finite values with rounding to nearest even. Raises UnsupportedError if they are too large for fp16."""
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
    """Write a `weights` folder: config.ini, token table, manifest and, unless linked, the tensors. An EAGLE-3 head has
    the table of its tokens instead of a token table.

    settings: inference parameters for config.ini. Its tensor_para_size is the number of ranks that share the weights.
    """
    spec = source.spec
    ranks = ranks_of(settings)
    tensors = split(spec.tensors, spec.config, ranks)
    weights.mkdir(parents=True, exist_ok=True)
    config = spec.config
    if source.is_head:
        written = [_write_draft_tokens(source, weights)]
    else:
        tokenizer = load_tokenizer(source.folder)
        written = [weights / workspace.TOKEN_TABLE, weights / workspace.TOKEN_SPLIT]
        build_token_table(tokenizer, config.vocab_size).save(written[0])
        build_token_split(tokenizer).save(written[1])
        config = _with_end_of_tokenizer(spec, tokenizer, progress)
    workspace.write_config_ini(weights / "config.ini", {**config.settings(), **settings})

    weights_id = fingerprint(source.folder)
    quality = _quality_of(source.folder, spec, weights_id)
    manifest = workspace.Manifest(str(source.folder.resolve()), ranks, weights_id, quality=quality)
    _add_layers(manifest, spec)
    if "quant_policy" in settings:
        manifest.kv_cache.pop("made_for", None)  # a choice needs no reminder; config.ini cannot tell 0 from no choice
    if source.adaptable:
        _add_modules(manifest, spec, tensors)
    for file in written:
        manifest.files[file.name] = {"bytes": file.stat().st_size, "sha256": workspace.sha256(file)}
    if link:
        _link_tensors(source.checkpoint, tensors, manifest)
    else:
        _copy_tensors(weights, source, tensors, manifest, progress)
    manifest.save(weights)


def _write_draft_tokens(source: Source, weights: Path) -> Path:
    """Write the model's token of each row of a head's output layer. Raises ModelError for wrong tokens."""
    config = source.spec.config
    tokens = np.arange(config.draft_vocab_size, dtype=np.int64)
    name = next((one for one in (OFFSETS, f"model.{OFFSETS}") if one in source.checkpoint.tensors), None)
    if name is not None:
        offsets = source.checkpoint.tensors[name]
        if offsets.shape != tokens.shape or offsets.dtype != "I64":
            raise ModelError(
                f"{source.folder}: tensor {name} is of type {offsets.dtype} with shape {list(offsets.shape)}, expected "
                f"I64 with {list(tokens.shape)} (draft_vocab_size)"
            )
        tokens = tokens + source.checkpoint.read(name)
    elif config.draft_vocab_size != config.vocab_size:
        raise ModelError(
            f"{source.folder}: tensor {OFFSETS} is missing, and draft_vocab_size {config.draft_vocab_size} differs "
            f"from vocab_size {config.vocab_size}"
        )
    if not ((tokens >= 0) & (tokens < config.vocab_size)).all():
        raise ModelError(f"{source.folder}: tensor {name} has tokens outside of vocab_size {config.vocab_size}")
    file = weights / workspace.DRAFT_TOKENS
    write_safetensors(file, {"tokens": tokens.shape}, "I64", lambda _: [tokens])
    return file


def _add_layers(manifest: workspace.Manifest, spec: ModelSpec) -> None:
    manifest.layers = [asdict(layer) for layer in spec.config.layers]
    said = {"made_for": spec.quantised_cache, "unusable": spec.unusable_scales}
    manifest.kv_cache = {key: text for key, text in said.items() if text}
    if any(name.startswith(MTP) for name in spec.tensors):
        manifest.mtp_layers = manifest.layers[-1:]


def _add_modules(manifest: workspace.Manifest, spec: ModelSpec, tensors: TensorMap) -> None:
    manifest.modules = module_places(spec, tensors)
    manifest.module_prefixes = [list(pair) for pair in spec.prefixes if pair[0]]


def _quality_of(folder: Path, spec: ModelSpec, weights_id: str | None = None) -> list[dict[str, Any]]:
    """Return the measured quality of these weights, if they keep their type or if the engine rounds them."""
    records = records_of_folder(folder, weights_id)
    return [
        record.content() for record in records if record.weight_type == spec.config.weight_type or record.quantization
    ]


def _file_of(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _copy_tensors(
    weights: Path, source: Source, tensors: TensorMap, manifest: workspace.Manifest, progress: Progress
) -> None:
    """Write a file for each rank. An output layer that is tied to the embedding refers to the embedding's rows."""
    config = source.spec.config
    dtype = WEIGHT_TYPES[config.data_type]
    for rank in range(manifest.ranks):
        file, output = _file_of(rank), f"output.{rank}.weight"
        mine = {name: parts for name, parts in tensors.items() if (rank_of(name) or 0) == rank}
        if config.tie_word_embeddings and not mine.get(output, ())[0].quantised:
            rows = output_rows(config, rank, manifest.ranks)
            place = {"file": _file_of(0), "name": "tok_embeddings.weight", "rows": rows}
            manifest.add(output, dtype, stacked_shape(mine.pop(output)), [place])
        _write_tensors(weights / file, source, mine, manifest, progress)


def _link_tensors(checkpoint: Checkpoint, tensors: TensorMap, manifest: workspace.Manifest) -> None:
    def linked(name: str) -> str:
        """Return the file of a tensor, and add it to the manifest."""
        info = checkpoint.tensors[name]
        file = info.file.resolve()
        entry = manifest.files.setdefault(str(file), {"bytes": file.stat().st_size})
        if info.offsets:
            place = {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.offsets}
            entry.setdefault("tensors", {})[name] = place
        return str(file)

    for name, parts in tensors.items():
        how = parts[0].quantised.how if parts[0].quantised else None
        dtype = how.dtype if how else checkpoint.tensors[parts[0].name].dtype
        places = []
        for part in parts:
            place: dict[str, Any] = {"file": linked(part.name), "name": part.name, "rows": part.rows, "cols": part.cols}
            if part.row_step > 1:
                place["row_step"] = part.row_step
            if part.quantised:
                place["type"] = part.quantised.block
                for kind, other in part.quantised.beside.items():
                    place[kind] = _place(linked(other), other, checkpoint.tensors[other].dtype)
            elif checkpoint.tensors[part.name].dtype != dtype:
                place["dtype"] = checkpoint.tensors[part.name].dtype
            places.append({key: value for key, value in place.items() if value})
        manifest.add(name, dtype, stacked_shape(parts), places, how)


def write_description(
    spec: ModelSpec, weights: Path, ranks: int, folder: Path | None = None, *, adaptable: bool
) -> None:
    """Write config.ini and a manifest without files, enough to compute the memory of a model but not to load it.
    folder: the model's folder, if it is available here. adaptable: of its Source."""
    workspace.write_config_ini(weights / "config.ini", spec.config.settings())
    quality = [] if folder is None else _quality_of(folder, spec)
    manifest = workspace.Manifest(spec.config.model_name, ranks, quality=quality)
    _add_layers(manifest, spec)
    tensors = split(spec.tensors, spec.config, ranks)
    if adaptable:
        _add_modules(manifest, spec, tensors)
    for name, parts in tensors.items():
        how = parts[0].quantised.how if parts[0].quantised else None
        manifest.add(name, how.dtype if how else WEIGHT_TYPES[spec.config.data_type], stacked_shape(parts), how=how)
    manifest.save(weights)


def convert(
    model: str | os.PathLike[str],
    dst_path: str | os.PathLike[str] = "workspace",
    *,
    tp: int | None = None,
    model_format: str = AUTO_FORMAT,
    dtype: str = "auto",
    force: bool = False,
    chat_template: Path | None = None,
    settings: Mapping[str, str] | None = None,
    show_progress: bool = False,
) -> Path:
    """Convert a Hugging Face folder, GGUF file or hub id to a workspace (docs/contracts.md) and return its path.

    tp: number of tensor-parallel ranks, short for the setting tensor_para_size. model_format: format of the weights,
    auto (detected) | hf (16 bits or fp32) | compressed-tensors | awq | gptq | fp8 | mxfp4 | modelopt | gguf. dtype:
    auto | bf16 | fp16 | fp32. chat_template: a file that replaces the model's. settings: inference parameters for
    config.ini. If it fails, the destination is not changed. Raises UnsupportedError, ModelError or InvalidRequestError
    with advice for the user.
    """
    settings = dict(settings or {})
    if tp is not None and settings.setdefault("tensor_para_size", str(tp)) != str(tp):
        raise InvalidRequestError(
            f"tp = {tp} and tensor_para_size = {settings['tensor_para_size']} contradict each other"
        )
    return _make(
        model,
        Path(dst_path),
        dtype,
        model_format,
        force,
        settings,
        link=False,
        head=None,
        chat_template=chat_template,
        show_progress=show_progress,
    )


def link_workspace(
    model: str | os.PathLike[str],
    dst_path: str | os.PathLike[str],
    dtype: str = "auto",
    *,
    model_format: str = AUTO_FORMAT,
    force: bool = False,
    chat_template: Path | None = None,
    settings: Mapping[str, str] | None = None,
    show_progress: bool = False,
    head: bool | None = False,
) -> Path:
    """Create a workspace whose manifest refers to the model's safetensors files. It is fast, and valid as long as these
    files exist.

    If the data type differs from the files, the engine converts the weights when it loads them. .bin checkpoints and
    experts with transposed matrices are always copied. With several ranks (tensor_para_size in settings) the manifest
    has the tensor ranges of each rank. head: see read_source().
    """
    return _make(
        model,
        Path(dst_path),
        dtype,
        model_format,
        force,
        settings or {},
        link=True,
        head=head,
        chat_template=chat_template,
        show_progress=show_progress,
    )


def _make(
    model: str | os.PathLike[str],
    destination: Path,
    dtype: str,
    model_format: str,
    force: bool,
    settings: Mapping[str, str],
    *,
    link: bool,
    head: bool | None,
    chat_template: Path | None,
    show_progress: bool,
) -> Path:
    if model_format not in _MODEL_FORMATS:
        raise UnsupportedError(
            f"--model-format {model_format!r} is not supported; supported: {', '.join(_MODEL_FORMATS)}"
        )
    with workspace.located(model) as location:
        if location.is_workspace:
            raise ModelError(
                f"{location.path} is already a workspace; convert needs a Hugging Face model folder or a hub id"
            )
        source = read_source(location.path, dtype, setting_of(settings), mtp=mtp_of(settings), head=head)
        found = source.spec.quantization.method if source.spec.quantization else DENSE
        if model_format not in (AUTO_FORMAT, found):
            raise ModelError(f"--model-format {model_format}: the weights of {model} are {found}: omit this option")
        if source.spec.config.latent_size and settings.get("quant_policy", "0") != "0":
            raise UnsupportedError(f"{model}: a KV cache of latents (MLA) cannot be quantised: omit quant_policy")
        progress = Progress(show_progress)
        for note in source.spec.notes:
            progress.warn(note)
        if found == "mxfp4" and not source.spec.interleaved_experts:
            progress.warn(
                f"{model}: Charonia assumes that the rows of gate and up alternate in experts.gate_up_proj, as in "
                "GPT-OSS. The files do not record this: if all gate rows come first, the results are wrong"
            )
        if force and workspace.is_held(destination.expanduser()):
            file = destination.expanduser() / workspace.LOCKED
            progress.warn(
                f"{destination} is in use by a server (`fuser -v {file}` shows which): that server continues with "
                "files that it has loaded, and uses the new ones after a restart",
                lasting=False,
            )
        link = link and source.linkable
        if source.is_head:
            unused = [*(key for key in settings if key != METHOD), *(["--chat-template"] if chat_template else [])]
            if unused:
                raise InvalidRequestError(
                    f"{model} is an EAGLE-3 head, without a use for {', '.join(unused)}: omit them"
                )
            return _write_head(source, destination, force, link=link, progress=progress)
        tokenizer = load_tokenizer(source.folder)
        if chat_template is not None:
            replace_chat_template(tokenizer, chat_template)
        prepare_tokenizer(source.folder, tokenizer, source.spec)
        with workspace.atomic_folder(destination, force) as root:
            write_weights(source, root / workspace.WEIGHTS, link=link, settings=settings, progress=progress)
            for note in source_notes(source.folder, tokenizer):
                progress.warn(note)
            if not link:  # servers print these at each start, with their own settings
                folder, given = root / workspace.WEIGHTS, {**_engine.settings_from_environment(), **settings}
                warnings = cache_warnings(folder, given)
                if given.get("quant_policy") == "16":  # the engine warns if there are no scales
                    policy = {"quant_policy": "16", "speculative_method": "off"}
                    found_by_engine = _engine.setting_warnings(folder, policy)
                    warnings += [one for one in found_by_engine if one.startswith("quant_policy")]
                for warning in warnings:
                    progress.warn(warning, lasting=False)
            ends = source.spec.config.model_task != "generate"
            copy_tokenizer(source.folder, tokenizer, root / workspace.TOKENIZER, ends=ends)
            _write_models(root)
            workspace.write_notes(root, progress.lasting)
    return destination.expanduser().absolute()


def _write_head(head: Source, destination: Path, force: bool, *, link: bool, progress: Progress) -> Path:
    with workspace.atomic_folder(destination, force) as root:
        write_weights(head, root / workspace.WEIGHTS, link=link, settings={}, progress=progress)
        workspace.write_notes(root, progress.lasting)
        (root / workspace.LOCKED).parent.mkdir(parents=True)
        (root / workspace.LOCKED).touch()  # Triton does not serve a head
    return destination.expanduser().absolute()


def _write_models(root: Path) -> None:
    """Write the files for Triton: models, their links, the repository, and the script that serves it in a container."""
    from charonia.triton_models import answers_dir, source_dir

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
    package = answers_dir()
    copied = models / "preprocessing" / "1" / package.name
    copied.mkdir()
    for file in sorted(package.glob("*.py")):
        shutil.copyfile(file, copied / file.name)
    (models / "engine" / "1" / "weights").symlink_to(Path("..", "..", "weights"))
    (models / "tokenizer" / workspace.TOKEN_TABLE).symlink_to(Path("..", "weights", workspace.TOKEN_TABLE))
    script = root / "service_docker_up.sh"
    script.write_bytes(resources.files("charonia").joinpath("service_docker_up.sh").read_bytes())
    script.chmod(0o755)
