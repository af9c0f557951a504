"""Runs stages in worker processes, within their time limits and the budget of the whole."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from gpu_check import records
from gpu_check.commands import kill_tree
from gpu_check.context import Context
from gpu_check.plan import BY_NAME, Stage
from gpu_check.records import Failure, Outcome, Results, StageRecord

_ENDING_S = 20
_LOG_LINES = 25


@dataclass
class Skip:
    """A stage that was not run this time, and why."""

    stage: Stage
    why: str


class Runner:
    """again: stages that passed with these sources are done once more. budget_s: no stage is begun that would, by what
    it took before, end later; what a rehearsal compiles is not of it, as that is brought along. save: called whenever
    the results have changed."""

    def __init__(
        self,
        context: Context,
        results: Results,
        *,
        budget_s: float,
        again: bool,
        say: Callable[[str], None],
        save: Callable[[], None],
    ) -> None:
        self._context = context
        self._results = results
        self._again = again
        self._say = say
        self._save = save
        self._deadline = time.monotonic() + budget_s
        self._worker: Worker | None = None
        self._engine_sources, self._sources = records.engine_sources(), records.all_sources()

    def run(self, stages: Sequence[Stage]) -> list[Skip]:
        """Runs what is not done. Returns what was left out."""
        skips = []
        try:
            for stage in stages:
                why = self._reason_to_skip(stage)
                if why:
                    self._say(f"{stage.name}: {why}")
                    if why != _DONE:
                        skips.append(Skip(stage, why))
                    continue
                record = self._measure(stage)
                self._results.records[stage.name] = record
                self._save()
                if not self._counts(stage):
                    self._deadline += record.seconds
                self._say(f"{stage.name}: {record.outcome.status} in {record.seconds:.0f} s: {record.outcome.summary}")
                if record.outcome.status == "skipped":
                    skips.append(Skip(stage, record.outcome.summary))
        except BaseException:  # who asks this process to end does not wait for a stage
            if self._worker is not None:
                self._worker.kill()
                self._worker = None
            raise
        self._leave()
        return skips

    def sources_of(self, stage: Stage) -> str:
        return self._engine_sources if stage.name == "build" else self._sources

    def is_done(self, stage: Stage) -> bool:
        """Passed, with the sources as they are; what was built must still be there."""
        record = self._results.records.get(stage.name)
        done = record is not None and record.outcome.status == "passed" and record.sources == self.sources_of(stage)
        return done and (stage.name != "build" or any((self._context.site / "charonia").glob("_engine.*.so")))

    def _counts(self, stage: Stage) -> bool:
        """Whether its seconds are of the budget: what a rehearsal compiles is brought along elsewhere."""
        return not (self._context.rehearse and stage.name == "build")

    def _reason_to_skip(self, stage: Stage) -> str:
        if self.is_done(stage) and not self._again:
            return _DONE
        for name in stage.needs:
            # A rehearsal may use the package that is installed; then nothing was built.
            if not self.is_done(BY_NAME[name]) and not (self._context.rehearse and name not in self._results.records):
                return f"not run: it needs {name}, which has not passed"
        before = self._results.records.get(stage.name)
        guess = before.seconds if before and before.outcome.status == "passed" else stage.guess_s
        left = self._deadline - time.monotonic()
        if self._counts(stage) and guess > left:
            return f"not run: about {guess:.0f} s and {max(left, 0):.0f} s of the budget are left"
        return ""

    def _measure(self, stage: Stage) -> StageRecord:
        began = time.monotonic()

        def record(outcome: Outcome) -> StageRecord:
            at = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
            return StageRecord(outcome, self.sources_of(stage), round(time.monotonic() - began, 1), at)

        def keep(partial: Outcome) -> None:
            self._results.records[stage.name] = record(_unfinished(partial, "not done when this was written"))
            self._save()

        return record(self._ask(stage, keep))

    def _ask(self, stage: Stage, keep: Callable[[Outcome], None]) -> Outcome:
        if self._worker is None or self._worker.group != stage.group:
            self._leave()
            self._worker = Worker(self._context, stage.group)
        self._say(f"{stage.name}: {stage.what} ...")
        limit = stage.limit_s
        if self._counts(stage):
            limit = min(limit, max(self._deadline - time.monotonic(), 1) + 30)
        so_far = Outcome("failed", "nothing")

        def told(partial: Outcome) -> None:
            nonlocal so_far
            so_far = partial
            keep(partial)

        answer = self._worker.run(stage, limit, told)
        if isinstance(answer, Outcome):
            return answer
        tail = self._worker.log_tail()
        self._worker.kill()
        self._worker = None
        outcome = _unfinished(so_far, answer)
        outcome.failures.append(Failure(stage.name, f"{answer}\n{tail}", records.CRASH))
        return outcome

    def _leave(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


def _unfinished(partial: Outcome, why: str) -> Outcome:
    summary = f"{why}; so far: {partial.summary}"
    return Outcome("failed", summary, partial.figures, partial.records, list(partial.failures))


_DONE = "done before, with these sources"


class Worker:
    """A process that runs one stage after the other: what to run goes in on stdin, outcomes come out on a pipe of their
    own, and all that is printed goes to a log file."""

    def __init__(self, context: Context, group: str) -> None:
        self.group = group
        context.logs.mkdir(parents=True, exist_ok=True)
        self.log = context.logs / f"{group}.log"
        ours, theirs = os.pipe()
        os.set_inheritable(theirs, True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpu_check.worker", str(theirs), context.to_json()],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=context.work,
                env=context.environment(triton=group == "stack"),
                pass_fds=[theirs],
            )
        os.close(theirs)
        os.set_blocking(ours, False)
        self._answers = ours
        self._pending = b""

    def run(self, stage: Stage, limit_s: float, told: Callable[[Outcome], None]) -> Outcome | str:
        """The outcome, or why there is none. told: gets what was found so far, whenever there is more."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"run": stage.run, "size": stage.size}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._ended()
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while True:
                while b"\n" not in self._pending:
                    if not selector.select(max(0.0, deadline - time.monotonic())):
                        return f"not done after {limit_s:.0f} s, and was killed"
                    received = os.read(self._answers, 1 << 16)
                    if not received:
                        return self._ended()
                    self._pending += received
                line, _, self._pending = self._pending.partition(b"\n")
                answer = json.loads(line)
                if not answer["partial"]:
                    return Outcome.from_json(answer)
                told(Outcome.from_json(answer))

    def _ended(self) -> str:
        code = self._process.wait()
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def log_tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])

    def end(self) -> None:
        """Lets it free what it holds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(_ENDING_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        self.kill()

    def kill(self) -> None:
        """With all that it started."""
        kill_tree(self._process.pid)
        self._process.wait()
        os.close(self._answers)
