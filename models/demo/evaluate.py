"""Ask a server of the demo model the held-out questions, and print how many responses are right.

    python models/demo/evaluate.py --tools [--gateway http://localhost:23333/v1]

Each line of questions.jsonl and questions_with_tools.jsonl is a dialogue: its group, a system prompt, the tools that
are offered (as in OpenAI's API) and the turns of the user (see Turn). The model did not see these wordings in training.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from openai import OpenAI
from rich.console import Console
from rich.table import Table

MAX_NEW_TOKENS = 160
_CHINESE = re.compile(r"[\u4e00-\u9fff]")
_DECLINES = {"en": re.compile(r"do not know|cannot"), "zh": re.compile(r"不知道|不会做")}

Message = dict[str, Any]
Calls = Sequence[tuple[str, Any]]  # name and arguments of each tool call


@dataclass(frozen=True)
class Turn:
    """A message of the user and what makes the response right."""

    text: str
    language: str  # "en" or "zh": of the question and of the response
    holds: Sequence[str] = ()  # regular expressions; the response matches all of them
    declines: bool = False  # whether the response says that the model does not know
    any_language: bool = False  # a bare "12 x 8" may be answered in either language
    calls: Sequence[Message] = ()  # tool calls that come before the response: name, arguments, and the tool's result
    json: str = ""  # the response is this JSON object, with the keys in this order

    def calls_right(self, calls: Calls) -> bool:
        """Whether these are the calls that the question needs. Spaces in arguments are ignored."""
        wanted = [(call["name"], call["arguments"]) for call in self.calls]
        return _without_spaces(calls) == _without_spaces(wanted)

    def passes(self, text: str) -> bool:
        """Whether the text of a response is right and in the language of the question."""
        if self.json:
            return _pairs(text) == _pairs(self.json)
        if not self.any_language and bool(_CHINESE.search(text)) != (self.language == "zh"):
            return False
        if bool(_DECLINES[self.language].search(text)) != self.declines:
            return False
        return all(re.search(pattern, text, re.IGNORECASE) for pattern in self.holds)


def _without_spaces(calls: Calls) -> list[tuple[str, str]]:
    return [(name, re.sub(r"\s", "", json.dumps(arguments, ensure_ascii=False))) for name, arguments in calls]


def _pairs(text: str) -> list[tuple[str, bool, Any]] | None:
    """The pairs of a JSON object in their order, repeated keys included; None if `text` is not a JSON object.

    Each has a flag that keeps true and 1 apart, which are equal in Python.
    """
    try:
        pairs = json.loads(text, object_pairs_hook=tuple)
    except ValueError:
        return None
    return [(key, isinstance(value, bool), value) for key, value in pairs] if isinstance(pairs, tuple) else None


@dataclass(frozen=True)
class Dialogue:
    group: str
    turns: Sequence[Turn]
    system: str = ""
    tools: Sequence[Message] = ()


def dialogues(file: str) -> list[Dialogue]:
    """The dialogues of questions.jsonl or questions_with_tools.jsonl."""
    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    return [
        Dialogue(**{**values, "turns": [Turn(**turn) for turn in values["turns"]]}) for values in map(json.loads, lines)
    ]


class Reply(NamedTuple):
    """A response: its text, its calls, and whether it ended by itself (finish reason `stop` or `tool_calls`)."""

    text: str
    ended: bool = True
    calls: Calls = ()


Answerer = Callable[[Sequence[Message], Sequence[Message]], Reply]  # of messages and tools


@dataclass
class Report:
    """Right and asked questions by group, and the wrong ones as (group, question, response)."""

    right: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, str, str]] = field(default_factory=list)


def evaluate(answer: Answerer, asked: Sequence[Dialogue], concurrency: int = 16) -> Report:
    """Run the dialogues, `concurrency` at a time. The model's own responses are the history of later turns."""

    def run(dialogue: Dialogue) -> list[tuple[Turn, Reply, bool]]:
        messages: list[Message] = [{"role": "system", "content": dialogue.system}] if dialogue.system else []
        results = []
        for turn in dialogue.turns:
            messages.append({"role": "user", "content": turn.text})
            reply = answer(messages, dialogue.tools)
            right = reply.ended and turn.calls_right(reply.calls)
            if right and reply.calls:
                messages += _called(reply, [call["result"] for call in turn.calls])
                reply = answer(messages, dialogue.tools)
                right = reply.ended and not reply.calls
            messages.append({"role": "assistant", "content": reply.text})
            results.append((turn, reply, right and turn.passes(reply.text)))
        return results

    report = Report()
    with ThreadPoolExecutor(concurrency) as pool:
        for dialogue, results in zip(asked, pool.map(run, asked), strict=True):
            for turn, reply, right in results:
                report.asked[dialogue.group] += 1
                report.right[dialogue.group] += right
                if not right:
                    shown = f"{reply.text} {list(reply.calls) or ''}".strip()
                    report.wrong.append((dialogue.group, turn.text, shown))
    return report


def _called(reply: Reply, results: Sequence[str]) -> list[Message]:
    """The messages of a response with tool calls and of the tools' results."""
    calls = [
        {"id": f"call{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(reply.calls)
    ]
    returned = [{"role": "tool", "tool_call_id": f"call{i}", "content": text} for i, text in enumerate(results)]
    return [{"role": "assistant", "content": reply.text or None, "tool_calls": calls}, *returned]


def _arguments(text: str) -> Any:
    """The arguments of a call. Text that is not JSON (a truncated call) stays text and matches no expected call."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def gateway_answerer(base_url: str, api_key: str) -> Answerer:
    """Greedy responses of the first model that the server at `base_url` lists."""
    client = OpenAI(base_url=base_url, api_key=api_key or "none")
    name = next(iter(client.models.list())).id

    def answer(messages: Sequence[Message], tools: Sequence[Message]) -> Reply:
        chat: Any = {"messages": messages, **({"tools": tools} if tools else {})}
        completion = client.chat.completions.create(model=name, max_tokens=MAX_NEW_TOKENS, temperature=0, **chat)
        choice = completion.choices[0]
        calls = [(call.function.name, _arguments(call.function.arguments)) for call in choice.message.tool_calls or ()]
        ended = choice.finish_reason == ("tool_calls" if calls else "stop")
        return Reply(choice.message.content or "", ended, calls)

    return answer


def main(
    gateway: Annotated[str, typer.Option(help="The server's URL; it ends in /v1.")] = "http://localhost:23333/v1",
    api_key: Annotated[str, typer.Option(envvar="CHARONIA_API_KEY", help="For a gateway that asks for a key.")] = "",
    require: Annotated[
        float, typer.Option(help="Share of right responses, without tools and JSON, below which the exit code is 1.")
    ] = 0.94,
    tools: Annotated[bool, typer.Option("--tools", help="Ask the questions with tools and for JSON, too.")] = False,
    require_tools: Annotated[
        float, typer.Option(help="The same share of the questions with tools and for JSON.")
    ] = 0.74,
    show: Annotated[int, typer.Option(help="How many wrong responses to print.")] = 20,
) -> None:
    """Print the share of right responses by group, and the wrong responses."""
    console = Console()
    table = Table("group", "right", "asked", "share")
    answerer = gateway_answerer(gateway, api_key)
    wrong, below = [], []
    parts = [("all without tools and JSON", "questions.jsonl", require)]
    parts += [("tools and JSON", "questions_with_tools.jsonl", require_tools)] if tools else []
    for title, file, required in parts:
        report = evaluate(answerer, dialogues(file))
        wrong += report.wrong
        right, asked = report.right.total(), report.asked.total()
        for group, count in report.asked.items():
            table.add_row(group, *_figures(report.right[group], count))
        table.add_row(title, *_figures(right, asked), end_section=True)
        if right < required * asked:
            below.append(f"{title}: {right / asked:.1%} is less than the {required:.0%} required")
    console.print(table)
    for group, question, text in wrong[:show]:
        console.print(f"[{group}] {question}\n    {text}", markup=False)
    for line in below:
        console.print(line, markup=False)
    sys.exit(bool(below))


def _figures(right: int, asked: int) -> tuple[str, str, str]:
    return str(right), str(asked), f"{right / asked:.1%}"


if __name__ == "__main__":
    typer.run(main)
