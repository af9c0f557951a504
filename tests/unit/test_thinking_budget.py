"""A budget for thinking after a tool call. The model is tiny, writes a call, and then thinks without end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_answer_tags
import thinking_engine
from answer_formats import call_marks
from charonia_answers.formats import CALL_FORMATS
from charonia_answers.reading import Part, Reader
from prepare import Fields, Preparation
from prompt_ids import load_tokenizer
from safetensors.numpy import save_file

from charonia import Engine, SamplingParams

pytestmark = pytest.mark.usefixtures("all_proposals")
engine, preparation = thinking_engine.engine, thinking_engine.preparation
tiny_models = test_answer_tags.tiny_models
CALL = '{"name": "f", "arguments": {"a": "</tool_call><think>", "b": "\\""}}'  # its texts have marks and a quote
WORDS = ("<tool_call>", CALL, "</tool_call>", "<think>", "hm", "</think>", "yes")
TEMPLATE = "{# <tool_call> <think> #}{% for message in messages %}{{ message.content }}{% endfor %}<x>"
CHAT = json.dumps([{"role": "user", "content": "x"}])
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endless")
    tiny_models.write_model(
        folder, "byte_level", "babbler", hidden=128, special=["<x>"], added=WORDS, chat_template=TEMPLATE
    )
    token = load_tokenizer(folder).convert_tokens_to_ids
    config = json.loads((folder / "config.json").read_text())
    end = config["eos_token_id"]
    following = np.full(config["vocab_size"], end)
    chain = [token(one) for one in ("<x>", "<tool_call>", CALL, "</tool_call>", "<think>", "hm")]
    following[chain[:-1]] = chain[1:]
    following[token("hm")] = token("hm")
    following[token("</think>")] = token("yes")
    save_file(tiny_models.llama_weights(config, following), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def complete(engine: Engine, preparation: Preparation, budget: int | None, **fields: Any) -> Part:
    made = preparation.prepare(Fields(messages=CHAT, **fields))
    sampling = SamplingParams(
        temperature=0, max_tokens=20, thinking_budget=budget, thinking_begun=made.in_reasoning,
        thinking_begin_ids=made.thinking[0], thinking_end_ids=made.thinking[1], thinking_call_ids=made.thinking_calls,
    )  # fmt: skip
    (output,) = engine.generate([made.chat.token_ids], sampling)
    pieces = [(one, preparation.tokenizer.decode([one]).encode()) for one in output.token_ids]
    tools = TOOLS if "tools" in fields else None
    whole = (0, sum(len(piece) for _, piece in pieces))
    return Reader(preparation.formats.describe(), tools).read(pieces, whole, last=True)


def test_budget_holds_for_reasoning_after_a_call(engine: Engine, preparation: Preparation) -> None:
    for budget in (0, 1, 5):
        part = complete(engine, preparation, budget, tools=json.dumps(TOOLS))
        arguments = "".join(call.get("arguments", "") for call in part.calls)
        assert json.loads(arguments) == json.loads(CALL)["arguments"]
        assert part.reasoning == "hm" * budget
        assert budget == 0 or part.content.startswith("yes")  # with 0, <think> is banned after the call
    assert complete(engine, preparation, None, tools=json.dumps(TOOLS)).reasoning == "hm" * 16


def test_without_tools_a_call_is_content_and_no_reasoning_follows(engine: Engine, preparation: Preparation) -> None:
    assert complete(engine, preparation, 1).content.endswith("hm" * 16)


def test_calls_whose_end_is_unknown_have_no_marks(preparation: Preparation) -> None:
    tokenizer = preparation.tokenizer
    known = {name: call_marks(tokenizer, one, ()) for name, one in CALL_FORMATS.items()}
    assert {name for name, marks in known.items() if not marks} == {
        *("llama3_json", "mistral", "mistral_named", "granite3"),  # without an end mark
        *("pythonic", "lfm2", "olmo3"),  # with Python's quotes
        "harmony",
    }
    shown = {name: [tokenizer.decode(ids) for ids in marks] for name, marks in known.items()}
    assert shown["hermes"] == ["<tool_call>", "</tool_call>", '"', '"']
    assert shown["qwen3_coder"][2:] == ["<parameter=", "</parameter>"]
    assert shown["gemma4"][2:] == ['<|"|>'] * 2
    for name in ("lfm2", "gemma4", "deepseek_v31"):  # no text spells a special token
        begin, end = CALL_FORMATS[name].begin[0], CALL_FORMATS[name].end
        assert [tokenizer.decode(ids) for ids in call_marks(tokenizer, CALL_FORMATS[name], [end])] == [begin, end]
    assert call_marks(tokenizer, None, ()) == []
