"""The GGUF files of released models give the tokens of their dequantised folders, which transformers has written."""

from __future__ import annotations

from pathlib import Path

import pytest
from released_texts import CHATS, TEXTS, long_text
from released_tokenizers import write_released_tokenizer

from charonia import Engine, Output, SamplingParams
from charonia.api.prompts import encode
from charonia.text.tokenizer import load_tokenizer
from charonia.weights import workspace

LENGTHS = (1, 64, 300, 600, 1500)


@pytest.fixture
def file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHARONIA_RUN_DIR", str(tmp_path / "run"))
    return folder.with_suffix(".gguf")


def generate(model: Path, dtype: str) -> list[Output]:
    sampling = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True, logprobs=0)
    with Engine.from_pretrained(model, dtype=dtype, threads=1, cache_users=1, cache_user_tokens=4096) as engine:
        whole = engine.encode(long_text())
        return engine.generate([whole[:length] for length in LENGTHS], sampling)


def test_greedy_tokens_of_the_gguf_file_in_fp32_equal_the_dequantised_folder(file: Path, folder: Path) -> None:
    found, expected = generate(file, "fp32"), generate(folder, "fp32")
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    errors = [
        abs(ours - theirs)
        for one, other in zip(found, expected, strict=True)
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True)
    ]
    print(f"{file.name}, fp32: largest distance of a log probability {max(errors):.2g}")
    assert max(errors) < 1e-4


def test_log_probabilities_of_the_gguf_file_in_bf16_are_near_fp32(file: Path, folder: Path) -> None:
    found, expected = generate(file, "bf16"), generate(folder, "fp32")
    distances = [abs(one.logprobs[0] - other.logprobs[0]) for one, other in zip(found, expected, strict=True)]
    print(f"{file.name}, bf16: distances of the first log probabilities {[round(one, 4) for one in distances]}")
    assert max(distances) < 0.1


def test_token_ids_and_chats_of_the_gguf_file_equal_the_folder(file: Path, folder: Path) -> None:
    ours, theirs = load_tokenizer(workspace.locate(file).path), load_tokenizer(folder)
    for text in TEXTS:
        assert encode(lambda: ours, text).token_ids == encode(lambda: theirs, text).token_ids, text
    if theirs.chat_template:
        for chat in CHATS:
            assert encode(lambda: ours, chat).token_ids == encode(lambda: theirs, chat).token_ids
    else:
        assert not ours.chat_template


def test_token_ids_of_gemmas_gguf_file_equal_its_released_tokenizer(file: Path, tmp_path: Path) -> None:
    if file.stem != "gemma3":
        pytest.skip("no package has this tokenizer")
    write_released_tokenizer("gemma3", tmp_path / "released")
    ours, theirs = load_tokenizer(workspace.locate(file).path), load_tokenizer(tmp_path / "released")
    for text in [*TEXTS, "a  b\n\n\n c\t\t", "<h1>x</h1>"]:
        assert ours.encode(text) == theirs.encode(text), text
