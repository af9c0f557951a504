"""`charonia quantize`: writes a Hugging Face folder with quantised weights in the compressed-tensors format."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from charonia import __version__
from charonia.errors import CharoniaError, InvalidRequestError, ModelError, UnsupportedError
from charonia.families import COMPOSITES, ModelSpec, TensorPart
from charonia.json_files import read_json
from charonia.quality.evaluate import default_text
from charonia.quantize import environment
from charonia.quantize.driver import DIFFERENCE, JobError, read_calibration
from charonia.text.tokenizer import TOKENIZER_FILES
from charonia.weights import workspace
from charonia.weights.checkpoint import DTYPES, WEIGHT_TYPES
from charonia.weights.convert import read_source
from charonia.weights.quantization_config import cache_type, read_quantization

RECORD_FILE = "charonia_quantize.json"
_JOB = "job.json"  # in the working folder
# KL divergences from the 16-bit model, in nats a token: 4 bits cost 0.05 to 0.2.
_GREAT_LOSS_KL, _DESTROYED_KL = 0.25, 1.0
# A prediction that ignores the text has KL divergences of 3 to 4 nats from a trained model, and about 2 from a model
# of random numbers. The predictions of a random model are so flat that rounding to 4 bits costs 1.7 nats. For such a
# model, any result that is better than the prediction that ignores the text is accepted.
_FLAT_KL = 2.5
_FLAT_TOKENS = 64  # with fewer tokens, their mean depends too much on each of them
# Model types with images whose text part AutoModelForCausalLM cannot read.
_WITH_IMAGES = {one.model_type for one in COMPOSITES} - {"gemma3"}
# Families without a class in the release of transformers in requirements.txt.
_WITH_CODE_OF_THEIR_OWN = ("baichuan", "internlm", "internlm2", "internlm3", "qwen", "yi")

# Families whose routers and shared experts have names that driver.py does not know.
_UNKNOWN_ROUTERS = ("dots1", "ernie4_5_moe", "gpt_oss", "hunyuan_v1_moe", "hy_v3", "mellum", "minimax_m2", "solar_open")
# Families without norms before attention and feed-forward. SmoothQuant rescales these norms.
_NO_NORM_TO_RESCALE = ("exaone4", "olmo2", "olmo3")


@dataclass(frozen=True)
class Scheme:
    """The number format of a scheme, and the methods that can produce it. The first method is the default."""

    methods: tuple[str, ...]
    bits: int
    group_size: int = 0  # input features that share a scale; 0: one scale for each output feature
    why: str = ""  # why other methods are not possible


SCHEMES = {
    "w4a16": Scheme(("awq", "gptq", "rtn"), 4, 128, "activations stay in 16 bits, so there is nothing to smooth"),
    "w8a16": Scheme(("rtn", "gptq"), 8, 0, "with 8 bits, rounding to the nearest loses very little"),
    "w8a8": Scheme(("smoothquant", "gptq", "rtn"), 8, 0, "AWQ scales weights for 16-bit activations"),
    "fp8": Scheme(("rtn",), 8, 0, "it rounds to the nearest value, and scales activations at run time"),
}
_GROUPED = ("w4a16", "w8a16")  # schemes that take a group size
_MIN_GROUP = 16
METHODS = {
    "awq": "scales channels by the size of their activations, then rounds with zero points",
    "gptq": "rounds column by column and corrects the following columns for each error",
    "smoothquant": "moves the range of activations into the weights, then GPTQ",
    "rtn": "rounds to the nearest; needs no calibration text",
}


def quantize(
    model: str | os.PathLike[str],
    destination: Path,
    *,
    scheme: str,
    method: str | None = None,
    group_size: int | None = None,
    calibration: Path | None = None,
    samples: int = 128,
    max_length: int = 2048,
    command: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write `destination`, which must not exist, and return it.

    model: a Hugging Face folder or a hub id with 16-bit weights. method, group_size: None means the default of the
    scheme. calibration: a text file, or a file with one JSON object per line that has `text` or `messages`; None means
    the short text of the package. samples, max_length: the maximum number of samples, and of tokens each. say: called
    with progress messages.

    On failure, only the environment stays, and the output of llm-compressor if it is complete but could not be moved to
    `destination`. A destroyed model is removed. Raises CharoniaError with advice for the user.
    """
    method = _method_of(scheme, method)
    group = _group_of(scheme, group_size)
    destination = _unused_path(destination)
    folder = checked_source(model, calibration, samples, max_length)
    spec = read_source(folder).spec
    _check_family(spec, method)
    if group_size is None and group and group != (fitting := _fitting_group(spec, group)):
        say(f"groups of {fitting} input features, because {group} does not divide all layers")
        group = fitting
    _check_group(spec, scheme, group)
    if method != "rtn" and calibration is None:
        calibration = default_text()
        say(
            f"warning: no --calibration, so {method} uses the short text that comes with Charonia. Name a file with "
            "texts like those that your users send, with 128 samples or more"
        )
    partial = _create_partial(destination, bytes_of_copy(spec, scheme, group))
    made = partial / "model"
    job: dict[str, Any] = {
        "task": "quantize",
        "model": str(folder),
        "output": str(made),
        "scheme": scheme,
        "method": method,
        "group_size": group,
        "calibration": None if method == "rtn" else str(calibration),
        "compared": str(calibration or default_text()),
        "samples": samples,
        "max_length": max_length,
    }
    try:
        (partial / _JOB).write_text(json.dumps(job), encoding="utf-8")
        say(f"{folder} to {scheme} with {method}: {METHODS[method]}")
        environment.run(partial / _JOB, made, say)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt):
            say("interrupted: nothing was written. The next run begins with the first layer; it keeps the environment")
        raise
    try:
        _finish(made, folder, {**job, "command": command, "charonia_version": __version__}, say)
        if os.path.lexists(destination):
            raise FileExistsError(errno.EEXIST, "it was created in the meantime", str(destination))
        made.rename(destination)
    except _DestroyedError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except BaseException as error:  # the result of hours of work stays
        whole = f"the output of llm-compressor is in {made}; copy the tokenizer files of {folder} into it"
        if isinstance(error, OSError):
            raise ModelError(f"{destination} could not be written ({_reason(error)}): {whole}") from error
        say(whole)
        raise
    shutil.rmtree(partial, ignore_errors=True)
    return destination


class _DestroyedError(ModelError):
    """The predictions of the quantised model differ too much from its source."""


def _unused_path(destination: Path) -> Path:
    """Return the absolute path. Raises ModelError if something exists there."""
    try:
        path = destination.expanduser().absolute()
    except RuntimeError as error:  # the user in ~user does not exist
        raise ModelError(f"--dst {destination}: {error}") from None
    if path.name in ("", ".."):
        raise ModelError(f"--dst {destination} must end with the name of a new folder")
    if os.path.lexists(path):
        raise ModelError(f"{destination} exists: choose another --dst, or remove it")
    return path


def _create_partial(destination: Path, needed: int) -> Path:
    """Create a temporary folder next to `destination`. Raises if fewer than `needed` bytes are free."""
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    except OSError as error:
        raise ModelError(f"--dst {destination} cannot be written: {_reason(error)}") from error
    try:
        environment.require_space(destination.parent, needed, "the quantised model")
    except environment.QuantizeError:
        partial.rmdir()
        raise
    return partial


def _reason(error: OSError) -> str:
    return f"{error.strerror}: {error.filename}" if error.strerror else str(error)


def checked_source(model: str | os.PathLike[str], calibration: Path | None, samples: int, max_length: int) -> Path:
    """Return the folder of check_source(). Raises InvalidRequestError before it if the calibration file has no usable
    sample, or if a number is too small."""
    if calibration is not None:
        if not calibration.is_file():
            raise InvalidRequestError(f"calibration = {calibration} is not a file")
        try:
            read_calibration(calibration)
        except JobError as error:
            raise InvalidRequestError(str(error)) from None
    if samples < 1 or max_length < 2:
        raise InvalidRequestError(f"samples = {samples} and max_length = {max_length}: at least 1 and 2 are needed")
    return check_source(model)


def check_source(model: str | os.PathLike[str]) -> Path:
    """Return the Hugging Face folder of a model with 16-bit weights. Raises an error if the model is not supported."""
    location = workspace.locate(model)
    if location.is_workspace:
        raise ModelError(
            f"{location.path} is a workspace; name the Hugging Face folder or hub id that it was made from"
        )
    config = read_json(location.path / "config.json")
    if (model_type := config.get("model_type")) in _WITH_IMAGES:
        raise UnsupportedError(
            f"{location.path} is of type {model_type}, a model with images. Of these only Gemma 3 is supported: use "
            "a copy that is already quantised (AWQ, GPTQ, compressed-tensors), or quant_policy, which works with the "
            "same weights"
        )
    # read_source also reads the other configuration files, and checks that the engine supports the model.
    spec = None if "quantization_config" in config else read_source(location.path).spec
    if spec is None or spec.quantization is not None:
        if cache_type(location.path, config) and read_quantization(location.path, config) is None:
            raise UnsupportedError(
                f"{location.path} was made for a quantised KV cache (kv_cache_scheme or kv_cache_quant_algo), and "
                "transformers would use one: name the model that it was made from"
            )
        raise UnsupportedError(f"{location.path} is already quantised: name the model with 16-bit weights")
    if (task := spec.config.model_task) != "generate":
        raise UnsupportedError(
            f"{location.path} is a model with task = {task}, and only models for text can be quantised: use the "
            "setting quantization, which quantises the weights when the model is loaded"
        )
    if spec.config.model_family in _WITH_CODE_OF_THEIR_OWN:
        raise UnsupportedError(
            f"{location.path} is of family {spec.config.model_family}. transformers reads it only with code that comes "
            "with the model, and Charonia does not run such code: use a copy that is already quantised (AWQ, GPTQ, "
            "compressed-tensors), or quant_policy, which works with the same weights"
        )
    if not any(name.startswith("layers.") for name in spec.tensors):
        raise UnsupportedError(f"{location.path} has no layers: there is nothing to quantise or to calibrate")
    return location.path


def _check_family(spec: ModelSpec, method: str) -> None:
    family = spec.config.model_family
    if spec.config.latent_size:
        raise UnsupportedError(
            f"charonia quantize does not support family {family}: latent attention has not been tested with it: "
            "use a copy that is already quantised (AWQ, GPTQ, compressed-tensors, FP8)"
        )
    if family in _UNKNOWN_ROUTERS:
        raise UnsupportedError(
            f"charonia quantize does not support models of family {family}: it does not know the names of their "
            "routers and shared experts. Use a copy that is already quantised (AWQ, GPTQ, compressed-tensors), or "
            "quant_policy, which works with the same weights"
        )
    if any(layer.mixer == "delta_net" for layer in spec.config.layers):
        raise UnsupportedError(
            f"charonia quantize does not support models of family {family}, which have gated delta nets. Use a copy "
            "that is already quantised (AWQ, GPTQ, FP8, compressed-tensors), or quant_policy, which works with the "
            "same weights"
        )
    if family in _NO_NORM_TO_RESCALE and method == "smoothquant":
        raise UnsupportedError(
            f"smoothquant rescales the norms before attention and feed-forward, and family {family} has no such norms: "
            "use --method gptq or rtn"
        )


def _method_of(scheme: str, method: str | None) -> str:
    if scheme not in SCHEMES:
        raise InvalidRequestError(f"scheme {scheme!r} is not known; expected {', '.join(SCHEMES)}")
    known = SCHEMES[scheme]
    if method is None:
        return known.methods[0]
    if method not in METHODS:
        raise InvalidRequestError(f"method {method!r} is not known; expected {', '.join(METHODS)}")
    if method not in known.methods:
        raise InvalidRequestError(
            f"{scheme} is not possible with {method}: {known.why}; expected {', '.join(known.methods)}"
        )
    return method


def _group_of(scheme: str, group_size: int | None) -> int:
    if group_size is None:
        return SCHEMES[scheme].group_size
    if scheme not in _GROUPED:
        raise InvalidRequestError(f"group_size = {group_size}: {scheme} has one scale for each output feature")
    if group_size != 0 and (group_size < _MIN_GROUP or group_size % _MIN_GROUP != 0):
        raise InvalidRequestError(
            f"group_size = {group_size} is not valid: it must be a multiple of {_MIN_GROUP}, or 0 (one scale for each "
            "output feature)"
        )
    return group_size


def _is_quantised(name: str, part: TensorPart) -> bool:
    """Whether the tensor is quantised: all linear layers except the output layer and routers (IGNORED in driver.py)."""
    return len(part.shape) == 2 and name.startswith("layers.") and ".feed_forward.gate" not in name


def bytes_of_copy(spec: ModelSpec, scheme: str, group: int) -> int:
    """Return the disk space of the quantised weights in bytes, with zero points for all groups."""
    dense = DTYPES[WEIGHT_TYPES[spec.config.data_type]].itemsize
    bits = SCHEMES[scheme].bits
    sizes: dict[tuple[Any, ...], int] = {}  # by tensor and range: the output layer may share the embedding
    for name, parts in spec.tensors.items():
        for part in parts:
            size = math.prod(part.taken) * dense
            if _is_quantised(name, part):
                rows, columns = part.taken
                size = rows * columns * bits // 8 + rows * (columns // group if group else 1) * (dense + 1)
            sizes[part.name, part.rows, part.cols] = size
    return sum(sizes.values())


def _widths(spec: ModelSpec) -> dict[str, int]:
    """The input features of each tensor that is quantised."""
    return {part.name: part.shape[1] for name, (part, *_) in spec.tensors.items() if _is_quantised(name, part)}


def _fitting_group(spec: ModelSpec, most: int) -> int:
    """The largest group size up to `most` that divides the input width of each layer; 0 if there is none."""
    common = math.gcd(*_widths(spec).values())
    return next((size for size in (128, 64, 32, 16) if size <= most and common % size == 0), 0)


def _check_group(spec: ModelSpec, scheme: str, group: int) -> None:
    """Check that the group size divides the input width of each layer, before llm-compressor loads the model."""
    if not group:
        return
    widths = _widths(spec)
    wrong = next((name for name, width in widths.items() if width % group), None)
    if wrong is None:
        return
    fitting = _fitting_group(spec, 128)
    raise InvalidRequestError(
        f"{wrong} has {widths[wrong]} input features, which is not a multiple of group_size = {group}: use "
        f"--group-size {fitting} ({scheme}), which fits all layers"
    )


def _finish(made: Path, source: Path, record: dict[str, Any], say: Callable[[str], None]) -> None:
    """Complete the output of llm-compressor: copy the tokenizer of the source, because the release of transformers may
    write it differently, and add the record. Raises _DestroyedError if the model lost too much."""
    difference = made.with_name(DIFFERENCE)
    if difference.is_file():  # otherwise driver.py has already printed why it is missing
        record["difference"] = _checked(read_json(difference), record, say)
    for name in TOKENIZER_FILES:
        if name != "config.json" and (source / name).is_file():
            shutil.copyfile(source / name, made / name)
    for file in filter(Path.is_file, made.iterdir()):
        file.chmod(0o644)
    try:
        read_source(made)
    except CharoniaError as error:
        raise ModelError(f"Charonia cannot read the output of llm-compressor: {error}") from error
    kept = {key: value for key, value in record.items() if key not in ("task", "output")}
    (made / RECORD_FILE).write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _checked(found: dict[str, Any], job: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Return the result of difference() in driver.py. Raises _DestroyedError if the model lost too much."""
    kl, blind = found["kl_mean"], found["kl_blind"]
    flat = blind < _FLAT_KL and found["tokens"] >= _FLAT_TOKENS
    limit = max(_DESTROYED_KL, blind) if flat else _DESTROYED_KL
    figures = (
        f"over {found['tokens']} tokens its mean KL divergence from {job['model']} is {kl:.4f}, and the most likely "
        f"token is the same for {found['top1_agreement']:.1%}"
    )
    remedy = _remedy(job["scheme"], job["method"], job["group_size"])
    if not kl < limit:  # NaN too
        raise _DestroyedError(
            f"the quantised model is destroyed and was removed: {figures}; less than {limit:.2f} is needed: {remedy}"
        )
    say(f"warning: a large loss: {figures}: measure it, or {remedy}" if kl > _GREAT_LOSS_KL else figures)
    return found


def _remedy(scheme: str, method: str, group: int) -> str:
    """Return advice with options that may lose less."""
    methods = [other for other in SCHEMES[scheme].methods if other != method]
    ways = [f"--method {' or '.join(methods)}"] if methods else []
    if scheme in _GROUPED and group != _MIN_GROUP:
        ways.append("a smaller --group-size" if group else "a --group-size")
    if scheme == "w4a16":
        ways.append("--scheme w8a16, which has 8 bits")
    elif scheme not in _GROUPED:
        ways.append("--scheme w8a16, which does not change activations")
    return f"use {', or '.join(ways)}"
