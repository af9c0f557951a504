"""The worker: python -m gpu_check.worker FD CONTEXT. Reads {"run", "size"} lines, answers outcomes on descriptor FD:
those of what is done so far with {"partial": true}, and at last the whole one."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from gpu_check.commands import kill_tree
from gpu_check.context import Context
from gpu_check.records import DEVICE, OTHER, Failure, Outcome

_DEVICE_WORDS = ("CUDA", "cuda", "cuBLAS", "NCCL", "illegal memory access")


class Session:
    """What stages of one group hand on to each other: the loaded engine, above all. tell: says what a stage has found
    so far, which is kept should it be killed."""

    def __init__(self, tell: Callable[[Outcome], None]) -> None:
        self.tell = tell
        self._engine: Any = None
        self._engine_key: Any = None
        self._stack = ExitStack()

    def engine(self, model: str, settings: dict[str, Any]) -> Any:
        """An engine of `model` with these settings: the one that is loaded if they are its own."""
        key = (model, json.dumps(settings, sort_keys=True))
        if self._engine_key != key:
            from charonia import Engine

            self.close()
            self._engine = self._stack.enter_context(Engine.from_pretrained(model, **settings))
            self._engine_key = key
        return self._engine

    def close(self) -> None:
        self._engine = self._engine_key = None
        self._stack.close()


def describe(error: BaseException) -> Failure:
    """The message, which is what tells most, then the last frames."""
    frames = "".join(traceback.format_tb(error.__traceback__)[-3:])
    device = any(word in str(error) for word in _DEVICE_WORDS)
    return Failure(type(error).__name__, f"{str(error)[:1500]}\n{frames}", DEVICE if device else OTHER)


def _end_with(parent: int) -> None:
    """Ends this process and all that it started when the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    kill_tree(os.getpid())


def main() -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    context = Context.from_json(sys.argv[2])

    def answer(outcome: Outcome, partial: bool) -> None:
        answers.write(json.dumps({"partial": partial, **outcome.to_json()}) + "\n")
        answers.flush()

    session = Session(lambda outcome: answer(outcome, True))
    for line in sys.stdin:
        asked = json.loads(line)
        module, _, function = asked["run"].partition(":")
        print(f"== {asked['run']} {asked['size']}", flush=True)
        try:
            run: Callable[..., Outcome] = getattr(importlib.import_module(f"gpu_check.{module}"), function)
            outcome = run(context, session, asked["size"])
        except Exception as error:
            traceback.print_exc()
            if isinstance(error, ModuleNotFoundError) and error.name:
                error.msg += (
                    f": bring a wheel of it along, scripts/gpu_check.sh --pack .whl --along {error.name}-....whl"
                )
            failure = describe(error)
            outcome = Outcome("failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                              failures=[failure])  # fmt: skip
        answer(outcome, False)
    session.close()


if __name__ == "__main__":
    main()
