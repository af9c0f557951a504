"""The setting quantization: weights are rounded while they are loaded.

tests/parity/test_quantised_parity.py compares the rounded weights with compressed-tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from charonia import Engine, SamplingParams, UnsupportedError
from charonia.bench.random_model import SHAPES, Shape, write_random_model
from charonia.quality.evaluate import evaluate
from charonia.weights import workspace
from charonia.weights.convert import convert, link_workspace
from charonia.weights.plan import make_plan
from charonia.weights.quality_record import records_of_folder

SCHEMES = {"fp8": ("fp8", 0), "w8a8": ("int8", 0), "w8a16": ("int8", 0), "w4a16": ("int4", 64)}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    write_random_model(folder, Shape(2, 128, 4, 2, 192, 320), scale=0.2)
    return folder


@pytest.mark.parametrize("scheme", SCHEMES)
def test_plan_and_engine_have_the_type_and_the_size_of_rounded_weights(scheme: str, model: Path) -> None:
    plan = make_plan(model, {"device": "cpu", "quantization": scheme})
    with Engine.from_pretrained(model, threads=1, device="cpu", quantization=scheme) as engine:
        info = engine.info
        assert engine.generate([[1, 2, 3]], GREEDY)[0].token_ids
    assert (plan.weight_type, plan.group_size) == (info.weight_type, info.group_size) == SCHEMES[scheme]
    assert plan.data_type == info.data_type == "bf16"
    assert plan.quantization == info.quantization == scheme
    # The plan also has the tables of positions.
    saved = make_plan(model, {"device": "cpu"}).weight_bytes - plan.weight_bytes
    with Engine.from_pretrained(model, threads=1, device="cpu") as engine:
        assert saved == pytest.approx(engine.info.weight_bytes - info.weight_bytes, rel=0.02)


def test_a_workspace_may_be_rounded_by_its_own_setting_or_by_the_callers(model: Path, tmp_path: Path) -> None:
    plain = convert(model, tmp_path / "plain")
    own = convert(model, tmp_path / "own", settings={"quantization": "w8a16"})
    outputs: list[Any] = []
    for folder, settings in ((model, {"quantization": "w8a16"}), (plain, {"quantization": "w8a16"}), (own, {})):
        with Engine.from_pretrained(folder, threads=1, **settings) as engine:
            outputs.append(engine.generate([[5, 6, 7]], GREEDY)[0].logprobs)
    assert outputs[0] == outputs[1] == outputs[2]
    with Engine.from_pretrained(own, threads=1, quantization="none") as engine:
        assert engine.info.weight_type == "bf16"


def test_a_quantised_model_is_rejected_with_its_format_and_the_remedy(tmp_path: Path) -> None:
    write_random_model(tmp_path, SHAPES["tiny"], scheme="w4a16")
    with pytest.raises(UnsupportedError, match=r"already quantised \(int4 in layout packed-rows.*quantization = none"):
        Engine.from_pretrained(tmp_path, quantization="w8a16")
    with pytest.raises(UnsupportedError, match="already quantised"):
        make_plan(tmp_path, {"quantization": "fp8"})


def test_ranks_that_would_divide_a_group_are_rejected_by_the_name_of_the_tensor(model: Path) -> None:
    settings = {"device": "cpu", "tensor_para_size": 2, "quantization": "w4a16"}
    with pytest.raises(UnsupportedError, match=r"a rank has 96 columns of layers\.0.*w2.*groups of 64.*w8a16"):
        make_plan(model, settings)
    assert make_plan(model, {**settings, "quantization": "w8a16"}).ranks == 2


def test_rows_that_no_groups_divide_are_rejected_with_the_remedy(tmp_path: Path) -> None:
    write_random_model(tmp_path, Shape(1, 72, 3, 3, 96, 320))
    with pytest.raises(UnsupportedError, match="has 72 columns\\. Use quantization = w8a16"):
        Engine.from_pretrained(tmp_path, quantization="w4a16")


def test_plan_suggests_w8a16_on_a_cpu_if_that_may_fit(model: Path) -> None:
    needed = make_plan(model, {"device": "cpu"})
    least = needed.weight_bytes + needed.activation_bytes + needed.kv_block_bytes
    for missing, suggested in ((1000, True), (needed.weight_bytes, False)):
        for settings in ({}, {"quantization": "w8a16"}):
            memory = least - missing - (needed.weight_bytes if settings else 0)
            [why] = make_plan(model, {"device": "cpu", **settings}, memory=str(memory)).warnings
            assert ("quantization = w8a16" in why) == (suggested and not settings), why


def test_the_quality_of_rounded_weights_has_a_record_of_its_own(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("One two three four. " * 20, encoding="utf-8")
    given: dict[str, Any] = {"text": text, "window": 64, "stride": 32, "ask": False}
    plain = evaluate(model, **given, settings={"threads": 1})
    rounded = evaluate(model, model, **given, settings={"threads": 1, "quantization": "w4a16"})
    assert rounded.reference is not None and rounded.reference.weight_type == "bf16" and rounded.reference.kl_mean > 0
    assert records_of_folder(model) == [plain, rounded]
    manifest = link_workspace(model, tmp_path / "linked") / workspace.WEIGHTS / "manifest.json"
    assert [one.get("quantization") for one in json.loads(manifest.read_text())["quality"]] == [None, "w4a16"]
    for settings, expected in (({}, plain), ({"quantization": "w4a16"}, rounded)):
        assert make_plan(model, {"device": "cpu", **settings}).quality == [expected.content()]
