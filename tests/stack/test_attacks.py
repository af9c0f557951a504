"""Attacks on a running stack. Each is bounded in the memory and the CPU time of every process, and other clients are
answered. No bound is on elapsed time, because machines differ."""

from __future__ import annotations

import resource
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from attacks import ATTACKS, IDLE_CONNECTIONS, Target, target_of
from engine_metrics import idle
from stack import DEMO_MODEL, HANG_S, Stack, running

pytestmark = pytest.mark.slow

GROWTH_MIB = 300
CPU_S = 20.0


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo model. This process may open as many connections as the attacks need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * IDLE_CONNECTIONS)), hard))
    with running(Stack(DEMO_MODEL, tmp_path_factory.mktemp("attacked"))) as served:
        yield served


def cpu_s(stack: Stack) -> dict[str, float]:
    """CPU seconds of the processes that handle requests."""
    times = {name: psutil.Process(int(name.split()[-1])).cpu_times() for name in stack.memory_mib()}
    return {name: time.user + time.system for name, time in times.items()}


def tracebacks(stack: Stack) -> list[str]:
    logs = [file.read_text(errors="replace") for file in sorted(stack.run_dir.glob("port-*/*.log"))]
    return [part[:2000] for log in logs for part in log.split("Traceback")[1:]]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
async def test_an_attack_costs_little_and_other_clients_are_answered(
    attacked: Stack, attack: Callable[[Target], Awaitable[None]]
) -> None:
    attacked.forget_peaks()
    memory, cpu, before = attacked.memory_mib(), cpu_s(attacked), tracebacks(attacked)
    async with target_of(attacked.gateway) as target:
        await attack(target)
        assert not [status for status in target.statuses if status.startswith("5")], target.statuses
        assert await target.chat(max_tokens=4) == 200
    await idle(attacked.metrics)
    peaks, now = attacked.memory_mib("VmHWM"), cpu_s(attacked)
    grown = {name: peaks[name] - size for name, size in memory.items()}
    spent = {name: now[name] - before for name, before in cpu.items()}
    print(attack.__name__, "MiB", grown, "CPU s", {name: round(value, 1) for name, value in spent.items()})
    assert max(grown.values()) < GROWTH_MIB, grown
    assert max(spent.values()) < CPU_S, spent
    assert tracebacks(attacked) == before


def test_files_of_a_stack_are_closed_to_other_users(attacked: Stack) -> None:
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 4}
    assert httpx.post(f"{attacked.gateway}/v1/completions", json=body, timeout=HANG_S).status_code == 200
    files = [path for folder in attacked.run_dir.glob("port-*") for path in (folder, *folder.rglob("*"))]
    files += {Path(open_.path) for pid in attacked.processes() for open_ in psutil.Process(pid).memory_maps()
              if open_.path.startswith("/dev/shm/")}  # fmt: skip
    assert any(path.suffix == ".log" for path in files) and any(path.parent == Path("/dev/shm") for path in files)
    assert [path for path in files if path.lstat().st_mode & 0o077 and not path.is_symlink()] == []
