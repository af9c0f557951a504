"""`charonia benchmark mixed` and `beside-prompts`, on the device that computes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from charonia.bench.steps import _Decoding, run_beside_prompts, run_mixed
from charonia.errors import InvalidRequestError

DEMO = str(Path(__file__).resolve().parents[2] / "models" / "demo" / "model")
# Sessions in which nothing ends that decodes, however late this process reads it.
NULL = {"device": "null", "null_step_ms": 2, "session_len": 2000}


def test_a_mixed_step_is_held_against_its_two_parts() -> None:
    found = run_mixed(DEMO, decodes=3, prompt_tokens=128, rounds=1, settings=NULL)
    assert all(record.case == {"decodes": 3, "prompt": 128} for record in found)
    value = {record.name: record.value for record in found}
    # Every step takes 2 ms or, on a busy machine, more.
    assert min(value["decodes alone"], value["prompt alone"], value["both in one step"]) > 1.9
    parts = value["decodes alone"] + value["prompt alone"]
    assert value["longer than the parts"] == pytest.approx(100 * (value["both in one step"] / parts - 1))
    [loss] = [record for record in found if record.name == "longer than the parts"]
    assert (loss.asked, loss.at_most) == (10, True)


def test_a_request_that_is_held_up_alone_does_not_make_the_step_longer() -> None:
    running = _Decoding(object(), [])
    running.made = [[0, 10, 20, 70, 80], [5, 15, 25, 75, 85], [5, 15, 25, 75, 900]]
    assert running.longest_step([2, 2, 2], [5, 5, 5]) == 50
    assert running.longest_step([2, 2, 2], [3, 3, 3]) == 10


@pytest.mark.parametrize("setting", [{"token_budget": 130}, {"step_time_ms": -1}])
def test_settings_that_cut_the_prompt_are_refused(setting: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError, match="cut a prompt of 128 tokens beside 3 decodes into several steps"):
        run_mixed(DEMO, decodes=3, prompt_tokens=128, rounds=1, settings={**NULL, **setting})


def test_tokens_beside_prompts_are_held_against_those_alone() -> None:
    found = run_beside_prompts(DEMO, streams=2, prompt_tokens=600, rounds=1, settings=NULL)
    for step_time_ms in (0, -1):
        value = {record.name: record.value for record in found if record.case == {"step_time_ms": step_time_ms}}
        for percent in ("median", "99th"):
            alone, beside = (value[f"between tokens, {when}, {percent}"] for when in ("alone", "beside prompts"))
            assert alone > 1.9 and beside > 1.9
            assert value[f"later, {percent}"] == pytest.approx(beside / alone)
        assert value["a prompt"] > 0.0019
