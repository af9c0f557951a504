"""The command line, run as users run it."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from charonia import __version__, _engine, cli, doctor
from charonia.__main__ import main
from charonia.api.options import _GROUPS, with_engine_options
from charonia.bench import records
from charonia.bench.cli import make_model
from charonia.bench.random_model import SHAPES, write_random_model
from charonia.errors import InvalidRequestError, ModelError, ServeError
from charonia.option_hints import HINTS
from charonia.settings import ServeSettings

COMMAND = [sys.executable, "-m", "charonia"]
PLAIN = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "200", "CHARONIA_THREADS": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    write_random_model(folder, SHAPES["tiny"], scale=0.2)
    return folder


def charonia(*arguments: str | Path, stdin: str = "", env: dict[str, str] | None = None) -> tuple[int, str, str]:
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**PLAIN, **(env or {})},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["evaluate", "serve", "quantize", "plan"])
def test_help_names_every_option_whole_on_a_narrow_terminal(command: str) -> None:
    code, out, err = charonia(command, "--help", env={"COLUMNS": "80"})
    assert code == 0 and "\u2026" not in out, err
    assert max(map(len, out.splitlines())) <= 80
    wanted = {"quantize": "--calibration", "serve": "--hang-timeout-s"}.get(command, "--no-enable-prefix-caching")
    assert wanted in out


def test_shell_completes_commands_and_options() -> None:
    cases = (("charonia doc", "1", "doctor"), ("charonia serve --grpc", "2", "--grpc-port"))
    values = (
        ("charonia plan x --quantization w8", "4", "w8a16"),
        ("charonia plan x --quant-policy 1", "4", "16"),
        ("charonia serve --speculative-method ", "3", "draft_model"),
        ("charonia serve --logs ", "3", "stderr"),
        ("charonia convert x --dtype b", "4", "bf16"),
        ("charonia quantize x --scheme w4", "4", "w4a16"),
    )
    for words, number, wanted in (*cases, *values, ("charonia make-model ", "2", "benchmark")):  # its group
        env = {"_CHARONIA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": number}
        done = subprocess.run([Path(sys.executable).parent / "charonia"], env={**PLAIN, **env}, capture_output=True)
        assert done.stderr == b"" and wanted in done.stdout.decode().splitlines()


def test_a_command_without_its_group_is_named_with_it() -> None:
    code, _, error = charonia("make-model", "x")
    assert code == 2 and "No such command 'make-model'. Did you mean charonia benchmark make-model?" in error
    assert "Did you mean 'serve'?" in charonia("serv")[2]


def test_doctor_names_each_problem_with_a_remedy(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = {"CHARONIA_GRPC_PORT": str(taken.getsockname()[1]), "CHARONIA_TRITON_DIR": str(tmp_path)}
        code, out, _ = charonia("doctor", "--run-dir", tmp_path / "run", env=env)
    assert code == 1
    lines = {line[9:].split("  ")[0].strip(): line for line in out.splitlines()}
    port, triton = lines[f"port {env['CHARONIA_GRPC_PORT']}"], lines["Triton"]
    assert port.startswith("PROBLEM") and port.endswith("choose another port with CHARONIA_GRPC_PORT")
    assert triton.startswith("PROBLEM") and "has no bin/tritonserver" in triton
    assert lines["Python"].startswith("ok") and lines["run folder"].endswith(f"  {tmp_path / 'run'}")
    assert set(lines) >= {
        "packages",
        "engine",
        "compiler",
        "processor",
        "GPU",
        "memory",
        "/dev/shm",
        "run folder",
        "disk",
    }


def test_doctor_names_equal_ports() -> None:
    env = dict.fromkeys(("CHARONIA_GRPC_PORT", "CHARONIA_HTTP_PORT", "CHARONIA_GATEWAY_PORT"), "33399")
    code, out, _ = charonia("doctor", env=env)
    lines = [line for line in out.splitlines() if line[9:].startswith("port 33399 ")]
    assert code == 1 and [line.split()[0] for line in lines] == ["ok", "PROBLEM", "PROBLEM"]
    assert "CHARONIA_HTTP_PORT and CHARONIA_GATEWAY_PORT are both 33399; give them different ports" in lines[2]


@pytest.mark.parametrize(
    "files",
    [
        {
            "memory.max": "3000000000",
            "memory.current": "2500000000",
            "memory.stat": "anon 5\ninactive_file 1000000000\n",
        },
        {
            "memory/memory.limit_in_bytes": "3000000000",
            "memory/memory.usage_in_bytes": "2500000000",
            "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 1000000000\n",
        },
    ],
)
def test_doctor_shows_the_memory_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    monkeypatch.setattr(doctor, "_CGROUP", tmp_path)
    assert "memory limit" not in doctor._memory().text
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = doctor._memory()
    assert found.state == "problem"
    assert found.text.startswith("1.40 GiB of 2.79 GiB are available: raise the memory limit of this container")
    if "memory.max" in files:
        (tmp_path / "memory.max").write_text("max\n")
        assert "of 2.79 GiB" not in doctor._memory().text


def test_doctor_tries_to_write_the_run_folder() -> None:
    """Root has every permission in /proc, but cannot make files there."""
    found = doctor._checked("run folder", lambda: doctor._writable(Path("/proc/charonia/run")))
    assert found.state == "problem" and "/proc/charonia/run cannot be written (" in found.text
    assert ": /proc): set CHARONIA_RUN_DIR" in found.text
    assert doctor._space("disk", Path("/proc/charonia/run"), 0, "").text.endswith("free for /proc/charonia/run")


def test_doctor_needs_grpc_only_for_the_probe_of_liveness(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "grpc" else find_spec(name))
    with pytest.raises(ServeError, match="package grpcio is not installed"):
        doctor._packages(ServeSettings(triton_dir=Path("there")))
    assert doctor._packages(ServeSettings(triton_dir=Path("there"), hang_timeout_s=0)) == "all that serving needs"


def test_help_of_serve_has_groups() -> None:
    code, out, _ = charonia("serve", "--help")
    assert code == 0
    found = re.findall(r"^([A-Z].*):$", out, re.MULTILINE)
    assert found == ["Arguments", "Options", "Service", *_GROUPS.values()]
    service = out.partition("\nService:")[2].partition("\nModel and KV cache:")[0]
    assert "--grpc-port" in service and "--session-len" not in service


@pytest.mark.slow
def test_plan_says_once_why_a_model_does_not_fit(model: Path) -> None:
    code, out, err = charonia("plan", model, "--memory", "1MiB", env={"COLUMNS": "1000"})
    (why,) = [line for line in f"{out}{err}".splitlines() if "does not fit" in line]
    assert code == 1 and why in err and why.startswith("error: ") and "KV cache of" not in out
    code, out, err = charonia("plan", model, "--kv-offload-memory", "1TiB", "--memory", "1GiB", env={"COLUMNS": "1000"})
    assert code == 1 and "error: kv_offload_memory = 1TiB, but " in err and "lower it" in err
    assert "warning" not in out and "KV cache of" not in out


@pytest.mark.slow
def test_an_embedding_model_is_not_offered_for_chats(tmp_path: Path) -> None:
    folder, made = tmp_path / "model", tmp_path / "w"
    write_random_model(folder, SHAPES["tiny"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    code, out, err = charonia("convert", folder, "--dst-path", made)
    assert code == 0 and "Serve it: charonia serve" in out and "charonia chat" not in out, err
    code, _, err = charonia("chat", made)
    assert code == 1 and "is for task = embed, so it cannot chat" in " ".join(err.split())


@pytest.mark.slow
def test_convert_then_check(model: Path, tmp_path: Path) -> None:
    # If PyTorch is installed, transformers imports it. This takes seconds, and tokenizers do not need it.
    (tmp_path / "torch.py").write_text("raise RuntimeError('PyTorch is imported')")
    command = ("convert", model, "--dst-path", tmp_path / "w", "--session-len", "77", "--dtype", "fp32")
    code, out, err = charonia(*command, env={"PYTHONPATH": str(tmp_path)})
    assert code == 0 and "is ready" in out, err
    ini = _engine.read_config_ini(tmp_path / "w/triton_models/weights/config.ini")
    assert (ini["session_len"], ini["weight_type"], ini["model_name"]) == ("77", "fp32", "small")
    # Settings from the environment apply to runs on this machine. They are not written into a workspace.
    assert ini["threads"] == "0"
    assert charonia("check", tmp_path / "w")[0] == 0
    (tmp_path / "w/triton_models/weights/rank-0.safetensors").write_bytes(b"x")
    code, _, err = charonia("check", tmp_path / "w")
    assert code == 1 and "--force" in err


@pytest.mark.slow
def test_an_error_is_one_message_and_exit_code_1(tmp_path: Path) -> None:
    code, out, err = charonia("convert", tmp_path / "nowhere")
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and "nowhere does not exist" in err and "Traceback" not in err


def test_every_inference_parameter_is_an_option_and_old_switches_are_not() -> None:
    _, out, _ = charonia("convert", "--help")
    for field in _engine.config_fields():
        shown = f"--{field.key.replace('_', '-')}" in out
        assert shown != (field.model_attribute or field.ignored), field.key


@pytest.mark.slow
def test_a_wrong_option_value_is_named(model: Path) -> None:
    code, _, err = charonia("chat", model, "--token-budget", "-1", stdin="hi\n")
    assert code == 1 and "token_budget" in err
    code, _, err = charonia("chat", model, "--token-budget", "many", stdin="hi\n")
    assert code == 2 and "--token-budget" in err


@pytest.mark.slow
def test_a_piped_chat_answers_each_message_and_leaves_on_exit(model: Path) -> None:
    arguments = ("chat", model, "--max-tokens", "8", "--temperature", "0", "--seed", "1")
    code, out, err = charonia(*arguments, stdin="hello\nthere\n\nagain\n\nexit\nnot read\n")
    assert code == 0
    assert err.count("tokens/s, first after") == 2
    one, _, notes = charonia(*arguments, stdin="hello\nthere")
    assert one == 0 and notes.count("first after") == 1
    code, again, notes = charonia(*arguments, "--enter-sends", stdin="hello\nthere\n")
    assert code == 0 and notes.count("first after") == 2
    assert out and again


@pytest.mark.slow
def test_chat_commands_change_the_conversation(model: Path) -> None:
    lines = "/help\n/regen\nHi\n\n/regen\n/system Be brief.\n/nothing\n /regen\n\n/clear\n/regen\nexit\n"
    code, out, err = charonia("chat", model, "--max-tokens", "3", "--temperature", "0", stdin=lines)
    assert code == 0, err
    assert err.count("[3 tokens") == 3, "Hi, its second response, and the text that begins with a space"
    assert err.index("/clear ") < err.index("there is no response yet") < err.index("/nothing is not a command")
    assert out and err.count("there is no response yet") == 2


@pytest.mark.slow
def test_chat_without_a_model_uses_the_model_of_the_environment(model: Path) -> None:
    code, out, err = charonia("chat", "--max-tokens", "4", stdin="hello\n\n", env={"MODEL": str(model)})
    assert code == 0 and out, err


@pytest.mark.slow
def test_a_chat_that_outgrows_the_context_forgets_its_oldest_messages(model: Path) -> None:
    messages = "".join(f"message number {index}, and it is not short\n\n" for index in range(8))
    code, _, err = charonia("chat", model, "--session-len", "200", "--max-tokens", "16", stdin=messages)
    assert code == 0 and "are removed" in err and "error" not in err


@pytest.mark.slow
def test_model_without_a_chat_template_gets_a_clear_error(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    code, _, err = charonia("chat", tmp_path, stdin="hi\n")
    assert code == 1 and "has no chat template" in err


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, *arguments: str | Path) -> None:
        self._master, slave = pty.openpty()
        env = {**PLAIN, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)], stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        os.close(slave)
        self.seen = ""

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str) -> None:
        """Read output until `pattern` matches the output since the last match."""
        while (found := re.search(pattern, self.seen)) is None:
            ready, _, _ = select.select([self._master], [], [], 300)
            assert ready, f"{pattern!r} did not come; seen: {self.seen[-2000:]}"
            self.seen += os.read(self._master, 65536).decode(errors="replace")
        self.seen = self.seen[found.end() :]

    def close(self) -> int:
        """Return the exit code. Reads the rest of the output, so that the command does not block."""
        while True:
            try:
                if not os.read(self._master, 65536):
                    break
            except OSError:
                break
        code = self.process.wait(300)
        os.close(self._master)
        return code


@pytest.mark.slow
def test_terminal_double_enter_sends_ctrl_c_interrupts_and_exit_leaves(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    endless = {**config, "eos_token_id": None, "max_position_embeddings": 16384}
    (tmp_path / "config.json").write_text(json.dumps(endless))
    terminal = Terminal("chat", tmp_path, "--temperature", "0", "--device", "null", "--null-step-ms", "50")
    try:
        terminal.wait_for("exit quits")
        terminal.wait_for(">")
        terminal.send("hello\r")
        terminal.send("\r")
        terminal.wait_for(r"w\d\d")  # an endless response
        os.killpg(terminal.process.pid, signal.SIGINT)
        terminal.wait_for(r"\(interrupted\)")
        terminal.wait_for(r"\[\d+ tokens, .*first after \d+ ms\]")
        terminal.wait_for(">")
        terminal.send("exit\r")
        assert terminal.close() == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()


@pytest.mark.slow
def test_benchmark_static_has_rates_and_shares_of_the_bandwidth(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "static.json"
    code, out, err = charonia(
        *("benchmark", "static", model, "--batch-size", "2", "--prompt-tokens", "8", "--output-tokens", "16"),
        *("--runs", "1", "--json", file, "--verbose"),
    )
    assert code == 0, err
    run, found = records.read(file)
    assert {tuple(record.case.items()) for record in found} == {(("batch", 2), ("prompt", 8), ("output", 16))}
    value = {record.name: record.value for record in found}
    assert value.keys() == {"prefill", "decode", "output in all", "weights", "weights and KV"}  # GEMMs: only on a GPU
    assert value["decode"] > 0 and 0 < value["weights"] < value["weights and KV"]
    about = run["settings"]
    assert about["bandwidth"] > 1e8 and about["gemm_flops"] is None and about["kernel_report"] == []
    assert run["machine"]["processors"] and run["commit"] and run["command"][:3] == ["charonia", "benchmark", "static"]
    assert "memory reads" in out and "the CPU device has no kernels to choose from" in out


@pytest.mark.slow
@pytest.mark.parametrize("when", [["--concurrency", "3"], ["--request-rate", "200"]])
def test_benchmark_serving_of_prompts_in_process(model: Path, tmp_path: Path, when: list[str]) -> None:
    prompts, file = tmp_path / "prompts.txt", tmp_path / "serving.json"
    prompts.write_text("one\n\ntwo words\n")
    code, _, err = charonia(
        *("benchmark", "serving", model, "--prompts", prompts, "--num-requests", "7", "--max-tokens", "9"),
        *("--json", file, *when),
    )
    assert code == 0, err
    value = counts(file)
    assert (value["requests"], value["errors"], value["output tokens"]) == (7, 0, 63)
    assert value["input tokens"] == 4 * 3 + 3 * 9
    assert 0 < value["time to first token"] <= value["end to end, 99th"]


def counts(file: Path) -> dict[str, float]:
    """Return the values of records by name. The value of "requests" is their count."""
    return {record.name: record.value for record in records.read(file)[1]}


@pytest.mark.slow
def test_benchmark_serving_of_a_trace(model: Path, tmp_path: Path) -> None:
    trace, file = tmp_path / "trace.csv", tmp_path / "serving.json"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,40,12\n"
        "2023-11-16 18:15:50.9951690,9000,7\n"
        "2023-11-16 18:15:51.2224670,1,1\n"
    )
    code, _, err = charonia("benchmark", "serving", model, "--trace", trace, "--speed", "50", "--json", file)
    assert code == 0, err
    value = counts(file)
    assert (value["requests"], value["errors"], value["output tokens"]) == (3, 0, 20)


def test_benchmark_guides_measures_each_schema(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "guides.json"
    options = ("--batch-size", "3", "--output-tokens", "24", "--rounds", "2", "--json", file)
    code, _, err = charonia("benchmark", "guides", model, *options)
    assert code in (0, 1), err  # depends on the load of the machine
    found = [record for record in records.read(file)[1] if record.name == "mask"]
    assert {record.case["schema"] for record in found} >= {"a string", "of at most 4000 characters"}
    assert all(record.value > 0 and record.asked == 1 for record in found)


@pytest.mark.slow
def test_make_model_writes_a_model_that_runs(tmp_path: Path) -> None:
    assert charonia("benchmark", "make-model", tmp_path / "m", "--shape", "1,32,2,1,64,300")[0] == 0
    code, out, _ = charonia("chat", tmp_path / "m", "--max-tokens", "4", stdin="hi\n")
    assert code == 0 and out
    code, _, err = charonia("benchmark", "make-model", tmp_path / "n", "--shape", "huge")
    assert code == 1 and "'huge'" in err


@pytest.mark.parametrize("existed", [False, True])
def test_make_model_leaves_nothing_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool
) -> None:
    folder = tmp_path / "m"
    if existed:
        folder.mkdir()

    def fails(file: Path, *_: Any, **__: Any) -> None:
        file.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("charonia.bench.random_model.write_safetensors", fails)
    with pytest.raises(
        ModelError, match=rf"^{folder} cannot be written: No space left on device at {folder} \(.* free\)"
    ):
        make_model(folder, "1,32,2,1,64,300")
    assert folder.exists() == existed and not list(tmp_path.glob("m/*"))
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequestError, match="file is not an empty folder"):
        make_model(tmp_path / "file")


def test_a_full_disk_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        copy = str(tmp_path / "missing" / "file")
        raise OSError(errno.ENOSPC, "No space left on device", "/source/file", None, copy)

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: No space left on device at \S+/missing/file \([\d.]+ \w+ are free\): free .*\n", error)


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--max-model-len", "here --session-len"),
        ("--ctx-size=9", "here --session-len"),
        ("--log-format", "set the variable CHARONIA_LOG_FORMAT"),
        ("-m", "the model is an argument: charonia serve MODEL"),
        ("--speculative-config={}", "here --speculative-method with --speculative-model"),
        ("--reasoning-budget", "here thinking_budget of a request"),
        ("--model", "the model is an argument: charonia serve MODEL"),
        ("--model_path=m", "the model is an argument: charonia serve MODEL"),
    ],
)
def test_an_option_of_another_server_gets_a_hint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str, hint: str
) -> None:
    monkeypatch.setattr("sys.argv", ["charonia", "serve", "a-model", option])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    error = capsys.readouterr().err
    assert f"No such option: {option.partition('=')[0]}: {hint}" in " ".join(error.split())


def test_a_hint_for_a_command_without_the_option_names_the_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("doctor", "plan"):
        monkeypatch.setattr("sys.argv", ["charonia", command, "--port", "8000"])
        with pytest.raises(SystemExit, match="2"):
            cli.main()
        said = "No such option: --port: charonia serve has --gateway-port (CHARONIA_GATEWAY_PORT)"
        assert said in " ".join(capsys.readouterr().err.split())


def test_a_hint_for_an_option_of_several_letters_with_one_dash_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for option, said in (("-md", "-md: here --speculative-model"), ("-m", "-m: the model is an argument")):
        monkeypatch.setattr("sys.argv", ["charonia", "serve", option, "x"])
        with pytest.raises(SystemExit, match="2"):
            cli.main()
        assert said in " ".join(capsys.readouterr().err.split())


def test_a_wrong_value_of_a_list_of_integers_names_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("fp8", "5"):
        monkeypatch.setattr("sys.argv", ["charonia", "serve", "x", "--quant-policy", value])
        with pytest.raises(SystemExit, match="1"):
            cli.main()
        said = " ".join(capsys.readouterr().err.split())
        assert f"quant_policy = '{value}' is not valid: it takes 0 | 4 | 8 | 16 (" in said and "16: FP8" in said


def test_integers_of_a_list_of_values_stay_integers() -> None:
    given: list[object] = []
    app = typer.Typer()
    app.command()(with_engine_options(environment=False)(lambda settings: given.append(settings)))
    CliRunner().invoke(app, ["--quant-policy", "8", "--use-logn-attn", "1", "--threads", "2"])
    assert given == [{"quant_policy": 8, "use_logn_attn": 1, "threads": 2}]


def test_hints_name_options_that_exist_and_are_in_the_docs() -> None:
    (serve,) = [one for one in typer.main.get_command(cli.app).commands.values() if one.name == "serve"]  # type: ignore[attr-defined]
    options = {name for option in serve.params for name in (*option.opts, *option.secondary_opts)}
    assert not HINTS.keys() & options
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")
    for option, hint in HINTS.items():
        assert f"| `{option}` | {hint} |" in page
        assert set(re.findall(r"(?<!\S)--[a-z-]+", hint)) <= options | {"--file"}, hint


def test_an_interrupt_while_the_command_is_imported_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupts:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "charonia.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "charonia.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])
    with pytest.raises(SystemExit, match="130"):
        main()


def test_version_is_an_option_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["charonia", "--version"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert capsys.readouterr().out.strip() == __version__
