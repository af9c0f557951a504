"""`charonia quantize`: a Hugging Face folder with quantised weights in compressed-tensors' format."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import math
import os
import re
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
from charonia.quantize import environment, programs
from charonia.quantize.driver import DIFFERENCE, JobError, read_calibration
from charonia.text.tokenizer import TOKENIZER_FILES
from charonia.weights import workspace
from charonia.weights.checkpoint import DTYPES, WEIGHT_TYPES
from charonia.weights.convert import read_source
from charonia.weights.quantization_config import read_quantization, says_cache

RECORD_FILE = "charonia_quantize.json"
_JOB = "job.json"  # of the folder that is worked in, until what is in it is whole
# KL divergences from the 16-bit model, in nats a token: 4 bits cost 0.05 to 0.2.
_GREAT_LOSS_KL, _DESTROYED_KL = 0.25, 1.0
# A prediction that knows nothing of the text is 3 to 4 nats from a trained model, and about 2 from one of random
# numbers, which are so flat that rounding to 4 bits costs 1.7: there, what is better than that prediction is taken.
_FLAT_KL = 2.5
_FLAT_TOKENS = 64  # of fewer tokens the prediction knows too much: their mean is made of them
# The models with images whose text part AutoModelForCausalLM does not read.
_WITH_IMAGES = {one.model_type for one in COMPOSITES} - {"gemma3"}
# Families that the release of transformers in requirements.txt has no class for.
_WITH_CODE_OF_THEIR_OWN = ("baichuan", "internlm", "internlm2", "internlm3", "qwen", "yi")

# Families whose routers and shared experts have names that the driver does not know.
_UNKNOWN_ROUTERS = ("dots1", "ernie4_5_moe", "hunyuan_v1_moe", "hy_v3", "mellum", "minimax_m2", "solar_open")
# Families without norms before attention and feed-forward, which SmoothQuant rescales.
_NO_NORM_TO_RESCALE = ("exaone4", "olmo2", "olmo3")


@dataclass(frozen=True)
class Scheme:
    """What a scheme makes of weights, and which methods it can be made with, the first by default."""

    methods: tuple[str, ...]
    bits: int
    group_size: int = 0  # input features that share a scale; 0: all of an output feature
    why: str = ""  # why it takes no other method


SCHEMES = {
    "w4a16": Scheme(("awq", "gptq", "rtn"), 4, 128, "activations stay in 16 bits, so there is nothing to smooth"),
    "w8a16": Scheme(("rtn", "gptq"), 8, 0, "with 8 bits, rounding to the nearest loses next to nothing"),
    "w8a8": Scheme(("smoothquant", "gptq", "rtn"), 8, 0, "AWQ scales weights for 16-bit activations"),
    "fp8": Scheme(("rtn",), 8, 0, "its numbers are rounded to the nearest, and activations are scaled as they come"),
}
_GROUPED = ("w4a16", "w8a16")  # schemes that take a group size
_MIN_GROUP = 16
METHODS = {
    "awq": "scales channels by what their activations need, then rounds with zero points",
    "gptq": "rounds column by column and makes up for each error in the columns that follow",
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
    """Writes `destination`, which must not exist, and returns it.

    model: a Hugging Face folder or a hub id with 16-bit weights. method, group_size: None is the scheme's own.
    calibration: a text, or a file with a JSON object a line that has `text` or `messages`; None is the
    package's short text. samples: at most so many, of at most max_length tokens. say: is told what is being done.
    Nothing is left behind when it fails, but the environment, and what llm-compressor had written whole where that
    could not be made `destination`; a model that is destroyed is removed. Raises CharoniaError saying what would be
    right.
    """
    method = _method_of(scheme, method)
    group = _group_of(scheme, group_size)
    destination = _free(destination)
    if calibration is not None:
        check_calibration(calibration)
    if samples < 1 or max_length < 2:
        raise InvalidRequestError(f"samples = {samples} and max_length = {max_length}: at least 1 and 2 are needed")
    folder = check_source(model)
    spec = _quantisable(read_source(folder).spec, scheme, method, group)
    if method != "rtn" and calibration is None:
        calibration = default_text()
        say(
            f"warning: no --calibration, so {method} gets the short text that comes with Charonia. Name a file of the "
            "kind of text that your users send, with 128 samples or more"
        )
    partial = _begin(destination, bytes_of_copy(spec, scheme, group), say)
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
        with programs.locked(partial / _JOB, json.dumps(job)):
            say(f"{folder} to {scheme} with {method}: {METHODS[method]}")
            environment.run(partial / _JOB, made, say)
    except BaseException as error:
        _remove(partial)
        if isinstance(error, KeyboardInterrupt):
            say(
                "interrupted: nothing was written. llm-compressor keeps nothing between layers, so the next run begins "
                "with the first one again; its environment stays"
            )
        raise
    try:
        _finish(made, folder, {**job, "command": command, "charonia_version": __version__}, say)
        if os.path.lexists(destination):
            raise FileExistsError(errno.EEXIST, "something is there by now", str(destination))
        made.rename(destination)
    except _DestroyedError:
        _remove(partial)
        raise
    except BaseException as error:  # hours of work: it stays
        whole = f"what llm-compressor has made is in {made}; it wants the tokenizer's files of {folder} beside it"
        if isinstance(error, OSError):
            raise ModelError(f"{destination} could not be written ({_reason(error)}): {whole}") from error
        say(whole)
        raise
    shutil.rmtree(partial, ignore_errors=True)
    return destination


class _DestroyedError(ModelError):
    """The quantised model says something else than its source."""


def _free(destination: Path) -> Path:
    """It as an absolute path, at which there is nothing. Raises ModelError."""
    try:
        path = destination.expanduser().absolute()
    except RuntimeError as error:  # of a user who is not there
        raise ModelError(f"--dst {destination}: {error}") from None
    if path.name in ("", ".."):
        raise ModelError(f"--dst {destination} must end with the name of a new folder")
    if os.path.lexists(path):
        raise ModelError(f"{destination} exists: choose another --dst, or remove it")
    return path


def _begin(destination: Path, needed: int, say: Callable[[str], None]) -> Path:
    """A new folder beside `destination`, with room for so many bytes."""
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _sweep(destination, say)
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


def _sweep(destination: Path, say: Callable[[str], None]) -> None:
    """Removes what runs for the same destination have left that were killed: folders whose job nobody has locked."""
    own_name = re.compile(re.escape(f".{destination.name}.") + "[a-z0-9_]{8}")  # as mkdtemp makes them
    for folder in destination.parent.glob(f".{glob.escape(destination.name)}.*"):
        if not own_name.fullmatch(folder.name):
            continue
        with contextlib.suppress(OSError, ValueError), (folder / _JOB).open("r+b") as job:
            fcntl.flock(job, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # One that has ended well removes the file before it lets go of it.
            if os.fstat(job.fileno()).st_nlink and _is_job(json.load(job), folder):
                say(f"removing {folder}, which a run that was killed has left")
                _remove(folder)


def _is_job(job: Any, folder: Path) -> bool:
    return isinstance(job, dict) and job.get("task") == "quantize" and job.get("output") == str(folder / "model")


def _remove(partial: Path) -> None:
    """The job last: while it is there, the next run knows what the rest is."""
    shutil.rmtree(partial / "model", ignore_errors=True)
    shutil.rmtree(partial, ignore_errors=True)


def check_calibration(file: Path) -> None:
    """InvalidRequestError where no sample can be taken of the file: to be asked before a model is loaded."""
    if not file.is_file():
        raise InvalidRequestError(f"calibration = {file} is no file")
    try:
        read_calibration(file)
    except JobError as error:
        raise InvalidRequestError(str(error)) from None


def check_source(model: str | os.PathLike[str]) -> Path:
    """The Hugging Face folder of a model with 16-bit weights. Raises what is wrong with it."""
    location = workspace.locate(model)
    if location.is_workspace:
        raise ModelError(
            f"{location.path} is a workspace; this takes the Hugging Face folder or hub id that it was made from"
        )
    config = read_json(location.path / "config.json")
    if (model_type := config.get("model_type")) in _WITH_IMAGES:
        raise UnsupportedError(
            f"{location.path} is of type {model_type}, a model with images, and of these only Gemma 3 can be "
            "quantised: take a copy that is quantised already (AWQ, GPTQ, compressed-tensors), or quant_policy, which "
            "needs no other weights"
        )
    # read_source finds what files beside config.json say, too, and whether the engine will know what comes of it.
    spec = None if "quantization_config" in config else read_source(location.path).spec
    if spec is None or spec.quantization is not None:
        if says_cache(location.path, config) and read_quantization(location.path, config) is None:
            raise UnsupportedError(
                f"{location.path} was made for a quantised KV cache (kv_cache_scheme), and transformers would load it "
                "with one: name the model that it was made from"
            )
        raise UnsupportedError(f"{location.path} is quantised already: name the model with 16-bit weights")
    if spec.config.model_family in _WITH_CODE_OF_THEIR_OWN:
        raise UnsupportedError(
            f"{location.path} is of family {spec.config.model_family}, which transformers reads only with code that "
            "comes with the model, and that code is not run: take a copy that is quantised already (AWQ, GPTQ, "
            "compressed-tensors), or quant_policy, which needs no other weights"
        )
    if not any(name.startswith("layers.") for name in spec.tensors):
        raise UnsupportedError(f"{location.path} has no layers: there is nothing to quantise or to calibrate")
    return location.path


def _quantisable(spec: ModelSpec, scheme: str, method: str, group: int) -> ModelSpec:
    """Returns the spec. Raises what is wrong with the scheme, the method or the group size for this model."""
    _check_family(spec, method)
    _check_group(spec, scheme, group)
    return spec


def _check_family(spec: ModelSpec, method: str) -> None:
    family = spec.config.model_family
    if family in _UNKNOWN_ROUTERS:
        raise UnsupportedError(
            f"models of family {family} are not supported by charonia quantize: it does not know the names of their "
            "routers and shared experts. Take a copy that is quantised already (AWQ, GPTQ, compressed-tensors), or "
            "quant_policy, which needs no other weights"
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
            f"{scheme} is not made with {method}: {known.why}; expected {', '.join(known.methods)}"
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
    """Whether it is quantised: all linear layers but the output layer and routers (driver.py, IGNORED)."""
    return len(part.shape) == 2 and name.startswith("layers.") and ".feed_forward.gate" not in name


def bytes_of_copy(spec: ModelSpec, scheme: str, group: int) -> int:
    """What the weights take on the disk when they are quantised, with zeros for all groups."""
    dense = DTYPES[WEIGHT_TYPES[spec.config.data_type]].itemsize
    bits = SCHEMES[scheme].bits
    sizes: dict[tuple[Any, ...], int] = {}  # of each range of a tensor; the output layer may be the embedding
    for name, parts in spec.tensors.items():
        for part in parts:
            size = math.prod(part.taken) * dense
            if _is_quantised(name, part):
                rows, columns = part.taken
                size = rows * columns * bits // 8 + rows * (columns // group if group else 1) * (dense + 1)
            sizes[part.name, part.rows, part.cols] = size
    return sum(sizes.values())


def _check_group(spec: ModelSpec, scheme: str, group: int) -> None:
    """Every layer's inputs must be whole groups; llm-compressor would say so after it has loaded the model."""
    if not group:
        return
    widths: dict[str, int] = {}  # input features, by the name of the tensor
    for name, (part, *_) in spec.tensors.items():
        if _is_quantised(name, part):
            widths[part.name] = part.shape[1]
    wrong = next((name for name, width in widths.items() if width % group), None)
    if wrong is None:
        return
    common = math.gcd(*widths.values())
    fitting = next((size for size in (128, 64, 32, 16) if common % size == 0), 0)
    raise InvalidRequestError(
        f"{wrong} has {widths[wrong]} input features, which is no multiple of group_size = {group}: use "
        f"--group-size {fitting} ({scheme}), which fits all layers"
    )


def _finish(made: Path, source: Path, record: dict[str, Any], say: Callable[[str], None]) -> None:
    """What llm-compressor has written becomes a folder that others read too: with the source's own tokenizer, which its
    release of transformers may write in another way. Raises _DestroyedError for a model that is."""
    difference = made.with_name(DIFFERENCE)
    if difference.is_file():  # else the driver has said why
        record["difference"] = _checked(read_json(difference), record, say)
    for name in TOKENIZER_FILES:
        if name != "config.json" and (source / name).is_file():
            shutil.copyfile(source / name, made / name)
    for file in filter(Path.is_file, made.iterdir()):
        file.chmod(0o644)
    try:
        read_source(made)
    except CharoniaError as error:
        raise ModelError(f"llm-compressor has written what Charonia cannot read: {error}") from error
    kept = {key: value for key, value in record.items() if key not in ("task", "output")}
    (made / RECORD_FILE).write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _checked(found: dict[str, Any], job: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """What driver.py's difference() has found, of a model that is not destroyed."""
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
    say(f"warning: a great loss: {figures}: measure it, or {remedy}" if kl > _GREAT_LOSS_KL else figures)
    return found


def _remedy(scheme: str, method: str, group: int) -> str:
    """What else the command takes, and may lose less."""
    methods = [other for other in SCHEMES[scheme].methods if other != method]
    ways = [f"--method {' or '.join(methods)}"] if methods else []
    if scheme in _GROUPED and group != _MIN_GROUP:
        ways.append("a smaller --group-size" if group else "a --group-size")
    if scheme == "w4a16":
        ways.append("--scheme w8a16, which has 8 bits")
    elif scheme not in _GROUPED:
        ways.append("--scheme w8a16, which leaves activations as they are")
    return f"take {', or '.join(ways)}"
