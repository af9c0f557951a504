"""The gateway in several processes: starts the workers, replaces a worker that dies, and stops them together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

from charonia_gateway.port import held_port
from charonia_gateway.settings import Settings

log = logging.getLogger("charonia_gateway")

CORES_PER_WORKER = 4  # the other cores are for Triton and its Python models, which need more time for each response
MAX_WORKERS = 8
SETTINGS_EXIT_CODE = 2  # exit code of a process with unusable settings
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STABLE_S = 60.0  # a worker that lived so long is replaced immediately
_MAX_DELAY_S = 30.0
_KILL_AFTER_S = 10.0  # in addition to the time for running requests


def default_workers(cores: float | None = None) -> int:
    """One for every four cores of this process, at least one and at most eight."""
    return max(1, min(MAX_WORKERS, int((_cores() if cores is None else cores) / CORES_PER_WORKER)))


def _cores(quota: Path = _QUOTA) -> float:
    """Processors that this process may use; in a container at most its quota (cgroup v2)."""
    found = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no quota, or no cgroup v2
        limit, period = quota.read_text().split()
        found = min(found, int(limit) / int(period))
    return found


def delay_s(early_deaths: int) -> float:
    """Seconds before a worker is replaced that has died early so often in a row: 0, 1, 2, 4 ... 30."""
    return 0.0 if early_deaths < 2 else min(2.0 ** (early_deaths - 2), _MAX_DELAY_S)


def supervise(settings: Settings, count: int) -> int:
    """Run the gateway until SIGTERM, SIGINT or SIGHUP. Returns the exit code. Raises PortError."""
    held = held_port(settings.host, settings.port)
    try:
        with tempfile.TemporaryDirectory(prefix="charonia-gateway-metrics-") as folder:
            return asyncio.run(_Supervisor(settings, count, folder).run())
    finally:
        for one in held:
            one.close()


class _Supervisor:
    def __init__(self, settings: Settings, count: int, folder: str) -> None:
        self._settings = settings
        self._count = count
        self._folder = folder  # for the metrics of the workers
        self._workers: dict[asyncio.subprocess.Process, Connection] = {}
        self._ending = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._stop)
        log.info("the gateway runs in %d processes", self._count)
        await asyncio.gather(*(self._keep(number) for number in range(1, self._count + 1)))
        return self._exit_code

    async def _keep(self, number: int) -> None:
        early_deaths = 0
        restarted = False
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                code = await self._run_one(restarted)
            except OSError as error:  # no free descriptor, process or memory
                log.error("worker %d cannot be started: %s", number, error)
                code = 1
            if self._ending.is_set():
                return
            if code == SETTINGS_EXIT_CODE:
                self._exit_code = code
                self._stop()
                return
            early_deaths = early_deaths + 1 if time.monotonic() - began < _STABLE_S else 0
            delay = delay_s(early_deaths)
            ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            log.error("worker %d %s; its replacement starts in %g s", number, ended, delay)
            restarted = True
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), delay)

    async def _run_one(self, restarted: bool) -> int:
        """Run a worker until it ends. Returns its exit code."""
        own, its = Pipe()
        with own, its:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "charonia_gateway.worker",
                str(its.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(its.fileno(),),
                env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": self._folder},
            )
            its.close()
            self._workers[process] = own
            with contextlib.suppress(OSError):  # it has ended
                own.send((self._settings, restarted))
                if self._ending.is_set():  # since it was started
                    own.send("stop")
            code = await process.wait()
            del self._workers[process]
        mark_process_dead(process.pid, self._folder)  # type: ignore[no-untyped-call]
        return code

    def _stop(self) -> None:
        """The first time, workers finish their running requests. The second time they end immediately."""
        if not self._ending.is_set():
            self._ending.set()
            limit = self._settings.shutdown_timeout_s + _KILL_AFTER_S
            asyncio.get_running_loop().call_later(limit, self._kill)
        for connection in self._workers.values():
            with contextlib.suppress(OSError):  # it has ended
                connection.send("stop")

    def _kill(self) -> None:
        for process in self._workers:
            log.error("a worker (process %d) has not ended by itself and is killed", process.pid)
            process.kill()
