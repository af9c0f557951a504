"""charonia generate: answers to all requests of a file, also after an interruption."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from charonia_gateway.batches.lines import AnswerFile
from waiting import HANG_S, wait_until

from charonia import Engine, SamplingParams
from charonia.bench.random_model import SHAPES, write_random_model
from charonia.errors import CharoniaError, InvalidRequestError
from charonia.settings import ServeSettings
from charonia.web import generate

GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    write_random_model(folder, replace(SHAPES["tiny"], max_positions=2000), scale=0.2)
    return folder


def start(model: Path, folder: Path) -> subprocess.Popen[str]:
    """Start `charonia generate` in a folder with the file of requests."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CHARONIA_")}
    # A gateway's settings in the environment have no effect.
    own = {"CHARONIA_THREADS": "1", "CHARONIA_RUN_DIR": str(folder / "run"), "CHARONIA_GATEWAY_KEYS_FILE": "/none"}
    command = [sys.executable, "-m", "charonia", "generate", str(model), "--in", "in.jsonl", "--out", "out.jsonl"]
    return subprocess.Popen(command, env={**inherited, **own}, cwd=folder, stderr=subprocess.PIPE, text=True)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_run_continues_without_a_lost_or_double_line(model: Path, tmp_path: Path, how: int) -> None:
    prompts = [f"prompt {number}" for number in range(60)]
    requests = [{"prompt": prompt, "custom_id": prompt, **GREEDY} for prompt in prompts]
    wrong = {"custom_id": "wrong", "body": {"messages": [], "model": "another"}, "url": "/v1/chat/completions"}
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, [*requests, wrong])))
    answers = tmp_path / "out.jsonl"
    with start(model, tmp_path) as first:
        wait_until(lambda: first.poll() is not None or (answers.exists() and answers.stat().st_size))
        first.send_signal(how)
        first.wait(HANG_S)
    before = answers.read_bytes()
    with answers.open("a") as file:  # a write that was cut off
        file.write(before.decode().splitlines()[-1][:-10])
    with start(model, tmp_path) as again:
        _, said = again.communicate(timeout=HANG_S)
    assert again.returncode == 0, said
    assert answers.read_bytes().startswith(before)
    found = {one["custom_id"]: one for one in lines(answers)}
    assert sorted(found) == sorted([*prompts, "wrong"]) and len(found) == len(lines(answers))
    assert found.pop("wrong")["response"]["status_code"] == 400
    with Engine.from_pretrained(model, threads=1) as engine:
        expected = engine.generate(prompts, SamplingParams(**GREEDY))
    texts = [found[prompt]["response"]["body"]["choices"][0]["text"] for prompt in prompts]
    assert texts == [output.text for output in expected]
    with start(model, tmp_path) as complete:
        _, said = complete.communicate(timeout=HANG_S)
    assert complete.returncode == 0 and "has all 61 answers already" in said


def test_a_full_disk_is_named_and_the_same_command_continues(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": f"{number}", **GREEDY}) for number in range(9)))
    write = AnswerFile.write

    def fails(file: AnswerFile, custom_id: str, line: bytes) -> None:
        if len(file.done) == 4:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        write(file, custom_id, line)

    settings = ServeSettings(model=str(model), run_dir=tmp_path / "run")
    with monkeypatch.context() as patched, pytest.raises(CharoniaError) as caught:
        patched.setattr(AnswerFile, "write", fails)
        generate.generate(settings, {"threads": "1"}, source, target)
    says = rf"{target} has 4 of 9 answers: No space left on device at {target} \(.* are free\): free some space, .*"
    assert re.fullmatch(says, str(caught.value)) and len(lines(target)) == 4
    generate.generate(settings, {"threads": "1"}, source, target)
    assert len({one["custom_id"] for one in lines(target)}) == len(lines(target)) == 9


def test_a_read_only_target_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}')

    def fails(_: AnswerFile, path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(AnswerFile, "__init__", fails)
    with pytest.raises(
        InvalidRequestError, match=rf"^--out: Read-only file system at {target} .*choose another folder"
    ):
        generate.generate(None, {}, source, target)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1: it is not JSON"),
        ('{"prompt": "a"}\n\n{"text": "b"}', "line 3: it has none of messages, prompt, input"),
        ('{"prompt": "a", "stream": true}', "line 1: body.stream: batches have whole responses only"),
        ('{"prompt": "\\ud800"}', "line 1: it has a lone surrogate"),
        ('{"prompt": "a", "custom_id": 7}', "line 1: custom_id is not a text"),
        ('{"prompt": "a", "custom_id": "x"}\n{"prompt": "b", "custom_id": "x"}', "line 2: an earlier line has"),
        ('{"custom_id": "x", "url": "/v1/rerank", "body": {}}', "line 1: url is '/v1/rerank'"),
        ('{"custom_id": "x", "url": "/v1/completions", "body": 7}', "line 1: body is not an object"),
    ],
)
def test_wrong_line_is_named_before_a_model_is_loaded(tmp_path: Path, text: str, says: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    with pytest.raises(InvalidRequestError, match=r"in\.jsonl, ") as caught:
        generate.generate(None, {}, source, tmp_path / "out.jsonl")  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert not (tmp_path / "out.jsonl").exists()


def test_file_of_other_answers_is_rejected(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}')

    def refusal() -> str:
        with pytest.raises(InvalidRequestError) as caught:
            generate.generate(None, {}, source, target)  # type: ignore[arg-type]
        return str(caught.value)

    for other, says in (
        ('{"custom_id": "b", "response": null}\n', "no such request: it belongs to another file"),
        ('{"prompt": "a"}\n', "out.jsonl, line 1 is not an answer"),
        ("a text without a line end", "out.jsonl, line 1 is not an answer"),
    ):
        target.write_text(other)
        assert says in refusal()
        assert target.read_text() == other
    target.write_text("")
    with target.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another process writes" in refusal()
