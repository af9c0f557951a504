"""Variables that `charonia serve` adds to the environment of Triton's process."""

from __future__ import annotations

from pathlib import Path

import pytest

from charonia.serve import triton

HERE = triton.Distribution(Path("/server"), Path("/python"), Path("/stub"), Path("/libraries"))


@pytest.mark.parametrize(
    ("given", "preloaded"),
    [
        ("", "libjemalloc.so.2"),
        ("/usr/lib/libother.so", "libjemalloc.so.2 /usr/lib/libother.so"),
        ("/usr/lib/libtcmalloc.so.4", "/usr/lib/libtcmalloc.so.4"),
        ("libasan.so.8", "libasan.so.8"),
    ],
)
def test_jemalloc_is_preloaded_unless_there_is_another_allocator(
    monkeypatch: pytest.MonkeyPatch, given: str, preloaded: str
) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.2")
    base = {"LD_PRELOAD": given} if given else {}
    assert triton.environment(HERE, base, jemalloc=True)["LD_PRELOAD"] == preloaded
    assert triton.environment(HERE, base, jemalloc=False).get("LD_PRELOAD", "") == given
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    assert triton.environment(HERE, base, jemalloc=True).get("LD_PRELOAD", "") == given
