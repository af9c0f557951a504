"""A budget for thinking in GPT-OSS' format harmony. The model is tiny, and writes messages of reasoning without end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_answer_tags
import thinking_engine
from answer_guide import Guide
from charonia_answers.harmony import MARKS
from charonia_answers.reading import Part, Reader
from prepare import Fields, Preparation, special_tokens
from prompt_ids import load_tokenizer
from safetensors.numpy import save_file

from charonia import Engine, SamplingParams
from charonia import Guide as EngineGuide

pytestmark = pytest.mark.usefixtures("all_proposals")
engine, preparation = thinking_engine.engine, thinking_engine.preparation
tiny_models = test_answer_tags.tiny_models
WORDS = ("assistant", "analysis", " analysis", "an", "alysis", "commentary", "final", "hm")
TEMPLATE = (
    "{# <|channel|>analysis<|message|> #}"
    "{% for message in messages %}{{ message.content }}{% endfor %}<|start|>assistant"
)
CHAT = json.dumps([{"role": "user", "content": "x"}])
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {**CITY, "additionalProperties": False}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After <|channel|>, the model prefers `analysis`, then other tokens that spell it, then `final`, then
    `commentary`."""
    folder = tmp_path_factory.mktemp("endless")
    special = [mark for mark in MARKS if mark != tiny_models.EOS]
    tiny_models.write_model(
        folder, "byte_level", "babbler", hidden=128, special=special, added=WORDS, chat_template=TEMPLATE
    )
    token = load_tokenizer(folder).convert_tokens_to_ids
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": "<|return|>"}))
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = [token("<|return|>"), token("<|call|>")]
    (folder / "config.json").write_text(json.dumps(config))
    following = np.full(config["vocab_size"], token("<|return|>"))
    loop = [token(one) for one in ("<|channel|>", "analysis", "<|message|>", "hm", "<|end|>", "<|start|>", "assistant")]
    following[loop] = np.roll(loop, -1)
    following[[token(one) for one in ("final", " analysis", "alysis")]] = token("<|message|>")
    following[token("an")] = token("alysis")
    weights = tiny_models.llama_weights({**config, "eos_token_id": token("<|return|>")}, following)
    for channel, share in ((" analysis", 2), ("an", 4), ("final", 8), ("commentary", 16)):
        weights["lm_head.weight"][token(channel)] += weights["model.embed_tokens.weight"][loop[0]] / share
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def complete(
    engine: Engine, preparation: Preparation, budget: int | None, tokens: int, **fields: Any
) -> tuple[int, Part]:
    """Return the number of tokens `hm` in the reasoning, and the parsed response."""
    made = preparation.prepare(Fields(messages=CHAT, **fields))
    sampling = SamplingParams(
        temperature=0, max_tokens=tokens, thinking_budget=budget, thinking_begun=made.in_reasoning,
        thinking_begin_ids=made.thinking[0], thinking_end_ids=made.thinking[1],
    )  # fmt: skip
    guide = EngineGuide(made.guide.type, made.guide.text) if made.guide.type else None
    (output,) = engine.generate([made.chat.token_ids], sampling, guide=guide)
    special = special_tokens(preparation.tokenizer).values()
    pieces = [
        (one, b"" if one in special else preparation.tokenizer.decode([one]).encode()) for one in output.token_ids
    ]
    tools = TOOLS if "tools" in fields else None
    part = Reader(preparation.formats.describe(), tools).read(
        pieces, (0, sum(len(piece) for _, piece in pieces)), last=True
    )
    return part.reasoning.count("hm"), part


def test_reasoning_ends_after_the_budget_and_a_final_message_follows(engine: Engine, preparation: Preparation) -> None:
    assert complete(engine, preparation, None, 28)[1].content == ""
    for budget in range(4):
        count, part = complete(engine, preparation, budget, 7 * max(budget, 1) + (4 if budget else 3))
        assert (count, part.content) == (budget, "hm")
    # Another message of reasoning after the content has no tokens.
    assert complete(engine, preparation, 2, 60)[0] == 2


def test_grammars_allow_the_forced_end_and_what_follows(engine: Engine, preparation: Preparation) -> None:
    for budget in (0, 2):
        guide = Guide("choice", '["yes", "no"]')
        count, part = complete(engine, preparation, budget, 60, guide=guide)
        assert (count, part.content in ("yes", "no")) == (budget, True)
        count, part = complete(engine, preparation, budget, 60, tools=json.dumps(TOOLS), tool_choice="required")
        assert count == budget and part.content == "" and part.calls
        arguments = "".join(call.get("arguments", "") for call in part.calls)
        assert json.loads(arguments) == {"city": "Paris"}
