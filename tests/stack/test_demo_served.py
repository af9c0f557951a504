"""The demo model gives the same responses through the whole stack as in transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from stack import START_LIMIT_S, Stack

EVALUATE = Path(__file__).resolve().parents[2] / "models" / "demo" / "evaluate.py"


def test_served_demo_model_passes_examination(stack: Stack) -> None:
    command = [sys.executable, EVALUATE, "--gateway", f"{stack.gateway}/v1", "--tools"]
    command += ["--require", "0.94", "--require-tools", "0.74", "--show", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "│ all without tools and JSON" in done.stdout and "│ tools and JSON" in done.stdout
