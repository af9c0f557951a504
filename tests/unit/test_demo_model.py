"""The demo model's corpus, its held-out questions and its files; nothing here needs PyTorch or the engine."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

DEMO = Path(__file__).parents[2] / "models" / "demo"
sys.path.insert(0, str(DEMO))

from demo_corpus import arithmetic, capitals, conversation, questions, units, unknown  # noqa: E402
from demo_corpus.facts import FACTS  # noqa: E402
from demo_corpus.text import expand  # noqa: E402

TURNS = [(dialogue.group, turn) for dialogue in questions.dialogues() for turn in dialogue.turns]


def test_held_out_wordings_never_occur_in_training() -> None:
    held_out = questions.held_out_wordings()
    assert len(held_out) > 400
    rng = random.Random(20240229)
    asked = {questions.wording(e.question) for _ in range(8000) for e in conversation.exchanges(rng)}
    assert len(asked) > 5000
    assert not asked & held_out


def test_a_wording_has_no_case_no_marks_and_no_fillings() -> None:
    assert questions.wording("What is the capital of France, 12?") == questions.wording("what is the capital of PERU 3")
    assert questions.wording("7 + 8") != questions.wording("7 - 8")


def test_questions_are_the_same_for_the_same_seed_and_cover_both_languages() -> None:
    assert questions.dialogues() == questions.dialogues()
    assert questions.dialogues(1) != questions.dialogues(2)
    for language in ("en", "zh"):
        assert sum(turn.language == language for _, turn in TURNS) > 250


def test_no_check_passes_for_an_empty_answer_or_for_the_other_language() -> None:
    for _, turn in TURNS:
        assert not turn.passes("")
        assert not turn.passes(unknown.ANSWER_ZH if turn.language == "en" else unknown.ANSWER_EN)


def test_declining_passes_exactly_where_the_model_cannot_know() -> None:
    for _, turn in TURNS:
        answer = unknown.ANSWER_EN if turn.language == "en" else unknown.ANSWER_ZH
        assert turn.passes(answer) == turn.declines


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_project_question_is_answered_by_a_fact(language: str) -> None:
    answers = [fact.answer_en if language == "en" else fact.answer_zh for fact in FACTS]
    for group, turn in TURNS:
        if group == "project" and turn.language == language:
            assert any(turn.passes(answer) for answer in answers), turn.text


def test_a_sum_passes_only_with_the_right_number() -> None:
    turn = questions.Turn("7 plus 8", questions._number(15), "en")
    assert turn.passes("7 plus 8 is 15.")
    for wrong in ("7 plus 8 is 16.", "7 plus 8 is 115.", "7 plus 8 is -15.", "7 plus 8 is 15 or 16.", "It is 150."):
        assert not turn.passes(wrong)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_corpus_computes_right(language: str) -> None:
    words = {"plus": "+", "minus": "-", "times": "*", "divided by": "//", "加": "+", "减": "-", "乘": "*", "除以": "//"}
    rng = random.Random(5)
    checked = 0
    for _ in range(3000):
        answer = arithmetic.exchange(language, rng).answer
        if match := re.fullmatch(r"(\d+) ?(\D+?) ?(\d+)(?: is |等于)(-?\d+)[.。]", answer):
            a, op, b, value = match.groups()
            assert eval(f"{a} {words[op]} {b}") == int(value), answer
            checked += 1
        else:
            assert answer in (arithmetic.TOO_LARGE_EN, arithmetic.TOO_LARGE_ZH)
    assert checked > 2000


def test_temperatures_are_right() -> None:
    assert all(f == c * 9 / 5 + 32 for c, f in units.CELSIUS.items())


def test_capitals_are_told_once_each_and_unknown_places_are_not_among_them() -> None:
    for column in range(4):
        names = [row[column] for row in capitals.COUNTRIES]
        assert len(set(names)) == len(names) >= 80
    known = {name for row in capitals.COUNTRIES for name in row}
    assert not known & {*capitals.UNKNOWN_EN, *capitals.UNKNOWN_ZH}


def test_templates_expand_with_nested_alternatives() -> None:
    got = {expand("[a[b|c]|d] {x}", random.Random(seed), x=1) for seed in range(50)}
    assert got == {"ab 1", "ac 1", "d 1"}


def test_training_texts_are_what_the_chat_template_writes() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": " Hi "}]
    end = conversation.END
    assert (
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        == f"<|system|>S{end}<|user|>Hi{end}<|assistant|>"
    )
    assert tokenizer.eos_token == end
    for token in conversation.SPECIAL_TOKENS:
        assert len(tokenizer(token)["input_ids"]) == 1


TEXTS = [
    "12 + 30 = 42",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 ok",
    "  two  spaces\n\ttab",
    "na\u00efve \u20ac",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_gives_any_text_back(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_the_model_is_a_small_bf16_llama_of_at_most_12_mb() -> None:
    folder = DEMO / "model"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12_000_000
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    with safe_open(folder / "model.safetensors", "np") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118
        assert weights.get_slice("model.embed_tokens.weight").get_shape() == [
            config["vocab_size"],
            config["hidden_size"],
        ]
