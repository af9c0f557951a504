"""The files of the demo model and its examination. Nothing here needs PyTorch, the engine or a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from charonia_answers.formats import find_call_format
from load_file import load_file
from safetensors import safe_open
from transformers import AutoTokenizer

DEMO = Path(__file__).parents[2] / "models" / "demo"
examination: Any = load_file(DEMO / "evaluate.py")
PLAIN, WITH_TOOLS = (examination.dialogues(f"{name}.jsonl") for name in ("questions", "questions_with_tools"))
TURNS = [(dialogue.group, turn) for dialogue in [*PLAIN, *WITH_TOOLS] for turn in dialogue.turns]
DECLINES = {"en": "I do not know that.", "zh": "这个我不知道。"}


def test_the_examination_asks_enough_in_both_languages() -> None:
    assert [sum(len(dialogue.turns) for dialogue in part) for part in (PLAIN, WITH_TOOLS)] == [933, 314]
    for language in ("en", "zh"):
        assert sum(turn.language == language for _, turn in TURNS) > 250


def test_no_check_passes_for_an_empty_response_or_the_other_language() -> None:
    for _, turn in TURNS:
        assert not turn.passes("")
        assert not turn.passes(DECLINES["zh" if turn.language == "en" else "en"])


def test_a_sum_passes_only_with_the_right_number() -> None:
    (turn,) = {turn.text: turn for _, turn in TURNS if turn.text == "How much would 7 plus 8 be?"}.values()
    assert turn.passes("7 plus 8 is 15.")
    for wrong in ("7 plus 8 is 16.", "7 plus 8 is 115.", "7 plus 8 is -15.", "7 plus 8 is 15 or 16.", "It is 150."):
        assert not turn.passes(wrong)


@pytest.mark.parametrize("wrong", ["", "call", "name", "end", "answer"])
def test_a_tool_question_passes_with_the_right_calls_and_results(wrong: str) -> None:
    asked = [d for d in WITH_TOOLS if d.group in ("weather tool", "calculator tool", "two calls")]
    asked = [d for d in asked if d.turns[0].language == "en"]
    assert len(asked) > 20
    calls_of = {(d.turns[0].text, json.dumps(d.tools)): d.turns[0].calls for d in asked}

    def answer(messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> Any:
        """Call the right tools, then respond with the question and the results."""
        if messages[-1]["role"] == "tool":
            said = " ".join(message["content"] for message in messages if message["role"] in ("user", "tool"))
            return examination.Reply("Sorry." if wrong == "answer" else said, wrong != "end")
        calls = [(call["name"], call["arguments"]) for call in calls_of[messages[-1]["content"], json.dumps(tools)]]
        if wrong == "name":
            calls = [("x", arguments) for _, arguments in calls]
        return examination.Reply("", calls=calls[:-1] if wrong == "call" else calls)

    report = examination.evaluate(answer, asked)
    assert report.right.total() == (0 if wrong else len(asked))
    assert report.asked.total() == len(asked)


def test_a_json_response_passes_with_the_keys_in_their_order() -> None:
    turns = [turn for _, turn in TURNS if turn.json]
    assert len(turns) == 78
    for turn in turns:
        pairs = list(json.loads(turn.json).items())
        assert turn.passes(turn.json) and turn.passes(json.dumps(dict(pairs), indent=1))
        wrong = [turn.json[:-1], json.dumps(pairs), f"It is {turn.json}", json.dumps({**dict(pairs), "more": 1})]
        wrong += [json.dumps(dict(reversed(pairs)))] if len(pairs) > 1 else []
        wrong += [f'{{"{pairs[0][0]}": 0, {turn.json[1:]}']
        wrong += [json.dumps(dict(pairs) | {key: True}) for key, value in pairs if value == 1]
        assert not any(turn.passes(text) for text in wrong)


def test_the_chat_template_writes_chats_and_hermes_calls() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    write: Callable[..., str] = tokenizer.apply_chat_template
    chat: list[dict[str, Any]] = [{"role": "system", "content": "S"}, {"role": "user", "content": " Hi "}]
    plain = "<|system|>S<|end|><|user|>Hi<|end|><|assistant|>"
    assert write(chat, tokenize=False, add_generation_prompt=True) == plain
    assert tokenizer.eos_token == "<|end|>"
    for token in ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"):
        assert len(tokenizer(token)["input_ids"]) == 1
    found = find_call_format(tokenizer.chat_template)
    assert found is not None and found.name == "hermes"
    calls = [("get_weather", {"place": "Oslo"}), ("get_weather", {"place": "利马"})]
    chat += [{"role": "assistant", "content": None, "tool_calls": [_call(*call) for call in calls]}]
    chat += [{"role": "tool", "content": " rain "}]
    tool = {"name": "get_weather", "description": "Weather\nof a place.", "parameters": {"properties": {"place": {}}}}
    assert write(chat, tools=[{"type": "function", "function": tool}], tokenize=False) == (
        '<|system|>S\nTools:\n{"name": "get_weather", "parameters": ["place"], "description": "Weather"}<|end|>'
        f"<|user|>Hi<|end|><|assistant|>{found.write(calls)}<|end|>"
        "<|user|><tool_response>\nrain\n</tool_response><|end|>"
    )


def _call(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TEXTS = [
    "12 + 30 = 42",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 ok",
    "  two  spaces\n\ttab",
    "na\u00efve \u20ac",
]


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_decodes_its_own_ids(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_model_is_a_small_bf16_llama_of_at_most_12_mb() -> None:
    folder = DEMO / "model"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12_000_000
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    with safe_open(folder / "model.safetensors", "np") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118
        shape = weights.get_slice("model.embed_tokens.weight").get_shape()
        assert shape == [config["vocab_size"], config["hidden_size"]]
