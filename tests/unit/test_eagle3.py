"""EAGLE-3 heads are read in both formats of the hub. Unsupported keys and tensors are rejected by name."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle3_heads import Head

from charonia import Engine, SamplingParams
from charonia.bench.random_model import parse_shape, write_random_model
from charonia.errors import CharoniaError, InvalidRequestError, ModelError, ServeError, UnsupportedError
from charonia.serve.model import prepare, prepare_all, prepare_draft
from charonia.serve.models import Served
from charonia.serve.shares import _of_first
from charonia.settings import ServeSettings
from charonia.weights import workspace
from charonia.weights.convert import convert, read_source
from charonia.weights.plan import make_plan

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_random_model(tmp_path / "model", parse_shape("3,64,4,2,96,320"))
    return tmp_path / "model"


def settings_for(head: Path) -> dict[str, str]:
    return {"speculative_method": "eagle3", "speculative_model": str(head), "device": "cpu"}


@pytest.mark.usefixtures("all_proposals")
@pytest.mark.parametrize("speculators", [False, True])
def test_both_formats_and_a_workspace_give_the_same_tokens(speculators: bool, model: Path, tmp_path: Path) -> None:
    Head(speculators=speculators).write(tmp_path / "head")
    made = convert(tmp_path / "head", tmp_path / "workspace")
    content = workspace.read_manifest(made / workspace.WEIGHTS)
    assert {"fc.weight", "enorm.weight", "hnorm.weight", "tok_embeddings.weight"} <= content.tensors.keys()
    assert list(workspace.check(made / workspace.WEIGHTS)) == []
    found = []
    for head in (None, tmp_path / "head", made, made / workspace.WEIGHTS):
        more = settings_for(head) if head else {"device": "cpu"}
        with Engine.from_pretrained(model, threads=1, **more) as engine:
            text = engine.generate([[5, 6, 7, 8]], GREEDY)[0].token_ids
            assert (engine.stats().proposed_tokens > 0) == bool(head)
            found.append(text)
    assert found[1:] == found[:-1]


def test_server_links_the_head_and_holds_it(model: Path, tmp_path: Path) -> None:
    Head().write(tmp_path / "head")
    with contextlib.ExitStack() as held:
        made = prepare_draft(settings_for(tmp_path / "head"), tmp_path / "run", print, held)
        weights = Path(made["speculative_model"])
        assert made == {**settings_for(weights)} and workspace.is_held(weights.parents[1])
        again = prepare_draft(settings_for(tmp_path / "head"), tmp_path / "run", print, held)
        assert again == made
        assert prepare_draft(settings_for(weights.parents[1]), tmp_path / "run", print, held) == made
        served = prepare_all(serve(model), tmp_path / "run", made, print, held)
        assert [one.workspace for one in served] == [prepare(str(model), tmp_path / "run", {})]
        with pytest.raises(ModelError, match=r"cannot be held .* not a folder inside it"):
            prepare_draft(settings_for(weights), tmp_path / "run", print, held)


def test_head_that_names_another_model_causes_a_warning(model: Path, tmp_path: Path) -> None:
    cached = f"/hub/models--owner--{tmp_path.name}/snapshots/1234"
    for verifier in (
        *(None, f"owner/{tmp_path.name}", f"/models/{tmp_path.name.upper()}/", cached, f"owner/{tmp_path.name}0"),
    ):
        head = Head(speculators=True, verifier=verifier)
        folder = tmp_path / f"head-{(verifier or '').replace('/', '-')}"
        head.write(folder)
        warnings = [one for one in make_plan(model, settings_for(folder)).warnings if "was trained for" in one]
        assert bool(warnings) == (verifier == f"owner/{tmp_path.name}0")
        assert all(f"for {verifier}, and the model is {tmp_path.name}" in one for one in warnings)


def serve(model: Path) -> ServeSettings:
    return ServeSettings(_env_file=None, model=str(model))  # type: ignore[call-arg]


def test_plan_counts_the_head(model: Path, tmp_path: Path) -> None:
    Head().write(tmp_path / "head")
    limits = {"device": "cpu", "cache_max_entry_count": 0.5, "max_batch_size": 100_000}
    without, made = (
        make_plan(model, {**limits, **more}, memory="2GiB") for more in ({}, settings_for(tmp_path / "head"))
    )
    assert without.speculative_bytes == 0 < made.speculative_bytes
    assert made.weight_bytes == without.weight_bytes and made.num_blocks < without.num_blocks


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (Head(target=96), "hidden_units = 96, and the model has 64"),
        (Head(vocab=400), "vocab_size = 400, and the model has 320"),
        (Head(layers=[0, 1, 4]), "input of layer 4, and the model has 3 layers"),
        (Head(hidden=32, embeds=False), "its hidden_units = 32 differ from the model's 64"),
    ],
)
def test_head_of_another_model_is_rejected_before_the_server_starts(
    head: Head, why: str, model: Path, tmp_path: Path
) -> None:
    head.write(tmp_path / "head")
    given = settings_for(tmp_path / "head")

    def start() -> None:
        with contextlib.ExitStack() as held:
            made = prepare_draft(given, tmp_path / "run", print, held)
            prepare_all(serve(model), tmp_path / "run", made, print, held)

    for act in (lambda: Engine.from_pretrained(model, **given), lambda: make_plan(model, given), start):
        with pytest.raises(CharoniaError, match=f"speculative_model = .*{why}"):
            act()
    [kept] = (tmp_path / "run" / "workspaces").iterdir()  # of the model; no lock
    assert not kept.name.startswith("head")


def test_workspace_of_a_head_stays_after_a_failure_of_the_server(model: Path, tmp_path: Path) -> None:
    Head().write(tmp_path / "head")
    with pytest.raises(ServeError, match="Triton"), contextlib.ExitStack() as held:
        made = prepare_draft(settings_for(tmp_path / "head"), tmp_path / "run", print, held)
        prepare_all(serve(model), tmp_path / "run", made, print, held)
        raise ServeError("Triton ended")
    weights = Path(made["speculative_model"])
    assert workspace.read_manifest(weights) and not workspace.is_held(weights.parents[1])


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"own": {"num_hidden_layers": 2}}, "num_hidden_layers 2 is not supported for EAGLE-3 heads"),
        ({"own": {"model_type": "deepseek_v3"}}, "model_type 'deepseek_v3' is not supported .*: llama, qwen3"),
        ({"own": {"hidden_act": "relu"}}, "hidden_act"),
        ({"own": {"attention_window_scale": 2}}, "the key attention_window_scale"),
        ({"outer": {"norm_before_fc": True, "fc_norm": True}}, "fc_norm and norm_before_fc are both true"),
        ({"outer": {"num_aux_hidden_states": 5}}, "num_aux_hidden_states 5 is not supported"),
        ({"outer": {"eagle_config": {"use_aux_hidden_state": False}}}, "eagle_config.use_aux_hidden_state False"),
        ({"outer": {"eagle_config": {"parallel": 1}}}, "eagle_config.parallel 1 is not supported"),
        ({"outer": {"speculators_model_type": "peagle"}}, "speculators_model_type 'peagle' is not supported"),
        ({"layers": [0, 1]}, r"\[0, 1\] must have 3 layers"),
        ({"layers": [], "outer": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}}, "two meanings"),
    ],
)
@pytest.mark.parametrize("speculators", [False, True])
def test_unsupported_keys_are_rejected_by_name(
    keys: Mapping[str, Any], why: str, speculators: bool, tmp_path: Path
) -> None:
    Head(speculators=speculators, **keys).write(tmp_path / "head")
    with pytest.raises(UnsupportedError, match=f"^{tmp_path / 'head'}: .*{why}"):
        read_source(tmp_path / "head", head=True)


@pytest.mark.parametrize("link", [[], ["--link"]])
def test_command_converts_a_head_and_says_how_to_use_it(link: list[str], tmp_path: Path) -> None:
    Head().write(tmp_path / "head")
    command = ["charonia", "convert", str(tmp_path / "head"), "--dst-path", str(tmp_path / "made"), *link]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=True, timeout=300)
    assert f"--speculative-method eagle3 --speculative-model {tmp_path / 'made'}" in done.stdout
    assert workspace.is_head(tmp_path / "made")


def test_names_may_begin_with_model(tmp_path: Path) -> None:
    made = []
    for before in ("", "model."):
        head = Head()
        kept = {f"{before}{name}": values for name, values in head.tensors().items() if name != "lm_head.weight"}
        head.write(tmp_path / f"head{before}", dict.fromkeys(head.tensors().keys() - {"lm_head.weight"}) | kept)
        made.append(convert(tmp_path / f"head{before}", tmp_path / f"workspace{before}") / workspace.WEIGHTS)
    for file in ("rank-0.safetensors", workspace.DRAFT_TOKENS):
        assert (made[0] / file).read_bytes() == (made[1] / file).read_bytes()


def test_layers_come_from_config(tmp_path: Path) -> None:
    inner = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 1, 0], "use_aux_hidden_state": True}}
    for number, (head, layers) in enumerate(
        [(Head(layers=[0, 2, 1]), (0, 2, 1)), (Head(layers=[], outer=inner), (2, 1, 0)), (Head(layers=[]), ())]
    ):
        head.write(tmp_path / str(number))
        spec = read_source(tmp_path / str(number), head=True).spec
        assert spec.config.target_layers == layers
        assert any("layers 2, n / 2 and n - 3" in note for note in spec.notes) == (not layers)


def test_layers_that_may_be_outputs_cause_a_note(tmp_path: Path) -> None:
    Head(layers=[1, 17, 32]).write(tmp_path / "head")
    notes = read_source(tmp_path / "head", head=True).spec.notes
    assert any(r"write [2, 18, 33]" in note for note in notes)


def test_flags_may_be_in_eagle_config(tmp_path: Path) -> None:
    norm = {"input_norm.weight": np.ones(192, np.float32)}
    Head(outer={"eagle_config": {"norm_before_fc": True, "norm_output": True}}).write(tmp_path / "head", norm)
    config = read_source(tmp_path / "head", head=True).spec.config
    assert (config.fused_norm, config.norm_output) == ("whole", True)


def test_options_of_models_are_rejected_by_name(tmp_path: Path) -> None:
    Head().write(tmp_path / "head")
    with pytest.raises(InvalidRequestError, match="EAGLE-3 head, without a use for task, --chat-template: omit"):
        convert(
            tmp_path / "head", tmp_path / "made", settings={"task": "embed"}, chat_template=tmp_path / "template.jinja"
        )
    assert not (tmp_path / "made").exists()


def test_further_models_use_ngram(tmp_path: Path) -> None:
    given = settings_for(tmp_path / "head")
    first, second = (_of_first(Served("m", label, tmp_path), given) for label in ("", "m"))
    assert first == {key: given[key] for key in ("speculative_method", "speculative_model")}
    assert second == {"speculative_method": "ngram", "speculative_model": ""}


def test_wrong_tensors_are_rejected_by_name(tmp_path: Path) -> None:
    drafts, wrong = np.arange(200), np.zeros((64, 100), np.float32)
    for number, (changes, why) in enumerate(
        [
            ({"fc.weight": wrong}, r"fc.weight has shape \[64, 100\] where config.json says \[64, 192\]"),
            ({"lm_head.weight": None}, "lm_head.weight is missing"),
            ({"d2t": None}, "d2t is missing, and draft_vocab_size 200 differs from vocab_size 320"),
            ({"d2t": drafts[:150]}, r"d2t is of type I64 with shape \[150\], expected I64 with \[200\]"),
            ({"d2t": drafts}, "d2t has tokens outside of vocab_size 320"),
            ({"input_norm.weight": wrong[0]}, "1 tensors are unknown to family eagle3 .*input_norm"),
        ]
    ):
        Head().write(tmp_path / f"head{number}", changes)
        with pytest.raises(CharoniaError, match=why):
            convert(tmp_path / f"head{number}", tmp_path / "made")
        assert not (tmp_path / "made").exists()


@pytest.mark.usefixtures("all_proposals")
def test_head_without_finite_logits_causes_one_warning(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Head().write(tmp_path / "head", {"fc.weight": np.full((64, 192), np.nan, np.float32)})
    with Engine.from_pretrained(model, threads=1, **settings_for(tmp_path / "head")) as engine:
        engine.generate([[5, 6, 7, 8]], GREEDY)
    told = capfd.readouterr().err
    assert told.count("EAGLE-3 head head proposes nothing where its logits are not finite: the logit of token") == 1


def test_head_is_no_model_and_a_model_is_no_head(model: Path, tmp_path: Path) -> None:
    Head().write(tmp_path / "head")
    draft = {"speculative_model": str(tmp_path / "head"), "device": "cpu"}
    made = convert(tmp_path / "head", tmp_path / "workspace")
    for act in (
        lambda: Engine.from_pretrained(tmp_path / "head"),
        lambda: prepare(str(tmp_path / "head"), tmp_path / "run", {}),
        lambda: make_plan(tmp_path / "head"),
        lambda: Engine.from_pretrained(model, **draft),
        lambda: Engine.from_pretrained(made),
        lambda: make_plan(made),
        lambda: prepare(str(made), tmp_path / "run", {}),
    ):
        with pytest.raises(UnsupportedError, match="is an EAGLE-3 head, and no model: serve the model that it was"):
            act()
    with pytest.raises(UnsupportedError, match="is no EAGLE-3 head: speculative_method = eagle3 needs one"):
        Engine.from_pretrained(model, **settings_for(model))


def test_unsupported_settings_are_rejected_by_name(model: Path, tmp_path: Path) -> None:
    Head().write(tmp_path / "head")
    given = settings_for(tmp_path / "head")
    for more, why in (
        ({"tensor_para_size": 2}, "it needs one rank"),
        ({"device": "null"}, "it needs a CPU or a GPU, and"),
    ):
        with pytest.raises(UnsupportedError, match=f"speculative_method = eagle3: {why}"):
            Engine.from_pretrained(model, **{**given, **more})
