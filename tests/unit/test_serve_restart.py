"""A restarted Triton finds no remains of the previous one. Messages about a process that died."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file
from typer.testing import CliRunner
from waiting import wait_until

from charonia import _engine
from charonia.errors import ServeError
from charonia.serve import access, command, drain, launcher
from charonia.serve.launcher import _Signals, _Stack
from charonia.serve.models import Models, Served
from charonia.serve.process import Child
from charonia.settings import ServeSettings
from charonia.triton_models import source_dir
from charonia.weights import workspace
from charonia.weights.fingerprint import fingerprint

HANG_S = 120
UNLOADED = "I1121 07:33:19.808406 27217 model_lifecycle.cc:642] \"successfully unloaded 'ensemble' version 1\""


class Hurried(_Signals):
    """Skips delays."""

    def wait(self, seconds: float) -> bool:
        return False


def left_in_shared_memory(stack: _Stack) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{stack._shared_memory}*"))


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Stack]:
    """A stack whose first Triton logs that the ensemble is unloaded, and leaves shared memory. Restarted ones are
    silent, and ready immediately."""
    one = _Stack(ServeSettings(max_restarts=2, gateway=False), {}, Console(quiet=True), Hurried())
    monkeypatch.setattr(one, "_until_server_ready", lambda: True)
    monkeypatch.setattr(drain, "CUT_OFF_S", 0)
    monkeypatch.setattr(drain, "LAST_TEXT_S", 0)

    def start(code: str) -> Child:
        return Child("Triton", [sys.executable, "-c", code], os.environ, None, one._control.see)

    served = [Served("a", "", Path("nowhere"))]
    url = "http://127.0.0.1:9"
    one._models = Models(one._control, served, alive=lambda: True, metrics_url=url, limits=(HANG_S, HANG_S))
    file = f"/dev/shm/{one._shared_memory}stub"
    one._children = [start(f"print({UNLOADED!r}); open({file!r}, 'w')")]
    one._start_server = lambda: start("import time; time.sleep(600)")
    assert one._children[0].wait(HANG_S)
    yield one
    one._stop()
    one._control.close()
    assert left_in_shared_memory(one) == []


def test_new_server_loads_the_models_that_the_old_one_had_unloaded(stack: _Stack) -> None:
    def is_unloaded() -> bool:
        return stack._control.wait_unloaded(["ensemble"], 0, lambda: True)

    stack._children[0].tail()
    assert is_unloaded()
    assert stack._restart()
    assert not is_unloaded()


def test_a_restart_updates_the_fingerprint_of_linked_weights(
    stack: _Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    manifest = stack._models.served()[0].workspace / workspace.WEIGHTS / "manifest.json"
    manifest.parent.mkdir(parents=True)
    linked = {"source": str(tmp_path), "files": {str(tmp_path / "model.safetensors"): {"bytes": 12}}}
    manifest.write_text(json.dumps({**linked, "weights": "2-old"}))
    assert stack._restart()
    assert json.loads(manifest.read_text()) == {**linked, "weights": fingerprint(tmp_path)}


def test_a_damaged_manifest_does_not_prevent_a_restart(
    stack: _Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manifest = stack._models.served()[0].workspace / workspace.WEIGHTS / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"files": {"a": 1}}')
    said: list[str] = []
    monkeypatch.setattr(stack, "_say", lambda text, *_: said.append(text))
    assert stack._restart()
    assert any("system_fingerprint" in text for text in said)
    assert stack._children[0].exit_status() is None


def test_a_key_may_not_load_a_workspace(stack: _Stack, tmp_path: Path) -> None:
    weights = tmp_path / "triton_models" / "weights"
    weights.mkdir(parents=True)
    (weights / "manifest.json").touch()
    with pytest.raises(ServeError, match=r"is a workspace, which contains code: .* use charonia models load"):
        stack._answer({"do": "load", "name": f"b={tmp_path}", "from_key": "1"})


def take_models(stack: _Stack, folder: Path, load_s: float = HANG_S) -> dict[str, str]:
    """Make the stack's models, with its run folder in `folder`. Return the order that adds a model."""
    stack._own = folder / "port-1"
    stack._added.mkdir(parents=True)
    stack._models = Models(
        stack._control, [Served("a", "", Path("nowhere"))], alive=lambda: True, metrics_url="",
        limits=(HANG_S, load_s), make=stack._made, publish=stack._write_models,
    )  # fmt: skip
    return {"do": "load", "name": f"b={source_dir() / 'models' / 'demo' / 'model'}"}


def test_added_model_that_triton_refuses_leaves_nothing(
    stack: _Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the lock of its workspace nor its parts. The same order works later."""
    refused = True

    def load(part: str, *_: Any) -> None:
        if refused and part == "engine.b":
            raise ServeError(f"{part} cannot be loaded: no memory")

    monkeypatch.setattr(stack._control, "load", load)
    order = take_models(stack, tmp_path)
    with contextlib.ExitStack() as stack._held:
        with pytest.raises(ServeError, match=r"engine\.b cannot be loaded: no memory"):
            stack._answer(order)
        (made,) = tmp_path.glob("workspaces/demo-*")
        assert not workspace.is_held(made) and list(stack._own.rglob("*")) == [stack._added]
        refused = False
        assert stack._answer(order) == "b is loaded"
        assert workspace.is_held(made) and stack._models_file.read_text() == "b=b"
        assert {part.name for part in stack._added.iterdir()} == set(stack._models.served()[1].parts)


def test_files_of_an_added_model_stay_while_triton_may_read_them(
    stack: _Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("charonia.serve.models._UNLOAD_S", 0)
    order, late = take_models(stack, tmp_path, load_s=0), r"preprocessing\.b is not loaded after 0 s"
    with contextlib.ExitStack() as stack._held:
        with pytest.raises(ServeError, match=late):
            stack._answer(order)
        assert [part.name for part in stack._added.iterdir()] == ["preprocessing.b"]
        assert workspace.is_held(next(tmp_path.glob("workspaces/demo-*")))
        with pytest.raises(ServeError, match=r"has not ended an earlier attempt to load preprocessing\.b") as again:
            stack._answer(order)
        assert again.value.status == 409
        stack._control.see(UNLOADED.replace("'ensemble'", "'preprocessing.b'"))
        with pytest.raises(ServeError, match=late):
            stack._answer(order)
        stack._remove_unserved()
        assert list(stack._added.iterdir()) == []


def test_next_load_repeats_a_failed_write_of_the_models_file(
    stack: _Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack._control, "load", lambda *_: None)
    order = take_models(stack, tmp_path)
    obstacle = stack._own / "models.new"
    obstacle.mkdir()
    with contextlib.ExitStack() as stack._held:
        with pytest.raises(ServeError, match=r"models\.new cannot be written \(Is a directory\), .* models load again"):
            stack._answer(order)
        obstacle.rmdir()
        assert stack._answer({"do": "load", "name": "b"}) == "b is loaded already"
        assert stack._models_file.read_text() == "b=b"


def test_loading_a_model_prints_the_warnings_about_its_cache(
    stack: _Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, ...]] = []
    monkeypatch.setattr(stack, "_say", lambda *text: said.append(text))
    monkeypatch.setattr(stack._control, "load", lambda *_: None)
    monkeypatch.setattr(command, "_ask", lambda _, **question: stack._answer(question))
    order, load = take_models(stack, tmp_path), ["load", "b"]
    with contextlib.ExitStack() as stack._held:
        assert stack._answer(order) == "b is loaded"
        manifest = stack._models.served()[1].workspace / workspace.WEIGHTS / "manifest.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "kv_cache": {"made_for": "fp8"}}))
        run = CliRunner().invoke(command.models_app, load)
        manifest.write_text('{"kv_cache": 1}')
        damaged = CliRunner().invoke(command.models_app, load)
    assert run.stdout == damaged.stdout == "b is loaded already\n" and not damaged.stderr, run.exception
    assert run.stderr.startswith("warning: b: demo was made for a quantised KV cache") and run.stderr.count("\n") == 1
    # A log in JSON has the level.
    assert [text[0][:9] for text in said if text[1:] == ("warning",)] == ["b: demo w", "b is load"]


@pytest.mark.parametrize("name", ["=m", "a,b=m", "a="])
def test_a_new_model_needs_one_name_and_one_location(stack: _Stack, name: str) -> None:
    with pytest.raises(ServeError, match="names no model: write MODEL or NAME=MODEL"):
        stack._answer({"do": "load", "name": name})


def test_hanging_servers_are_restarted_a_limited_number_of_times(
    stack: _Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Child] = []
    start: Callable[[], Child] = stack._start_server

    def start_and_count() -> Child:
        started.append(start())
        return started[-1]

    def hang() -> bool:
        raise ServeError("Triton is not ready after 600 s")

    monkeypatch.setattr(stack, "_start_server", start_and_count)
    assert stack._restart()  # this one is ready, and dies later
    stack._children[0].kill_group()
    monkeypatch.setattr(stack, "_until_server_ready", hang)
    assert stack._restart()
    assert stack._children[0].exit_status() == "was not ready in time and was killed"
    assert not stack._restart()
    assert len(started) == stack._settings.max_restarts == 2


def test_restart_names_the_adapters_that_are_lost(
    stack: _Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(stack, "_say", lambda text, level="info", of="": told.append(text))
    stack._inference = {"lora_adapters": "start=/start"}
    changes = ("loaded the adapter %s from /x", "unloaded the adapter %s")
    did = ((0, "start"), (0, "kept"), (0, "gone"), (1, "gone"))
    lines = [f"I1128 06:51:38.000000 1 charonia:1] {changes[which] % name}" for which, name in did]
    child = stack._spawn("Triton", [sys.executable, "-c", f"print({chr(10).join(lines)!r})"], {}, tmp_path / "log")
    assert child.wait(HANG_S) and len(child.tail()) == len(lines)
    stack._children = [child]
    assert stack._restart()
    (lost,) = [text for text in told if "adapters are lost" in text]
    assert "Triton ran: kept. Load them again" in lost and not stack._adapters


def test_restarts_of_a_server_that_was_stable_are_forgotten(stack: _Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(stack, "_say", lambda text, level="info", of="": told.append(text))
    for _ in range(2):
        assert stack._restart()
        stack._children[0].kill_group()
    stack._ready_at -= launcher._STABLE_S
    assert stack._restart()
    assert [text.partition("is started again in ")[2] for text in told if "in a row" in text] == [
        "1 s (restart 1 of at most 2 in a row)",
        "2 s (restart 2 of at most 2 in a row)",
        "1 s (restart 1 of at most 2 in a row)",
    ]


@pytest.mark.slow
def test_start_timeout_error_names_its_setting(stack: _Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def wait(seconds: float) -> bool:
        nonlocal now
        now += seconds
        return False

    assert stack._restart()  # one that lives
    said = r"Triton is not ready after 50 s \(b does not answer\).*CHARONIA_START_TIMEOUT_S"
    with monkeypatch.context() as patched:
        patched.setenv("CHARONIA_START_TIMEOUT_S", "50")
        patched.setattr(stack, "_settings", ServeSettings(gateway=False))
        patched.setattr(stack._signals, "wait", wait)
        patched.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: now))
        with pytest.raises(ServeError, match=said):
            stack._until(stack._children[0], {"a": lambda: True, "b": lambda: False})
    assert 50 <= now < 51


def killed(name: str, number: signal.Signals, said: str = "") -> Child:
    """Return a process that prints a text and dies by a signal."""
    code = (
        f"import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); print({said!r}, flush=True); "
        f"os.kill(os.getpid(), {int(number)})"
    )
    child = Child(name, [sys.executable, "-c", code], os.environ, None)
    assert child.wait(HANG_S)
    return child


@pytest.mark.parametrize(
    ("number", "http_inference", "hint"),
    [
        (signal.SIGKILL, False, "SIGKILL (often the kernel's out-of-memory killer: see dmesg);"),
        (signal.SIGSEGV, True, "SIGSEGV (one deeply nested body to its HTTP port can do that"),
        (signal.SIGSEGV, False, "SIGSEGV;"),
    ],
)
def test_death_by_a_signal_names_the_usual_cause(
    stack: _Stack, number: signal.Signals, http_inference: bool, hint: str
) -> None:
    stack._settings = ServeSettings(gateway=False, http_inference=http_inference)
    stack._children[0] = killed("Triton", number)
    assert f"Triton was killed by {hint}" in str(stack._death_of(stack._children[0]))


def test_error_of_a_killed_process_has_only_its_last_output(stack: _Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    child = stack._children[0] = killed("Triton", signal.SIGKILL, "ERROR: something")
    assert str(stack._death_of(child)).endswith("its log says:\n  something")
    monkeypatch.setattr(launcher, "_LAST_OUTPUT_S", -1)
    assert str(stack._death_of(child)).endswith("its log says:\n  nothing of it")


def test_death_of_the_gateway_is_reported_before_triton_stops(stack: _Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(stack, "_say", lambda text, level="info", of="": told.append(text))
    monkeypatch.setattr(stack._control, "drain", lambda *given: told.append("drain"))
    stack._ready = True
    stack._children = [stack._start_server(), killed("the gateway", signal.SIGKILL)]
    stack._stop()
    assert told[:2] == ["the gateway was killed by SIGKILL; stopping Triton", "drain"]


def test_shutdown_does_not_wait_for_a_loading_model(stack: _Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ensemble cannot be unloaded, and its engine does not report its queue."""
    served = [Served("a", "", Path("nowhere")), Served("b", "b", Path("nowhere"))]
    stack._models = Models(stack._control, served, alive=lambda: True, metrics_url="", limits=(HANG_S, HANG_S))
    stack._models._states["b"] = "loading"
    drained: list[list[str]] = []
    monkeypatch.setattr(stack._control, "drain", lambda *given: drained.append(given[-1]))
    stack._children[0] = stack._start_server()
    stack._ready = True
    stack._stop()
    assert drained == [[""]]


@pytest.mark.parametrize("models", ["a", "ab"])
def test_run_folder_without_sockets_is_a_warning(stack: _Stack, tmp_path: Path, models: str) -> None:
    """Like some network file systems. The message appears if there is something to load."""
    said = io.StringIO()
    stack._console = Console(file=said, soft_wrap=True)
    served = [Served(name, "" if name == "a" else name, Path("nowhere")) for name in models]
    stack._models = Models(stack._control, served, alive=lambda: True, metrics_url="", limits=(HANG_S, HANG_S))
    (tmp_path / "control.sock").mkdir()
    stack._own = tmp_path
    with contextlib.ExitStack() as stack._held:
        stack._take_orders()
    words = f"charonia models does not reach this server: a socket cannot be made in {tmp_path} (Is a directory)"
    assert (words in said.getvalue()) is (len(models) > 1)


@pytest.mark.parametrize("unloads", [True, False])
def test_triton_is_killed_when_its_engines_are_unloaded_and_its_clients_are_gone(
    stack: _Stack, monkeypatch: pytest.MonkeyPatch, unloads: bool
) -> None:
    """A Triton that unloads no engine is killed at the time limit, with a message."""
    monkeypatch.setattr(launcher, "_KILL_AFTER_S", HANG_S if unloads else 0)
    line = UNLOADED.replace("ensemble", "engine") if unloads else ""
    code = f"""if 1:
        import signal, time
        signal.signal(signal.SIGTERM, lambda *_: print({line!r}, flush=True))
        print("up", flush=True)
        time.sleep(600)"""
    server = Child("Triton", [sys.executable, "-c", code], os.environ, None, stack._control.see)
    stack._children = [server]
    wait_until(lambda: server.tail() == ["up"])
    stack._models._states["a"] = "unloading"  # by an order, whose requests still run
    stack._ready, stack._console = True, Console(file=io.StringIO())
    looks: list[bool] = []

    def has_clients(ports: tuple[int, int]) -> bool:
        assert ports == (stack._settings.grpc_port, stack._settings.http_port)
        looks.append(server.exit_status() is None)
        return len(looks) != 3  # another client comes later

    monkeypatch.setattr(access, "has_clients", has_clients)
    stack._stop()
    assert server.exit_code == -signal.SIGKILL and all(looks) and len(looks) == (3 if unloads else 0)
    assert isinstance(stack._console.file, io.StringIO)
    assert ("has not ended by itself and is killed" in stack._console.file.getvalue()) is not unloads


def test_clients_are_seen_until_the_server_has_closed_their_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        port = listener.getsockname()[1]
        with socket.create_connection(other.getsockname()):
            assert not access.has_clients((port,))
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            assert access.has_clients((1, port))
        with accepted:
            assert accepted.recv(1) == b"" and access.has_clients((port,)), "it may still be sent something"
        assert not access.has_clients((port,))


def test_a_warning_of_the_settings_is_printed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's log has it too. Other warnings of Triton are printed as they arrive."""
    known = "session_len = 9 is more than the 8 positions that the model was trained for"
    lines = [f"W1128 06:51:38.000000 1 charonia:1] engine version 1: {text}" for text in (known, "it is late")]
    console = Console(file=io.StringIO(), width=200)
    stack = _Stack(ServeSettings(gateway=False), {}, console, Hurried())
    monkeypatch.setattr(_engine, "setting_warnings", lambda *_: [known])
    weights = tmp_path / "a" / workspace.WEIGHTS
    weights.mkdir(parents=True)
    (weights / "config.ini").write_text("[llama]\nmodel_name = a\n")
    (weights / "manifest.json").write_text('{"kv_cache": {"made_for": "fp8"}}')
    stack._warn_of_settings([Served("a", "", tmp_path / "a")])
    code = f"print({chr(10).join(lines)!r})"
    child = stack._spawn("Triton", [sys.executable, "-c", code], dict(os.environ), tmp_path / "triton.log")
    assert child.wait(HANG_S) and len(child.tail()) == 2  # tail() waits for the last line
    stack._control.close()
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert printed.count(known) == 1 and printed.count("warning of Triton: engine version 1: it is late") == 1
    assert (tmp_path / "triton.log").read_text().count(known) == 1
    assert printed.count("warning: a was made for a quantised KV cache") == 1


@pytest.fixture
def announced(tmp_path: Path) -> Callable[..., str]:
    def announce(settings: ServeSettings, *tasks: str, **inference: str) -> str:
        """tasks: of the models, named smollm2, b, c. No task: one model that generates text. inference: parameters."""
        served = []
        for task, name in zip(tasks or ("generate",), ("smollm2", "b", "c"), strict=False):
            weights = tmp_path / name / workspace.WEIGHTS
            weights.mkdir(parents=True, exist_ok=True)
            (weights / "config.ini").write_text(f"[llama]\nmodel_task = {task}\nlora_adapters = {name}-lora=/{name}\n")
            served.append(Served(name, name if served else "", tmp_path / name))
        said = io.StringIO()
        stack = _Stack(settings, inference, Console(file=said, soft_wrap=True), Hurried())
        stack._announce(served, 1.0)
        stack._control.close()
        return said.getvalue()

    return announce


def test_first_message_names_the_adapters(announced: Callable[..., str]) -> None:
    assert "Adapters    tuned, other   (" in announced(ServeSettings(), lora_adapters="tuned=/a,other=/b,tuned=/a")
    assert "Adapters    smollm2-lora, b-lora   (" in announced(ServeSettings(), "generate", "generate")  # of config.ini
    assert "Adapters" not in announced(ServeSettings(), lora_adapters="")


def test_first_message_names_the_page_and_the_command_of_the_readme(
    announced: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = announced(ServeSettings())
    assert text.index("Chat page   http://127.0.0.1:23333\n") < text.index("Runs on") and "NAME" not in text
    command = text.partition("Ask it")[2].partition("\n  Chat")[0]
    readme = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
    assert " ".join(command.split()) in " ".join(readme.split())
    monkeypatch.setenv("CHARONIA_GATEWAY_PAGE", "0")
    assert "Chat page" not in announced(ServeSettings())


def test_first_message_offers_the_requests_that_the_models_take(announced: Callable[..., str]) -> None:
    embed, score = announced(ServeSettings(), "embed"), announced(ServeSettings(), "score")
    assert "/v1/embeddings" in embed and '"input": ' in embed and "/v1/rerank" in score and '"query": ' in score
    for text in (embed, score):
        assert not any(word in text for word in ("Chat", "chat", "triton_client"))
    several = announced(ServeSettings(), "score", "generate", "generate")
    routes = [word.partition("23333")[2] for word in several.split() if "23333/v1/" in word]
    assert routes == ["/v1/rerank", "/v1/chat/completions"] and '"model": "b"' in several
    chats = several.partition("Chat  ")[2].partition("API docs")[0].split("\n")
    assert [line.rpartition(" ")[2] for line in chats if "triton_client" in line] == ["ensemble.b", "ensemble.c"]


def test_first_message_names_the_addresses_for_other_machines(
    announced: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpubox")
    text = announced(ServeSettings(host="0.0.0.0"))
    assert "Chat page   http://127.0.0.1:23333\n" in text and "http://gpubox:23333\n" in text
    assert "CHARONIA_GATEWAY_ALLOWED_ORIGINS=http://NAME:23333\n" in text
