"""Weight files: damaged and unusual ones are rejected with their name and a remedy, and old formats are read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from missing_tools import needed_module

from charonia.errors import ModelError
from charonia.json_files import read_json
from charonia.weights.checkpoint import open_checkpoint


def write_safetensors_file(file: Path, header: bytes, data: bytes = bytes(64)) -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64], **changes}


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b"[]",
        b'"text"',
        b"null",
        b"\xff",
        *(
            json.dumps({"w": changed}).encode()
            for changed in (
                [],
                "F32",
                entry(dtype=["F32"]),
                entry(dtype=None),
                entry(shape=[4, 4.0]),
                entry(shape=[4, -4]),
                entry(shape=4),
                entry(shape=[4, 5]),
                entry(shape=[10**400, 4]),
                entry(data_offsets=[0]),
                entry(data_offsets=[0, 1e300]),
                entry(data_offsets=[0, True]),
                entry(data_offsets=[64, 0]),
                entry(data_offsets=[-64, 0]),
                entry(data_offsets=[0, 65]),
                entry(dtype="F4", data_offsets=[0, 65]),
            )
        ),
    ],
    ids=lambda header: header[:48].decode("latin-1"),
)
def test_a_safetensors_file_with_a_wrong_header_is_refused(tmp_path: Path, header: bytes) -> None:
    write_safetensors_file(tmp_path / "model.safetensors", header)
    with pytest.raises(ModelError, match=r"model\.safetensors is not a complete safetensors file.*download it again"):
        open_checkpoint(tmp_path)


def test_a_header_of_more_than_100_mb_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((100_000_001).to_bytes(8, "little"))
    with file.open("r+b") as stream:
        stream.truncate(200_000_000)
    with pytest.raises(ModelError, match=r"model\.safetensors .*header of 100000001 bytes.*download it again"):
        open_checkpoint(tmp_path)


def test_a_json_file_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        read_json(tmp_path / "config.json")


def index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", [5, None, ["a"], {"a": "b"}, ""])
def test_an_index_that_names_no_files_is_refused(tmp_path: Path, name: Any) -> None:
    index(tmp_path, {"w": name, "v": "model-1.safetensors"})
    with pytest.raises(ModelError, match=r"weight_map says .* for w; it must be the name of a file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "way", ["{outside}/w.safetensors", "../outside/w.safetensors", "sub/../../outside/w.safetensors"]
)
def test_an_index_does_not_lead_out_of_the_folder_and_a_link_may(tmp_path: Path, way: str) -> None:
    outside, model = tmp_path / "outside", tmp_path / "model"
    outside.mkdir()
    (model / "sub").mkdir(parents=True)
    write_safetensors_file(outside / "w.safetensors", json.dumps({"w": entry()}).encode())
    index(model, {"w": way.format(outside=outside)})
    with pytest.raises(ModelError, match=r"which is outside of the model's folder: put the file there, or a link"):
        open_checkpoint(model)
    (model / "sub" / "w.safetensors").symlink_to(outside / "w.safetensors")
    index(model, {"w": "sub/w.safetensors"})
    assert open_checkpoint(model).read("w").tolist() == [[0.0] * 4] * 4


def test_tensor_in_two_files_is_read_from_the_file_in_the_index(tmp_path: Path) -> None:
    for number, data in ((1, bytes(64)), (2, np.ones(16, np.float32).tobytes())):
        header = json.dumps({"w": entry(), f"v{number}": entry()}).encode()
        write_safetensors_file(tmp_path / f"{number}.safetensors", header, data)
    for number, expected in ((1, 0.0), (2, 1.0)):
        index(tmp_path, {"w": f"{number}.safetensors", "v1": "1.safetensors", "v2": "2.safetensors"})
        checkpoint = open_checkpoint(tmp_path)
        assert checkpoint.read("w").tolist() == [[expected] * 4] * 4
        first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
        said = f"tensor w is in {first} and in {second}: {number}.safetensors is used, as the index says"
        assert checkpoint.notes == (said,)
    index(tmp_path, {"v1": "1.safetensors", "v2": "2.safetensors"})
    with pytest.raises(ModelError, match=r"tensor w is in .*1\.safetensors and in .*2\.safetensors, and no index says"):
        open_checkpoint(tmp_path)


VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("zipped", [True, False])
def test_bin_files_of_every_pytorch_are_read(tmp_path: Path, zipped: bool) -> None:
    """Files from before PyTorch 1.6 are not zip archives. Parameters, which require gradients, count as tensors."""
    torch = needed_module("torch")
    tensors = {
        "w": torch.from_numpy(VALUES),
        "half": torch.from_numpy(VALUES).bfloat16(),
        "parameter": torch.nn.Parameter(torch.from_numpy(VALUES)),
        "transposed": torch.from_numpy(VALUES).T,
    }
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    checkpoint = open_checkpoint(tmp_path)
    for name in tensors:
        expected = VALUES.T if name == "transposed" else VALUES
        assert np.array_equal(checkpoint.read(name).astype(np.float32), expected), name
    assert checkpoint.tensors["half"].dtype == "BF16"


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        *((kept, zipped) for kept in (0, 1, 100, -20) for zipped in (True, False)),
        *(b"garbage", b"\x80\x02garbage", b"PK\x03\x04garbage", bytes(1000), b"[" * 1000),
    ],
)
def test_a_damaged_bin_file_is_refused(damage: tuple[int, bool] | bytes, tmp_path: Path) -> None:
    """damage: the whole content, or the number of bytes that are left, and the format."""
    torch = needed_module("torch")
    file = tmp_path / "pytorch_model.bin"
    if isinstance(damage, bytes):
        file.write_bytes(damage)
    else:
        kept, zipped = damage
        torch.save({"w": torch.from_numpy(VALUES)}, file, _use_new_zipfile_serialization=zipped)
        os.truncate(file, kept if kept >= 0 else file.stat().st_size + kept)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read as PyTorch weights.*download it again"):
        open_checkpoint(tmp_path)


class Evil:
    """A pickle that runs code when it is loaded without weights_only."""

    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["CHARONIA_TEST_EVIL"],))


@pytest.mark.slow
def test_a_bin_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = needed_module("torch")
    monkeypatch.setenv("CHARONIA_TEST_EVIL", str(tmp_path / "made"))
    torch.save({"w": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be read as PyTorch weights"):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([1, 2], "holds a list; it must hold tensors by name"),
        ({"state_dict": {"w": 1}}, "holds a dict under 'state_dict'"),
        ({"epoch": 3}, "holds a int under 'epoch'"),
        ({7: "w"}, "holds a str under 7"),
        ("sparse", "under 'w'; it must hold dense tensors"),
    ],
)
def test_a_bin_file_of_other_things_than_dense_tensors_is_refused(tmp_path: Path, content: Any, named: str) -> None:
    torch = needed_module("torch")
    torch.save({"w": torch.eye(3).to_sparse()} if content == "sparse" else content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=named):
        open_checkpoint(tmp_path)
