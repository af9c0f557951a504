"""Asks the demo model its held-out questions and tells how many answers are right.

    python models/demo/evaluate.py [--model models/demo/model]
    python models/demo/evaluate.py --gateway http://localhost:23333/v1
    python models/demo/evaluate.py --tools --model build/demo

The third asks the questions with tools and for JSON, too.

`evaluate` takes any function that answers chats; the command answers with transformers in this process, or asks a
server that speaks OpenAI's API.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from demo_corpus.dialogue import Dialogue
from demo_corpus.questions import dialogues, tools_and_json

Message = dict[str, Any]  # {"role": ..., "content": ...}, with "tool_calls" or "tool_call_id" where there are tools
MAX_NEW_TOKENS = 160


@dataclass(frozen=True)
class Chat:
    """What is asked: the messages so far, and the tools that are offered, as OpenAI's API has them."""

    messages: list[Message]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Reply:
    """An answer's text without special tokens and calls, whether it ended by itself (finish reason `stop` or
    `tool_calls`), and the calls (name, arguments) in it."""

    text: str
    ended: bool = True
    calls: tuple[tuple[str, Any], ...] = ()


Answerer = Callable[[Sequence[Chat]], Sequence[Reply]]


@dataclass
class Report:
    """Right and asked questions by group, and the wrong ones as (group, question, answer)."""

    right: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    asked: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    wrong: list[tuple[str, str, str]] = field(default_factory=list)

    def total(self, groups: Collection[str]) -> tuple[int, int]:
        """Right and asked questions of these groups together; those that were not asked count for nothing."""
        return sum(self.right.get(group, 0) for group in groups), sum(self.asked.get(group, 0) for group in groups)


def evaluate(answer: Answerer, asked: Sequence[Dialogue] | None = None) -> Report:
    """Runs all dialogues side by side, turn by turn: `answer` gets one chat of each and returns as many replies. Where
    the right tools were called, it is asked once more, with what they return."""
    pending = list(dialogues() if asked is None else asked)
    chats = [Chat([{"role": "system", "content": d.system}] if d.system else [], d.tools) for d in pending]
    report = Report()
    depth = 0
    while pending:
        for dialogue, chat in zip(pending, chats, strict=True):
            chat.messages.append({"role": "user", "content": dialogue.turns[depth].text})
        replies = answer(chats)
        right = [
            reply.ended and dialogue.turns[depth].calls_right(list(reply.calls))
            for dialogue, reply in zip(pending, replies, strict=True)
        ]
        called = [i for i, reply in enumerate(replies) if right[i] and reply.calls]
        for i in called:
            chats[i].messages.extend(_called(replies[i], [call.result for call in pending[i].turns[depth].calls]))
        later = dict(zip(called, answer([chats[i] for i in called]) if called else (), strict=True))
        for i, (dialogue, chat) in enumerate(zip(pending, chats, strict=True)):
            reply = later.get(i, replies[i])
            chat.messages.append({"role": "assistant", "content": reply.text})
            report.asked[dialogue.group] += 1
            # Of an answer that was to follow calls, no second calls.
            again = i in later and bool(reply.calls)
            if right[i] and reply.ended and not again and dialogue.turns[depth].passes(reply.text):
                report.right[dialogue.group] += 1
            else:
                shown = f"{reply.text} {list(reply.calls) or ''}".strip()
                report.wrong.append((dialogue.group, dialogue.turns[depth].text, shown))
        depth += 1
        going = [i for i, dialogue in enumerate(pending) if len(dialogue.turns) > depth]
        pending, chats = [pending[i] for i in going], [chats[i] for i in going]
    return report


def _called(reply: Reply, results: Sequence[str]) -> list[Message]:
    """An answer that calls tools, and what they return, as messages."""
    calls = [
        {"id": f"call{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(reply.calls)
    ]
    returned = [{"role": "tool", "tool_call_id": f"call{i}", "content": text} for i, text in enumerate(results)]
    return [{"role": "assistant", "content": reply.text or None, "tool_calls": calls}, *returned]


_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def read_reply(text: str, ended: bool, tools: Sequence[Any]) -> Reply:
    """The reply in a model's raw text. Calls are read where tools are offered."""
    if not tools:
        return Reply(text, ended)
    calls = []
    for found in _CALL.findall(text):
        try:
            call = json.loads(found)
            calls.append((str(call["name"]), call["arguments"]))
        except (ValueError, LookupError, TypeError):
            return Reply(text, ended)
    return Reply(_CALL.sub("", text).strip(), ended, tuple(calls))


def prompt(tokenizer: Any, chat: Chat) -> str:
    """A chat as the model reads it. Arguments become objects, which chat templates print."""
    messages = []
    for message in chat.messages:
        calls = [
            {"function": {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        messages.append({**message, "tool_calls": calls} if calls else message)
    return str(
        tokenizer.apply_chat_template(
            messages, tools=list(chat.tools) or None, tokenize=False, add_generation_prompt=True
        )
    )


def transformers_answerer(folder: Path, threads: int = 0, batch: int = 64) -> Answerer:
    """Greedy answers of the model in `folder` with transformers, in fp32, batches padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if threads:
        torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def answer(chats: Sequence[Chat]) -> list[Reply]:
        texts = [prompt(tokenizer, chat) for chat in chats]
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
                replies[i] = read_reply(text, ended, chats[i].tools)
        return replies

    return answer


def _arguments(text: str) -> Any:
    """Those of a call; what is no JSON, as of an answer that was cut off, stays a text, which is right nowhere."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def gateway_answerer(base_url: str, api_key: str = "", concurrency: int = 16) -> Answerer:
    """Greedy answers of the first model that the OpenAI-style server at `base_url` lists, `concurrency` at a time."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key or "none")
    name = next(iter(client.models.list())).id

    def one(chat: Chat) -> Reply:
        answer = client.chat.completions.create(
            model=name,
            messages=chat.messages,  # type: ignore[arg-type]  # plain dicts of the right shape
            max_tokens=MAX_NEW_TOKENS,
            temperature=0.0,
            **({"tools": list(chat.tools)} if chat.tools else {}),
        ).choices[0]
        calls = [(call.function.name, _arguments(call.function.arguments)) for call in answer.message.tool_calls or ()]
        ended = answer.finish_reason == ("tool_calls" if calls else "stop")
        return Reply(answer.message.content or "", ended, tuple(calls))

    def answer(chats: Sequence[Chat]) -> list[Reply]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(one, chats))

    return answer


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model in Hugging Face layout.")] = Path(__file__).parent
    / "model",
    gateway: Annotated[str, typer.Option(help="Ask the server at this URL (it ends in /v1) instead.")] = "",
    api_key: Annotated[str, typer.Option(envvar="CHARONIA_API_KEY", help="For a gateway that asks for a key.")] = "",
    threads: Annotated[int, typer.Option(help="Threads of PyTorch; 0 leaves its default.")] = 0,
    require: Annotated[
        float, typer.Option(help="Share of right answers, without tools and JSON, below which the exit code is 1.")
    ] = 0.95,
    tools: Annotated[bool, typer.Option("--tools", help="Ask the questions with tools and for JSON, too.")] = False,
    require_tools: Annotated[
        float, typer.Option(help="The same share of the questions with tools and for JSON.")
    ] = 0.0,
    show: Annotated[int, typer.Option(help="How many wrong answers to print.")] = 20,
) -> None:
    """Prints the share of right answers by group, and the wrong ones."""
    console = Console()
    plain, new = dialogues(), tools_and_json() if tools else []
    answerer = gateway_answerer(gateway, api_key) if gateway else transformers_answerer(model, threads)
    report = evaluate(answerer, plain + new)
    table = Table("group", "right", "asked", "share")
    below = []
    for title, part, required in (
        ("all without tools and JSON", plain, require),
        ("tools and JSON", new, require_tools),
    ):
        groups = {dialogue.group for dialogue in part}
        for group in (group for group in report.asked if group in groups):
            table.add_row(group, *_figures(*report.total([group])))
        if groups:
            right, asked = report.total(groups)
            table.add_row(title, *_figures(right, asked), end_section=True)
            if right < required * asked:
                below.append(f"{title}: {right / asked:.1%} is less than the {required:.0%} required")
    console.print(table)
    for group, question, reply in report.wrong[:show]:
        console.print(f"[{group}] {question}\n    {reply}", markup=False)
    for line in below:
        console.print(line, markup=False)
    sys.exit(bool(below))


def _figures(right: int, asked: int) -> tuple[str, str, str]:
    return str(right), str(asked), f"{right / asked:.1%}"


if __name__ == "__main__":
    typer.run(main)
