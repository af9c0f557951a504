"""Asks the demo model its held-out questions and tells how many answers are right.

    python models/demo/evaluate.py [--model models/demo/model]
    python models/demo/evaluate.py --gateway http://localhost:23333/v1

`evaluate` takes any function that answers chats; the command answers with transformers in this process, or asks a
server that speaks OpenAI's API.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from demo_corpus.questions import Dialogue, dialogues

Message = dict[str, str]  # {"role": ..., "content": ...}
MAX_NEW_TOKENS = 128


class Reply(NamedTuple):
    """An answer's text without special tokens, and whether it ended by itself (finish reason `stop`)."""

    text: str
    ended: bool = True


Answerer = Callable[[Sequence[list[Message]]], Sequence[Reply]]


@dataclass
class Report:
    """Right and asked questions by group, and the wrong ones as (group, question, answer)."""

    right: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    asked: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    wrong: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Right answers in all, 0 to 1."""
        return sum(self.right.values()) / max(1, sum(self.asked.values()))


def evaluate(answer: Answerer, asked: Sequence[Dialogue] | None = None) -> Report:
    """Runs all dialogues side by side, turn by turn: `answer` gets one chat of each and returns as many replies."""
    pending = list(dialogues() if asked is None else asked)
    chats: list[list[Message]] = [[{"role": "system", "content": d.system}] if d.system else [] for d in pending]
    report = Report()
    depth = 0
    while pending:
        for dialogue, chat in zip(pending, chats, strict=True):
            chat.append({"role": "user", "content": dialogue.turns[depth].text})
        replies = answer(chats)
        for dialogue, chat, reply in zip(pending, chats, replies, strict=True):
            chat.append({"role": "assistant", "content": reply.text})
            report.asked[dialogue.group] += 1
            if reply.ended and dialogue.turns[depth].passes(reply.text):
                report.right[dialogue.group] += 1
            else:
                report.wrong.append((dialogue.group, dialogue.turns[depth].text, reply.text))
        depth += 1
        going = [i for i, dialogue in enumerate(pending) if len(dialogue.turns) > depth]
        pending, chats = [pending[i] for i in going], [chats[i] for i in going]
    return report


def transformers_answerer(folder: Path, threads: int = 0, batch: int = 64) -> Answerer:
    """Greedy answers of the model in `folder` with transformers, in fp32, batches padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if threads:
        torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def answer(chats: Sequence[list[Message]]) -> list[Reply]:
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        replies = [Reply("", False)] * len(texts)
        for at in range(0, len(order), batch):
            part = order[at : at + batch]
            inputs = tokenizer([texts[i] for i in part], return_tensors="pt", padding=True, return_token_type_ids=False)
            with torch.inference_mode():
                output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            for i, ids in zip(part, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
                ended = tokenizer.eos_token_id in ids
                text = str(tokenizer.decode(ids, skip_special_tokens=True))
                replies[i] = Reply(text, ended)
        return replies

    return answer


def gateway_answerer(base_url: str, concurrency: int = 16) -> Answerer:
    """Greedy answers of the first model that the OpenAI-style server at `base_url` lists, `concurrency` at a time."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="none")
    name = next(iter(client.models.list())).id

    def one(chat: list[Message]) -> Reply:
        answer = client.chat.completions.create(
            model=name,
            messages=chat,  # type: ignore[arg-type]  # plain dicts of the right shape
            max_tokens=MAX_NEW_TOKENS,
            temperature=0.0,
        ).choices[0]
        return Reply(answer.message.content or "", answer.finish_reason == "stop")

    def answer(chats: Sequence[list[Message]]) -> list[Reply]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(one, chats))

    return answer


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model in Hugging Face layout.")] = Path(__file__).parent
    / "model",
    gateway: Annotated[str, typer.Option(help="Ask the server at this URL (it ends in /v1) instead.")] = "",
    threads: Annotated[int, typer.Option(help="Threads of PyTorch; 0 leaves its default.")] = 0,
    require: Annotated[float, typer.Option(help="Share of right answers below which the exit code is 1.")] = 0.95,
    show: Annotated[int, typer.Option(help="How many wrong answers to print.")] = 20,
) -> None:
    """Prints the share of right answers by group, and the wrong ones."""
    console = Console()
    report = evaluate(gateway_answerer(gateway) if gateway else transformers_answerer(model, threads))
    table = Table("group", "right", "asked", "share")
    for group, asked in report.asked.items():
        table.add_row(group, str(report.right[group]), str(asked), f"{report.right[group] / asked:.1%}")
    table.add_row("all", str(sum(report.right.values())), str(sum(report.asked.values())), f"{report.share:.1%}")
    console.print(table)
    for group, question, reply in report.wrong[:show]:
        console.print(f"[{group}] {question}\n    {reply}", markup=False)
    if report.share < require:
        console.print(f"{report.share:.1%} is less than the {require:.0%} required", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
