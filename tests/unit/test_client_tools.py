"""Python functions as tools: their descriptions for the model, and the results of its calls."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import pytest
from charonia_client import Client, GenerateRequest, GenerateResponse, Tools, TooManyRounds, converse
from charonia_client.chat import Chat
from charonia_client.cli import _ensemble_of, _tools_of, app
from charonia_client.errors import Unavailable
from charonia_client.types import ToolCallDelta
from triton_double import Double
from typer.testing import CliRunner

from charonia.serve.models import with_labels

EXAMPLE = Path(__file__).resolve().parents[2] / "client" / "examples" / "tools.py"


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", places: list[str] | None = None) -> dict[str, Any]:
    """The weather of a city."""
    return {"city": city, "days": days, "unit": unit, "places": places}


async def fail(why: str) -> str:
    raise RuntimeError(why)


def test_a_function_is_described_by_its_annotations_and_its_docstring() -> None:
    (described,) = Tools([weather]).described
    assert described["type"] == "function"
    assert described["function"] == {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "places": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
        },
    }


async def test_example_file_has_two_functions_with_clear_errors() -> None:
    tools = _tools_of(EXAMPLE)
    parameters = {
        tool["function"]["name"]: list(tool["function"]["parameters"]["properties"]) for tool in tools.described
    }
    assert parameters == {"get_weather": ["place"], "calculate": ["expression"]}

    async def text(name: str, **arguments: str) -> str:
        return (await tools.call("1", name, json.dumps(arguments))).text

    assert await text("calculate", expression="318 * (47 - 2.5) / -2") == '{"result": -7075.5}'
    assert await text("calculate", expression="640 / 16") == '{"result": 40}'
    for expression, error in (
        ("2 ** 9", "ValueError"),
        ("__import__('os')", "ValueError"),
        ("1 / 0", "ZeroDivisionError"),
        ("1 +", "SyntaxError"),
        ("9" * 201, "ValueError"),
        ("1e999", "OverflowError"),
    ):
        assert (await text("calculate", expression=expression)).startswith(f"error: {error}: ")
    weather = json.loads(await text("get_weather", place="Oslo"))
    assert weather == {**json.loads(await text("get_weather", place="oslo")), "place": "Oslo"}
    assert set(weather) == {"place", "weather", "temperature"}


def odd(value: bytes) -> None: ...


def many(*values: str) -> None: ...


@pytest.mark.parametrize("function", [odd, many])
def test_parameter_of_an_unsupported_type_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=rf"{function.__name__}\(values?\)"):
        Tools([function])


async def test_a_call_runs_the_function_with_its_arguments() -> None:
    result = await Tools([weather]).call("1", "weather", '{"city": "Paris", "days": 2}')
    assert (result.call_id, result.name) == ("1", "weather")
    assert json.loads(result.text) == {"city": "Paris", "days": 2, "unit": "C", "places": None}


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("other", "{}", "error: LookupError: there is no function 'other'; there are weather, fail"),
        ("weather", '{"city": ', "error: JSONDecodeError:"),
        ("weather", "[]", "error: TypeError: the arguments are not a JSON object"),
        ("weather", '{"town": "Paris"}', "error: TypeError: missing a required argument"),
        ("fail", '{"why": "no network"}', "error: RuntimeError: no network"),
    ],
)
async def test_error_of_a_call_is_its_result(name: str, arguments: str, text: str) -> None:
    assert (await Tools([weather, fail]).call("1", name, arguments)).text.startswith(text)


class Caller(Client):
    """A client of a model that reasons, and first calls `weather`. choices: the received values of tool_choice."""

    def __init__(self, calls: int) -> None:
        self.choices: list[Any] = []
        self._calls = calls

    async def generate(self, request: GenerateRequest, **_: Any) -> Any:
        self.choices.append(request.tool_choice)
        calls = (
            [ToolCallDelta(0, "1", "weather", '{"city": "Paris"}', True)] if len(self.choices) <= self._calls else []
        )
        yield GenerateResponse("", reasoning="I thi")
        yield GenerateResponse("", reasoning="nk.", finish_reason="stop", tool_calls=calls)

    async def end_session(self, session_id: str) -> None: ...


async def test_call_is_forced_only_in_the_first_response() -> None:
    """Otherwise the model would call tools without end."""
    for choice, seen in (("required", ["required", None, None]), ("none", ["none"] * 3), (None, [None] * 3)):
        client = Caller(2)
        request = GenerateRequest(messages=[], tool_choice=choice)
        history: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
        _ = [item async for item in converse(client, request, Tools([weather]), history)]
        assert client.choices == seen
        assert [message.get("reasoning_content") for message in history] == [None, "I think.", None, "I think.", None]


async def test_endless_calls_end_after_the_maximum_of_rounds() -> None:
    request, history = GenerateRequest(messages=[]), [{"role": "user", "content": "x"}]
    with pytest.raises(TooManyRounds, match="functions in each of 2 responses"):
        _ = [item async for item in converse(Caller(9), request, Tools([weather]), history, max_rounds=2)]
    assert [message["role"] for message in history] == ["user", *["assistant", "tool"] * 2]
    with pytest.raises(ValueError, match="max_rounds = 0; it must be at least 1"):
        await anext(converse(Caller(9), request, Tools([weather]), history, max_rounds=0))


class Once:
    """Reads one message."""

    hint = ""

    def __init__(self) -> None:
        self._messages = ["x"]

    async def read(self) -> str | None:
        return self._messages.pop() if self._messages else None


async def test_terminal_prints_the_maximum_of_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    client = Caller(100)
    assert await Chat(client, Once(), sampling={}, tools=Tools([weather])).run() == 0
    assert (
        "in each of 8 responses; no further response was requested: send a message to continue)"
        in capsys.readouterr().out
    )
    assert len(client.choices) == 8


async def test_terminal_asks_the_adapter() -> None:
    asked: list[str | None] = []

    class Listener(Caller):
        async def generate(self, request: GenerateRequest, **_: Any) -> Any:
            asked.append(request.lora_name)
            yield GenerateResponse("x", finish_reason="stop")

    for lora in (None, "sql"):
        assert await Chat(Listener(0), Once(), sampling={}, lora=lora).run() == 0
    assert asked == [None, "sql"]


def test_terminal_refuses_an_adapter_without_a_name() -> None:
    done = CliRunner().invoke(app, ["--lora", ""])
    assert done.exit_code == 2 and "the adapter has no name" in done.output


async def test_terminal_finds_ensemble_by_the_name_of_the_model() -> None:
    *_, served = with_labels([("first", Path()), ("Qwen/Qwen3: 0.6B", Path())])
    ensemble = served.part("ensemble")
    async with Double() as triton, Client(triton.target) as client:
        triton.unloaded = {served.name, f"{ensemble}-2", "first", "ensemble.first"}
        assert await _ensemble_of(client, served.name) == ensemble
        assert await _ensemble_of(client, ensemble) == ensemble
        with pytest.raises(Unavailable, match="no model 'first' that is ready: leave --model out"):
            await _ensemble_of(client, "first")
        triton.unloaded.remove(f"{ensemble}-2")
        with pytest.raises(Unavailable, match=r"several models whose names are like 'Qwen/Qwen3: 0\.6B'"):
            await _ensemble_of(client, served.name)


def test_terminal_prints_its_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0 and done.output.strip() == version("charonia-client")
