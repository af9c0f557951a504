"""`make serve` and `make chat` in this checkout after `make setup`, as in the README."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stack import DEMO_MODEL, HANG_S, Stack, running

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="the tests run in another environment than make's")
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_serve_and_make_chat_work_and_leave_no_process(tmp_path: Path) -> None:
    # The environment of a user, without the variables of a make that runs these tests. The variables of the setup stay.
    env = {"MAKEFLAGS": "", "MAKELEVEL": "0"}
    env |= {name: os.environ[name] for name in ("CHARONIA_CUDA",) if name in os.environ}
    (tmp_path / "run" / "workspaces").mkdir(parents=True)  # an empty folder, as at a first start
    with running(Stack(DEMO_MODEL, tmp_path / "run", env, command=("make", "-C", ROOT, "serve"))) as stack:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CHARONIA_")}
        chat = subprocess.run(
            ["make", "--silent", "-C", ROOT, "chat"],
            env={**inherited, **env, "CHARONIA_GRPC_PORT": stack.grpc.rpartition(":")[2]},
            # It samples: one response in two thousand does not name the city.
            input="What is the capital of France?\n\n" * 3,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert chat.returncode == 0 and "Paris" in chat.stdout, chat.stdout + chat.stderr
        stack.signal(signal.SIGTERM)
        stack.wait()
        deadline = time.monotonic() + HANG_S
        while stack.processes():
            assert time.monotonic() < deadline, stack.log()
            time.sleep(0.05)
        assert "Traceback" not in stack.log_file.read_text()
