"""The measurement of the gateway's events, at work for a moment."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.gateway_events import main, measured  # noqa: E402


@pytest.mark.skipif(sys.platform != "linux", reason="CPU time is read in /proc")
def test_each_turn_of_each_checkout_has_its_cpu_time() -> None:
    found = asyncio.run(measured([ROOT, ROOT], count=3, turns=2, parts=2))
    assert [len(times) for times in found] == [2, 2]
    assert all(time > 0 for times in found for time in times)


def test_what_is_no_checkout_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gateway_events", str(tmp_path), str(ROOT)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"{tmp_path} is no checkout of Charonia" in capsys.readouterr().err
