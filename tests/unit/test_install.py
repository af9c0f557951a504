"""scripts/install.py: uv installs with pip's settings, or pip installs if uv cannot."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from load_file import load_file

WANTED = ["--requirement", "wanted.txt"]
SCRIPT = Path(__file__).resolve().parents[2] / "scripts/install.py"


@pytest.fixture
def install() -> ModuleType:
    return load_file(SCRIPT)


def command(folder: Path, name: str, status: int = 0) -> Path:
    """A program that prints the file pip-config for `config`, and otherwise writes its input to <name>.json."""
    file = folder / name
    (folder / "pip-config").touch()
    (folder / "venv/bin").mkdir(parents=True, exist_ok=True)
    file.write_text(
        f"#!{sys.executable}\nimport json, os, pathlib, sys\n"
        f"print(open({str(folder / 'pip-config')!r}).read())\n"
        "if 'config' in sys.argv: sys.exit(0)\n"
        f"pathlib.Path({str(folder / name)!r} + '.json').write_text(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
        f"print('no such package', file=sys.stderr)\nsys.exit({status})\n"
    )
    file.chmod(0o755)
    return file


@pytest.fixture
def tools(install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a uv and a pip that install nothing."""
    uv = command(tmp_path, "uv")
    monkeypatch.setattr(install, "PIP", [str(command(tmp_path, "pip"))])
    monkeypatch.setattr(install, "find_uv", lambda: str(uv))
    monkeypatch.setattr(sys, "argv", ["install.py", "--into", str(tmp_path / "venv/bin/python"), *WANTED])
    for name in ("CHARONIA_INSTALLER", "PYTHONDONTWRITEBYTECODE", "UV_INDEX", "UV_COMPILE_BYTECODE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def told(folder: Path, name: str) -> tuple[list[str], dict[str, str]]:
    arguments, env = json.loads((folder / f"{name}.json").read_text())
    return arguments, env


def test_uv_gets_the_settings_of_pip(install: ModuleType, tools: Path) -> None:
    (tools / "pip-config").write_text(
        "global.index-url='https://user:key@mirror.example/simple'\n"
        "global.find-links='/opt/wheels\\n/opt/more'\n"
        "global.timeout='5'\n"
        "global.retries='9'\n"
        "global.cache-dir='/scratch/pip'\n"
        ":env:.extra-index-url='https://a.example/simple https://b.example/simple'\n"
        ":env:.timeout='60'\n"
        "wheel.no-build-isolation='true'\n"
    )
    assert install.main() == 0
    arguments, env = told(tools, "uv")
    assert arguments == ["pip", "install", "--quiet", "--python", str(tools / "venv/bin/python"), *WANTED]
    assert env["UV_DEFAULT_INDEX"] == "https://user:key@mirror.example/simple"
    assert env["UV_FIND_LINKS"] == "/opt/wheels,/opt/more"
    assert env["UV_INDEX"] == "https://a.example/simple https://b.example/simple"
    assert env["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert env["UV_HTTP_TIMEOUT"] == "60"
    assert env["UV_CACHE_DIR"] == "/scratch/pip/uv"
    assert "UV_COMPILE_BYTECODE" not in env
    assert not (tools / "pip.json").exists()


@pytest.mark.parametrize(("more", "constrained"), [([], True), (["--require-hashes"], False)])
def test_uv_has_no_constraints_where_versions_are_pinned(
    install: ModuleType, tools: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], constrained: bool
) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv, *more])
    (tools / "pip-config").write_text("global.constraint='/etc/constraints.txt'\n")
    assert install.main() == 0
    assert ("UV_CONSTRAINT" in told(tools, "uv")[1]) == constrained


@pytest.mark.slow
def test_the_real_pips_settings_are_found(install: ModuleType, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tools / "pip.conf"
    config.write_text(
        "[global]\nfind-links = /opt/wheels\n    /opt/more\n[install]\nindex-url = https://b.example/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_FIND_LINKS", "/opt/mine")
    monkeypatch.setattr(install, "PIP", [sys.executable, "-m", "pip"])
    assert install.main() == 0
    env = told(tools, "uv")[1]
    assert (env["UV_FIND_LINKS"], env["UV_DEFAULT_INDEX"]) == ("/opt/mine", "https://b.example/simple")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("uv fails", "no such package"),
        ("a setting that uv cannot be told", "no-binary"),
        ("no uv", "no wheel of it"),
        ("asked for", "CHARONIA_INSTALLER"),
    ],
)
def test_pip_installs_where_uv_cannot(
    install: ModuleType,
    tools: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    reason: str,
    words: str,
) -> None:
    if reason == "uv fails":
        command(tools, "uv", status=1)
    elif reason == "a setting that uv cannot be told":
        (tools / "pip-config").write_text("install.no-binary='numpy'\n")
    elif reason == "no uv":

        def find_uv() -> str:
            raise OSError("no wheel of it")

        monkeypatch.setattr(install, "find_uv", find_uv)
    else:
        monkeypatch.setenv("CHARONIA_INSTALLER", "pip")
    assert install.main() == 0
    again = ["--force-reinstall"] if reason == "uv fails" else []
    python = str(tools / "venv/bin/python")
    assert told(tools, "pip")[0] == ["--quiet", "--python", python, "install", "--no-compile", *again, *WANTED]
    assert words in capfd.readouterr().err


@pytest.mark.slow
def test_interrupted_installation_is_repeated(
    install: ModuleType, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv records a package before all of its files exist."""
    uv = tools / "uv"
    whole = uv.read_text()
    uv.write_text(f"#!{sys.executable}\nimport os, signal\nos.kill(os.getppid(), signal.SIGTERM)\n")
    program = "import runpy, sys\nmain = runpy.run_path(sys.argv.pop(1))['main']\n"
    program += f"main.__globals__['find_uv'] = lambda: {str(uv)!r}\nmain()"
    arguments = ["--into", str(tools / "venv/bin/python"), "--requirement", "other.txt"]
    ended = subprocess.run([sys.executable, "-c", program, str(SCRIPT), *arguments])
    assert ended.returncode == -signal.SIGTERM
    uv.write_text(whole)
    assert install.main() == 0  # for other packages: some of the first ones may be among them
    assert "--reinstall" in told(tools, "uv")[0]
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "other.txt"])
    assert install.main() == 0
    assert "--reinstall" in told(tools, "uv")[0]
    assert install.main() == 0
    assert "--reinstall" not in told(tools, "uv")[0]


def test_failure_of_uv_and_pip_is_an_error(install: ModuleType, tools: Path) -> None:
    command(tools, "uv", status=1)
    command(tools, "pip", status=1)
    assert install.main() == 1
