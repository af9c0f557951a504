"""`charonia plan` with a hub id: its output before the download, and the number of downloaded bytes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eagle3_heads import Head
from hub_double import HubDouble
from tokenizers import Tokenizer, models

from charonia.bench.random_model import Shape, write_random_model
from charonia.json_files import read_json
from charonia.weights.plan import make_plan

PLAIN = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "200", "HF_HUB_DISABLE_TELEMETRY": "1"}
CPU = ("--device", "cpu", "--memory", "4GiB", "--json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    write_random_model(folder, Shape(2, 256, 4, 2, 512, 8192))  # 11 MB
    return folder


@pytest.fixture
def hub(model: Path) -> Iterator[HubDouble]:
    with HubDouble({"them/small": model}, gated=("them/gated",)) as running:
        yield running


def plan(endpoint: str, home: Path, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "charonia", "plan", *arguments]
    environment = {**PLAIN, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    return done.returncode, done.stdout, done.stderr


def planned(endpoint: str, home: Path, model: str, *more: str) -> dict[str, Any]:
    code, out, err = plan(endpoint, home, model, *CPU, *more)
    assert code == 0, err
    answer: dict[str, Any] = json.loads(out)
    return answer


def plan_here(folder: Path, dtype: str = "auto") -> dict[str, Any]:
    made = make_plan(folder, {"device": "cpu"}, dtype=dtype, memory="4GiB")
    answer: dict[str, Any] = json.loads(json.dumps(made.answers(None, None)))
    return answer


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address that does not listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def without_weights(model: Path, folder: Path) -> Path:
    """Copy a model without its safetensors files."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    return folder


@pytest.mark.slow
def test_a_plan_takes_the_headers_of_the_weights_and_no_more(model: Path, hub: HubDouble, tmp_path: Path) -> None:
    assert planned(hub.url, tmp_path, "them/small") == plan_here(model)
    weights = model / "model.safetensors"
    assert 0 < hub.sent[weights.name] <= 100_001 < weights.stat().st_size / 10
    assert sum(hub.sent.values()) < 110_000
    assert set(hub.sent) <= {"config.json", "generation_config.json", weights.name}


@pytest.mark.slow
def test_a_plan_takes_the_headers_of_an_eagle3_head(model: Path, tmp_path: Path) -> None:
    Head(vocab=8192, drafts=4000, target=256, layers=[0, 1, 1]).write(tmp_path / "head")
    method = ("--speculative-method", "eagle3", "--speculative-model")
    with HubDouble({"them/small": model, "them/head": tmp_path / "head"}) as hub:
        found = planned(hub.url, tmp_path, "them/small", *method, "them/head")
        assert sum(hub.sent.values()) < 220_000
        here = planned(hub.url, tmp_path, str(model), *method, str(tmp_path / "head"))
    assert found["speculative_bytes"] == here["speculative_bytes"] > 1_000_000


@pytest.mark.slow
def test_quantised_weights_are_planned_from_their_headers_too(model: Path, hub: HubDouble, tmp_path: Path) -> None:
    folder = tmp_path / "quantised"
    write_random_model(folder, Shape(2, 256, 4, 2, 512, 8192), scheme="w4a16")
    hub.models["them/quantised"] = folder
    said = planned(hub.url, tmp_path / "home", "them/quantised")
    assert said == plan_here(folder)
    # A layer weight takes 4 bits, and 2 bytes per group of 128, instead of 2 bytes. All other sizes are equal.
    layers = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)
    assert said["weight_type"] == "int4"
    assert plan_here(model)["weight_bytes"] - said["weight_bytes"] == pytest.approx(
        layers * (2 - 4 / 8 - 2 / 128), rel=0.01
    )
    assert hub.sent["model.safetensors"] <= 100_001


@pytest.mark.slow
def test_each_file_of_a_model_that_is_in_several_is_asked_for_its_header(
    model: Path, hub: HubDouble, tmp_path: Path
) -> None:
    sharded = without_weights(model, tmp_path / "small")
    names = split_weights(model / "model.safetensors", sharded)
    hub.models["them/small"] = sharded
    assert planned(hub.url, tmp_path / "home", "them/small")["weight_bytes"] == plan_here(model)["weight_bytes"]
    assert all(hub.ranges[name] == ["bytes=0-100000"] for name in names)


def split_weights(file: Path, folder: Path) -> list[str]:
    """Write the tensors of a file to two files with an index."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    keys = sorted(tensors)
    halves = {"model-1.safetensors": keys[: len(keys) // 2], "model-2.safetensors": keys[len(keys) // 2 :]}
    for name, mine in halves.items():
        save_file({key: tensors[key] for key in mine}, folder / name)
    weight_map = {key: name for name, mine in halves.items() for key in mine}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return list(halves)


@pytest.mark.slow
def test_headers_that_contradict_config_json_are_an_error(model: Path, hub: HubDouble, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    config = read_json(other / "config.json")
    (other / "config.json").write_text(json.dumps({**config, "intermediate_size": config["intermediate_size"] + 64}))
    hub.models["them/small"] = other
    code, _, err = plan(hub.url, tmp_path / "home", "them/small", *CPU)
    assert code == 1 and "where config.json says" in err


@pytest.mark.slow
def test_bin_weights_are_planned_from_config_json_with_a_warning(model: Path, hub: HubDouble, tmp_path: Path) -> None:
    old = without_weights(model, tmp_path / "old")
    (old / "pytorch_model.bin").write_bytes(b"x" * 1_000_000)
    hub.models["them/small"] = old
    config = read_json(old / "config.json")
    config.pop("dtype", None)
    (old / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    said = planned(hub.url, tmp_path / "home", "them/small")
    assert (said["weight_type"], said["weight_bytes"]) == ("bf16", plan_here(model, "bf16")["weight_bytes"])
    assert "can be checked only after their download" in said["warnings"][0]
    assert "pytorch_model.bin" not in hub.sent

    config.pop("torch_dtype", None)
    (old / "config.json").write_text(json.dumps(config))
    code, _, err = plan(hub.url, tmp_path / "another", "them/small", *CPU)
    assert code == 1 and "--dtype fp32 | fp16 | bf16" in err
    assert planned(hub.url, tmp_path / "another", "them/small", "--dtype", "fp32")["weight_type"] == "fp32"


@pytest.mark.slow
def test_files_that_the_hub_lacks_are_named_with_the_remedy(
    model: Path, hub: HubDouble, nobody: str, tmp_path: Path
) -> None:
    hub.models["them/gated"] = model
    hub.models["them/empty"] = without_weights(model, tmp_path / "empty")
    for endpoint, name, parts in (
        (hub.url, "them/gated", ("gated", "accept its terms", "HF_TOKEN")),
        (hub.url, "them/nothing", ("no model of that name", "check the name")),
        (hub.url, "them/empty", ("no weights on the hub", "pytorch_model.bin")),
        (nobody, "them/small", ("cannot be downloaded", "check the network", "HF_ENDPOINT")),
        (hub.url, "no/hub/id", ("is not a hub id (owner/name",)),
    ):
        code, out, err = plan(endpoint, tmp_path / "home", name, *CPU)
        assert code == 1 and out == "" and "Traceback" not in err
        assert all(part in err for part in parts), err


@pytest.mark.slow
def test_a_model_that_is_in_the_cache_is_planned_without_a_network(
    model: Path, hub: HubDouble, nobody: str, tmp_path: Path
) -> None:
    # As GPT-OSS and Mistral, it has copies of its weights in other formats.
    folder = Path(shutil.copytree(model, tmp_path / "small"))
    (folder / "original").mkdir()
    for copy in (folder / "original" / "model.safetensors", folder / "consolidated.safetensors"):
        shutil.copy(model / "model.safetensors", copy)
    hub.models["them/small"] = folder
    environment = {**PLAIN, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
    code = "from charonia.weights.hub import download; print(download('them/small'))"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, timeout=300)
    sent = dict(hub.sent)
    assert sent["model.safetensors"] == (model / "model.safetensors").stat().st_size
    assert [name for name in sent if name.endswith(".safetensors")] == ["model.safetensors"]
    said = planned(hub.url, tmp_path, "them/small")
    assert hub.sent == sent
    assert planned(nobody, tmp_path, "them/small") == said


@pytest.mark.slow
def test_a_plan_of_a_score_takes_the_tokenizer_for_the_tokens_no_and_yes(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "ranker")
    Tokenizer(models.WordLevel({"no": 7, "yes": 4, "x": 0}, "x")).save(str(tmp_path / "ranker" / "tokenizer.json"))
    with HubDouble({"them/ranker": tmp_path / "ranker"}) as hub:
        found = planned(hub.url, tmp_path / "home", "them/ranker", "--task", "score")
    here = make_plan(tmp_path / "ranker", {"device": "cpu", "task": "score"}, memory="4GiB").answers(None, None)
    assert found == json.loads(json.dumps(here))
