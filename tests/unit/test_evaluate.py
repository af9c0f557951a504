"""The measurements of `charonia evaluate`, and the storage of its records."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.numpy import save_file

from charonia import Engine, EngineClosedError, SamplingParams
from charonia.bench.random_model import SHAPES, write_random_model
from charonia.errors import InvalidRequestError, ModelError
from charonia.quality.evaluate import default_questions, default_text, evaluate
from charonia.quality.perplexity import Perplexity, Window, compare, log_softmax, perplexity, windows
from charonia.quality.questions import Question, answers_right, check_prompts, read_questions
from charonia.serve.model import prepare
from charonia.web.engine_server import EngineServer
from charonia.weights import quality_record, workspace
from charonia.weights.convert import convert, link_workspace
from charonia.weights.fingerprint import fingerprint
from charonia.weights.plan import make_plan
from charonia.weights.quality_record import (
    SIDE_FILE,
    QualityRecord,
    fingerprint_of,
    parse_records,
    quality_table,
    records_of_folder,
    records_of_weights,
    save_record,
)

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
SHORT: dict[str, Any] = {"ask": False, "window": 64, "stride": 32}
TINY: dict[str, Any] = {"ask": False, "window": 4, "stride": 2}
SETTINGS: dict[str, Any] = {"threads": 1, "cache_max_entry_count": 40, "max_batch_size": 16}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("models") / name for name in ("one", "other")]
    for seed, folder in enumerate(folders):
        write_random_model(folder, SHAPES["tiny"], seed=seed, scale=0.2)
    return folders


@pytest.fixture(scope="module")
def engine(models: list[Path]) -> Iterator[Engine]:
    with Engine.from_pretrained(models[0], **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with Engine.from_pretrained(DEMO / "model", threads=2, cache_max_entry_count=100) as engine:
        yield engine


def tokens(engine: Engine, count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, engine.info.vocab_size, count)]


def all_rows(engine: Engine, ids: list[int]) -> Any:
    pieces = list(engine.prompt_logits(ids))
    assert [position for position, _ in pieces] == list(np.cumsum([0, *(len(rows) for _, rows in pieces)])[:-1])
    return np.concatenate([rows for _, rows in pieces])


@given(st.integers(2, 300), st.integers(2, 60), st.data())
def test_windows_equal_transformers_documentation(count: int, length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(2, length))
    expected, previous_end = [], 0
    for begin in range(0, count, stride):
        end = min(begin + length, count)
        expected.append((begin, end, end - previous_end))
        previous_end = end
        if end == count:
            break
    found = windows(count, length, stride)
    assert [(one.begin, one.end, one.scored) for one in found] == expected
    assert sum(one.scored for one in found) == count


@pytest.mark.parametrize(("count", "length", "stride"), [(1, 8, 8), (9, 8, 0), (9, 8, 1), (9, 8, 9), (9, 1, 1)])
def test_windows_that_score_nothing_are_refused(count: int, length: int, stride: int) -> None:
    with pytest.raises(InvalidRequestError, match="tokens"):
        windows(count, length, stride)


def test_prompt_logits_match_the_reported_log_probabilities(engine: Engine) -> None:
    ids = tokens(engine, 70)
    rows = all_rows(engine, ids)
    assert rows.shape == (69, engine.info.vocab_size) and rows.dtype == np.float32
    reported = engine.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
    assert log_softmax(rows)[np.arange(69), ids[1:]] == pytest.approx(reported, abs=1e-5)


def test_leaving_the_rows_early_ends_the_request(engine: Engine) -> None:
    for _ in engine.prompt_logits(tokens(engine, 200)):
        break
    while engine.stats().num_running + engine.stats().num_waiting:
        engine.generate([[5]])
    engine.check_integrity()


def test_a_prompt_of_one_token_has_no_rows(engine: Engine) -> None:
    assert list(engine.prompt_logits([5])) == []


def test_closing_engine_ends_readers_of_rows_with_an_error(models: list[Path]) -> None:
    closed: EngineClosedError | None = None
    while closed is None:  # the engine may have computed all rows before it closes
        engine = Engine.from_pretrained(models[0], **{**SETTINGS, "max_batch_size": 1})
        rows = engine.prompt_logits(tokens(engine, 2000))
        next(rows)
        engine.close()
        try:
            assert len(list(rows)) == 1998
        except EngineClosedError as error:
            closed = error


def test_a_comparison_is_of_whole_distributions(engine: Engine, models: list[Path]) -> None:
    ids = tokens(engine, 90)
    with Engine.from_pretrained(models[1], **SETTINGS) as other:
        found = compare(engine, other, ids, 40, 25)
        divergences, same = [], []
        for window in windows(90, 40, 25):
            part = ids[window.begin : window.end]
            model, reference = (log_softmax(all_rows(one, part).astype(np.float64)) for one in (engine, other))
            kl = (np.exp(reference) * (reference - model)).sum(axis=1)
            divergences += list(kl[-window.scored :])
            same += list((reference.argmax(axis=1) == model.argmax(axis=1))[-window.scored :])
        assert len(divergences) == 89
        assert found.kl_mean == pytest.approx(np.mean(divergences), rel=1e-4)
        assert found.kl_p99 == pytest.approx(np.quantile(divergences, 0.99), rel=1e-4)
        assert found.kl_max == pytest.approx(max(divergences), rel=1e-4)
        assert found.top1_agreement == pytest.approx(np.mean(same))
        assert found.perplexity == pytest.approx(perplexity(engine, ids, 40, 25), rel=1e-5)
        assert found.reference_perplexity == pytest.approx(perplexity(other, ids, 40, 25), rel=1e-5)


def test_a_model_is_as_itself(engine: Engine) -> None:
    found = compare(engine, engine, tokens(engine, 80), 32, 16)
    assert (found.kl_mean, found.kl_max, found.top1_agreement) == (0, 0, 1)


@pytest.mark.parametrize(
    ("answer", "said", "right"),
    [
        ("7", "3 plus 4 is 7.", True),
        ("7", "等于7。", True),
        ("7", "17", False),
        ("7", "7.5", False),
        ("7", "2.7", False),
        ("20000", "That is 20,000 grams.", True),
        ("2000", "That is 20,000 grams.", False),
        ("oslo", "It is Oslo", True),
        ("Oslo", "Osloer", False),
        ("东京", "日本的首都是东京。", True),
        (["Kyiv", "Kiev"], "kiev!", True),
    ],
)
def test_an_answer_is_found_as_words(answer: Any, said: str, right: bool) -> None:
    assert Question(prompt="?", answer=answer).passes(said) is right


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2 is not a JSON"),
        ('{"prompt": "a"}', "answer"),
        ('{"prompt": "a", "answer": 1}', "must be a text"),
        ('{"prompt": "a", "answer": "x", "choices": ["x", "y"]}', "index of a choice, 0 to 1"),
        ('{"prompt": "a", "answer": 2, "choices": ["x", "y"]}', "index of a choice, 0 to 1"),
        ('{"prompt": "a", "answer": 0, "choices": ["x", " "]}', "choices must not be empty"),
        ('{"prompt": "a", "answer": "x", "anwser": "y"}', "anwser"),
    ],
)
def test_a_wrong_question_is_named_by_its_line(tmp_path: Path, line: str, problem: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"prompt": "fine", "answer": "yes"}\n' + line + "\n")
    with pytest.raises(InvalidRequestError, match="line 2") as error:
        read_questions(file)
    assert problem in str(error.value)


def test_lines_end_only_at_newlines_of_json(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"prompt": "one\u2028two\x85", "answer": "yes"}\r\n', encoding="utf-8")
    assert [question.prompt for question in read_questions(file)] == ["one\u2028two\x85"]


def test_evaluate_ignores_sampling_defaults_and_the_references_kv_type(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(models[0], tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"repetition_penalty": 2, "top_k": 1}')
    (tmp_path / "text.txt").write_text("One two three four. " * 20, encoding="utf-8")
    defaults, policies = [], []
    load = Engine.from_pretrained

    def noted(*given: Any, **settings: Any) -> Engine:
        engine = load(*given, **settings)
        defaults.append(engine.info.default_sampling)
        policies.append(engine.info.quant_policy)
        return engine

    monkeypatch.setattr(Engine, "from_pretrained", noted)
    given: dict[str, Any] = {"text": tmp_path / "text.txt", **SHORT, "save": False}
    evaluate(tmp_path / "model", tmp_path / "model", settings={"quant_policy": 16}, **given)
    noted(tmp_path / "model", **SETTINGS).close()
    assert [(one.repetition_penalty, one.top_k) for one in defaults] == [(1, 0), (1, 0), (2, 1)]
    assert policies == [16, 0, 0], "the reference has a cache of 16 bits"
    assert caplog.text.count("stored in FP8 with scale 1") == 1


def test_a_file_without_text_is_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n\n", encoding="utf-8")
    with pytest.raises(InvalidRequestError, match=r"empty\.txt has no text"):
        evaluate(tmp_path / "no_model", text=tmp_path / "empty.txt")


def test_our_questions_are_held_out_and_do_not_contain_their_answers() -> None:
    questions = read_questions(default_questions())
    assert len(questions) == len({str(question.prompt) for question in questions}) == 120
    assert [question.prompt for question in questions if question.passes(str(question.prompt))] == []
    lines = (DEMO / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    held_out = {turn["text"] for line in lines for turn in json.loads(line)["turns"]}
    assert {question.prompt for question in questions} <= held_out


def test_the_demo_model_knows_the_answers_and_chooses_the_likelier_one(demo: Engine) -> None:
    asked = read_questions(default_questions())[::5]
    assert answers_right(demo, asked) >= 0.9 * len(asked)
    choices = ["The capital of Norway is Lima.", "The capital of Norway is Oslo."]
    chosen = Question(prompt="Would you name Norway's capital?", choices=choices, answer=1)
    wrong = Question(prompt="Would you name Norway's capital?", choices=choices, answer=0)
    spoken = Question(prompt=[{"role": "user", "content": "Would you name Norway's capital?"}], answer="Oslo")
    assert answers_right(demo, [chosen, spoken, wrong]) == 2


def test_a_record_stays_with_a_folder_its_workspaces_and_their_plans(
    models: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model"
    shutil.copytree(models[0], model)
    (tmp_path / "text.txt").write_text(default_text().read_text(encoding="utf-8")[:2000], encoding="utf-8")
    (model / SIDE_FILE).write_text(json.dumps({"records": [{**record_of(), "weights": "2-old"}]}))
    record = evaluate(model, models[1], text=tmp_path / "text.txt", **SHORT, settings={"threads": 1})
    assert caplog.text.count("of the quality records") == 1, "loading and saving see the old record"
    assert record.reference is not None and record.reference.kl_mean > 0 and record.questions is None
    assert records_of_folder(model) == [record]
    again = evaluate(model, text=tmp_path / "text.txt", **SHORT, settings={"threads": 1, "quant_policy": 8})
    assert (again.quant_policy, again.reference) == (8, None)
    assert records_of_folder(model) == [record, again]
    assert [one["quant_policy"] for one in make_plan(model, {"device": "cpu"}).quality] == [0, 8]

    copied = convert(model, tmp_path / "copied")
    linked = link_workspace(model, tmp_path / "linked")
    for made in (copied, linked):
        assert records_of_weights(made / workspace.WEIGHTS) == [record, again]
    other_type = convert(model, tmp_path / "fp16", dtype="fp16")
    assert records_of_weights(other_type / workspace.WEIGHTS) == [], "they were measured of other weights"
    # A workspace has it in its manifest, which is otherwise unchanged.
    before = json.loads((copied / workspace.WEIGHTS / "manifest.json").read_text())
    changed = record.model_copy(update={"date": "2030-01-01T00:00:00+00:00"})
    save_record(workspace.locate(copied), changed)
    after = json.loads((copied / workspace.WEIGHTS / "manifest.json").read_text())
    assert records_of_weights(copied / workspace.WEIGHTS) == [again, changed]
    assert {**before, "quality": []} == {**after, "quality": []}
    assert list(workspace.check(copied / workspace.WEIGHTS)) == []
    assert make_plan(copied, {"device": "cpu"}).quality == [again.content(), changed.content()]


def test_a_record_goes_with_the_weights_that_it_was_measured_of(
    models: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Path(shutil.copytree(models[0], tmp_path / "model"))
    record = QualityRecord.model_validate({**record_of(), "weight_type": "fp32", "weights": fingerprint(model)})
    save_record(workspace.locate(model), record)
    linked, copied = link_workspace(model, tmp_path / "linked"), convert(model, tmp_path / "copied")
    save_record(workspace.locate(linked), record)
    save_record(workspace.locate(copied), record)
    (model / "model.safetensors").touch()
    moved = Path(shutil.copytree(model, tmp_path / "moved"))
    for folder in (model, moved):
        assert records_of_folder(folder) == [record], "times and places are not the weights"
    assert records_of_weights(linked / workspace.WEIGHTS) == [record]

    content = bytearray((model / "model.safetensors").read_bytes())
    for at in range(len(content) // 2, len(content), 2048):
        content[at] ^= 1
    (model / "model.safetensors").write_bytes(content)
    caplog.clear()
    assert records_of_folder(model) == []
    assert "1 of the quality records" in caplog.text and "charonia evaluate" in caplog.text
    assert records_of_weights(convert(model, tmp_path / "again") / workspace.WEIGHTS) == []
    assert make_plan(linked, {"device": "cpu"}).quality == []
    before = json.loads((linked / workspace.WEIGHTS / "manifest.json").read_text())
    prepare(str(linked), tmp_path / "run", {})
    after = json.loads((linked / workspace.WEIGHTS / "manifest.json").read_text())
    assert after == {**before, "quality": [], "weights": fingerprint(model)} and len(before["quality"]) == 1
    assert before["weights"] == record.weights != fingerprint(model)
    # An older version had another fingerprint, and may have had no records.
    old = {name: value for name, value in after.items() if name != "quality"}
    (linked / workspace.WEIGHTS / "manifest.json").write_text(json.dumps({**old, "weights": "0" * 32}))
    prepare(str(linked), tmp_path / "run", {})
    assert json.loads((linked / workspace.WEIGHTS / "manifest.json").read_text()) == old
    assert records_of_weights(copied / workspace.WEIGHTS) == [record], "it has copies of the old ones"
    save_record(workspace.locate(model), record.model_copy(update={"weights": fingerprint(model), "quant_policy": 8}))
    assert [one.quant_policy for one in records_of_folder(model)] == [8]


def test_a_linked_workspace_keeps_the_fingerprint_of_its_files(
    models: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Path(shutil.copytree(models[0], tmp_path / "model"))
    weights, first = source / "model.safetensors", tmp_path / "first.safetensors"
    weights.rename(first)
    weights.symlink_to(first)
    record = QualityRecord.model_validate({**record_of(), "weight_type": "fp32", "weights": fingerprint(source)})
    linked = link_workspace(source, tmp_path / "linked")
    save_record(workspace.locate(linked), record)
    manifest = linked / workspace.WEIGHTS / "manifest.json"
    before = manifest.read_text()
    weights.unlink()
    for other in (models[1] / weights.name, tmp_path / "missing"):
        weights.symlink_to(other)
        prepare(str(linked), tmp_path / "run", {})
        assert manifest.read_text() == before
        assert "links to weight files" in caplog.text and "convert the model again" in caplog.text
        caplog.clear()
        assert records_of_weights(manifest.parent) == [record]
        weights.unlink()


def test_a_start_reads_the_weights_of_a_linked_workspace_once(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(models[0], tmp_path / "model"))
    record = QualityRecord.model_validate({**record_of(), "weight_type": "fp32", "weights": fingerprint(model)})
    save_record(workspace.locate(model), record)
    read: list[Path] = []

    def counted(folder: Path) -> str:
        read.append(folder)
        return fingerprint(folder)

    for module in ("convert", "quality_record"):
        monkeypatch.setattr(f"charonia.weights.{module}.fingerprint", counted)
    linked = link_workspace(model, tmp_path / "linked")
    assert read == [model]
    save_record(workspace.locate(linked), record)
    read.clear()
    prepare(str(linked), tmp_path / "run", {})
    assert read == [model]
    assert records_of_weights(linked / workspace.WEIGHTS) == [record]


def test_a_start_keeps_a_record_that_is_stored_meanwhile(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked = link_workspace(models[0], tmp_path / "linked")
    record = QualityRecord.model_validate({**record_of(), "weights": fingerprint(models[0])})
    manifest = linked / workspace.WEIGHTS / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "weights": "2-old"}))

    def meanwhile(folder: Path) -> str:
        save_record(workspace.locate(linked), record)
        return fingerprint(folder)

    monkeypatch.setattr("charonia.weights.quality_record.fingerprint", meanwhile)
    prepare(str(linked), tmp_path / "run", {})
    after = json.loads(manifest.read_text())
    assert after["weights"] == record.weights and parse_records(after["quality"]) == [record]


async def test_records_of_other_versions_are_kept_and_ignored(
    models: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Path(shutil.copytree(models[0], tmp_path / "model"))
    linked = link_workspace(model, tmp_path / "linked")
    record = QualityRecord.model_validate({**record_of(), "weight_type": "fp32", "weights": fingerprint(model)})
    others = [{**record.content(), "weights": "0" * 32}, {"weights": "3-a", "a field of later": 1}]
    side, manifest = model / SIDE_FILE, linked / workspace.WEIGHTS / "manifest.json"
    side.write_text(json.dumps({"records": others}))
    changed = {**json.loads(manifest.read_text()), "weights": "0" * 32}
    stale = {**record.content(), "weights": "2-old"}
    manifest.write_text(json.dumps({**changed, "quality": [*others, stale]}))
    prepare(str(linked), tmp_path / "run", {})
    assert json.loads(manifest.read_text())["quality"] == others, "the server of the other version still has them"
    assert records_of_weights(manifest.parent) == records_of_folder(model) == []
    assert "stored by another version" in caplog.text
    caplog.clear()
    for place in (model, linked):
        save_record(workspace.locate(place), record)
        save_record(workspace.locate(place), record)
    caplog.clear()
    prepare(str(linked), tmp_path / "run", {})
    for file, key in ((side, "records"), (manifest, "quality")):
        assert json.loads(file.read_text())[key] == [*others, record.content()]
    assert records_of_weights(manifest.parent) == records_of_folder(model) == [record] and not caplog.text
    server = EngineServer("m", workspace.locate(linked), {"device": "cpu", "threads": "1"}, {})
    try:
        assert await server.quality() == [record.content()]
        content = json.loads(manifest.read_text())
        damaged = [None, "x", [1], {"weights": ["2-"]}, {"weights": {}}]
        for quality, shown in (
            ([*damaged, record.content()], [record.content()]), (None, []), ("x", []), ({"a": 1}, [])
        ):  # fmt: skip
            manifest.write_text(json.dumps({**content, "quality": quality}))
            assert await server.quality() == shown
        # A server of another version starts with the same files.
        manifest.write_text(json.dumps({**content, "weights": "3-a"}))
        assert record.content() in await server.quality()
    finally:
        await server.close()


def test_a_new_record_of_a_converted_workspace_replaces_one_of_another_version(
    models: list[Path], tmp_path: Path
) -> None:
    location = workspace.locate(convert(models[0], tmp_path / "w"))
    assert location.weights
    manifest = location.weights / "manifest.json"
    old = QualityRecord.model_validate({**record_of(), "weights": "0" * 32})
    other = old.model_copy(update={"quant_policy": 4})
    records = [old.content(), other.content()]
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "weights": "0" * 32, "quality": records}))
    new = old.model_copy(update={"weights": fingerprint_of(location), "date": "later"})
    save_record(location, new)
    assert records_of_weights(location.weights) == [other, new]


def test_a_start_with_weights_that_cannot_be_read_warns(
    models: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Path(shutil.copytree(models[0], tmp_path / "model"))
    linked = link_workspace(model, tmp_path / "linked")
    (model / "model.safetensors").write_bytes(b"")
    prepare(str(linked), tmp_path / "run", {})
    assert "manifest.json cannot be updated" in caplog.text and "system_fingerprint" in caplog.text


def record_of(**changed: Any) -> dict[str, Any]:
    text = {"name": "t[/x]", "sha256": "0", "tokens": 9, "window": 4, "stride": 2, "perplexity": 2.5}
    head = {"date": "today", "charonia_version": "0", "command": "c", "model": "m[awq]", "weight_type": "bf16"}
    return {**head, "weight_bytes": 1, "quant_policy": 0, "device": "cpu", "text": {**text, **changed}}


def test_a_record_that_is_not_understood_is_left_out(tmp_path: Path) -> None:
    # The engine rejects a manifest with infinity, which is not valid JSON.
    wrong = [{"date": "today"}, record_of(perplexity=math.inf), record_of(perplexity=math.nan)]
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    right = {**record_of(), "weights": fingerprint(tmp_path)}
    (tmp_path / SIDE_FILE).write_text(json.dumps({"records": [*wrong, right]}))
    assert [record.content() for record in records_of_folder(tmp_path)] == [right]


def test_names_with_brackets_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=80).print(quality_table(parse_records([record_of()])))
    shown = capsys.readouterr().out
    assert "m[awq]" in shown and "t[/x]" in shown


@pytest.mark.parametrize("log_probability", [-math.inf, math.nan, -1e5])
def test_a_perplexity_that_is_no_number_is_an_error(log_probability: float) -> None:
    found = Perplexity()
    found.add(Window(0, 4, 4), np.array([-1.0, log_probability, -1.0]))
    with pytest.raises(ModelError, match="output is useless"):
        _ = found.value


def test_a_result_that_cannot_be_saved_is_not_lost(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Known problems are errors before the measurement. A disk may still be full at the end."""
    (tmp_path / "text.txt").write_text("a b c d")
    given: dict[str, Any] = {"text": tmp_path / "text.txt", **TINY}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(quality_record, "_write", full)
    assert evaluate(models[0], **given, settings={"threads": 1}).text.perplexity > 1
    assert "No space left on device" in caplog.text
    monkeypatch.setattr(quality_record.os, "access", lambda *_: False)
    monkeypatch.setattr(Engine, "from_pretrained", None)
    with pytest.raises(ModelError, match="--no-save"):
        evaluate(models[0], **given)


def test_questions_longer_than_the_context_are_rejected_first(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "generate", None)
    long = "word " * engine.info.session_len
    check_prompts(engine, [Question(prompt="short", answer="x")])
    for question in (Question(prompt=long, answer="x"), Question(prompt="short", choices=["x", long], answer=0)):
        with pytest.raises(InvalidRequestError, match=r"tokens.*session_len"):
            check_prompts(engine, [question])


def test_models_that_do_not_fit_together_are_refused(models: list[Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        evaluate(DEMO / "model", models[0], save=False, settings={"threads": 1})
    with pytest.raises(InvalidRequestError, match="window = 9000"):
        evaluate(models[0], ask=False, window=9000, save=False, settings={"threads": 1})
    with pytest.raises(InvalidRequestError, match=r"none\.txt"):
        evaluate(models[0], text=tmp_path / "none.txt", save=False)
    with pytest.raises(InvalidRequestError, match="device = null computes nothing, so there is nothing to evaluate"):
        evaluate(models[0], settings={"device": "null"}, save=False)


def test_wrong_evaluation_options_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"questions = .*and ask = false \(--no-ask\) contradict"):
        evaluate(tmp_path / "none", questions=tmp_path / "q.jsonl", ask=False)


def test_texts_of_the_same_name_have_names_that_differ(models: list[Path], tmp_path: Path) -> None:
    names = []
    for content in ("a b c d", "d c b a"):
        (tmp_path / "text.txt").write_text(content)
        record = evaluate(models[0], text=tmp_path / "text.txt", **TINY, save=False)
        names.append(record.text.name)
        assert record.text.name == f"text.txt ({record.text.sha256[:8]})"
    assert names[0] != names[1]


@pytest.mark.slow
def test_the_command_prints_a_table_or_json(models: list[Path], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(default_text().read_text(encoding="utf-8")[:1000], encoding="utf-8")
    (tmp_path / "questions.jsonl").write_text('{"prompt": "a", "choices": ["x", "y"], "answer": 1}\n')
    command = [sys.executable, "-m", "charonia", "evaluate", str(models[0]), "--no-save", "--window", "64"]
    command += ["--stride", "32", "--text", str(tmp_path / "text.txt"), "--questions"]
    command += [str(tmp_path / "questions.jsonl"), "--threads", "1", "--quant-policy", "4"]
    plain = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "120"}
    against = [*command, "--against", str(models[0])]
    done = subprocess.run(against, capture_output=True, text=True, timeout=300, check=True, env=plain)
    assert "one (reference)" in done.stdout and "KL mean" in done.stdout and "int4" in done.stdout
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=300, check=True, env=plain)
    record = json.loads(done.stdout)
    assert (record["quant_policy"], record["questions"]["asked"]) == (4, 1)
    assert record["command"].startswith("charonia evaluate ") and record["text"]["perplexity"] > 1
    assert not (models[0] / SIDE_FILE).exists()
