"""The gateway in several processes: starts them, replaces those that die, and ends them together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import sqlite3
import sys
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

from charonia_gateway import folder as folders
from charonia_gateway.port import PortError, held_port
from charonia_gateway.settings import Settings
from charonia_gateway.shared import Shared, create
from charonia_gateway.worker import Message, Post

log = logging.getLogger("charonia_gateway")

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STABLE_S = 60.0  # a worker that lived so long is replaced at once
_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 30.0
_KILL_AFTER_S = 10.0  # what workers get on top of the time for running answers
_ALIVE_S = 2.0  # a worker says so often that its event loop gets on
_SILENT_S = 30.0  # one that says nothing for so long hangs
_START_S = 120.0  # so does one that is not ready by then


def delay_s(early_deaths: int) -> float:
    """Seconds before a worker is replaced, by how often in a row its number died young, this time included: none, then
    1, 2, 4 ... 30."""
    return 0.0 if early_deaths < 2 else min(_FIRST_DELAY_S * 2.0 ** (early_deaths - 2), _MAX_DELAY_S)


def supervise(settings: Settings, count: int) -> int:
    """Returns the exit code after SIGTERM, SIGINT or SIGHUP, when all workers have ended, or after the first start of
    one failed, or the port or a folder cannot be had. Call it from the main thread."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not with nohup
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(0))
    try:
        held = held_port(settings.host, settings.port)
    except PortError as error:
        log.error("%s", error)
        return 1
    try:
        folder = folders.made()
        _create(folder)
    except (OSError, sqlite3.Error) as error:  # a full disk, or one that lacks the locks that a database needs
        log.error("the gateway's processes need a folder for what they share: set TMPDIR to one (%s)", error)
        return 1
    try:
        return asyncio.run(_run(_Supervisor(settings, count, folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for one in held:
            one.close()


def _create(folder: Path) -> None:
    try:
        create(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


async def _run(supervisor: _Supervisor) -> int:
    try:
        return await supervisor.run()
    finally:  # one more signal does not keep the folder from being removed
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


@dataclass
class _Running:
    process: asyncio.subprocess.Process
    connection: Connection
    ready: bool = False
    idle: bool = False
    silent_s: float = 0.0  # on this process' clock: while it is stopped, no time goes by

    @property
    def hangs(self) -> bool:
        return self.silent_s >= (_SILENT_S if self.ready else _START_S)

    def send(self, message: Message | Post) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.connection.send(message)


class _Supervisor:
    def __init__(self, settings: Settings, count: int, folder: Path) -> None:
        self._settings = settings
        self._count = count
        self._folder = folder
        self._began = int(time.time())
        self._shared = Shared(folder)
        self._workers: dict[int, _Running] = {}  # by number
        self._started: set[int] = set()  # numbers that have been ready
        self._unforgotten: set[int] = set()  # numbers of dead workers of which something is still held
        self._ending = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._signalled)
        log.info("the gateway runs in %d worker processes", self._count)
        watching = asyncio.create_task(self._end_hanging())
        try:
            await asyncio.gather(*(self._keep(number) for number in range(1, self._count + 1)))
        finally:
            watching.cancel()
            self._shared.close()
        return self._exit_code

    async def _end_hanging(self) -> None:
        while True:
            await asyncio.sleep(_ALIVE_S)
            for number, one in self._workers.items():
                one.silent_s += _ALIVE_S
                if one.hangs:
                    why = "has not answered for" if one.ready else "is not ready after"
                    log.error(
                        "worker %d (process %d) %s %g s and is killed", number, one.process.pid, why, one.silent_s
                    )
                    _kill(one)

    async def _keep(self, number: int) -> None:
        early_deaths = 0
        restarted = False
        while not self._ending.is_set():
            began = time.monotonic()
            what, code = await self._run_one(number, restarted)
            if self._ending.is_set():
                return
            if len(self._started) < self._count:
                log.error("worker %d%s before all were ready: the gateway ends", number, what)
                self._exit_code = code if code > 0 else 1
                self._end()
                return
            early_deaths = early_deaths + 1 if time.monotonic() - began < _STABLE_S else 0
            delay = delay_s(early_deaths)
            if number in self._unforgotten:  # what stood in the way may go away
                delay = max(delay, _FIRST_DELAY_S)
            log.error("worker %d%s; another one starts%s", number, what, f" in {delay:g} s" if delay else "")
            restarted = True
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), delay)

    async def _run_one(self, number: int, restarted: bool) -> tuple[str, int]:
        """From a worker's start to its end: what became of it, in words, and its exit code."""
        if number in self._unforgotten:
            self._forget(number)
        try:
            running = await self._start(number, restarted)
        except OSError as error:  # no descriptor, process or memory can be had
            return f" cannot be started ({error})", 1
        code = await running.process.wait()
        self._has_ended(number, running)
        return f" (process {running.process.pid}) {_ending_of(code)}", code

    async def _start(self, number: int, restarted: bool) -> _Running:
        own, its = Pipe()
        with contextlib.ExitStack() as on_error, its:
            on_error.enter_context(own)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "charonia_gateway.worker_main",
                str(its.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(its.fileno(),),
            )
            on_error.pop_all()
        running = self._workers[number] = _Running(process, own)
        running.send(Post(self._settings, number, self._folder, self._began, restarted, _ALIVE_S))
        asyncio.get_running_loop().add_reader(own.fileno(), self._read, number, running)
        if self._ending.is_set():  # since it was started
            process.terminate()
        return running

    def _read(self, number: int, running: _Running) -> None:
        try:
            message: Message = running.connection.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(running.connection.fileno())
            return
        running.silent_s = 0.0
        if message == "alive":
            return
        if message == "idle":
            running.idle = True
            if not self._ending.is_set():  # somebody told this one alone
                running.send("end")
            self._end_if_idle()
            return
        running.ready = True
        self._started.add(number)
        if len(self._started) == self._count:
            for one in self._workers.values():
                one.send("started")
        if self._ending.is_set():
            running.send("drain")

    def _has_ended(self, number: int, running: _Running) -> None:
        """Nothing that it had is held any more."""
        del self._workers[number]
        asyncio.get_running_loop().remove_reader(running.connection.fileno())
        running.connection.close()
        self._forget(number)
        self._end_if_idle()

    def _forget(self, number: int) -> None:
        """Where that cannot be now, it is tried again before another worker takes the number."""
        try:
            self._shared.forget(number)
            mark_process_dead(number, str(self._folder))  # type: ignore[no-untyped-call]
        except (sqlite3.Error, OSError) as error:
            self._unforgotten.add(number)
            log.error("what worker %d had running is still counted: %s", number, error)
        else:
            self._unforgotten.discard(number)

    def _signalled(self) -> None:
        """The first time workers let what runs come to its end, then they end at once."""
        if self._ending.is_set():
            for one in self._workers.values():
                one.send("end")
        else:
            self._end()

    def _end(self) -> None:
        self._ending.set()
        for one in self._workers.values():
            if one.ready:
                one.send("drain")
            else:
                one.process.terminate()
        limit = self._settings.shutdown_timeout_s + _KILL_AFTER_S
        asyncio.get_running_loop().call_later(limit, self._kill)

    def _end_if_idle(self) -> None:
        """They end together: until then each says that the gateway takes no request."""
        if self._ending.is_set() and all(one.idle or not one.ready for one in self._workers.values()):
            for one in self._workers.values():
                one.send("end")

    def _kill(self) -> None:
        for number, one in self._workers.items():
            log.error("worker %d (process %d) has not ended by itself and is killed", number, one.process.pid)
            _kill(one)


def _kill(running: _Running) -> None:
    with contextlib.suppress(ProcessLookupError):
        running.process.kill()


def _ending_of(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
