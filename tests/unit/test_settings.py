"""The sources of the settings of `charonia serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from charonia.api.options import with_engine_options
from charonia.errors import InvalidRequestError
from charonia.serve.command import with_setting_options
from charonia.settings import inference_settings, misspelled, read_settings


@pytest.fixture(autouse=True)
def folder_with_env_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("MODEL", "CHARONIA_GRPC_PORT", "CHARONIA_THREADS", "CHARONIA_TOKEN_BUDGET", "CHARONIA_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".env").write_text("MODEL=from-file\nCHARONIA_GRPC_PORT=4001\nCHARONIA_THREADS=3\nCHARONIA_HOST=\n")
    return tmp_path


def test_precedence_is_arguments_environment_env_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings().grpc_port == 4001
    monkeypatch.setenv("CHARONIA_GRPC_PORT", "4002")
    assert read_settings().grpc_port == 4002
    assert read_settings(grpc_port=4003, model=None).grpc_port == 4003
    assert read_settings().model == "from-file"


def test_an_empty_value_is_not_set() -> None:
    assert read_settings().host == "127.0.0.1"


def test_a_wrong_port_names_its_variable() -> None:
    with pytest.raises(InvalidRequestError, match="CHARONIA_HTTP_PORT=70000"):
        read_settings(http_port=70000)


@pytest.mark.parametrize("value", ["0", "5", "60"])
def test_hang_timeout_of_5_s_or_0_is_accepted(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHARONIA_HANG_TIMEOUT_S", value)
    assert read_settings().hang_timeout_s == float(value)


@pytest.mark.parametrize("value", ["0.001", "4.9", "-1", "nan"])
def test_too_short_hang_timeout_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHARONIA_HANG_TIMEOUT_S", value)
    with pytest.raises(InvalidRequestError, match=rf"CHARONIA_HANG_TIMEOUT_S='{value}': it must be 0 \(off\) or at le"):
        read_settings()


def test_inference_parameters_come_from_the_engines_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHARONIA_TOKEN_BUDGET", "128")
    assert inference_settings({"session_len": "64"}) == {"threads": "3", "token_budget": "128", "session_len": "64"}


def test_a_wrong_inference_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHARONIA_TOKEN_BUDGET", "much")
    with pytest.raises(InvalidRequestError, match=r"token_budget.*much"):
        inference_settings()


def test_a_misspelled_variable_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHARONIA_SESION_LEN", "64")
    for name in ("CHARONIA_GATEWAY_REQUEST_TIMEOUT_S", "CHARONIA_TRITON_ENDPOINTS", "CHARONIA_CACHE_DIR"):
        monkeypatch.setenv(name, "1")  # the gateway and the engine read these
    assert misspelled() == ["CHARONIA_SESION_LEN is unknown and ignored; did you mean CHARONIA_SESSION_LEN?"]


def test_options_with_the_values_0_and_false_count_as_given() -> None:
    found: list[Any] = []
    app = typer.Typer()

    @app.command()
    @with_engine_options(environment=False)
    @with_setting_options("gateway", "max_restarts", "run_dir", "model_name")
    def command(given: Any = None, settings: Any = None) -> None:
        found.extend((given, settings))

    options = ["--no-gateway", "--max-restarts", "0", "--run-dir", "x", "--no-enable-prefix-caching", "--threads", "0"]
    assert CliRunner().invoke(app, options).exit_code == 0
    assert found[0] == {"gateway": False, "max_restarts": 0, "run_dir": Path("x")}
    assert found[1] == {"enable_prefix_caching": False, "threads": 0}
