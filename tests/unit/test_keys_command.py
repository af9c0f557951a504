"""`charonia keys` as users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import pytest
from charonia_gateway import keys

CHARONIA = (sys.executable, "-m", "charonia", "keys")
# An image that contains only the gateway.
GATEWAY = (Path(sys.executable).parent / "charonia_gateway_keys",)


def charonia(
    *arguments: str, file: Path, command: tuple[str | Path, ...] = CHARONIA
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments],
        env={**os.environ, "CHARONIA_GATEWAY_KEYS_FILE": str(file)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A key file, and a key in it."""
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    options = ["--expires", "30d", "--model", "demo", "--requests-per-minute", "60", "--tokens-per-minute", "9000"]
    done = charonia("create", "alice", *options, "--max-concurrent", "4", "--priority", "-1", file=file)
    assert done.returncode == 0, done.stderr
    yield file, done.stdout.strip()


@pytest.mark.slow
def test_a_key_is_shown_once_and_the_file_has_its_hash(made: tuple[Path, str]) -> None:
    file, text = made
    assert len(text) >= 43 and text not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    key = keys.KeyRing(file).find(text)
    assert key is not None and key.why_not_valid(datetime.now(timezone.utc)) is None
    assert (key.name, key.models, key.priority) == ("alice", ("demo",), -1)
    assert (key.requests_per_minute, key.tokens_per_minute, key.max_concurrent) == (60, 9000, 4)
    assert key.expires is not None and 29 <= (key.expires - key.created).days <= 30


@pytest.mark.slow
def test_list_of_keys_shows_no_key(made: tuple[Path, str]) -> None:
    file, text = made
    shown = charonia("list", file=file).stdout
    assert charonia("list", file=file, command=GATEWAY).stdout == shown
    (listed,) = json.loads(charonia("list", "--json", file=file).stdout)["keys"]
    for written in ("alice", listed["id"], "valid", "models: demo", "9000 tokens/min", "inference", "priority -1"):
        assert written in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert listed["name"] == "alice" and listed["tokens_per_minute"] == 9000
    assert text not in shown and keys.hash_of(text) not in shown and "sha256" not in listed


@pytest.mark.slow
def test_a_revoked_key_holds_no_more_and_its_name_is_free(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    old = charonia("create", "bob", file=file, command=GATEWAY).stdout.strip()
    twice = charonia("create", "bob", file=file)
    assert twice.returncode == 1 and "revoke it first" in twice.stderr
    assert charonia("revoke", "bob", file=file).returncode == 0
    key = keys.KeyRing(file).find(old)
    assert key is not None and key.why_not_valid(datetime.now(timezone.utc)) == "was revoked"
    new = charonia("create", "bob", file=file).stdout.strip()
    ring = keys.KeyRing(file)
    assert ring.find(old) is None and ring.find(new) is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create", "a b"], "name = 'a b'"),
        (["create", "a", "--expires", "soon"], "'soon' is not an expiry: expected 12h, 30d"),
        (["create", "a", "--expires", "2020-01-31"], "is past"),
        (["create", "a", "--access", "everything"], "'inference', 'metrics' or 'admin'"),
        (["revoke", "nobody"], "has no key 'nobody'"),
    ],
)
def test_wrong_arguments_are_reported_and_change_no_file(
    made: tuple[Path, str], arguments: list[str], said: str
) -> None:
    file, _ = made
    before = file.read_bytes()
    done = charonia(*arguments, file=file)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
    assert file.read_bytes() == before


def test_simultaneous_changes_of_a_file_lose_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"

    def add(number: int) -> None:
        with keys.changing(file) as held:
            text, id = keys.new_key()
            now = datetime.now(timezone.utc)
            held.keys.append(keys.Key(id=id, name=f"k{number}", sha256=keys.hash_of(text), created=now))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(40)))
    assert len(keys.read_keys(file).keys) == 40
    assert [path.name for path in tmp_path.iterdir()] == ["keys.json"], "nothing else is left"
