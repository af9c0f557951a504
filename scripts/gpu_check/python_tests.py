"""The Python tests whose device is a setting: parity with transformers, the engine's API, reproducible results."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path

from gpu_check.commands import run
from gpu_check.context import ROOT, Context
from gpu_check.records import ASSERTION, CRASH, DEVICE, Failure, Outcome

_DEVICE_ERROR = re.compile(r"cuda|cublas|nccl|illegal memory|out of memory", re.IGNORECASE)
# Of a rehearsal, in which nothing but the way through the tests is to be seen.
_REHEARSED = "llama2-grouped or qwen2"


def parity(context: Context, session: object, size: str) -> Outcome:
    """fp32 against transformers, 16 bits against its distance from fp32; then what only a GPU shows."""
    chosen = ["-k", _REHEARSED] if context.rehearse else []
    return _pytest(context, "parity", [ROOT / "tests" / "parity", ROOT / "tests" / "gpu", *chosen], limit_s=170)


def engine(context: Context) -> Outcome:
    tests = [ROOT / "tests" / "unit" / name for name in ("test_engine_api.py", "test_reproducible.py")]
    return _pytest(context, "engine_api", tests, limit_s=80, CHARONIA_REPRODUCIBLE="true")


def _pytest(context: Context, name: str, tests: Sequence[str | Path], *, limit_s: float, **variables: str) -> Outcome:
    report = context.logs / f"{name}.xml"
    report.unlink(missing_ok=True)
    command: list[str | Path] = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--maxfail=8",
        f"--junitxml={report}", *tests,
    ]  # fmt: skip
    done = run(command, context.logs / f"{name}.log", limit_s=limit_s, env=context.environment() | variables)
    if not report.is_file():
        return Outcome("failed", f"pytest {done.how}", failures=[Failure(name, done.text[-1500:], CRASH)])
    passed, skips, failures = 0, 0, []
    for case in xml.parse(report).getroot().iter("testcase"):
        broken = [*case.findall("failure"), *case.findall("error")]
        if broken:
            failures.append(_failure(f"{case.get('classname')}::{case.get('name')}", broken[0]))
        elif case.find("skipped") is not None:
            skips += 1
        else:
            passed += 1
    if done.code != 0 and not failures:
        failures.append(Failure(name, f"pytest {done.how}\n{done.text[-1000:]}", CRASH))
    told = f"{passed} tests passed" + (f", {skips} skipped" if skips else "")
    figures = {"passed": passed, "skipped": skips}
    if failures or not passed:
        return Outcome("failed", f"{len(failures)} failed, {told}", figures, failures=failures)
    return Outcome("passed", told, figures)


def _failure(where: str, element: xml.Element) -> Failure:
    lines = (element.text or element.get("message") or "").splitlines()
    telling = [line for line in lines if line.startswith(("E ", ">"))] or lines
    text = "\n".join(line[:240] for line in telling[:10])
    return Failure(where, text, DEVICE if _DEVICE_ERROR.search(text) else ASSERTION)
