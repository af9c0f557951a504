"""tests/gpu on the emulated device, without the rest of the check."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from gpu_check.build import make_site
from gpu_check.context import ROOT, Context


def run(context: Context, folder: Path) -> int:
    """folder: of CMake, with the target _engine_on_host built. Returns pytest's exit code."""
    module = folder / "emulated" / f"_engine{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not module.is_file():
        print(f"{module} is missing: cmake --build {folder} --target _engine_on_host", file=sys.stderr)
        return 1
    package = make_site(folder / "emulated" / "site")
    (package / module.name).symlink_to(module)
    env = {**context.environment(), "PYTHONPATH": str(package.parent), "CHARONIA_DEVICE": "cuda"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(min(context.jobs, 4)), "--durations", "9"]
    return subprocess.run([*command, ROOT / "tests" / "gpu"], env=env, cwd=ROOT).returncode
