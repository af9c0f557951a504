"""A process and its log file: problems with the file do not stop the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from charonia.serve import process
from charonia.serve.process import Child

HANG_S = 120
LINES = 20_000  # more than a pipe can hold


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine reads the last lines late, and the length of this wait is not tested here."""
    monkeypatch.setattr(process, "_LAST_LINES_S", HANG_S)


def child(log_file: Path, **options: object) -> Child:
    command = [sys.executable, "-c", f"for number in range({LINES}): print(f'line {{number}}')"]
    return Child("the child", command, os.environ, log_file, **options)  # type: ignore[arg-type]


def ended(one: Child) -> None:
    try:
        assert one.wait(HANG_S), "it hangs: nobody reads its output"
        assert one.exit_code == 0
        assert one.tail()[-1] == f"line {LINES - 1}"
    finally:
        one.kill_group()


def test_full_disk_does_not_stop_a_process() -> None:
    complaints: list[str] = []
    ended(child(Path("/dev/full"), complain=complaints.append))
    (complaint,) = complaints
    assert "/dev/full cannot be written" in complaint
    assert "No space left" in complaint


@pytest.mark.slow
@pytest.mark.parametrize("error", [BrokenPipeError(), SystemExit(1)], ids=["by the pipe", "by rich"])
def test_closed_terminal_does_not_stop_a_process(tmp_path: Path, error: BaseException) -> None:
    def broken(_: str) -> None:
        raise error

    ended(child(tmp_path / "log", on_line=broken, complain=broken))
    assert (tmp_path / "log").read_text().count("\n") == LINES


def test_a_killed_process_has_the_status_that_was_given(tmp_path: Path) -> None:
    one = Child("it", ["sleep", "600"], os.environ, tmp_path / "log")
    assert one.exit_status() is None
    one.kill_group("was too slow")
    assert one.exit_status() == "was too slow"


def test_logs_have_a_bounded_size_and_a_start_begins_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOG_BYTES", 10_000)
    log = tmp_path / "triton.log"
    log.write_text("of the run before\n")
    ended(child(log))
    names = ["triton.log", *(f"triton.log.{number}" for number in range(1, process.OLD_LOGS + 1))]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    assert all(file.stat().st_size <= 10_000 for file in tmp_path.iterdir())
    assert log.read_text().endswith(f"line {LINES - 1}\n")
    # A short run keeps the log of the previous run.
    monkeypatch.setattr(process, "LOG_BYTES", 10 << 20)
    ended(child(log))
    assert log.read_text().startswith("line 0\n")
    assert (tmp_path / "triton.log.1").read_text().endswith(f"line {LINES - 1}\n")


# Threads that use gRPC, as the liveness probe does, and children that start beside them.
FORKS = """
import subprocess, threading
from charonia.serve import liveness

def probe():
    while True:
        with liveness.grpc.insecure_channel("127.0.0.1:1") as channel:
            try:
                channel.unary_unary("/a/b")(b"", timeout=0.01)
            except liveness.grpc.RpcError:
                pass

for _ in range(4):
    threading.Thread(target=probe, daemon=True).start()
ended = {subprocess.Popen(["true"], preexec_fn=lambda: None).wait() for _ in range(40)}
print(ended, flush=True)
liveness.os._exit(0)
"""


def test_a_process_that_starts_beside_a_probe_is_not_aborted() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run([sys.executable, "-c", FORKS], env=env, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{0}\n", "")
