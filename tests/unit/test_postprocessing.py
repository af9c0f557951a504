"""postprocessing/detokenize.py against Python's own decoding."""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_file import load_file
from safetensors.numpy import save_file

from charonia.weights.fingerprint import VERSION

ROOT = Path(__file__).resolve().parents[2]


def load_module(name: str = "detokenize") -> ModuleType:
    return load_file(ROOT / "postprocessing" / f"{name}.py")


detokenize = load_module()


def make_table(tokens: list[bytes], special: list[bool] | None = None) -> Any:
    offsets = np.array([0, *accumulate(len(token) for token in tokens)], np.int64)
    marks = np.array(special or [False] * len(tokens), np.uint8)
    return detokenize.TokenTable(offsets, np.frombuffer(b"".join(tokens), np.uint8), marks)


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


@given(st.data(), st.lists(st.binary(max_size=5), min_size=1, max_size=20))
def test_text_is_the_slice_of_the_joined_bytes(data: st.DataObject, tokens: list[bytes]) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(tokens) - 1), max_size=20))
    joined = b"".join(tokens[index] for index in chosen)
    begin = data.draw(st.integers(0, len(joined)))
    end = data.draw(st.integers(begin, len(joined)))
    text = make_table(tokens).text(ids(*chosen), begin, end)
    assert text.decode() == joined[begin:end].decode("utf-8", "replace")


def test_a_character_split_over_tokens_is_whole() -> None:
    snail = "🐚".encode()
    assert make_table([snail[:1], snail[1:3], snail[3:]]).text(ids(0, 1, 2), 0, 4) == snail


def test_special_tokens_and_ids_past_the_table_have_no_text() -> None:
    table = make_table([b"a", b"<end>", b"b"], [False, True, False])
    assert table.join(ids(0, 1, 2, 99, -1)) == b"ab"


def test_lookup_tells_special_tokens_bytes() -> None:
    table = make_table([b"a", b"<end>"], [False, True])
    assert table.lookup(ids(1, 0, 99)) == ([b"<end>", b"a", b""], [True, False, True])


def test_no_ids_have_no_text() -> None:
    assert make_table([b"a"]).text(ids(), 0, 0) == b""


def test_a_table_loads_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token_table.safetensors"
    data = np.frombuffer(b"xyz", np.uint8)
    save_file({"offsets": np.array([0, 2, 3]), "bytes": data, "special": np.zeros(2, np.uint8)}, file)
    assert detokenize.TokenTable.load(file).join(ids(1, 0)) == b"zxy"


def test_token_table_with_inconsistent_parts_is_rejected() -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        detokenize.TokenTable(np.array([0, 9]), np.zeros(3, np.uint8), np.zeros(1, np.uint8))


def test_quality_records_follow_a_changed_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "model_repository")])
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", ModuleType("triton_python_backend_utils"))
    monkeypatch.setitem(sys.modules, "detokenize", detokenize)
    model = load_module("model")
    assert model.WEIGHTS_VERSION == VERSION
    records = model.quality_records
    manifest, read = tmp_path / "manifest.json", []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: read.append(text) or loads(text))  # type: ignore[func-returns-value]
    assert records(manifest) == []
    own, other = {"weights": "2-a"}, {"weights": "3-a"}
    for content, expected in (
        ({}, []), ({"quality": [{"a": 1}]}, [{"a": 1}]), ({"quality": "x"}, []), ([], []),
        ({**own, "quality": [own, other]}, [own]), ({**other, "quality": [own]}, [own]),
    ):  # fmt: skip
        (tmp_path / "new").write_text(json.dumps(content))
        (tmp_path / "new").replace(manifest)
        read.clear()
        assert [records(manifest) for _ in range(3)] == [expected] * 3
        assert len(read) == 1
    manifest.write_text("{")
    assert records(manifest) == []
