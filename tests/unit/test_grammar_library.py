"""The library of structured output, which is compiled while the server runs, after the first start of a checkout: what
asks for it before it is there, and how it gets there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from site_copy import LOG, ROOT, SiteCopy

from charonia import _engine
from charonia.serve.structured_output import StructuredOutput

HANG_S = 120
DEMO = ROOT / "models" / "demo" / "model"

# Says what comes of each request of its input, a word a line: plain, guided, or what state the library is in.
ASK = """
import sys
from charonia import CharoniaError, Engine, Guide, SamplingParams, _engine
with Engine.from_pretrained(sys.argv[1], threads=1) as engine:
    for word in sys.stdin:
        guide = Guide.regex("[0-9]{3}") if word.strip() == "guided" else None
        if word.strip() == "state":
            print(*_engine.guide_library(), flush=True)
            continue
        try:
            answer = engine.generate("x", SamplingParams(max_tokens=4, temperature=0), guide=guide)
        except CharoniaError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        else:
            print("answer", answer[0].text.strip() if guide else "", flush=True)
"""


def test_guides_wait_for_the_library_and_other_requests_do_not(tmp_path: Path) -> None:
    site = SiteCopy(tmp_path / "site")
    process = subprocess.Popen(
        [sys.executable, "-c", ASK, DEMO],
        env={**os.environ, **site.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )

    def said(word: str) -> str:
        assert process.stdin is not None and process.stdout is not None
        print(word, file=process.stdin, flush=True)
        return process.stdout.readline().strip()

    try:
        assert said("state").startswith("missing structured output is missing: there is no libcharonia_grammar.so")
        assert said("guided").startswith("UnsupportedError: structured output is missing")
        assert said("plain") == "answer"
        with site.compiling():
            assert said("state").startswith("compiling ")
            pending = said("guided")
            assert pending.startswith("PendingError: structured output is still being compiled")
            assert pending.endswith("; retry after 20 s")
            assert said("plain") == "answer"
        assert LOG in said("guided")  # it has failed
        site.library.write_bytes(b"no library")
        assert said("guided").startswith("UnsupportedError: structured output cannot be used: libcharonia_grammar.so: ")
        site.library.unlink()
        site.give()
        assert said("state") == "there"
        word, text = said("guided").split()
        assert word == "answer" and len(text) == 3 and text.isdigit()
    finally:
        process.communicate(timeout=HANG_S)
    assert process.returncode == 0


def test_what_is_installed_here_has_it() -> None:
    assert _engine.guide_library() == ("there", "")


def test_the_terminal_says_what_becomes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str]] = []
    now = 0.0

    def look(state: str, after: float = 2.0) -> list[tuple[str, str]]:
        nonlocal now
        now += after
        monkeypatch.setattr(_engine, "guide_library", lambda: (state, f"it is {state}"))
        said.clear()
        output.look()
        return list(said)

    def begin() -> StructuredOutput:
        return StructuredOutput(lambda text, level: said.append((level, text)), lambda: now)

    output = begin()
    assert look("there") == []  # as always but after the first start
    assert look("missing") == []
    output = begin()
    [(level, text)] = look("compiling")
    assert level == "info" and text.startswith("Structured output is still being compiled")
    assert look("compiling") == []
    assert look("there", after=0.1) == []
    assert look("there") == [("info", "Structured output is ready")]
    output = begin()
    assert look("compiling") != []
    assert look("missing") == [("warning", "it is missing")]
    assert look("missing") == []


class Checkout:
    """One in which scripts/compile_grammar.sh runs, with a compiler of the test's."""

    def __init__(self, folder: Path, compiler: str) -> None:
        self.folder = folder
        self.library = folder / "site packages" / "libcharonia_grammar.so"
        self.marker = Path(f"{self.library}.build")
        for each in (folder / "scripts", folder / ".venv" / "bin", folder / "build" / "engine", self.library.parent):
            each.mkdir(parents=True)
        shutil.copy2(ROOT / "scripts" / "compile_grammar.sh", folder / "scripts")
        cmake = folder / ".venv" / "bin" / "cmake"
        cmake.write_text(f"#!/bin/sh\n{compiler}\n")
        cmake.chmod(0o755)

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [self.folder / "scripts" / "compile_grammar.sh", self.library], start_new_session=True, cwd="/"
        )


def test_what_is_compiled_is_put_into_its_place_whole(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, "echo compiled >build/engine/libcharonia_grammar.so")
    assert checkout.start().wait(HANG_S) == 0
    assert checkout.library.read_text() == "compiled\n"
    assert list(checkout.library.parent.iterdir()) == [checkout.library]


def test_what_does_not_compile_leaves_the_name_of_its_log(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, "echo an error >&2; exit 1")
    assert checkout.start().wait(HANG_S) == 1
    assert not checkout.library.exists()
    assert checkout.marker.read_text() == f"{LOG}\n"
    assert (tmp_path / LOG).read_text() == "an error\n"


def test_what_is_interrupted_is_begun_anew(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, "echo half >build/engine/libcharonia_grammar.so; touch begun; exec sleep 600")
    running = checkout.start()
    deadline = time.monotonic() + HANG_S
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait(HANG_S)
    assert not checkout.library.exists()
    cmake = tmp_path / ".venv" / "bin" / "cmake"
    cmake.write_text(cmake.read_text().replace("exec sleep 600", "echo whole >build/engine/libcharonia_grammar.so"))
    assert checkout.start().wait(HANG_S) == 0
    assert checkout.library.read_text() == "whole\n"
