"""The committed generated files are up to date, and the definitions agree with the code."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from charonia_client import GenerateRequest
from charonia_gateway.settings import Settings as GatewaySettings
from pydantic import TypeAdapter, ValidationError

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from charonia import SamplingParams, _engine  # noqa: E402
from charonia.families import ModelConfig  # noqa: E402
from charonia.serve.launcher import AFTER_DRAINS_S  # noqa: E402
from charonia.settings import ServeSettings, env_name  # noqa: E402
from definitions.outputs import COMMITTED, render  # noqa: E402
from definitions.sampling import SamplingParameter, parameters  # noqa: E402
from definitions.services import TRUE_WORDS, ServiceSetting, service_settings, variables  # noqa: E402
from definitions.settings import Setting, engine_settings, model_attributes  # noqa: E402
from definitions.tensors import STEPS, Tensor, inputs, tensors  # noqa: E402


@pytest.mark.parametrize("path", COMMITTED)
def test_generated_files_are_committed(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == render([path])[path], f"{path} is out of date: make generate"


def test_engine_fields_equal_the_definitions() -> None:
    found = [(field.key, field.help, field.model_attribute, field.ignored) for field in _engine.config_fields()]
    defined = [(entry.name, entry.help, True, False) for entry in model_attributes()]
    defined += [(entry.name, entry.help, False, entry.ignored) for entry in engine_settings()]
    assert found == defined


def test_defaults_of_a_model_in_python_equal_the_engine() -> None:
    required = {entry.name: 1 for entry in model_attributes() if entry.required}
    assert set(required) < {field.name for field in fields(ModelConfig)}
    written = {key: value for key, value in ModelConfig(**required).settings().items() if key not in required}
    spelled = {"true": "1", "false": "0"}
    for field in _engine.config_fields():
        if field.key in written:
            mine = spelled.get(written[field.key], written[field.key])
            theirs = "" if field.key in ("end_id", "target_layers") else field.default_value  # -1 means none there
            assert mine == theirs or float(mine) == float(theirs), field.key


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (Setting, {"type": "integer"}, "of type 'integer'"),
        (Setting, {"type": "int"}, "needs either a default or required"),
        (Setting, {"type": "int", "default": 1}, "does not define the allowed values"),
        (ServiceSetting, {"of": ("gateway",), "type": "bool", "default": True}, "decide whether it changes tokens"),
        (ServiceSetting, {"of": ("gateway",), "type": "float", "default_from": "drain_time"}, "not an engine setting"),
        (ServiceSetting, {"of": ("gateway",), "type": "float"}, "needs a default, or unset"),
        (SamplingParameter, {"type": "int", "default": 1, "optional": True}, "needs one of default, optional and none"),
        (SamplingParameter, {"type": "float", "default": 1.0, "model": True}, "cannot have a model's default"),
        (Tensor, {"type": "INT32", "dims": (1,), "inputs": ("engines",)}, "engines"),
        (Tensor, {"type": "INT32", "dims": (1,), "outputs": ("engine",), "required": ("engine",)}, "does not take it"),
    ],
)
def test_an_inconsistent_entry_is_rejected(kind: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"\[x\].*{message}"):
        kind(name="x", help="an entry", **given)


def test_sampling_parameters_and_their_defaults_are_the_same_everywhere() -> None:
    native, api, client = _engine.SamplingParams(), SamplingParams(), GenerateRequest(text="")
    for one in parameters():
        if one.is_value:
            assert getattr(native, one.name) == pytest.approx(one.none if one.default is None else one.default), (
                one.name
            )
            assert getattr(api, one.name) == (None if one.unset else one.default), one.name
            if one.name != "thinking_begun":  # the prompt determines it
                assert getattr(client, one.name) is None, one.name
        else:
            assert getattr(native, one.name) == [], one.name
    assert {field.name for field in fields(api)} - {"stop"} == {one.name for one in parameters()} - {"stop_words"}


def test_inputs_of_a_step_come_from_earlier_steps() -> None:
    echo = next(one for one in tensors() if one.name == "echo")
    assert [echo.source(step) for step in STEPS] == ["", "preprocessing_echo", "engine_echo"]
    # Only in direct calls of the engine.
    direct = {"stop", "cancel", "subscription_read", "subscription_end", "lora_path", "lora_unload", "lora_list"}
    for step in STEPS:
        lacking = {one.name for one in inputs(step) if not one.source(step)}
        assert lacking == (direct if step == "engine" else set()), step


# --- variables of the environment

_QUOTED = re.compile(r'"(CHARONIA_[A-Z0-9_]*[A-Z0-9])"')
_EXPANDED = re.compile(r"\$\{?(CHARONIA_[A-Z0-9_]+)")
_OF_COMPOSE = re.compile(r"(?<!\$)\$\{?([A-Z][A-Z0-9_]*)")
_PATTERNS = {"py": _QUOTED, "cpp": _QUOTED, "h": _QUOTED, "cu": _QUOTED}
_PATTERNS |= dict.fromkeys(("sh", "yml", "Dockerfile", "Makefile", "run"), _EXPANDED)


def variables_named(*, tests: bool = False) -> dict[str, set[str]]:
    """Return variable -> the files that name it, of tests or of the product: quoted in C++ and Python, expanded in
    scripts and compose. For compose, all variables, with any prefix."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found: dict[str, set[str]] = {}
    for path in listed.split("\0"):
        compose = path.startswith("docker-compose")
        pattern = _OF_COMPOSE if compose else _PATTERNS.get(re.split(r"[./]", path)[-1])
        generated = path == "charonia/serve_fields.py"  # it also names variables that other processes read
        if pattern is not None and not generated and path.startswith(("tests/", "engine/tests/")) == tests:
            for name in pattern.findall((ROOT / path).read_text(encoding="utf-8")):
                found.setdefault(name, set()).add(path)
    return found


def test_every_variable_that_code_names_is_documented() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    named = variables_named()
    assert {"CHARONIA_CUDA_SYNC", "CHARONIA_NCCL", "CHARONIA_TAG", "CHARONIA_CCACHE"} <= set(named)
    missing = {name: files for name, files in named.items() if f"`{name}`" not in page}
    assert not missing, "definitions/environment.toml lacks them"


def test_every_variable_of_the_environment_is_read_somewhere() -> None:
    of_library = {"HF_TOKEN", "HF_ENDPOINT"}  # read by huggingface_hub
    of_tests = {one.name for one in variables() if one.group == "tests"}
    unread = {one.name for one in variables()} - set(variables_named()) - of_library
    unread -= of_tests & set(variables_named(tests=True))
    assert not unread, "nothing reads what definitions/environment.toml has"


def test_launcher_and_gateway_settings_equal_the_definitions() -> None:
    serve = {env_name(field): field for field in ServeSettings.model_fields}
    assert serve == {one.name: one.field("serve") for one in service_settings() if "serve" in one.of}
    gateway = {one.field("gateway"): one.default_of("gateway") for one in service_settings() if "gateway" in one.of}
    assert {name: field.default for name, field in GatewaySettings.model_fields.items()} == gateway


def test_the_engine_and_the_gateway_take_the_same_words_for_true() -> None:
    settings = TypeAdapter(bool)
    for word in TRUE_WORDS:
        assert settings.validate_python(word) and settings.validate_python(word.upper())
    for word in ("0", "false", "no", "off", "f", "n"):
        assert not settings.validate_python(word)
    for word in ("", "2", "enabled", "wahr"):
        with pytest.raises(ValidationError):
            settings.validate_python(word)


_WITH_DEFAULT = re.compile(r"\$\{([A-Z][A-Z0-9_]*):?-([^${}]*)\}")
# docker compose has its own defaults for these, which .env.example lists. setup.sh has the last one, which is a text.
_DEFAULT_OF_OWN = {"MODEL", "CHARONIA_MODEL_NAME", "CHARONIA_GATEWAY_WORKERS", "CHARONIA_DEVICE", "CHARONIA_CUDA"}


def defined_defaults() -> dict[str, str]:
    found = {one.name: one.default for one in variables()}
    found |= {f"CHARONIA_{one.name.upper()}": str(one.default) for one in engine_settings()}
    return found | {one.name: str(one.default) for one in service_settings()}


def same_default(written: str, defined: str) -> bool:
    """Whether two defaults agree. `defined` may be a text."""
    nothing = written in ("", "/dev/null") and defined.startswith(("none", "all "))
    return nothing or defined in (written, f"the volume {written}")


def test_defaults_in_scripts_and_compose_equal_the_definitions() -> None:
    defined = defined_defaults()
    compose, scripts = [*ROOT.glob("docker-compose*.yml")], [*ROOT.glob("scripts/*.sh"), *ROOT.glob("charonia/*.sh")]
    written = [given for file in compose for given in _WITH_DEFAULT.findall(file.read_text(encoding="utf-8"))]
    for file in scripts:  # there an empty variable counts as unset
        written += [given for given in _WITH_DEFAULT.findall(file.read_text(encoding="utf-8")) if given[1]]
    compared = [(name, value) for name, value in written if name in defined and name not in _DEFAULT_OF_OWN]
    assert {"CHARONIA_HTTP_PORT", "CHARONIA_GATEWAY_PORT", "CHARONIA_SHM_SIZE", "GRAFANA_PORT"} <= dict(compared).keys()
    assert [(name, value) for name, value in compared if not same_default(value, defined[name])] == []
    (grace,) = {value for name, value in compared if name == "CHARONIA_STOP_GRACE_PERIOD"}
    seconds = f"{2 * float(defined['CHARONIA_DRAIN_TIMEOUT_S']) + AFTER_DRAINS_S:g}"
    assert grace == f"{seconds}s"
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    assert f"at least twice as many and {AFTER_DRAINS_S} more.\n#CHARONIA_STOP_GRACE_PERIOD={grace}\n" in example
    limit = f"twice `drain_timeout_s` plus {AFTER_DRAINS_S} s"
    pages = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("contracts.md", "operations.md")}
    assert f"{limit} before SIGKILL ({seconds} s by" in pages["contracts.md"]
    assert pages["operations.md"].count(limit) == 3 and f"is {seconds} s. It" in pages["operations.md"]


@pytest.mark.parametrize(
    ("file", "pattern", "names"),
    [
        ("Makefile", r"\$\{port:-(\d+)\}", ("GRPC",)),
        ("client/charonia_client/cli.py", r"^DEFAULT_PORT = (\d+)", ("GRPC",)),
        ("docker/health.py", r'"CHARONIA_GATEWAY_PORT", "(\d+)"', ("GATEWAY",)),
        ("docker/gateway.Dockerfile", r"^EXPOSE (\d+)$", ("GATEWAY",)),
        ("docker/gateway.Dockerfile", r'"health", "(\d+)"', ("GATEWAY",)),
        ("docker/server.Dockerfile", r"^EXPOSE (\d+) (\d+) (\d+)$", ("HTTP", "GRPC", "METRICS")),
        ("docker/server.Dockerfile", r'"health", "(\d+)"', ("HTTP",)),
        ("docker-compose.yml", r"CHARONIA_GATEWAY_PORT:-\d+\}:(\d+)", ("GATEWAY",)),
        ("charonia/service_docker_up.sh", r"CHARONIA_HTTP_PORT:-\d+\}:(\d+)", ("HTTP",)),
        ("charonia/service_docker_up.sh", r"CHARONIA_GRPC_PORT:-\d+\}:(\d+)", ("GRPC",)),
        ("charonia/service_docker_up.sh", r"CHARONIA_METRICS_PORT:-\d+\}:(\d+)", ("METRICS",)),
    ],
)
def test_ports_are_those_that_are_defined(file: str, pattern: str, names: tuple[str, ...]) -> None:
    found = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    assert found.groups() == tuple(defined_defaults()[f"CHARONIA_{name}_PORT"] for name in names)
