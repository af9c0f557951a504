"""`charonia quantize` without llm-compressor: rejected input, the job, and remaining files.

llm-compressor is not installed here. A double reads the job and writes a folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
from load_file import load_file
from missing_tools import needed_module
from rich.console import Console
from waiting import HANG_S, wait_until

from charonia.bench.random_model import SHAPES, Shape, write_random_model
from charonia.errors import CharoniaError, InvalidRequestError, ModelError, UnsupportedError
from charonia.quality.evaluate import default_text
from charonia.quantize import command, environment
from charonia.quantize.calibrate import InputStats, KvStats, Ranges, calibrate, show
from charonia.quantize.command import METHODS, RECORD_FILE, SCHEMES, quantize
from charonia.weights.convert import convert, read_source

DRIVER = Path(environment.__file__).with_name("driver.py")
# Replaces the environment's Python: called as `python driver.py JOB`, it copies the model and records its arguments.
STAND_IN = """#!{python}
import json, os, pathlib, shutil, signal, subprocess, sys, tempfile, time
job = json.loads(pathlib.Path(sys.argv[2]).read_text())
print("noise of a package", file=sys.stderr)
print("charonia: stand-in has the job\\n(1/3): Calibrating:  50%|#  |", file=sys.stderr, end="")
print("\\r(1/3): Calibrating: 100%|##|\\r(2/3): Propagating: 1%\\ncharonia: writing", file=sys.stderr)
if "{mode}" == "fails":
    sys.exit(3)
if "{mode}" == "leaves":
    print("the last", file=sys.stderr)
    subprocess.Popen(["sleep", "3600"])
    sys.exit(3)
if "{mode}" == "lazy":
    sys.exit(0)
if "{mode}" == "says":
    print("\\ncharonia failed: no such thing\\nmore noise", file=sys.stderr)
    sys.exit(1)
if "{mode}" == "killed":
    os.kill(os.getpid(), 9)
out = pathlib.Path(job["output"])
out.mkdir()
if "{mode}" == "waits":
    tempfile.mkdtemp()
    own = subprocess.Popen(["sleep", "3600"])
    pathlib.Path("{seen}").write_text(json.dumps([os.getpid(), own.pid]))
    while True:
        time.sleep(3600)
for name in ("config.json", "model.safetensors"):
    shutil.copyfile(pathlib.Path(job["model"]) / name, out / name)
if "{mode}" == "renames":
    file = out / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"mlp.up_proj", b"mlp.upproj_"))
(out / "model.safetensors").chmod(0o600)
pathlib.Path("{seen}").write_text(json.dumps([job, sys.argv[1], dict(os.environ)]))
kl, blind = dict(
    destroys=(1.1, 3.4), nan=(float("nan"), 3.4), loses=(0.26, 3.4), flat=(1.7, 1.9), chance=(2.0, 1.9),
    short=(2.3, 2.4),
).get("{mode}", (0.01, 3.4))
found = dict(tokens=12 if "{mode}" == "short" else 99, kl_blind=blind, top1_agreement=0.5, kl_mean=kl)
out.with_name("difference.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    write_random_model(folder, SHAPES["tiny"], scale=0.2)
    return folder


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str = "works") -> Path:
    """Install the double as the environment. Returns the file that records its arguments."""
    program, seen = tmp_path / "python", tmp_path / "seen.json"
    program.write_text(STAND_IN.format(python=sys.executable, mode=mode, seen=seen))
    program.chmod(0o755)
    monkeypatch.setenv(environment.PYTHON_VARIABLE, str(program))
    monkeypatch.setenv("CHARONIA_RUN_DIR", str(tmp_path / "run"))
    (tmp_path / "temporary").mkdir(exist_ok=True)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    return seen


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that fails must not install llm-compressor."""
    monkeypatch.setenv(environment.PYTHON_VARIABLE, os.devnull)


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    return load_file(DRIVER)


def test_the_folder_is_there_whole_with_the_models_own_tokenizer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = stand_in(tmp_path, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    said: list[str] = []
    made = quantize(model, tmp_path / "out" / "q", scheme="w4a16", group_size=32, command="a b", say=said.append)
    assert made == tmp_path / "out" / "q"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["q"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (made / name).read_bytes() == (model / name).read_bytes()
    assert oct((made / "model.safetensors").stat().st_mode)[-3:] == "644"
    job, program, variables = json.loads(seen.read_text())
    assert Path(program) == DRIVER and "PYTHONPATH" not in variables and variables["HF_HUB_OFFLINE"] == "1"
    assert (job["scheme"], job["method"], job["group_size"]) == ("w4a16", "awq", 32)
    assert job["calibration"] == str(default_text()) and any("no --calibration" in line for line in said)
    record = json.loads((made / RECORD_FILE).read_text())
    assert (record["scheme"], record["method"], record["command"]) == ("w4a16", "awq", "a b")
    assert record["difference"]["kl_mean"] == 0.01
    assert said[-1].startswith(f"over 99 tokens its mean KL divergence from {model} is 0.0100, and the most likely ")


@pytest.mark.parametrize(
    ("mode", "figure", "limit"),
    [
        ("destroys", "1.1000", "1.00"),
        ("nan", "nan", "1.00"),
        ("chance", "2.0000", "1.90"),
        ("short", "2.3000", "1.00"),
        ("loses", "0.2600", None),
        ("flat", "1.7000", None),
    ],
)
def test_a_model_that_is_destroyed_is_not_called_ready(
    mode: str, figure: str, limit: str | None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trained model, or one with such flat predictions that ignoring the text is almost as good."""
    stand_in(tmp_path, monkeypatch, mode)
    said: list[str] = []
    if limit is None:
        quantize(model, tmp_path / "out" / "q", scheme="w8a8", say=said.append)
        assert (
            said[-1].startswith("warning: a large loss: over 99 tokens its mean KL divergence") and figure in said[-1]
        )
        return
    with pytest.raises(ModelError, match=rf"is destroyed and was removed: .* is {figure}, .*; less than {limit} is"):
        quantize(model, tmp_path / "out" / "q", scheme="w8a8", say=said.append)
    assert list((tmp_path / "out").iterdir()) == [] and not any("llm-compressor is in" in line for line in said)


def test_large_loss_is_reported_with_other_options() -> None:
    assert command._remedy("w4a16", "rtn", 128) == (
        "use --method awq or gptq, or a smaller --group-size, or --scheme w8a16, which has 8 bits"
    )
    assert command._remedy("w8a16", "rtn", 0) == "use --method gptq, or a --group-size"
    assert command._remedy("w8a16", "gptq", 16) == "use --method rtn"
    w8a16 = "--scheme w8a16, which does not change activations"
    assert command._remedy("w8a8", "gptq", 0) == f"use --method smoothquant or rtn, or {w8a16}"
    assert command._remedy("fp8", "rtn", 0) == f"use {w8a16}"


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        ("fails", r"failed with exit code 3: \(2/3\): Propagating: 1% "),
        ("leaves", "failed with exit code 3: the last "),
        ("killed", "signal 9"),
        ("says", "^no such thing "),
        ("lazy", "python has written nothing"),
    ],
)
def test_failure_leaves_no_files(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, problem: str
) -> None:
    stand_in(tmp_path, monkeypatch, mode)
    said: list[str] = []
    with pytest.raises(environment.QuantizeError, match=problem) as error:
        quantize(model, tmp_path / "out" / "q", scheme="fp8", say=said.append)
    assert list((tmp_path / "out").iterdir()) == []
    (log,) = (tmp_path / "run").iterdir()
    assert str(log) in str(error.value) and "noise of a package" in log.read_text()
    assert said[1:] == ["stand-in has the job", "calibrating part 1 of 3", "propagating part 2 of 3", "writing"]


def command_of(model: Path, dst: Path | str) -> list[str]:
    return [sys.executable, "-m", "charonia", "quantize", str(model), "--scheme", "w8a8", "--dst", str(dst)]


def is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_driver_and_no_files(
    number: signal.Signals, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that the driver started end with it, except after SIGKILL, which also leaves files."""
    seen, out = stand_in(tmp_path, monkeypatch, "waits"), tmp_path / "out"
    with (
        subprocess.Popen(
            command_of(model, out / "q"), stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as run,
        contextlib.ExitStack() as end,
    ):
        end.callback(run.kill)
        wait_until(lambda: seen.exists() and seen.read_text())
        pid, started = json.loads(seen.read_text())
        end.callback(kill, started)
        run.send_signal(number)
        said = run.communicate(timeout=HANG_S)[1]
        wait_until(lambda: is_gone(pid))
        if number != signal.SIGKILL:
            assert run.returncode == 130 and "interrupted: nothing was written" in said
            assert list(out.iterdir()) == [] and list((tmp_path / "run").iterdir()) == []
            wait_until(lambda: is_gone(started))


def test_a_signal_that_is_ignored_stays_so(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nohup does that, for runs of hours."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), environment.signals_as_interrupts():
            signal.raise_signal(signal.SIGHUP)
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                for number in (signal.SIGTERM, signal.SIGQUIT):
                    assert signal.getsignal(number) == signal.SIG_IGN, "what is removed now is removed whole"
                with pytest.raises(KeyboardInterrupt):  # a second Ctrl-C ends a download that hangs
                    signal.raise_signal(signal.SIGINT)
    finally:
        assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


@pytest.mark.parametrize("problem", ["appears", "cannot be copied"])
def test_quantised_weights_survive_a_failure_of_the_last_step(
    problem: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch)
    destination = tmp_path / "out" / "q"
    run = environment.run

    def run_and_break(*given: Any) -> None:
        run(*given)
        if problem == "appears":
            destination.symlink_to("nowhere")
        else:
            monkeypatch.setattr(command.shutil, "copyfile", fail)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/somewhere")

    monkeypatch.setattr(environment, "run", run_and_break)
    with pytest.raises(ModelError, match=r"created in the meantime|No space left on device: /somewhere") as error:
        quantize(model, destination, scheme="fp8")
    monkeypatch.undo()
    (kept,) = (folder for folder in destination.parent.iterdir() if folder.name.startswith(".q."))
    assert f"is in {kept / 'model'};" in str(error.value) and (kept / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("dst", "problem"),
    [
        ("file/q", "--dst .*/file/q cannot be written: (File exists|Not a directory): .*file"),
        ("file/a/q", "--dst .*/file/a/q cannot be written: Not a directory: .*file"),
        ("/proc/q", "--dst /proc/q cannot be written: "),
        ("/proc/a/q", "--dst /proc/a/q cannot be written: "),
        ("q" * 250, "--dst .*/qqq+ cannot be written: File name too long"),
        ("q" * 300, "--dst .*/qqq+ cannot be written: File name too long"),
        ("~nosuchuser/q", "--dst ~nosuchuser/q: .*home directory"),
        ("new/..", r"--dst .*/new/\.\. must end with the name of a new folder"),
        ("link", "link exists: choose another --dst"),
        ("/", "/ must end with the name"),
    ],
)
def test_a_destination_that_cannot_be_is_refused_before_any_work(
    dst: str, problem: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = stand_in(tmp_path, monkeypatch)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ModelError, match=problem):
        quantize(model, Path(dst) if dst[0] in "~/" else tmp_path / dst, scheme="fp8")
    assert not seen.exists() and not (tmp_path / "new").exists()


def test_python_without_the_packages_is_rejected_with_their_names(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real driver in an empty environment."""
    monkeypatch.setenv("CHARONIA_RUN_DIR", str(tmp_path / "run"))
    bare = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    monkeypatch.setenv(environment.PYTHON_VARIABLE, str(bare))
    (tmp_path / "text.txt").write_text("some text")
    with pytest.raises(
        environment.QuantizeError, match=r"bare/bin/python does not have torch, transformers, datasets, .*inst"
    ):
        quantize(model, tmp_path / "q", scheme="fp8")
    with pytest.raises(environment.QuantizeError, match=r"have torch, transformers: install .*requirements\.txt"):
        calibrate(model, calibration=tmp_path / "text.txt")


def installed(command: list[str], folder: Path) -> None:
    """Replaces venv and pip."""
    python = folder / "bin" / "python"
    if not os.access(python, os.X_OK):
        python.parent.mkdir(parents=True, exist_ok=True)
        python.unlink(missing_ok=True)
        python.symlink_to(sys.executable)


def test_environment_without_its_python_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.PYTHON_VARIABLE, raising=False)
    monkeypatch.setenv("CHARONIA_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(environment, "require_space", lambda *_: None)
    commands: list[list[str]] = []

    def run(command: list[str], folder: Path) -> None:
        commands.append(command)
        installed(command, folder)

    monkeypatch.setattr(environment, "_run", run)

    def begin() -> Path:
        with environment.interpreter(lambda _: None) as python:
            assert os.access(python, os.X_OK)
        return python

    python = begin()
    begin()
    assert len(commands) == 3
    python.unlink()
    python.symlink_to(tmp_path / "python-that-was-upgraded")
    begin()
    assert len(commands) == 6 and "--clear" in commands[3]


def test_a_python_that_cannot_be_run_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    (tmp_path / "python").write_text("no program")
    with pytest.raises(environment.QuantizeError, match=r"python cannot be run: Exec format error"):
        quantize(model, tmp_path / "q", scheme="fp8")


def test_unused_environments_of_other_versions_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.PYTHON_VARIABLE, raising=False)
    monkeypatch.setenv("CHARONIA_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(environment, "_run", installed)
    monkeypatch.setattr(environment, "require_space", lambda *_: None)
    unused, used, foreign = others = [tmp_path / f"quantize-{digit * 12}" for digit in "012"]
    for folder in others:
        folder.mkdir()
        (folder / "pyvenv.cfg").touch()
    (foreign / "pyvenv.cfg").unlink()
    said: list[str] = []
    with environment._lock_file(used).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with environment.interpreter(said.append) as first, environment.interpreter(said.append) as second:
            assert first == second, "several may use it at once"
    assert [folder.exists() for folder in others] == [False, True, True]
    assert [str(unused) in line for line in said if line.startswith("removing")] == [True]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("method", METHODS)
def test_each_scheme_and_method_is_taken_or_refused_with_the_reason(
    scheme: str, method: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = stand_in(tmp_path, monkeypatch)
    group = 32 if scheme == "w4a16" else None
    if method in SCHEMES[scheme].methods:
        quantize(model, tmp_path / "q", scheme=scheme, method=method, group_size=group)
        job = json.loads(seen.read_text())[0]
        assert (job["method"], job["calibration"] is None) == (method, method == "rtn")
    else:
        with pytest.raises(InvalidRequestError, match=f"{scheme} is not possible with {method}: .*expected"):
            quantize(model, tmp_path / "q", scheme=scheme, method=method, group_size=group)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"scheme": "w3a16"}, "w3a16.*w4a16"),
        ({"scheme": "fp8", "method": "magic"}, "magic.*awq"),
        ({"scheme": "fp8", "group_size": 64}, "one scale for each"),
        ({"scheme": "w4a16", "group_size": 12}, "multiple of 16"),
        ({"scheme": "w4a16", "group_size": 4096}, "not a multiple of group_size = 4096: use --group-size"),
        ({"scheme": "fp8", "calibration": Path("/none")}, "/none is not a file"),
        ({"scheme": "fp8", "calibration": Path(os.devnull)}, "/dev/null is not a file"),
        ({"scheme": "fp8", "samples": 0}, "samples = 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: dict[str, Any], problem: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        quantize(model, tmp_path / "q", **options)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.txt", b" \n", "no text to calibrate with"),
        ("a.txt", b"\xff\xfe\x00", "cannot be read"),
        ("a.jsonl", b"\n", "no text to calibrate with"),
        ("a.jsonl", b'{"text": " "}\n{"messages": []}', "no text to calibrate with"),
        ("a.jsonl", b'{"messages": [], "text": null}\n{"messages": [], "text": 5}', "no text to calibrate with"),
        ("a.jsonl", b'{"text": "a"}\n[', "line 2 is not a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n' + b"[" * 100_000, "line 2 is not a JSON object"),
    ],
)
def test_calibration_file_without_text_is_rejected_first(
    name: str, content: bytes, problem: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequestError, match=problem):
        quantize(tmp_path / "none", tmp_path / "q", scheme="w8a8", calibration=tmp_path / name)
    with pytest.raises(InvalidRequestError, match=problem):
        calibrate(tmp_path / "none", calibration=tmp_path / name)


def test_the_group_size_that_is_advised_fits_all_layers(model: Path, tmp_path: Path) -> None:
    """The layers of this model have 128 and 96 input features. The first layer that does not fit has 128."""
    write_random_model(tmp_path / "m", Shape(1, 128, 4, 2, 96, 320))
    with pytest.raises(InvalidRequestError, match=r"use --group-size 32 \(w4a16\), which fits all layers"):
        quantize(tmp_path / "m", tmp_path / "q", scheme="w4a16", group_size=256)
    with pytest.raises(InvalidRequestError, match=r"has 96 input features, .*= 64: use --group-size 32 "):
        quantize(tmp_path / "m", tmp_path / "q", scheme="w4a16", group_size=64)


def test_default_group_size_fits_all_layers(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(tmp_path, monkeypatch)
    write_random_model(tmp_path / "m", Shape(1, 128, 4, 2, 96, 320))
    said: list[str] = []
    quantize(tmp_path / "m", tmp_path / "out" / "q", scheme="w4a16", say=said.append)
    assert json.loads(seen.read_text())[0]["group_size"] == 32
    assert "groups of 32 input features, because 128 does not divide all layers" in said


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(90, "about 90 seconds"), (500, "about 8 minutes"), (1200, "20 minutes. --method rtn takes seconds")],
)
def test_time_of_a_long_run_names_the_fast_method(driver: ModuleType, seconds: float, text: str) -> None:
    said = driver.time_text(seconds, 30)
    assert text in said and ("rtn" in said) is (seconds > 600)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_required_disk_space_equals_the_size_of_the_weights(scheme: str, tmp_path: Path) -> None:
    """The embedding and the output layer, half of this model, stay in 16 bits."""
    shape = Shape(2, 128, 4, 2, 256, 2000)
    write_random_model(tmp_path / "m", shape)
    write_random_model(tmp_path / "q", shape, scheme="w4a16-zeros" if scheme == "w4a16" else scheme)
    group = 128 if scheme.endswith("16") else 0
    taken = (tmp_path / "q" / "model.safetensors").stat().st_size
    assert taken * 0.97 < command.bytes_of_copy(read_source(tmp_path / "m").spec, scheme, group) < taken * 1.03


def test_a_model_without_a_linear_layer_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = replace(read_source(model).spec, tensors={})
    monkeypatch.setattr(command, "read_source", lambda folder: replace(read_source(folder), spec=empty))
    with pytest.raises(UnsupportedError, match="has no layers: there is nothing to quantise or to calibrate"):
        calibrate(model)


def test_models_that_cannot_be_quantised_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch)
    (tmp_path / "there").mkdir()
    with pytest.raises(ModelError, match="exists"):
        quantize(model, tmp_path / "there", scheme="fp8")
    with pytest.raises(ModelError, match="is a workspace"):
        quantize(convert(model, tmp_path / "workspace"), tmp_path / "q", scheme="fp8")
    shutil.copytree(model, tmp_path / "twice")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "twice" / "config.json").write_text(json.dumps({**config, "quantization_config": {}}))
    with pytest.raises(UnsupportedError, match="already"):
        quantize(tmp_path / "twice", tmp_path / "q", scheme="fp8")
    cache = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}
    (tmp_path / "twice" / "config.json").write_text(json.dumps({**config, "quantization_config": cache}))
    with pytest.raises(UnsupportedError, match=r"for a quantised KV cache .*: name the model that"):
        quantize(tmp_path / "twice", tmp_path / "q", scheme="fp8")
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda _: os.statvfs_result([0] * 10) and _Full())
    with pytest.raises(environment.QuantizeError, match=r"are free: free some space"):
        quantize(model, tmp_path / "q", scheme="fp8")


class _Full:
    free = 0


WITH_CODE = {**SHAPES["tiny"].config(), "bias": False, "num_key_value_heads": 4, "head_dim": 16}
EXPERTS_OF_TWO = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": None},
}
PLAIN = {key: value for key, value in WITH_CODE.items() if key not in ("attention_bias", "bias")}


@pytest.mark.parametrize(
    ("config", "scheme", "said"),
    [
        # AutoModelForCausalLM has no class for models with images.
        *(
            ({"model_type": one, "text_config": {}}, "w8a16", f"is of type {one}, a model with images.*only Gemma 3")
            for one in ("qwen3_vl", "mistral3", "internvl_chat")
        ),
        *(
            (
                {**WITH_CODE, "model_type": family},
                "fp8",
                rf"is of family {family.lower()}\. transformers reads it only with code .*: use a copy",
            )
            for family in ("baichuan", "internlm", "internlm2", "internlm3", "Yi")
        ),
        # A method would damage these.
        (
            {**PLAIN, "model_type": "olmo2"},
            "w8a8",
            r"smoothquant rescales .* family olmo2 has no such norms: use --method gptq or rtn",
        ),
        (
            {**PLAIN, **EXPERTS_OF_TWO, "model_type": "minimax_m2"},
            "fp8",
            r"charonia quantize does not support models of family minimax_m2",
        ),
        (
            {**PLAIN, "model_type": "qwen3_5_text", "num_hidden_layers": 2, "full_attention_interval": 2},
            "w8a16",
            r"charonia quantize does not support models of family qwen3_5, which have gated delta nets",
        ),
        (
            {**PLAIN, **LATENT, "model_type": "deepseek_v2"},
            "fp8",
            r"charonia quantize does not support family deepseek_v2: latent attention has not been tested with it",
        ),
    ],
)
def test_models_that_cannot_be_quantised_are_rejected_before_installing(
    config: dict[str, Any], scheme: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = stand_in(tmp_path, monkeypatch)
    if "hidden_size" in config:
        write_random_model(tmp_path / "m", config)
    else:
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=said):
        quantize(tmp_path / "m", tmp_path / "q", scheme=scheme)
    if "transformers reads" in said:
        with pytest.raises(UnsupportedError, match=said):
            calibrate(tmp_path / "m")
    assert not seen.exists()


@pytest.mark.slow
def test_environment_that_cannot_be_installed_names_its_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No index responds. The partial environment stays, and the next attempt continues."""
    monkeypatch.delenv(environment.PYTHON_VARIABLE, raising=False)
    monkeypatch.setenv("CHARONIA_RUN_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(environment, "_CPU_BYTES", 1)
    monkeypatch.setattr(environment, "_CUDA_BYTES", 1)
    monkeypatch.setattr(environment, "TORCH", "torch==0.0.0.dev0")
    monkeypatch.setattr(environment, "CPU_INDEX", "http://127.0.0.1:9")
    # With this variable pip would find PyTorch, but the driver would not.
    (tmp_path / "torch-0.0.0.dev0.dist-info").mkdir()
    (tmp_path / "torch-0.0.0.dev0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 0.0.0.dev0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(environment, "REQUIREMENTS", tmp_path / "requirements.txt")
    (tmp_path / "requirements.txt").touch()
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_CONFIG_FILE", os.devnull), ("PIP_RETRIES", "0")):
        monkeypatch.setenv(name, value)
    for _ in range(2):
        with (
            pytest.raises(CharoniaError, match=r"could not be installed.*PyPI.*again"),
            environment.interpreter(lambda _: None),
        ):
            pass
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert (folder / "bin" / "python").exists() and not (folder / "complete").exists()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_drivers_schemes_equal_those_of_compressed_tensors(driver: ModuleType, scheme: str) -> None:
    quantization = needed_module("compressed_tensors.quantization")
    for method in SCHEMES[scheme].methods:
        job = {"scheme": scheme, "method": method, "group_size": SCHEMES[scheme].group_size}
        found = quantization.QuantizationScheme.model_validate(driver.scheme_of(job))
        bits = 4 if scheme == "w4a16" else 8
        assert (found.weights.num_bits, found.weights.symmetric) == (bits, method != "awq")
        assert found.weights.group_size == (SCHEMES[scheme].group_size or None)
        assert (found.input_activations is None) == scheme.endswith("a16")
        if found.input_activations:
            assert found.input_activations.dynamic and found.input_activations.strategy == "token"


def test_a_folder_that_cannot_be_read_is_not_called_ready(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llm-compressor writes Mixtral's experts under its own names."""
    stand_in(tmp_path, monkeypatch, "renames")
    said: list[str] = []
    with pytest.raises(ModelError, match=r"Charonia cannot read the output of llm-compressor: .*mlp\.up_proj\.weight"):
        quantize(model, tmp_path / "q", scheme="w8a16", say=said.append)
    assert not (tmp_path / "q").exists() and "the output of llm-compressor is in " in said[-1]


@pytest.mark.slow
def test_experts_are_written_by_the_names_of_their_family(driver: ModuleType, tmp_path: Path) -> None:
    torch = needed_module("torch")
    from transformers.core_model_loading import revert_weight_conversion

    config = {**SHAPES["tiny"].config(), "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    write_random_model(tmp_path, {**config, "num_local_experts": 2})
    model, _ = driver.load({"model": str(tmp_path)})
    driver.name_as_before(model)
    parts = ("gate", "experts.0.gate_proj", "experts.1.up_proj", "experts.1.down_proj")
    tensors = {f"model.layers.1.mlp.{part}.weight_scale": torch.zeros(1) for part in parts}
    written = {
        name.removeprefix("model.layers.1.block_sparse_moe.") for name in revert_weight_conversion(model, tensors)
    }
    assert written == {f"{part}.weight_scale" for part in ("gate", "experts.0.w1", "experts.1.w3", "experts.1.w2")}


def test_routers_stay_in_16_bits(driver: ModuleType) -> None:
    patterns = [one.removeprefix("re:") for one in driver.IGNORED if one.startswith("re:")]
    for router in ("mlp.gate", "mlp.gate.wg", "block_sparse_moe.gate", "mlp.shared_expert_gate"):
        assert any(re.match(pattern, f"model.layers.0.{router}") for pattern in patterns), router
    assert not any(re.match(pattern, "model.layers.0.mlp.gate_proj") for pattern in patterns)


@pytest.mark.slow
def test_vision_layers_and_the_output_layer_stay_in_16_bits(driver: ModuleType) -> None:
    torch = needed_module("torch")
    matching = needed_module("compressed_tensors.utils.match")
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"num_hidden_layers": 2}
    with torch.device("meta"):
        config = AutoConfig.for_model("gemma3", text_config=small, vision_config=small)
        model = AutoModelForCausalLM.from_config(config)
    names = {name for name, _ in matching.match_named_modules(model, ["Linear"], driver.IGNORED)}
    assert len(names) == 14 and all("language_model.layers." in name for name in names)


SIZES: dict[str, Any] = dict.fromkeys(("vocab_size", "hidden_size"), 16)
SIZES |= {"intermediate_size": 32, "moe_intermediate_size": 24, "num_hidden_layers": 3, "head_dim": 8}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2, "pad_token_id": None}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 3},
    "qwen2_moe": {"num_experts": 3, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    "qwen3_moe": {"num_experts": 3, "mlp_only_layers": [1]},
    "glm4_moe": {"n_routed_experts": 3},
    "hunyuan_v1_moe": {"num_experts": 3, "moe_topk": 2},
}
# Families without norms before attention and feed-forward.
NORMS_BEHIND = ("olmo2", "olmo3", "exaone4")


def weights_by_name(model: Any) -> dict[str, Any]:
    """Return the weights of all modules, and of experts as llm-compressor splits them."""
    weights = {name: module.weight for name, module in model.named_modules() if hasattr(module, "weight")}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            for index, (pair, down) in enumerate(zip(module.gate_up_proj, module.down_proj, strict=True)):
                gate, up = pair.chunk(2)
                weights |= {f"{name}.{index}.gate_proj": gate, f"{name}.{index}.up_proj": up}
                weights[f"{name}.{index}.down_proj"] = down
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("method", ["smoothquant", "awq"])
@pytest.mark.parametrize(
    "family", ["llama", "phi3", "gemma2", "gemma3_text", "vaultgemma", "glm4", "cohere2", *NORMS_BEHIND, *EXPERTS]
)
def test_smoothing_leaves_the_models_output_unchanged(driver: ModuleType, family: str, method: str) -> None:
    """Instead of llm-compressor, divide everything by random numbers: the model's output must not change."""
    torch = needed_module("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **EXPERTS.get(family, {})))
    model = model.double().eval()
    model.set_experts_implementation("eager")  # other implementations do not support fp64
    ids = torch.arange(3, 15)[None]
    offset = 1 if "gemma" in family else 0  # added to the norms' weights
    divided = []
    with torch.no_grad():
        weights = weights_by_name(model)
        for weight in weights.values():
            weight.normal_(std=0.3)
        expected = model(ids).logits
        modules = [name for name, _ in model.named_modules()]
        names = [*modules, *weights.keys() - set(modules)]
        if family in NORMS_BEHIND and method == "smoothquant":
            with pytest.raises(driver.JobError, match="use --method gptq"):
                driver.smoothed(names, method)
            return
        for scaled, readers in driver.smoothed(names, method):
            for name, weight in weights.items():
                if not re.match(scaled.removeprefix("re:"), name):
                    continue
                # In the same expert, otherwise in the same layer.
                place = name.rpartition(".")[0] if ".experts." in name else ".".join(name.split(".")[:3])
                pattern = "|".join(reader.removeprefix("re:") for reader in readers)
                read = [other for key, other in weights.items() if key.startswith(place) and re.match(pattern, key)]
                scales = torch.rand(read[0].shape[1], dtype=torch.float64) + 0.5
                for other in read:
                    other.mul_(scales)
                if weight.ndim == 1:
                    weight.add_(offset).div_(scales).sub_(offset)
                else:  # with layers that are packed together, the last one counts
                    weight[-len(scales) :].div_(scales[:, None])
                divided.append(name)
        found = model(ids).logits
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()  # norms compute in fp32
    assert len(divided) == len(set(divided))
    kinds = {re.sub(r"[.]\d+", "", name).removeprefix("model.layers.") for name in divided}
    feeding = "pre_feedforward_layernorm" if offset else "post_attention_layernorm"
    all_sparse = family in ("mixtral", "hunyuan_v1_moe")
    assert ("mlp.up_proj" in kinds) == (method == "awq" and family not in ("phi3", "glm4") and not all_sparse)
    shared = [kind for kind in kinds if "mlp.shared_" in kind]
    assert len(shared) == (method == "awq" and family in ("qwen2_moe", "glm4_moe", "hunyuan_v1_moe")), kinds
    feeds = family not in ("cohere2", *NORMS_BEHIND)
    assert (feeding in kinds) == (feeds and (not all_sparse or method == "awq")), kinds
    scaled = family not in NORMS_BEHIND and (family != "gemma3_text" or method == "smoothquant")
    assert ("input_layernorm" in kinds) == scaled, kinds


def test_the_driver_cuts_a_text_and_takes_lines(driver: ModuleType, tmp_path: Path) -> None:
    class Tokenizer:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            calls.append(text)
            return {"input_ids": [ord(letter) for letter in text]}

        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
            return "".join(message["content"] for message in messages)

    calls: list[str] = []

    def samples(name: str, content: str, count: int = 9) -> list[str]:
        calls.clear()
        (tmp_path / name).write_text(content)
        job = {"calibration": str(tmp_path / name), "samples": count, "max_length": 4}
        return ["".join(map(chr, row)) for row in driver.samples_of(job, Tokenizer())]

    assert samples("a.txt", "abcdefghi") == ["abcd", "efgh"], "a sample of one token has nothing to predict"
    assert samples("a.txt", "abcdefghi", 1) == ["abcd"]
    lines = [{"text": "hello"}, {"messages": [{"role": "user", "content": "yes"}]}]
    assert samples("a.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n") == ["hell", "yes"]
    assert samples("a.jsonl", "\n".join(map(json.dumps, lines * 9)), 3) == ["hell", "yes", "hell"]
    assert len(calls) == 3, "no more than are asked for"
    assert samples("a.jsonl", '{"text": "a\u2028b\x85"}\r\n{"text": "cd"}') == ["a\u2028b\x85", "cd"], "one line each"
    lines = [{"messages": [], "text": "hello"}, {"messages": [], "text": None}]
    assert samples("a.jsonl", "\n".join(map(json.dumps, lines))) == ["hell"], "no messages, no template"
    with pytest.raises(driver.JobError, match="no text"):
        samples("a.jsonl", "\n")
    with pytest.raises(driver.JobError, match="no sample of two tokens"):
        samples("a.txt", "a")
    for line in ("[", "[1]", '{"txt": "a"}', '{"text": 1}', '{"messages": "a"}'):
        with pytest.raises(driver.JobError, match=r"line 2.*JSON object"):
            samples("a.jsonl", '{"text": "hello"}\n' + line)


def test_models_are_compared_on_ends_that_differ(driver: ModuleType, tmp_path: Path) -> None:
    def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    lines = [{"text": "<" + "prompt" * 20 + str(number // 2)} for number in range(99)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [{"text": "short"}, *lines])))

    def compared(count: int) -> list[str]:
        job = {"compared": str(tmp_path / "a.jsonl"), "samples": count}
        return ["".join(map(chr, row)) for row in driver.compared_of(job, tokenizer)]

    end = ("prompt" * 20)[-62:]
    assert compared(99) == ["short", *(f"<{end}{number}" for number in range(3))]
    assert compared(1) == ["short", f"<{end}0", f"<{end}1"], "of the first four"


@pytest.mark.slow
def test_predictions_of_a_batch_equal_those_of_single_rows(driver: ModuleType, model: Path) -> None:
    torch = needed_module("torch")
    loaded, _ = driver.load({"model": str(model)})
    rows = [list(range(at, at + 8)) for at in (3, 40)]
    alone = torch.cat([driver.predictions(loaded, [row]) for row in rows])
    assert alone.shape[0] == 16
    torch.testing.assert_close(driver.predictions(loaded, rows), alone, atol=0.05, rtol=0)  # bf16
    torch.testing.assert_close(driver.predictions(loaded, [rows[0][:3], rows[1]])[3:], alone[8:])


@pytest.mark.slow
@pytest.mark.parametrize("problem", [IndexError("of a library"), RuntimeError("no memory")])
def test_quantised_weights_are_written_although_they_cannot_be_compared(
    problem: Exception, driver: ModuleType, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed_module("torch")
    for name, members in {"datasets": {"Dataset": None}, "llmcompressor": {"oneshot": lambda **_: None}}.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))

    def fails(*_: Any) -> None:
        raise problem

    for name in ("recipe_of", "leave_memory_unpinned"):
        monkeypatch.setattr(driver, name, lambda *_: None)
    monkeypatch.setattr(driver, "difference", fails)
    said: list[str] = []
    monkeypatch.setattr(driver, "say", said.append)
    job = {"model": str(model), "output": str(tmp_path / "q"), "compared": str(default_text()), "samples": 9}
    driver.quantize({**job, "calibration": None})
    assert (tmp_path / "q" / "model.safetensors").is_file() and not (tmp_path / "difference.json").exists()
    assert said[-1] == "writing" and said[-2].endswith(f"could not be compared with its source: {problem}")


@pytest.mark.slow
def test_the_driver_runs_no_code_that_comes_with_a_model(
    driver: ModuleType, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed_module("torch")
    folder = Path(shutil.copytree(model, tmp_path / "m"))
    config = json.loads((model / "config.json").read_text())
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.T", "own.T"]}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": auto_map}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="trust_remote_code"):
        driver.load({"model": str(folder)})
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_quantize_prints_the_next_command(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    command = command_of(model, tmp_path / "q")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "charonia evaluate" in done.stdout and "stand-in has the job" in done.stderr
    assert "noise" not in done.stderr and sorted(path.name for path in (tmp_path / "run").iterdir()) == []
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "exists" in done.stderr


@pytest.mark.slow
def test_calibrate_shows_the_ranges_of_activations(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real driver. It needs only PyTorch and transformers of the environment's packages."""
    torch = needed_module("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv(environment.PYTHON_VARIABLE, sys.executable)
    monkeypatch.setenv("CHARONIA_RUN_DIR", str(tmp_path / "run"))
    text = default_text().read_text(encoding="utf-8")[:300]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    ranges = calibrate(model, calibration=tmp_path / "text.txt", samples=2, max_length=64)

    ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"][:128]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    seen: list[Any] = []
    reference.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.inference_mode():
        caches = [reference(torch.tensor([ids[at : at + 64]])).past_key_values for at in (0, 64)]
    assert ranges.tokens == len(ids)
    held = torch.cat([cache.layers[1].keys for cache in caches], dim=2).double()
    assert (ranges.keys[1].min, ranges.keys[1].max) == (float(held.min()), float(held.max()))
    low, high = held.amin(-1, keepdim=True), held.amax(-1, keepdim=True)
    for bits, found in ((8, ranges.keys[1].error8), (4, ranges.keys[1].error4)):
        scale = (high - low) / (2**bits - 1)
        error = held - (((held - low) / scale).round() * scale + low)
        assert found == pytest.approx(float((error**2).mean().sqrt() / (held**2).mean().sqrt()), rel=0.02)
    rows = torch.cat(seen, dim=1).reshape(len(ids), -1).float().abs()
    down = ranges.inputs["model.layers.1.mlp.down_proj"]
    assert down.max == float(rows.max()) and down.mean == pytest.approx(float(rows.mean()), rel=1e-4)
    assert down.outliers == pytest.approx(float(rows.amax(0).max() / rows.amax(0).median()), rel=1e-4)
    assert "lm_head" not in ranges.inputs and len(ranges.inputs) == 14
    show(ranges, Console(width=160))
    shown = capsys.readouterr().out
    assert "model.layers.1.mlp.down_proj" in shown and "quant_policy = " in shown


@pytest.mark.slow
def test_calibrate_shows_the_inputs_of_routers_and_experts(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed_module("torch")
    config = {**SHAPES["tiny"].config(), "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    write_random_model(tmp_path, {**config, "num_local_experts": 3, "num_experts_per_tok": 2}, scale=0.2)
    job = {"model": str(tmp_path), "output": str(tmp_path / "ranges.json"), "calibration": str(default_text())}
    loaded, tokenizer = driver.load(job)
    up = loaded.model.layers[0].mlp.experts.gate_up_proj
    for expert in range(3):  # each has outliers in a third of the channels
        up.data[expert, up.shape[1] // 2 + expert :: 3] *= 100
    monkeypatch.setattr(driver, "load", lambda _: (loaded, tokenizer))
    driver.calibrate({**job, "samples": 2, "max_length": 32})
    inputs = json.loads((tmp_path / "ranges.json").read_text())["inputs"]
    layer = {name.removeprefix("model.layers.1."): one for name, one in inputs.items() if "layers.1." in name}
    attention = {f"self_attn.{kind}_proj" for kind in "qkvo"}
    assert layer.keys() == {*attention, "mlp.gate", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    router, experts, down = (layer[f"mlp.{name}"] for name in ("gate", "experts.gate_up_proj", "experts.down_proj"))
    # Each token goes to two experts.
    assert experts["max"] == router["max"] and experts["mean"] == pytest.approx(router["mean"], rel=1e-3)
    assert 0 < down["mean"] < down["max"] and down["max"] != router["max"]
    assert not any("lm_head" in name for name in inputs)
    assert inputs["model.layers.0.mlp.experts.down_proj"]["outliers"] > 20 > layer["mlp.experts.down_proj"]["outliers"]


@pytest.mark.parametrize(
    ("error8", "error4", "policy"), [(0.001, 0.05, 4), (0.01, 0.2, 8), (0.001, 0.0801, 8), (0.03, 0.3, 0)]
)
def test_the_worst_layer_decides_the_advice(error8: float, error4: float, policy: int) -> None:
    good, bad = KvStats(-1, 1, 0.0001, 0.01), KvStats(-1, 1, error8, error4)
    ranges = Ranges("m", 9, [good, bad], [good, good], {})
    assert ranges.quant_policy == policy
    for name, w8a8 in {
        "layers.1.mlp.up_proj": "w8a8 needs --method smoothquant",
        "layers.1.mlp.down_proj": "w8a8 may lose much accuracy there",
        "layers.1.mlp.experts.gate_up_proj": "w8a8 may lose much accuracy there",
    }.items():
        rows = {"a": InputStats(1, 2, 3), name: InputStats(1, 60, 40), "layers.1.mlp.gate": InputStats(1, 60, 50)}
        advice = replace(ranges, inputs=rows).advice()
        assert len(advice) == 2
        assert f"quant_policy = {policy}" in advice[0] and f"({name}: 40 times the median channel): {w8a8}" in advice[1]


def test_the_advice_names_the_worst_input_of_each_kind() -> None:
    held = [KvStats(-1, 1, 0.0001, 0.01)]

    def advice(q: float, down: float) -> list[str]:
        outliers = {"layers.0.self_attn.q_proj": q, "layers.0.mlp.down_proj": down, "layers.0.mlp.gate": 99.0}
        return Ranges("m", 9, held, held, {name: InputStats(1, 2, one) for name, one in outliers.items()}).advice()[1:]

    for q, down in ((60, 61), (61, 60)):
        smoothed, other = advice(q, down)
        assert f"q_proj: {q} times" in smoothed and "needs --method smoothquant" in smoothed
        assert f"down_proj: {down} times" in other and "may lose much accuracy there" in other
    (few,) = advice(3, 4)
    assert few == "activations have few outliers (layers.0.mlp.down_proj: 4 times the median channel)"


@pytest.mark.slow
def test_outliers_of_each_expert_are_shown(driver: ModuleType) -> None:
    torch = needed_module("torch")

    def expert(channel: int, tokens: int) -> Any:
        inputs = driver.InputStats()
        rows = torch.ones(tokens, 4)
        rows[:, channel] = 50
        inputs.see(rows)
        return inputs

    many = [expert(channel, driver.FEW_TOKENS) for channel in range(4)]
    assert driver.report_of([*many, driver.InputStats()]) == {"mean": 53 / 4, "max": 50, "outliers": 50}
    calm = driver.InputStats()
    calm.see(torch.ones(99, 4))
    assert driver.report_of([calm, expert(0, 1)]) == {"mean": 449 / 400, "max": 50, "outliers": 1}, "by chance"
    assert driver.report_of([expert(0, 1)])["outliers"] == 50
