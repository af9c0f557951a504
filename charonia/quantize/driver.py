"""Quantises and calibrates with llm-compressor. It runs in the environment that environment.py creates and uses only
the packages there, so it imports nothing of charonia.

    python driver.py JOB.json

command.py and calibrate.py write the job. Messages go to stderr, in lines that begin with SAID or FAILED. The packages
write to stderr too.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

# Modules that stay in 16 bits: the output layer, the routers of experts (small, and sensitive), and the image modules.
# A text cannot calibrate image modules, and in Gemma 3 the group size does not divide their rows.
IGNORED = [
    *(
        "lm_head",
        "re:.*block_sparse_moe[.]gate$",
        "re:.*mlp[.]gate([.]wg)?$",
        "re:.*router$",
        "re:.*shared_expert_gate$",
    ),
    *("re:.*vision_tower[.]", "re:.*multi_modal_projector[.]"),
]
SMOOTHING = 0.8  # SmoothQuant's strength for models with gated feed-forward, as in llm-compressor's examples
# The quantised model is compared with its source on this many samples and tokens, enough to see a destroyed one.
COMPARED_SAMPLES, COMPARED_LENGTH = 4, 64
# Outliers count from this many tokens on: in one token of random numbers, the largest value is 30 times the median.
FEW_TOKENS = 16
DIFFERENCE = "difference.json"  # next to the output

LONG_MINUTES = 10  # longer runs name the method that needs no calibration
SAID, FAILED = "charonia: ", "charonia failed: "
# Packages that each task needs.
NEEDED = {
    "quantize": ("torch", "transformers", "datasets", "compressed_tensors", "llmcompressor"),
    "calibrate": ("torch", "transformers"),
}


class JobError(Exception):
    """An error that the user can fix."""


def scheme_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration group of compressed-tensors: the formats of weights and activations."""
    group = job["group_size"]
    grouped = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    by_token = {"strategy": "token", "symmetric": True, "dynamic": True}
    integer, floating = {"type": "int", "symmetric": True}, {"type": "float", "symmetric": True, "num_bits": 8}
    weights: dict[str, Any]
    activations: dict[str, Any] | None = None
    match job["scheme"]:
        case "w4a16":
            # AWQ is more accurate with zero points; GPTQ does not need them.
            weights = {**integer, "num_bits": 4, **grouped, "symmetric": job["method"] != "awq"}
        case "w8a16":
            weights = {**integer, "num_bits": 8, **grouped}
        case "w8a8":
            weights = {**integer, "num_bits": 8, "strategy": "channel"}
            activations = {"type": "int", "num_bits": 8, **by_token}
        case "fp8":
            weights = {**floating, "strategy": "channel"}
            activations = {"type": "float", "num_bits": 8, **by_token}
        case other:
            raise JobError(f"scheme {other} is not known")
    return {"targets": ["Linear"], "weights": weights, "input_activations": activations}


def smoothed(names: list[str], method: str) -> list[tuple[str, list[str]]]:
    """Return llm-compressor's mappings: each module that may be rescaled, with the modules that read its output and
    compensate. Both are name patterns. names: the names of all modules of the model.

    Raises JobError if SmoothQuant has nothing to rescale.

    The tables of llm-compressor 0.14 are wrong: for SmoothQuant, Gemma's feed-forward follows the norm after attention;
    for AWQ, Mixtral's router is not compensated, and models that have experts in some layers only get no mappings.
    """
    before = "pre_feedforward_layernorm" if any("pre_feedforward_layernorm" in name for name in names) else ""
    norm = before or "post_attention_layernorm"

    def layers_with(part: str) -> set[str]:
        return {name.removesuffix(f".{part}") for name in names if name.endswith(f".{part}")}

    normed, sparse = layers_with("input_layernorm"), layers_with("mlp.experts")
    layers = normed | layers_with("post_attention_layernorm")
    # OLMo 2 and EXAONE 4 have no input_layernorm, and their other norm comes after attention.
    fed = normed & layers_with(norm)
    parallel = normed - fed  # Cohere 2: attention and feed-forward read one norm

    shared = "mlp[.]shared_(mlp|experts?)[.]"
    router = "mlp[.]gate[.]wg" if any(name.endswith(".mlp.gate.wg") for name in names) else "mlp[.]gate"
    beside = [
        reader
        for reader in (f"{shared}(gate|up)_proj", "mlp[.]shared_expert_gate")
        if any(re.search(f"[.]{reader}$", name) for name in names)
    ]

    def mapping(where: set[str], scaled: str, *readers: str) -> list[tuple[str, list[str]]]:
        start = f"re:^({'|'.join(map(re.escape, sorted(where)))})[.]"
        return [(f"{start}{scaled}$", [f"{start}{reader}$" for reader in readers])] if where else []

    attention, feed_forward = "self_attn[.](q|k|v|qkv)_proj", "mlp[.](gate|up|gate_up)_proj"
    found = [
        *mapping(fed, "input_layernorm", attention),
        *mapping(fed - sparse, norm, feed_forward),
        *mapping(parallel, "input_layernorm", attention, feed_forward),
    ]
    if method == "smoothquant":  # one scale for all experts of a layer loses more than it gains
        if not found:  # otherwise llm-compressor would use its own table
            raise JobError("the model has no norm before a layer, so smoothquant changes nothing: use --method gptq")
        return found
    if before and any(name.endswith(".q_norm") for name in names):  # Gemma 3: AWQ loses more there than it gains
        found = found[1:]
    return [
        *found,
        *mapping(sparse, norm, router, r"mlp[.]experts[.]\d+[.](gate|up)_proj", *beside),
        *mapping(layers, "self_attn[.](v|qkv)_proj", "self_attn[.]o_proj"),
        *mapping(layers - sparse, "mlp[.](up|gate_up)_proj", "mlp[.]down_proj"),
        *mapping(sparse, r"mlp[.]experts[.]\d+[.]up_proj", r"mlp[.]experts[.]\d+[.]down_proj"),
        *mapping(sparse if beside else set(), f"{shared}up_proj", f"{shared}down_proj"),
    ]


def recipe_of(job: dict[str, Any], model: Any) -> list[Any]:
    """Return llm-compressor's modifiers for the job."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    how = {"config_groups": {"group_0": scheme_of(job)}, "ignore": IGNORED}
    mappings = smoothed([name for name, _ in model.named_modules()], job["method"])
    match job["method"]:
        case "rtn":
            return [QuantizationModifier(**how)]
        case "awq":
            return [AWQModifier(mappings=[AWQMapping(*one) for one in mappings]), QuantizationModifier(**how)]
        case "gptq":
            return [GPTQModifier(**how)]
        case "smoothquant":
            pairs = [(readers, scaled) for scaled, readers in mappings]
            return [SmoothQuantModifier(smoothing_strength=SMOOTHING, mappings=pairs), GPTQModifier(**how)]
        case other:
            raise JobError(f"method {other} is not known")


def read_calibration(file: Path) -> str | list[dict[str, Any]]:
    """Return a plain text, or the objects of a JSON lines file, each with a text or a list of messages. Not empty."""
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"the calibration text cannot be read from {file}: {error}") from None
    if file.suffix not in (".jsonl", ".json"):
        if not content.strip():
            raise JobError(f"{file} has no text to calibrate with")
        return content
    # splitlines() would also cut at U+2028 and similar characters within a text.
    lines = [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    entries = [entry_of(line, f"{file}, line {number}") for number, line in lines]
    if not any(messages_of(entry) or text_of(entry) for entry in entries):
        raise JobError(f"{file} has no text to calibrate with")
    return entries


def samples_of(job: dict[str, Any], tokenizer: Any) -> list[list[int]]:
    """Return token ids [samples][2 to max_length] of the calibration file. A plain text is cut into samples."""
    file, length = Path(job["calibration"]), job["max_length"]
    rows = [row[:length] for row in islice(token_ids(file, length, tokenizer), job["samples"])]
    if not rows:
        raise JobError(f"{file} has no sample of two tokens or more to calibrate with")
    return rows


def compared_of(job: dict[str, Any], tokenizer: Any) -> list[list[int]]:
    """Return token ids for comparing models: the ends of samples with different ends, because chats start with the same
    prompt. The first token stays, because models attend to it strongly."""
    file, length = Path(job["compared"]), COMPARED_LENGTH
    rows: dict[tuple[int, ...], None] = {}
    for row in islice(token_ids(file, length, tokenizer), max(job["samples"], COMPARED_SAMPLES)):
        rows[tuple(row if len(row) <= length else [row[0], *row[1 - length :]])] = None
        if len(rows) == COMPARED_SAMPLES:
            break
    if not rows:
        raise JobError(f"{file} has no sample of two tokens or more to compare models on")
    return list(map(list, rows))


def token_ids(file: Path, length: int, tokenizer: Any) -> Iterator[list[int]]:
    """Yield the token ids of each sample with two or more tokens. A plain text is cut into samples of `length`."""
    content = read_calibration(file)
    if isinstance(content, str):
        ids = tokenizer(content, verbose=False)["input_ids"]
        rows = (ids[at : at + length] for at in range(0, len(ids), length))
    else:
        rows = (ids_of(entry, tokenizer) for entry in content)
    return (row for row in rows if len(row) > 1)


def ids_of(entry: dict[str, Any], tokenizer: Any) -> list[int]:
    """Return the token ids of an entry; empty if it has no text."""
    ids: list[int] = []
    if messages := messages_of(entry):
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    elif text := text_of(entry):
        ids = tokenizer(text, verbose=False)["input_ids"]
    return ids


def entry_of(line: str, place: str) -> dict[str, Any]:
    """Parse the JSON object of a line."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise JobError(f"{place} is not a JSON object: {error}") from None
    if not isinstance(entry, dict) or not (
        isinstance(entry.get("messages"), list) or isinstance(entry.get("text"), str)
    ):
        raise JobError(f"{place} must be a JSON object with a text, or a list of messages")
    return entry


def messages_of(entry: dict[str, Any]) -> list[Any]:
    """Return the messages of an entry; empty if it has none."""
    messages = entry.get("messages")
    return messages if isinstance(messages, list) else []


def text_of(entry: dict[str, Any]) -> str:
    """Return the text of an entry; empty if it has none, or only spaces."""
    text = entry.get("text")
    return text if isinstance(text, str) and text.strip() else ""


def load(job: dict[str, Any]) -> tuple[Any, Any]:
    """Load the model and its tokenizer. Never runs code that comes with the model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer does not follow tokenizer.json. The other rules of charonia are not available in this environment.
    described = (Path(job["model"]) / "tokenizer.json").is_file()
    kind: Any = PreTrainedTokenizerFast if described else AutoTokenizer
    tokenizer = kind.from_pretrained(job["model"], trust_remote_code=False)
    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto", trust_remote_code=False)
    return model.eval(), tokenizer


def name_as_before(model: Any) -> None:
    """Save the experts' layers of Mixtral, which llm-compressor splits, under their original names: release 0.14 writes
    names that no other program reads."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    if model.config.model_type == "mixtral":
        names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
        model._weight_conversions = [
            *(one for one in model._weight_conversions if not isinstance(one, WeightConverter)),
            *(WeightRenaming(rf"\.experts\.(\d+)\.{old}\.", rf".experts.\1.{new}.") for old, new in names.items()),
        ]


def quantize(job: dict[str, Any]) -> None:
    """Write config.json and safetensors in the compressed-tensors format to job["output"]."""
    from datasets import Dataset
    from llmcompressor import oneshot

    model, tokenizer = load(job)
    compared = compared_of(job, tokenizer)
    say(f"computing the predictions of the 16-bit model for {sum(map(len, compared))} tokens")
    before = predictions(model, compared)
    given: dict[str, Any] = {}
    if job["calibration"]:
        rows = samples_of(job, tokenizer)
        say(f"calibrating with {len(rows)} samples, {sum(map(len, rows))} tokens")
        columns = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        given = {
            "dataset": Dataset.from_dict(columns),
            "max_seq_length": job["max_length"],
            "num_calibration_samples": len(rows),
            "shuffle_calibration_samples": False,
        }
    leave_memory_unpinned()
    # Sequential: layers are computed one by one, each calibrated with the output of the quantised layers before it.
    pipeline = {"pipeline": "sequential"} if job["calibration"] else {}
    with time_estimated(model):
        oneshot(model=model, tokenizer=tokenizer, recipe=recipe_of(job, model), **given, **pipeline)
    say("comparing them with the predictions of the quantised model")
    result = Path(job["output"]).with_name(DIFFERENCE)
    try:
        result.write_text(json.dumps(difference(before, predictions(model, compared))), encoding="utf-8")
    except Exception as error:  # the result of hours of work is still written
        result.unlink(missing_ok=True)
        say(f"warning: the quantised model could not be compared with its source: {error}")
    say("writing")
    name_as_before(model)
    model.save_pretrained(job["output"], save_compressed=True)


@contextmanager
def time_estimated(model: Any) -> Iterator[None]:
    """Say how long all layers take, when the second layer begins. Methods that calibrate take one layer after the
    other."""
    names = {name: module for name, module in model.named_modules() if re.fullmatch(r"(.*[.])?layers", name)}
    layers = max((list(one) for name, one in names.items() if "vision" not in name), key=len, default=[])
    began: dict[int, float] = {}

    def begins(number: int) -> None:
        if number in began:
            return
        began[number] = time.monotonic()
        if number == 1 and 0 in began:
            say(time_text((began[1] - began[0]) * len(layers), len(layers)))

    def hook(number: int) -> Any:
        return lambda *_: begins(number)

    hooks = [layer.register_forward_pre_hook(hook(number)) for number, layer in enumerate(layers[:2])]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def time_text(seconds: float, layers: int) -> str:
    minutes = seconds / 60
    amount = f"{seconds:.0f} seconds" if minutes < 2 else f"{minutes:.0f} minutes"
    text = f"the first of {layers} layers is done; all take about {amount}"
    return text if minutes <= LONG_MINUTES else f"{text}. --method rtn takes seconds, and loses more"


def predictions(model: Any, rows: list[list[int]]) -> Any:
    """Return log probabilities [tokens of all rows, vocabulary] of the token after each position."""
    import torch

    # One batch if the rows have equal lengths, because each call unpacks the quantised weights.
    batches = [rows] if len(set(map(len, rows))) == 1 else [[row] for row in rows]
    with torch.no_grad():
        logits = [model(torch.tensor(batch, device=model.device), use_cache=False).logits for batch in batches]
    return torch.cat([one.flatten(0, 1) for one in logits]).float().log_softmax(-1).cpu()


def difference(before: Any, after: Any) -> dict[str, float]:
    """Return how much predictions differ from `before`, in nats, computed as in `charonia evaluate`. kl_blind: the same
    for one fixed prediction, the mean of `before`, which ignores the text."""
    blind = (before.logsumexp(0) - math.log(len(before))).expand_as(before)
    return {
        "tokens": len(before),
        "kl_mean": float((before.exp() * (before - after)).sum(-1).mean()),
        "kl_blind": float((before.exp() * (before - blind)).sum(-1).mean()),
        "top1_agreement": float((before.argmax(-1) == after.argmax(-1)).float().mean()),
    }


def calibrate(job: dict[str, Any]) -> None:
    """Write statistics of the inputs of linear layers and of the KV cache to job["output"], by layer."""
    import torch

    model, tokenizer = load(job)
    rows = samples_of(job, tokenizer)
    tokens = sum(map(len, rows))
    say(f"running {len(rows)} samples, {tokens} tokens")
    caches: list[dict[str, KvStats]] = []
    inputs: dict[str, dict[int, InputStats]] = {}
    for number, row in enumerate(rows, 1):
        with torch.inference_mode(), inputs_seen(model, inputs):
            cache = model(torch.tensor([row]), use_cache=True).past_key_values
        for index, layer in enumerate(cache.layers):
            if index == len(caches):
                caches.append({"k": KvStats(), "v": KvStats()})
            caches[index]["k"].see(layer.keys)
            caches[index]["v"].see(layer.values)
        if number % 8 == 0 or number == len(rows):
            say(f"{number} of {len(rows)} samples")
    found = {
        "tokens": tokens,
        "inputs": {name: report_of(list(parts.values())) for name, parts in inputs.items()},
        "layers": [{kind: held.report() for kind, held in layer.items()} for layer in caches],
    }
    Path(job["output"]).write_text(json.dumps(found), encoding="utf-8")


@contextmanager
def inputs_seen(model: Any, inputs: dict[str, dict[int, InputStats]]) -> Iterator[None]:
    """Add the inputs of every weight except the output layer's to `inputs`, by weight name and expert number. The
    experts of a layer are parts of one weight, so module hooks would not see them."""
    import torch

    model.set_experts_implementation("eager")  # multiplies the experts one by one
    output = model.get_output_embeddings().weight.data_ptr()
    weights = sorted(
        (weight.data_ptr(), (weight[0] if weight.ndim == 3 else weight).nbytes, name.removesuffix(".weight"))
        for name, weight in model.named_parameters()
        if weight.ndim > 1
    )
    starts = [start for start, _, _ in weights]
    linear = torch.nn.functional.linear

    def seen(x: Any, weight: Any, bias: Any = None) -> Any:
        if weight.data_ptr() != output:
            start, size, name = weights[bisect_right(starts, weight.data_ptr()) - 1]
            inputs.setdefault(name, {}).setdefault((weight.data_ptr() - start) // size, InputStats()).see(x)
        return linear(x, weight, bias)

    torch.nn.functional.linear = seen
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


class InputStats:
    """Statistics of the input of one linear layer: the sum of absolute values, and their maximum by channel."""

    def __init__(self) -> None:
        self.count = 0  # tokens
        self.total = 0.0
        self.most: Any = None

    def see(self, x: Any) -> None:
        if x.numel() == 0:  # an expert that no token chose
            return
        rows = x.reshape(-1, x.shape[-1]).float().abs()
        most = rows.amax(0)
        self.most = most if self.most is None else self.most.maximum(most)
        self.total += float(rows.sum())
        self.count += len(rows)

    def outliers(self) -> float:
        """Return the maximum of the largest channel divided by the maximum of the median channel."""
        median = float(self.most.median())
        return float(self.most.max()) / median if median > 0 else 0.0


def report_of(parts: list[InputStats]) -> dict[str, float]:
    """Return the statistics of one layer or of its experts. Each expert has its own channels, so the worst
    expert with at least FEW_TOKENS tokens determines the outliers (any expert, if all have fewer)."""
    parts = [part for part in parts if part.count]
    judged = [part for part in parts if part.count >= FEW_TOKENS] or parts
    return {
        "mean": sum(part.total for part in parts) / sum(part.count * len(part.most) for part in parts),
        "max": max(float(part.most.max()) for part in parts),
        "outliers": max(part.outliers() for part in judged),
    }


class KvStats:
    """Statistics of the keys or values of one layer, and of their errors as integers. Each token and head has a scale
    and a minimum, as in engine/src/ops/kv_quant.h."""

    def __init__(self) -> None:
        self.least, self.most = float("inf"), float("-inf")
        self.squares = 0.0
        self.errors = {8: 0.0, 4: 0.0}

    def see(self, x: Any) -> None:
        """x [batch, heads, tokens, head_dim]."""
        x = x.float()
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        self.least, self.most = min(self.least, float(low.min())), max(self.most, float(high.max()))
        self.squares += float((x.double() ** 2).sum())
        for bits in self.errors:
            scale = ((high - low) / (2**bits - 1)).half().float().clamp(min=1e-12)
            minimum = low.half().float()
            restored = ((x - minimum) / scale).round().clamp(0, 2**bits - 1) * scale + minimum
            self.errors[bits] += float(((x - restored).double() ** 2).sum())

    def report(self) -> dict[str, float]:
        """error8, error4: the RMS error divided by the RMS value."""
        relative = {bits: (error / self.squares) ** 0.5 if self.squares else 0.0 for bits, error in self.errors.items()}
        return {"min": self.least, "max": self.most, "error8": relative[8], "error4": relative[4]}


def leave_memory_unpinned() -> None:
    """Disable pinned memory without a GPU: llm-compressor 0.14 would pin AWQ's cache, and PyTorch would refuse."""
    import torch
    from llmcompressor.pipelines.cache import IntermediatesCache

    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *_: None


def say(text: str, kind: str = SAID) -> None:
    """Print a line of its own, also while a progress bar is shown."""
    print(f"\n{kind}{text}", file=sys.stderr, flush=True)


def check_packages(task: str) -> None:
    missing = [name for name in NEEDED[task] if importlib.util.find_spec(name) is None]
    if missing:
        requirements = Path(__file__).resolve().parent / "requirements.txt"
        raise JobError(
            f"{sys.executable} does not have {', '.join(missing)}: install the packages of {requirements} and PyTorch "
            "there, or unset CHARONIA_QUANTIZE_PYTHON to let Charonia create an environment"
        )


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        check_packages(job["task"])
        {"quantize": quantize, "calibrate": calibrate}[job["task"]](job)
    except JobError as error:
        say(str(error), FAILED)
        sys.exit(1)


if __name__ == "__main__":
    main()
