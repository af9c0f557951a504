"""owner/name@revision: the downloaded files, and the errors for invalid names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hub_double import COMMIT, HubDouble

from charonia.errors import ModelError
from charonia.weights.hub import parse_id, pinned_id
from charonia.weights.workspace import existing, locate

DOWNLOAD = """
import shutil, sys
from types import SimpleNamespace
from charonia.errors import ModelError
from charonia.weights.hub import download, pinned_id
if len(sys.argv) > 2:
    shutil.disk_usage = lambda _: SimpleNamespace(free=int(sys.argv[2]))
try:
    folder = download(sys.argv[1])
    print(folder.name, pinned_id(sys.argv[1], folder))
except ModelError as error:
    sys.exit(f"{error.status} {error}")
"""
V1 = "d" * 40


def download(endpoint: str, home: Path, model: str, *free: str) -> tuple[str, str]:
    """free: bytes on the disk."""
    done = subprocess.run(
        [sys.executable, "-c", DOWNLOAD, model, *free],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"},
    )
    return done.stdout.strip(), done.stderr.strip()


@pytest.mark.slow
def test_a_revision_names_the_files_of_its_commit(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(8))
    with HubDouble({"them/small": model}) as hub:
        for name, said in (
            ("them/small", f"{COMMIT} them/small@{COMMIT}"),
            ("them/small@v1", f"{V1} them/small@{V1}"),
            (f"them/small@{V1}", f"{V1} None"),
        ):
            out, err = download(hub.url, tmp_path / "home", name)
            assert out == said, err
        out, err = download(hub.url, tmp_path / "home", "them/small@v9")
        assert out == ""
        assert download(hub.url, tmp_path / "home", "them/small", "0")[0] == f"{COMMIT} them/small@{COMMIT}"
        assert "the download of them/small needs about" in download(hub.url, tmp_path / "other", "them/small", "9")[1]
        assert "the hub's them/small has no revision v9: name a branch, a tag or a full commit" in err


def test_an_id_is_its_repository_and_its_revision() -> None:
    assert parse_id("Qwen/Qwen2.5-0.5B") == ("Qwen/Qwen2.5-0.5B", None)
    assert parse_id(f"a/b@{V1}") == ("a/b", V1)
    assert parse_id("a/b@refs/pr/7") == ("a/b", "refs/pr/7")


@pytest.mark.parametrize(
    "name",
    ["a", "a/", "/b", "a/b/c", "a@v1", "../b", "a b/c", "a/b--c", "a/b.git", "a/b@", "a/b@v 1", "a/b@../c", "a/b@v1@2"],
)
def test_wrong_hub_id_is_rejected_with_the_right_form(name: str) -> None:
    with pytest.raises(ModelError, match=re.escape(f"{name!r} is not a hub id (owner/name or owner/name@revision)")):
        parse_id(name)


@pytest.mark.parametrize(("name", "near"), [("Demo", "demo"), ("smolm2", "smollm2"), ("SmolLM2", "smollm2")])
def test_a_name_like_that_of_a_built_in_model_gets_it_as_a_suggestion(name: str, near: str) -> None:
    with pytest.raises(ModelError, match=f"; did you mean {near}\\?$"):
        locate(name)


def test_a_folder_is_not_pinned(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / V1
    folder.mkdir(parents=True)
    assert pinned_id(str(folder), folder) is None
    assert pinned_id("a/b", tmp_path) is None


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "x" * 5000])
def test_name_that_is_no_path_is_a_hub_id(name: str) -> None:
    assert existing(name) is None
    with pytest.raises(ModelError, match="is not a hub id"):
        locate(name)


@pytest.mark.slow
def test_download_without_a_hub_may_be_repeated_later(tmp_path: Path) -> None:
    closed = "http://127.0.0.1:9"
    said = [download(closed, tmp_path, name)[1] for name in ("them/small", "them/small@..")]
    assert said[0].startswith("503 them/small does not exist here, and it cannot be") and said[1].startswith("400 ")
