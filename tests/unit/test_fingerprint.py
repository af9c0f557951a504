"""The fingerprint of weights: every small tensor counts, and names of files do not."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from charonia.errors import ModelError
from charonia.weights.fingerprint import VERSION, fingerprint

_LARGE = np.zeros((1 << 10, 1 << 10), np.float32)  # far more than the pieces of a file
_SCALE = np.array([0.0131], np.float32)
_NORM = np.linspace(1, 2, 5000, dtype=np.float32)
BIN = pytest.param("bin", marks=pytest.mark.slow)  # needs PyTorch
TENSORS = {"a.large": _LARGE, "b.k_scale": _SCALE, "c.large": _LARGE, "d.norm": _NORM, "e.large": _LARGE}


def write(folder: Path, kind: str) -> Path:
    """Write TENSORS, and return the file."""
    folder.mkdir()
    if kind == "gguf":
        file = folder / "weights-00001-of-00001.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        for name, values in TENSORS.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file
    if kind == "bin":
        import torch

        file = folder / "pytorch_model.bin"
        torch.save({name: torch.from_numpy(values.copy()) for name, values in TENSORS.items()}, file)
        return file
    file = folder / "model.safetensors"
    save_file(TENSORS, file)
    return file


def change(file: Path, values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
    """Change the last byte of a tensor."""
    content = bytearray(file.read_bytes())
    content[content.index(values.tobytes()) + values.nbytes - 1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("kind", ["safetensors", BIN, "gguf"])
def test_one_changed_byte_of_a_small_tensor_changes_the_fingerprint(kind: str, tmp_path: Path) -> None:
    found = {fingerprint(write(tmp_path / "model", kind).parent)}
    assert found == {fingerprint(write(tmp_path / "copy", kind).parent)}
    for values in (_SCALE, _NORM):
        change(next((tmp_path / "model").iterdir()), values)
        found.add(fingerprint(tmp_path / "model"))
    assert len(found) == 3 and all(one.startswith(VERSION) for one in found)


def test_places_and_names_of_tensors_count_and_names_of_files_do_not(tmp_path: Path) -> None:
    found = set()
    for index, names in enumerate((["a", "b"], ["z", "b"])):
        folder = tmp_path / f"{index}"
        folder.mkdir()
        save_file({"x": _LARGE, "y": _SCALE}, folder / f"{names[0]}.safetensors")
        save_file({"u": _LARGE, "v": _NORM}, folder / f"{names[1]}.safetensors")
        places = {tensor: f"{names[tensor in 'uv']}.safetensors" for tensor in "xyuv"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        found.add(fingerprint(folder))
    assert len(found) == 1
    save_file({"x": _LARGE, "w": _SCALE}, folder / "z.safetensors")
    assert fingerprint(folder) not in found


def test_the_smallest_tensors_are_read_if_all_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.weights.fingerprint._MOST_SMALL_BYTES", 100)
    file = write(tmp_path / "model", "safetensors")
    first = fingerprint(file.parent)
    change(file, _NORM)
    assert fingerprint(file.parent) == first
    change(file, _SCALE)
    assert fingerprint(file.parent) != first


@pytest.mark.slow
def test_checksums_show_every_change_of_a_bin_file(tmp_path: Path) -> None:
    import torch

    file = write(tmp_path / "model", "bin")
    first = fingerprint(file.parent)
    large = torch.zeros(1 << 10, 1 << 10)
    large[500, 501] = 1
    torch.save({**{name: torch.from_numpy(values.copy()) for name, values in TENSORS.items()}, "c.large": large}, file)
    assert fingerprint(file.parent) != first
    old = dict.fromkeys(TENSORS, torch.zeros(3))
    torch.save(old, file, _use_new_zipfile_serialization=False)
    assert fingerprint(file.parent) != first


def test_an_index_of_a_single_file_does_not_count(tmp_path: Path) -> None:
    file = write(tmp_path / "model", "safetensors")
    first = fingerprint(file.parent)
    (file.parent / f"{file.name}.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, file.name)}))
    assert fingerprint(file.parent) == first


@pytest.mark.slow
def test_the_file_that_the_index_names_for_a_tensor_counts(tmp_path: Path) -> None:
    import torch

    for kind, index in (("safetensors", "model.safetensors"), ("bin", "pytorch_model.bin")):
        folder = tmp_path / kind
        folder.mkdir()
        for name, values in (("a", _SCALE), ("b", _NORM)):
            if kind == "bin":
                torch.save({"x": torch.from_numpy(values.copy()), name: torch.zeros(1)}, folder / f"{name}.{kind}")
            else:
                save_file({"x": values, name: _SCALE}, folder / f"{name}.{kind}")
        found = set()
        for place in "ab":
            places = {"x": f"{place}.{kind}", "a": f"a.{kind}", "b": f"b.{kind}"}
            (folder / f"{index}.index.json").write_text(json.dumps({"weight_map": places}))
            found.add(fingerprint(folder))
        assert len(found) == 2


@pytest.mark.parametrize("kind", ["safetensors", BIN])
def test_little_is_read_where_the_file_system_asks_for_large_buffers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            read.append(super().readinto(buffer) or 0)
            return read[-1]

    def opened(path: Path, mode: str, buffering: int = 1 << 20) -> io.BufferedReader:
        return io.BufferedReader(Counted(path, mode), buffering)

    file = write(tmp_path / "model", kind)
    first = fingerprint(file.parent)
    monkeypatch.setattr(Path, "open", opened)
    assert fingerprint(file.parent) == first
    assert 64 * 4096 <= sum(read) < 1 << 20 < file.stat().st_size / 8


@pytest.mark.slow
def test_a_bin_file_without_checksums_counts_as_its_small_tensors_and_pieces(tmp_path: Path) -> None:
    import torch

    torch.serialization.set_crc32_options(False)
    try:
        file = write(tmp_path / "model", "bin")
        first = fingerprint(file.parent)
        scale = {"b.k_scale": torch.from_numpy(_SCALE * 2)}
        torch.save({**{name: torch.from_numpy(values.copy()) for name, values in TENSORS.items()}, **scale}, file)
        assert fingerprint(file.parent) != first
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.mark.slow
def test_damaged_zip_files_and_unusual_names_have_no_traceback(tmp_path: Path) -> None:
    file = write(tmp_path / "model", "bin")
    content = file.read_bytes()
    entry = content.index(b"PK\1\2")  # the first entry of the directory
    utf8 = content[: entry + 8] + b"\0\x08" + content[entry + 10 :]
    damaged = [
        content[: entry + 6] + b"\xff" + content[entry + 7 :],  # a version that no program can read
        utf8[: entry + 46] + b"\xff" + utf8[entry + 47 :],  # a name that is not UTF-8
    ]
    for one in damaged:
        file.write_bytes(one)
        with pytest.raises(ModelError, match=f"{file.name} is not a complete file of PyTorch weights"):
            fingerprint(file.parent)
    file.unlink()
    header = json.dumps({"\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (file.parent / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert fingerprint(file.parent).startswith(VERSION)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_an_incomplete_file_is_named(kind: str, tmp_path: Path) -> None:
    file = write(tmp_path / "model", kind)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=file.name):
        fingerprint(file.parent)
