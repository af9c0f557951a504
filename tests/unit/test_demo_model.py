"""The demo model's corpus, its held-out questions and its files; nothing here needs PyTorch or the engine."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from missing_tools import needed_module
from safetensors import safe_open
from transformers import AutoTokenizer
from typer.testing import CliRunner

DEMO = Path(__file__).parents[2] / "models" / "demo"
sys.path.insert(0, str(DEMO))

from charonia_answers.formats import find_call_format  # noqa: E402
from demo_corpus import arithmetic, capitals, chat_format, conversation, json_answers, questions, tools, units, unknown  # noqa: E402
from demo_corpus.facts import FACTS  # noqa: E402
from demo_corpus.text import Call, Exchange, expand  # noqa: E402

DIALOGUES = [*questions.dialogues(), *questions.tools_and_json()]
TURNS = [(dialogue.group, turn) for dialogue in DIALOGUES for turn in dialogue.turns]


def test_held_out_wordings_never_occur_in_training() -> None:
    held_out = questions.held_out_wordings()
    assert len(held_out) > 400
    rng = random.Random(20240229)
    asked = {wording for _ in range(8000) for wording in _questions(conversation.sample(rng)[0])}
    assert len(asked) > 5000
    assert not asked & held_out


def _questions(segments: list[tuple[str, bool]]) -> list[str]:
    text = "".join(text for text, _ in segments)
    found: list[str] = re.findall(r"<\|user\|>(?!<tool_response>)(.*?)<\|end\|>", text, re.DOTALL)
    return [questions.wording(question) for question in found]


def test_a_wording_has_no_case_no_marks_and_no_fillings() -> None:
    assert questions.wording("What is the capital of France, 12?") == questions.wording("what is the capital of PERU 3")
    assert questions.wording("7 + 8") != questions.wording("7 - 8")


def test_questions_are_the_same_for_the_same_seed_and_cover_both_languages() -> None:
    for asked in (questions.dialogues, questions.tools_and_json):
        assert asked() == asked()
        assert asked(1) != asked(2)
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
    turn = questions.Turn("7 plus 8", questions.number(15), "en")
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
    end = chat_format.END
    for template in (tokenizer.chat_template, chat_format.CHAT_TEMPLATE):  # the model's, and that of the next export
        tokenizer.chat_template = template
        assert (
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            == f"<|system|>S{end}<|user|>Hi{end}<|assistant|>"
        )
    assert tokenizer.eos_token == end
    for token in chat_format.SPECIAL_TOKENS:
        assert len(tokenizer(token)["input_ids"]) == 1
    rng = random.Random(3)
    called = 0
    for _ in range(200):
        offered, prompt = tools.offer(rng), rng.choice(["", "Be brief."])
        asked = conversation.with_tools(offered, rng)
        messages = [{"role": "system", "content": prompt}] if prompt else []
        messages += [message for exchange in asked for message in _messages(exchange)]
        text = tokenizer.apply_chat_template(messages, tools=offered.described(), tokenize=False)
        head = chat_format.system(prompt, offered.described())
        assert text == "".join(text for text, _ in conversation.segments(asked, head))
        called += sum(bool(exchange.calls) for exchange in asked)
    assert called > 100


def _messages(exchange: Exchange) -> list[dict[str, Any]]:
    """An exchange as OpenAI has it; charonia makes objects of the arguments."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": exchange.question}]
    if exchange.calls:
        calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in exchange.calls]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [{"role": "tool", "content": call.result} for call in exchange.calls]
    return [*messages, {"role": "assistant", "content": exchange.answer}]


def test_calls_are_written_in_the_format_that_the_template_shows() -> None:
    found = find_call_format(chat_format.CHAT_TEMPLATE)
    assert found is not None and found.name == "hermes"
    rng = random.Random(8)
    offer = tools.Offer((), tools.weather_tool(rng), tools.calculator_tool(rng))
    for language in ("en", "zh"):
        calls = tools.two_calls(offer, language, rng).calls
        assert chat_format.calls_text(calls) == found.write([(call.name, call.arguments) for call in calls])


def test_arguments_of_calls_stand_in_the_question() -> None:
    rng = random.Random(12)
    for _ in range(500):
        offered = tools.offer(rng)
        for exchange in conversation.with_tools(offered, rng):
            for call in exchange.calls:
                (value,) = call.arguments.values()
                place = offered.weather is not None and call.name == offered.weather.name
                assert value and (not place or value in exchange.question), exchange


def test_results_of_calculators_are_right() -> None:
    rng = random.Random(13)
    tool = tools.calculator_tool(rng)
    told = 0
    for _ in range(500):
        exchange = tools.calculation(tool, rng.choice(["en", "zh"]), rng)
        (call,) = exchange.calls
        if exchange.answer not in (tools.FAILED_EN, tools.FAILED_ZH):
            value = eval(call.arguments[tool.main])
            assert re.search(rf"(?<![\d.]){re.escape(str(round(value, 4)).removesuffix('.0'))}[.。]$", exchange.answer)
            told += 1
    assert told > 400


def test_answers_in_json_are_json_of_the_keys_that_were_asked_for() -> None:
    rng = random.Random(14)
    for _ in range(500):
        exchange = json_answers.exchange(rng.choice(["en", "zh"]), rng, lambda exchange, _: exchange)
        value = json.loads(exchange.answer)
        assert chat_format.to_json(value) == exchange.answer
        if any(key not in exchange.question for key in value):
            assert not re.search("key|field|schema|键|字段", exchange.question), exchange


@pytest.fixture
def examination(monkeypatch: pytest.MonkeyPatch) -> Any:
    """models/demo/evaluate.py, under a name that no package has."""
    spec = importlib.util.spec_from_file_location("demo_examination", DEMO / "evaluate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("wrong", ["", "call", "name", "end", "answer"])
def test_a_question_for_a_tool_passes_with_the_right_calls_and_what_they_returned(wrong: str, examination: Any) -> None:
    groups = ("weather tool", "calculator tool", "two calls")
    asked = [d for d in questions.tools_and_json() if d.group in groups and d.turns[0].language == "en"]
    assert {dialogue.group for dialogue in asked} == set(groups)
    turns = {dialogue.turns[0].text: dialogue.turns[0] for dialogue in asked}

    def answer(chats: Any) -> list[Any]:
        """What a model would write whose answers are the question and the results of its calls."""
        replies = []
        for chat in chats:
            results = [message["content"] for message in chat.messages if message["role"] == "tool"]
            said = [message["content"] for message in chat.messages if message["role"] in ("user", "tool")]
            text = " ".join(said) if wrong != "answer" else "Sorry."
            if not results:
                calls = [call for d in asked if d.tools == chat.tools for call in _calls_of(d, chat)]
                calls = calls[:-1] if wrong == "call" else calls
                text = chat_format.calls_text([replace(c, name="x") if wrong == "name" else c for c in calls])
            replies.append(examination.read_reply(text, wrong != "end", chat.tools))
        return replies

    assert len(turns) > 20
    report = examination.evaluate(answer, asked)
    assert sum(report.right.values()) == (0 if wrong else len(asked))
    assert sum(report.asked.values()) == len(asked)


@pytest.mark.parametrize(
    ("plain", "tools", "said"),
    [
        (95, 80, ""),
        (94, 80, "all without tools and JSON: 94.0% is less than the 95%"),
        (95, 79, "tools and JSON: 79.0%"),
    ],
)
def test_the_examination_fails_below_either_share(
    plain: int, tools: int, said: str, examination: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = examination.Report(
        right={"capitals": plain, "two calls": tools}, asked={"capitals": 100, "two calls": 100}
    )
    monkeypatch.setattr(examination, "transformers_answerer", lambda *_: None)
    monkeypatch.setattr(examination, "evaluate", lambda *_: report)
    app = typer.Typer()
    app.command()(examination.main)
    done = CliRunner().invoke(app, ["--tools", "--require", "0.95", "--require-tools", "0.8"])
    assert done.exit_code == bool(said), done.output
    assert said in done.output and ("less than" in done.output) == bool(said)


def _calls_of(dialogue: Any, chat: Any) -> tuple[Call, ...]:
    """The calls that a chat needs, if it is this dialogue's."""
    turn = dialogue.turns[0]
    return turn.calls if turn.text == chat.messages[-1]["content"] else ()


def test_what_two_calls_returned_is_not_mixed_up() -> None:
    (turn,) = [turn for group, turn in TURNS if group == "two calls" and "Montpellier as well as Lima" in turn.text]
    said = ["Montpellier is cloudy, at -1 degrees.", "Lima is sunny, at -3 degrees."]
    assert turn.passes(" ".join(said))
    mixed_up = ["Montpellier is sunny, at -1 degrees.", "Lima is cloudy, at -3 degrees."]
    for wrong in (said[:1], mixed_up, [text.replace("-3", "-3.5") for text in said]):
        assert not turn.passes(" ".join(wrong))


def test_arguments_of_a_call_that_was_cut_off_are_wrong_and_end_nothing(examination: Any) -> None:
    assert examination._arguments('{"place": "Par') == '{"place": "Par'
    assert examination._arguments('{"place": "Paris"}') == {"place": "Paris"}


def test_an_answer_in_json_passes_with_the_keys_in_their_order() -> None:
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


def test_training_goes_on_from_a_model_and_exports_the_template_of_the_corpus(tmp_path: Path) -> None:
    needed_module("torch")
    output = tmp_path / "model"
    command = [sys.executable, DEMO / "train.py", "--from", DEMO / "model", "--rate", "0.1", "--steps", "1"]
    command += [
        "--teacher",
        DEMO / "model",
        "--copies",
        "1",
        "--tokens",
        "512",
        "--checkpoint",
        tmp_path / "run.pt",
        "--output",
        output,
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert AutoTokenizer.from_pretrained(output).chat_template == chat_format.CHAT_TEMPLATE
    assert (output / "tokenizer.json").read_bytes() == (DEMO / "model" / "tokenizer.json").read_bytes()
    name = "model.layers.0.self_attn.q_proj.weight"
    with (
        safe_open(DEMO / "model" / "model.safetensors", "pt") as before,
        safe_open(output / "model.safetensors", "pt") as after,
    ):
        moved = (after.get_tensor(name).float() - before.get_tensor(name).float()).abs().max().item()
        largest = before.get_tensor(name).float().abs().max().item()
    assert 0 < moved < 0.1 * largest


def test_what_copying_learns_stood_in_its_row_before_and_is_told_by_what_comes_before_it() -> None:
    needed_module("torch")
    import train

    rng = random.Random(3)
    words, digits = range(100, 2000), range(10, 20)
    learned = 0
    for width in [64, 96, 128] * 20:
        ids, labels = train.copying_row(rng, width, words, digits)
        assert len(ids) == len(labels) == width
        for at, label in enumerate(labels):
            if label == train.IGNORED:
                continue
            learned += 1
            told = ids[at - 2 : at + 1] if ids[at] in digits else ids[at : at + 1]
            row = [*ids, label]
            earlier = [row[i : i + len(told) + 1] for i in range(at - len(told) + 1)]
            assert [*told, label] in earlier
    assert learned > 1000


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
