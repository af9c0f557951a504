"""Trains the demo model and writes it in Hugging Face layout.

    python models/demo/train.py --steps 2900 --checkpoint build/demo.pt --output models/demo/model
    python models/demo/train.py --from models/demo/model --rate 0.4 --steps 1000 --output build/demo

The second goes on from a model that was trained before, with its tokenizer and today's corpus and chat template.
The text is generated as training goes on (demo_corpus), so no question is seen twice in quite the same way. Given the
same seed, steps, number of threads and PyTorch, the run is the same. A checkpoint is written every few minutes, and a
run that finds one goes on from there with the text that it would have seen.
"""

from __future__ import annotations

import functools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo_corpus.chat_format import CHAT_TEMPLATE
from demo_corpus.conversation import sample
from tokenizer import train_tokenizer

VOCAB_SIZE = 2048
CONTEXT = 2048  # tokens; the training texts are shorter
IGNORED = -100

Row = tuple[list[int], list[int], list[float], bool]  # ids, labels, weights, and whether a teacher knows it


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """3.5 million parameters: 7 MB in bf16."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def batches(
    tokenizer: PreTrainedTokenizerFast, tokens: int, seed: int, chunk: int = 2048
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Endless batches (ids, labels, weights, old) of at most `tokens` cells, rows of about equal length.

    ids, labels and weights are [rows, length]. `old` [rows] says which rows are of the corpus without tools and JSON.

    `labels` holds the id that follows each position where that id belongs to an answer, else IGNORED; `weights` what
    its loss counts, less in a long answer, so that a sum's few digits are not drowned in recited sentences. Rows are
    padded at their end, where a causal model cannot see it, so that no attention mask is needed.
    """
    part = 0
    while True:
        rng = random.Random(seed * 1_000_003 + part)
        part += 1
        rows: list[Row] = []
        samples = [sample(rng) for _ in range(chunk)]
        encoded = iter(tokenizer([text for segments, _ in samples for text, _ in segments])["input_ids"])
        for segments, old in samples:
            ids: list[int] = []
            weights: list[float] = []
            for _, learn in segments:
                piece = next(encoded)
                ids += piece
                weights += [len(piece) ** -0.5 if learn else 0.0] * len(piece)
            labels = [i if weight else IGNORED for i, weight in zip(ids, weights, strict=True)]
            rows.append((ids[:-1], labels[1:], weights[1:], old))
        rows.sort(key=lambda row: len(row[0]))
        groups: list[list[Row]] = [[]]
        for row in rows:
            if (len(groups[-1]) + 1) * len(row[0]) > tokens and groups[-1]:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for group in groups:
            width = len(group[-1][0])
            pad = tokenizer.pad_token_id
            yield (
                torch.tensor([ids + [pad] * (width - len(ids)) for ids, _, _, _ in group]),
                torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels, _, _ in group]),
                torch.tensor([weights + [0.0] * (width - len(weights)) for _, _, weights, _ in group]),
                torch.tensor([old for _, _, _, old in group]),
            )


def copying_row(
    rng: random.Random, width: int, tokens: Sequence[int], digits: Sequence[int]
) -> tuple[list[int], list[int]]:
    """A row of `width` ids and its labels that teach copying alone: a few pieces of random tokens, or of random digits,
    that come again and again in any order. What is learned is how a piece goes on that was there before.

    Looking back for the same tokens and going on as they did (induction, Olsson et al. 2022) is what puts a name of the
    question into a call. Answers alone teach it slowly, since few of their tokens need it.
    """
    pieces = [
        rng.choices(digits if rng.random() < 0.3 else tokens, k=rng.randint(3, 12)) for _ in range(2 + width // 64)
    ]
    ids: list[int] = []
    labels: list[int] = []
    met: set[int] = set()
    while len(ids) <= width:
        index = rng.randrange(len(pieces))
        piece = pieces[index]
        told = min(len(piece), 3 if piece[0] in digits else 1)  # the tokens that tell which piece it is
        ids += [rng.choice(tokens), *piece]
        labels += [IGNORED] * (1 + told) + (piece[told:] if index in met else [IGNORED] * (len(piece) - told))
        met.add(index)
    return ids[:width], labels[1 : width + 1]


def copying_batch(tokenizer: PreTrainedTokenizerFast, step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows that teach copying, 2304 ids in all, of three lengths by turns: ids and labels, both [rows, length]."""
    rng = random.Random(seed * 1_000_003 + step)
    rows, length = ((36, 64), (24, 96), (18, 128))[step % 3]
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    tokens = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids and i not in digits]
    made = [copying_row(rng, length, tokens, digits) for _ in range(rows)]
    return torch.tensor([ids for ids, _ in made]), torch.tensor([labels for _, labels in made])


def guidance(attentions: Sequence[Tensor], ids: Tensor, labels: Tensor) -> Tensor:
    """How far some heads are from where copying needs them to look: a mean of negative logarithms of attention.

    Three heads of the second layer are to look at the token before, or the one before that; four of the last two layers
    at the tokens that followed what is read now, earlier in the row. Left to themselves, heads had
    not found this after 400 steps. `attentions`: [rows, heads, length, length] of each layer; ids, labels:
    [rows, length].
    """
    before = torch.cat([ids.new_full((len(ids), 1), -1), ids[:, :-1]], 1)
    followed = (ids[:, :, None] == before[:, None, :]) & (labels[:, :, None] == ids[:, None, :])
    followed &= torch.ones_like(followed[0]).tril()
    known = followed.any(-1)
    found = [(attentions[layer][:, head].float() * followed).sum(-1)[known] for layer in (2, 3) for head in (0, 2)]
    found += [attentions[1][:, head].float().diagonal(-back, 1, 2) for head, back in ((0, 1), (2, 2), (4, 1))]
    return torch.stack([-(part + 1e-6).log().mean() for part in found]).mean()


@functools.cache
def fast_bf16() -> bool:
    """Whether this CPU has instructions for bf16; without them PyTorch's bf16 takes twenty times as long as fp32."""
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text()


class WithoutBf16(TorchFunctionMode):
    """Within it `bfloat16()` gives an fp32 copy: Muon iterates in bf16, whatever the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0].clone() if func is Tensor.bfloat16 else func(*args, **(kwargs or {}))


def copying_loss(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a batch that teaches copying, and its guidance. ids, labels: [rows, length]."""
    model.set_attn_implementation("eager")  # which gives the attention
    with torch.autocast("cpu", torch.bfloat16, enabled=fast_bf16()):
        output = model.model(input_ids=ids, use_cache=False, output_attentions=True)
        wanted = labels != IGNORED
        logits = model.lm_head(output.last_hidden_state[wanted])
    model.set_attn_implementation("sdpa")
    loss = nn.functional.cross_entropy(logits.float(), labels[wanted])
    return loss, guidance(output.attentions, ids, labels)


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024, orthogonalised momentum) for the matrices, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.05, momentum=0.95),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate(step: int, steps: int, warmup: int = 60, floor: float = 0.02) -> float:
    """Factor of the learning rates at `step`: a linear warm-up, then half a cosine down to `floor`."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def logits_of(model: LlamaForCausalLM, ids: Tensor, wanted: Tensor) -> Tensor:
    """Logits [wanted tokens, vocab] of the positions that `wanted` names. ids, wanted: [rows, length]."""
    with torch.autocast("cpu", torch.bfloat16, enabled=fast_bf16()):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # [rows, length, hidden]
        return model.lm_head(hidden[wanted]).float()


def loss_of(
    model: LlamaForCausalLM, ids: Tensor, labels: Tensor, weights: Tensor, old: Tensor, teacher: LlamaForCausalLM | None
) -> Tensor:
    """Weighted mean loss over the answers' tokens, for which alone logits are computed. ids, labels, weights:
    [rows, length]; old: [rows].

    The loss of a token is its cross-entropy. With a teacher it is half of that in the old rows, and half the divergence
    of the model from the teacher's distribution (distillation, Hinton et al. 2015): what the teacher makes of words
    that the text does not have is what a model forgets when it learns new things.
    """
    wanted = labels != IGNORED
    logits = logits_of(model, ids, wanted)
    losses = nn.functional.cross_entropy(logits, labels[wanted], reduction="none")
    if teacher is not None and old.any():
        with torch.no_grad():
            known = logits_of(teacher, ids[old], wanted[old]).log_softmax(-1)
        taught = old[:, None].expand_as(wanted)[wanted]  # [answer tokens]
        apart = nn.functional.kl_div(logits[taught].log_softmax(-1), known, reduction="none", log_target=True).sum(-1)
        losses = losses.masked_scatter(taught, 0.5 * losses[taught] + 0.5 * apart)
    return (losses * weights[wanted]).sum() / weights.sum()


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors (bf16) and the tokenizer's files to `output`."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy = copy.to(torch.bfloat16)
    copy.config.dtype = torch.bfloat16
    copy.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    copy.save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(output, save_jinja_files=False)
    settings = output / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    for local in ("is_local", "local_files_only"):
        content.pop(local, None)
    content["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 and 5 both know
    settings.write_text(json.dumps(content, indent=2) + "\n")


def initial(folder: Path | None, seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model of `folder`, in fp32, and its tokenizer; without one a model of random weights, and a new tokenizer."""
    if folder is None:
        tokenizer = train_tokenizer(VOCAB_SIZE, CONTEXT, seed)
        return LlamaForCausalLM(model_config(tokenizer)), tokenizer
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer


def main(
    steps: Annotated[int, typer.Option(help="Optimiser steps in all.")] = 2900,
    tokens: Annotated[int, typer.Option(help="Tokens in one step's batch, padding included.")] = 3072,
    seed: Annotated[int, typer.Option(help="Seed of the text, the weights and the tokenizer.")] = 1,
    threads: Annotated[int, typer.Option(help="Threads of PyTorch.")] = 2,
    checkpoint: Annotated[
        Path, typer.Option(help="Where the run's state is kept; an existing one (with its --output) is resumed.")
    ] = Path("build/demo.pt"),
    output: Annotated[Path, typer.Option(help="Folder of the trained model.")] = Path(__file__).parent / "model",
    export_every: Annotated[int, typer.Option(help="Steps between exports and checkpoints.")] = 200,
    start_from: Annotated[
        Path | None, typer.Option("--from", help="Folder of a trained model to go on from, with a fresh optimiser.")
    ] = None,
    teacher_folder: Annotated[
        Path | None, typer.Option("--teacher", help="Folder of a model to keep to in texts without tools and JSON.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Factor of the learning rates.")] = 1.0,
    copies: Annotated[
        int, typer.Option(help="Steps at the beginning that teach copying too; later every fourth does. 0: none.")
    ] = 0,
) -> None:
    """Trains the demo model from nothing or from an earlier one, or goes on from its checkpoint."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model, tokenizer = initial(output if checkpoint.exists() else start_from, seed)
    teacher = LlamaForCausalLM.from_pretrained(teacher_folder, dtype=torch.float32) if teacher_folder else None
    tuned = optimizers(model)
    base = [[group["lr"] for group in optimizer.param_groups] for optimizer in tuned]
    start = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(tuned, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        start = state["step"]
        typer.echo(f"going on from step {start} of {checkpoint}")
    stream = batches(tokenizer, tokens, seed)
    for _ in range(start):
        next(stream)

    began, seen, mean, copied_mean = time.monotonic(), 0, 0.0, 0.0
    for step in range(start, steps):
        batch = next(stream)
        for optimizer, rates in zip(tuned, base, strict=True):
            for group, full in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * full * learning_rate(step, steps)
        loss = loss_of(model, *batch, teacher)
        if copies and (step < copies or step % 4 == 0):
            copied, guided = copying_loss(model, *copying_batch(tokenizer, step, seed))
            (0.5 * loss + 0.5 * copied + 0.25 * guided).backward()
            copied_mean = 0.9 * copied_mean + 0.1 * copied.item() if copied_mean else copied.item()
        else:
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with nullcontext() if fast_bf16() else WithoutBf16():
            for optimizer in tuned:
                optimizer.step()
        model.zero_grad(set_to_none=True)
        seen += batch[0].numel()
        mean = loss.item() if step == start else 0.95 * mean + 0.05 * loss.item()
        if (step + 1) % 20 == 0:
            speed = seen / (time.monotonic() - began)
            typer.echo(f"step {step + 1}/{steps}  loss {mean:.4f}  copying {copied_mean:.3f}  {speed:.0f} tokens/s")
        if (step + 1) % export_every == 0 or step + 1 == steps:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            state = {"step": step + 1, "model": model.state_dict(), "optimizers": [o.state_dict() for o in tuned]}
            partial = checkpoint.with_suffix(".part")
            torch.save(state, partial)
            partial.replace(checkpoint)
            export(model, tokenizer, output)


if __name__ == "__main__":
    typer.run(main)
