"""Conversion: the workspace that docs/contracts.md promises, from every kind of source, or an error that helps."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from missing_tools import needed_module

from charonia import Engine, ModelError, SamplingParams, UnsupportedError, _engine
from charonia.bench.random_model import SHAPES, write_random_model
from charonia.errors import InternalError, InvalidRequestError, ServeError
from charonia.families import TensorPart, describe
from charonia.serve.model import prepare, prepare_all, prepare_draft
from charonia.settings import ServeSettings
from charonia.text.tokenizer import load_tokenizer
from charonia.triton_models import answers_dir
from charonia.weights import workspace
from charonia.weights.checkpoint import DTYPES, Array, SafetensorsCheckpoint, open_checkpoint
from charonia.weights.convert import convert, link_workspace, read_config, read_source
from charonia.weights.safetensors_writer import write_safetensors
from charonia.weights.tensor_parallel import split

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "a-model"
    write_random_model(folder, SHAPES["tiny"], weight_type="fp32", scale=0.2)
    return folder


def answers(path: Path, **settings: int | str) -> tuple[list[int], list[float]]:
    with Engine.from_pretrained(path, threads=1, cache_max_entry_count=20, **settings) as engine:
        output = engine.generate([[5, 6, 7]], GREEDY)[0]
        return output.token_ids, output.logprobs


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def rewrite(folder: Path, change: Callable[[dict[str, Array]], object], dtype: str = "F32") -> None:
    """Write model.safetensors again after `change`."""
    checkpoint = open_checkpoint(folder)
    tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.tensors}
    change(tensors)
    shapes = {name: values.shape for name, values in tensors.items()}
    write_safetensors(folder / "new", shapes, dtype, lambda name: [tensors[name].astype(DTYPES[dtype])])
    (folder / "new").rename(folder / "model.safetensors")


def split_into_shards(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    names = sorted(checkpoint.tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        shapes = {name: checkpoint.tensors[name].shape for name in part}
        write_safetensors(folder / file, shapes, "F32", lambda name: [checkpoint.read(name)])
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def test_the_layout_follows_the_contract(model: Path, tmp_path: Path) -> None:
    root = convert(model, tmp_path / "w")
    for name in ("preprocessing", "engine", "postprocessing", "ensemble"):
        link = root / "model_repository" / name
        assert link.is_symlink() and not link.readlink().is_absolute()
        assert (link / "config.pbtxt").is_file() and (link / "1").is_dir()
    assert (root / "model_repository/preprocessing/1/model.py").is_file()
    assert (root / "model_repository/preprocessing/1/tokenizer/tokenizer.json").is_file()
    assert (root / "model_repository/engine/1/weights/config.ini").is_file()
    table = root / "triton_models/tokenizer/token_table.safetensors"
    assert table.is_symlink() and table.is_file()
    script = root / "service_docker_up.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    moved = root.rename(tmp_path / "moved")
    assert answers(moved) == answers(model)


def test_a_workspace_has_the_chat_template_as_a_file_to_edit(model: Path, tmp_path: Path) -> None:
    file = convert(model, tmp_path / "own") / workspace.TOKENIZER / "chat_template.jinja"
    assert file.read_text() == load_tokenizer(model).chat_template
    file.write_text("edited")
    assert load_tokenizer(file.parent).chat_template == "edited"
    given = tmp_path / "given.jinja"
    given.write_text("{{ messages }}")
    for make in (convert, link_workspace):
        made = make(model, tmp_path / make.__name__, chat_template=given)
        assert load_tokenizer(made / workspace.TOKENIZER).chat_template == "{{ messages }}"
    with pytest.raises(ModelError, match=r"nothing.jinja cannot be read"):
        convert(model, tmp_path / "third", chat_template=tmp_path / "nothing.jinja")


def test_a_chat_template_of_serve_is_a_file_and_for_one_model(model: Path, tmp_path: Path) -> None:
    def prepared(file: Path, **more: str) -> Any:
        settings = ServeSettings(_env_file=None, model=str(model), chat_template=file, **more)  # type: ignore[call-arg]
        return prepare_all(settings, tmp_path, {}, lambda _: None, contextlib.ExitStack())

    with pytest.raises(ServeError, match=r"CHARONIA_CHAT_TEMPLATE=/nothing is not a file"):
        prepared(Path("/nothing"))
    (tmp_path / "given.jinja").write_text("x")
    prepared(tmp_path / "given.jinja")
    (tmp_path / "bad.jinja").write_text("{% if %}")
    with pytest.raises(ModelError, match=r"bad.jinja is not valid Jinja"):
        prepared(tmp_path / "bad.jinja")
    with pytest.raises(ServeError, match=r"is for one model, and 2 were named: convert a model with charonia convert"):
        prepared(tmp_path / "given.jinja", more_models=f"second={model}")


def test_a_workspace_of_an_older_version_names_the_command_that_mends_it(model: Path, tmp_path: Path) -> None:
    root = convert(model, tmp_path / "w")
    (root / "model_repository" / "postprocessing").unlink()
    with pytest.raises(ModelError, match="older version, without Triton model 'postprocessing': run charonia convert"):
        prepare(str(root), tmp_path, {})


@pytest.mark.parametrize(("key", "value", "name"), [("rope_theta", 0, "rope_theta"), ("head_dim", 1, "size_per_head")])
def test_value_that_the_engine_rejects_is_named_with_config_json(
    key: str, value: int, name: str, tmp_path: Path
) -> None:
    write_random_model(tmp_path, SHAPES["tiny"].config())
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(ModelError, match=f"{file}: the engine does not support this model: setting {name} = "):
        read_config(tmp_path)


def test_warnings_about_a_model_are_repeated_at_every_start(model: Path, tmp_path: Path) -> None:
    edit_config(model, favourite_colour="red")
    note = "warning: config.json has unknown keys, which are ignored: favourite_colour"
    for place in (model, convert(model, tmp_path / "w")):
        said: list[str] = []
        prepare(str(place), tmp_path / "run", {})
        prepare(str(place), tmp_path / "run", {}, said.append)
        assert said == [note]
    edit_config(model, favourite_colour=None)
    prepare(str(model), tmp_path / "run", {})
    said = []
    prepare(str(model), tmp_path / "run", {}, said.append)
    assert said == []


def test_the_tensors_are_the_models(model: Path, tmp_path: Path) -> None:
    weights = convert(model, tmp_path / "w") / workspace.WEIGHTS
    ours, theirs = SafetensorsCheckpoint([weights / "rank-0.safetensors"]), open_checkpoint(model)
    qkv = [theirs.read(f"model.layers.1.self_attn.{part}_proj.weight") for part in "qkv"]
    assert np.array_equal(ours.read("layers.1.attention.w_qkv.0.weight"), np.concatenate(qkv))
    assert np.array_equal(ours.read("output.0.weight"), theirs.read("lm_head.weight"))
    manifest = json.loads((weights / "manifest.json").read_text())
    assert (manifest["format_version"], manifest["ranks"]) == (3, 1)
    assert manifest["tensors"].keys() == ours.tensors.keys()
    for name, entry in manifest["tensors"].items():
        assert (entry["dtype"], tuple(entry["shape"])) == (ours.tensors[name].dtype, ours.tensors[name].shape)
        assert entry["parts"] == [{"file": "rank-0.safetensors", "name": name}]
        assert entry.get("rank") == (0 if ".0." in name.removeprefix("layers.0.") else None)
    for name, entry in manifest["files"].items():
        assert (weights / name).stat().st_size == entry["bytes"]
        assert workspace.sha256(weights / name) == entry["sha256"]


def test_linked_workspace_uses_the_models_files_and_answers_equally(model: Path, tmp_path: Path) -> None:
    root = link_workspace(model, tmp_path / "w")
    manifest = json.loads((root / workspace.WEIGHTS / "manifest.json").read_text())
    assert str(model / "model.safetensors") in manifest["files"]
    assert not (root / workspace.WEIGHTS / "rank-0.safetensors").exists()
    assert answers(root) == answers(model) == answers(convert(model, tmp_path / "c"))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_are_rounded_to_nearest_when_converted_and_when_linked(model: Path, tmp_path: Path, dtype: str) -> None:
    weights = convert(model, tmp_path / "w", dtype=dtype) / workspace.WEIGHTS
    numpy_type = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}[dtype]
    ours = SafetensorsCheckpoint([weights / "rank-0.safetensors"]).read("output.0.weight")
    assert np.array_equal(ours, open_checkpoint(model).read("lm_head.weight").astype(numpy_type))
    linked = link_workspace(model, tmp_path / "l", dtype)
    assert answers(linked) == answers(tmp_path / "w")


def test_auto_is_the_type_of_most_weights_not_of_config_json(model: Path) -> None:
    edit_config(model, torch_dtype="bfloat16")
    assert read_source(model).spec.config.weight_type == "fp32"
    rewrite(model, lambda tensors: None, "BF16")
    assert read_source(model).spec.config.weight_type == "bf16"


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ONES = np.ones(4, np.float32)


def with_value(value: float, at: tuple[int, int] = (-1, -1)) -> Callable[[dict[str, Array]], None]:
    return lambda tensors: tensors[HEAD].__setitem__(at, value)


def tie_with_a_bias(tensors: dict[str, Array]) -> None:
    tensors[HEAD] = tensors[EMBEDDING]
    tensors["lm_head.bias"] = np.ones(len(tensors[HEAD]), np.float32)


# A change of the tensors, the type of the file, the type to convert to, changed keys of config.json, and the error.
@pytest.mark.parametrize(
    ("change", "stored", "dtype", "keys", "said"),
    [
        (with_value(1e5, (0, 0)), "F32", "fp16", {}, r"lm_head\.weight has values up to 1e\+05.*--dtype bf16"),
        *(
            (with_value(value), stored, "auto", {}, r"tensor lm_head\.weight has values that are not finite")
            for stored in ("F32", "F16", "BF16")
            for value in (np.nan, np.inf, -np.inf)
        ),
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
            *("F32", "auto", {}, r"1 tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        ),
        (lambda tensors: tensors.pop(HEAD), "F32", "auto", {}, r"lm_head\.weight is missing"),
        (
            lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": ONES}),
            *("F32", "auto", {}, r"q_norm\.weight"),
        ),
        (
            lambda tensors: None,
            *("F32", "auto", {"intermediate_size": 161}),
            r"gate_proj\.weight has shape \[160, 64\] where config\.json says \[161, 64\]",
        ),
        (tie_with_a_bias, "F32", "auto", {"tie_word_embeddings": True}, r"lm_head\.bias"),
    ],
)
def test_weights_that_are_wrong_are_refused_at_conversion_by_name(
    change: Callable[[dict[str, Array]], object],
    stored: str,
    dtype: str,
    keys: dict[str, Any],
    said: str,
    model: Path,
    tmp_path: Path,
) -> None:
    rewrite(model, change, stored)
    edit_config(model, **keys)
    with pytest.raises((ModelError, UnsupportedError), match=said):
        convert(model, tmp_path / "w", dtype=dtype)
    assert not list(tmp_path.glob("*w*"))


def test_old_rotary_tables_and_output_tensors_of_tied_models_are_ignored(model: Path, tmp_path: Path) -> None:
    rewrite(model, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": ONES}))
    convert(model, tmp_path / "w")
    rewrite(model, lambda tensors: tensors.pop(HEAD))
    edit_config(model, tie_word_embeddings=True)
    convert(model, tmp_path / "v")


def test_a_truncated_file_is_refused(model: Path, tmp_path: Path) -> None:
    file = model / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(ModelError, match="download it again"):
        convert(model, tmp_path / "w")


def test_weights_that_are_used_in_place_and_not_finite_fail_the_request(model: Path) -> None:
    rewrite(model, lambda tensors: tensors["lm_head.weight"].__setitem__((-1, -1), np.nan))
    error = pytest.raises(InternalError, match=r"the logit of token .* is nan: the model's weights")
    with Engine.from_pretrained(model, threads=1) as engine, error:
        engine.generate([[5, 6, 7]], GREEDY)


def test_the_largest_finite_weights_are_converted(model: Path, tmp_path: Path) -> None:
    largest = np.finfo(np.float16).max
    rewrite(model, lambda tensors: tensors["lm_head.weight"].__setitem__((0, 0), -largest), "F16")
    weights = convert(model, tmp_path / "w") / workspace.WEIGHTS
    assert SafetensorsCheckpoint([weights / "rank-0.safetensors"]).read("output.0.weight")[0, 0] == -largest


def test_sharded_files_are_one_model(model: Path, tmp_path: Path) -> None:
    whole = answers(model)
    split_into_shards(model)
    assert answers(model) == whole
    assert answers(convert(model, tmp_path / "w")) == whole
    next(model.glob("model-00002*")).unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        convert(model, tmp_path / "v")


@pytest.mark.slow
def test_old_bin_checkpoints_are_converted_even_when_a_link_is_asked_for(model: Path, tmp_path: Path) -> None:
    torch = needed_module("torch")
    whole = answers(model)
    checkpoint = open_checkpoint(model)
    tensors = {name: torch.from_numpy(np.array(checkpoint.read(name))) for name in checkpoint.tensors}
    torch.save(tensors, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    assert answers(link_workspace(model, tmp_path / "w")) == whole
    assert (tmp_path / "w" / workspace.WEIGHTS / "rank-0.safetensors").is_file()
    assert answers(model) == whole


def end_ids(weights: Path) -> str:
    return _engine.read_config_ini(weights / "config.ini")["end_id"]


def name_end(model: Path, token: str | None) -> None:
    """Set eos_token, or remove it."""
    file = model / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": token}
    file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def test_end_ids_come_from_both_configs_and_the_tokenizer(model: Path, tmp_path: Path) -> None:
    token = load_tokenizer(model).convert_ids_to_tokens(9)
    edit_config(model, eos_token_id=[5, 2])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    name_end(model, token)
    assert end_ids(convert(model, tmp_path / "copied") / workspace.WEIGHTS) == "2,7,5,9"
    assert end_ids(link_workspace(model, tmp_path / "linked") / workspace.WEIGHTS) == "2,7,5,9"


def test_end_tokens_of_a_family_are_end_ids_if_the_tokenizer_has_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = (load_tokenizer(model).convert_ids_to_tokens(9), "<|call|>")
    monkeypatch.setattr(
        "charonia.weights.convert.describe", lambda *given: replace(describe(*given), end_tokens=tokens)
    )
    edit_config(model, eos_token_id=2)
    assert end_ids(convert(model, tmp_path / "w") / workspace.WEIGHTS) == "2,9"


def test_a_full_disk_is_named_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=12_345))
    monkeypatch.setattr("charonia.weights.convert.write_safetensors", lambda *_: pytest.fail("it writes"))
    with pytest.raises(ModelError, match=r"needs about [\d.]+ \wiB in .*, but 12\.1 KiB are free"):
        convert(model, tmp_path / "w")
    assert list(tmp_path.iterdir()) == [model]


def raised(error: OSError) -> Callable[..., None]:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    return fails


@pytest.mark.parametrize("make", [convert, link_workspace])
def test_a_disk_that_becomes_full_is_named_in_one_sentence(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    monkeypatch.setattr(workspace.Manifest, "save", raised(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ModelError, match=r"w cannot be written: No space left on device at .* \wiB are free\)"):
        make(model, tmp_path / "w")
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize("name", [workspace.TOKEN_TABLE, workspace.TOKEN_SPLIT, "tokenizer.json"])
def test_a_full_disk_is_named_for_each_file_of_a_linked_workspace(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    full, written = OSError(errno.ENOSPC, "No space left on device"), Path.write_bytes

    def write(file: Path, data: bytes) -> int:
        return written(file, data) if file.name != name else raised(full)()

    def copy(source: Path, target: Path) -> None:
        if target.name == name:  # as shutil.copyfile() does
            full.filename, full.filename2 = str(source), str(target)
            raise full

    monkeypatch.setattr(Path, "write_bytes", write)
    monkeypatch.setattr("charonia.text.tokenizer.shutil.copyfile", copy)
    with pytest.raises(ModelError, match=r"w cannot be written: No space left on device at .*: free some") as caught:
        link_workspace(model, tmp_path / "w")
    assert f"at {model}" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_target_that_cannot_be_written_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr("tempfile.mkdtemp", raised(OSError(code, "reason", str(tmp_path / ".w.1"))))
    with pytest.raises(ModelError, match=rf"w cannot be written: reason at {tmp_path}"):
        convert(model, tmp_path / "w")


@pytest.mark.parametrize("target", ["file/w", "file/a/w"])
def test_a_file_in_the_place_of_the_targets_folder_is_named(model: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=rf"w cannot be written: {tmp_path}/file is not a folder: choose another"):
        convert(model, tmp_path / target)


def test_a_fault_of_the_model_is_not_a_fault_of_the_target(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (str(model / "config.json" / "x"), None):
        monkeypatch.setattr(workspace.Manifest, "save", raised(OSError(errno.ENOTDIR, "reason", name)))
        with pytest.raises(NotADirectoryError):
            convert(model, tmp_path / "w")


def test_an_end_token_that_the_model_cannot_generate_is_left_out(model: Path, tmp_path: Path) -> None:
    edit_config(model, eos_token_id=2)
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    name_end(model, "<|an end that tokenizer.json lacks|>")
    assert load_tokenizer(model).eos_token_id >= size
    assert end_ids(convert(model, tmp_path / "w") / workspace.WEIGHTS) == "2"


def test_a_model_without_end_ids_is_named(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_config(model, eos_token_id=None)
    (model / "generation_config.json").unlink(missing_ok=True)
    name_end(model, None)
    assert end_ids(convert(model, tmp_path / "w") / workspace.WEIGHTS) in ("", "-1")
    assert "names no token that ends a response" in caplog.text
    caplog.clear()
    with Engine.from_pretrained(model, cache_max_entry_count=20, threads=1):
        assert "names no token that ends a response" in caplog.text


def test_a_tokenizer_whose_class_gives_other_ids_is_named(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    convert(model, tmp_path / "agrees")
    assert "differs" not in caplog.text
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "CohereTokenizer"}))
    for make, name in ((convert, "converted"), (link_workspace, "linked")):
        caplog.clear()
        make(model, tmp_path / name)
        assert "uses tokenizer.json, but transformers' CohereTokenizer differs from it" in caplog.text


@pytest.mark.parametrize(("value", "expected"), [(0, "0,2"), ([0, 7], "0,7,2"), (None, "2"), ([], "2")])
def test_an_end_id_of_generation_config_may_be_0_or_unsaid(
    model: Path, tmp_path: Path, value: Any, expected: str
) -> None:
    edit_config(model, eos_token_id=2)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert ",".join(map(str, read_source(model).spec.config.end_id)) == expected


RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "repetition_penalty": 1.05}


def test_generation_config_sampling_values_are_attributes(model: Path, tmp_path: Path) -> None:
    others = {"do_sample": False, "max_new_tokens": 20, "typical_p": 0.5}
    (model / "generation_config.json").write_text(json.dumps({**RECOMMENDED, **others}))
    weights = convert(model, tmp_path / "w") / workspace.WEIGHTS
    written = _engine.read_config_ini(weights / "config.ini")
    found = {name: float(written[f"default_{name}"]) for name in RECOMMENDED}
    assert found == {**RECOMMENDED, "min_p": 0.0}


def test_generation_config_top_k_of_minus_1_is_all_tokens(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"top_k": -1}))
    assert read_source(model).spec.config.default_top_k == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"temperature": -1}', "temperature is -1 and must be a number >= 0"),
        ('{"temperature": NaN}', "temperature is nan"),
        ('{"temperature": Infinity}', "temperature is inf"),
        ('{"temperature": "abc"}', "temperature is 'abc'"),
        ('{"temperature": true}', "temperature is True"),
        ('{"top_p": 2}', r"top_p is 2 and must be a number in \(0, 1\]"),
        ('{"top_p": 0}', "top_p is 0 "),
        ('{"top_k": 0.5}', "top_k is 0.5 and must be a whole number >= 0"),
        ('{"top_k": -2}', "top_k is -2"),
        ('{"top_k": 10000000000}', "top_k is 10000000000"),
        ('{"min_p": 1.5}', "min_p is 1.5"),
        ('{"repetition_penalty": 0}', r"repetition_penalty is 0 and must be a number in \[0.01, 100\]"),
    ],
)
def test_generation_config_value_out_of_range_is_refused(model: Path, content: str, says: str) -> None:
    (model / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"generation_config\.json: {says}.*correct it, or remove it"):
        read_source(model)


def test_a_workspace_without_sampling_defaults_has_the_engines(model: Path, tmp_path: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    ini = convert(model, tmp_path / "w") / workspace.WEIGHTS / "config.ini"
    lines = ini.read_text().splitlines(keepends=True)
    ini.write_text("".join(line for line in lines if not line.startswith(("default_", "generation_config"))))
    with Engine.from_pretrained(tmp_path / "w", cache_max_entry_count=20, threads=1) as engine:
        own = _engine.SamplingParams()
        assert all(getattr(engine.info.default_sampling, name) == getattr(own, name) for name in RECOMMENDED)


def test_config_ini_has_every_key_once_and_takes_settings(model: Path, tmp_path: Path) -> None:
    weights = convert(model, tmp_path / "w", settings={"session_len": "99"}) / workspace.WEIGHTS
    lines = (weights / "config.ini").read_text().splitlines()
    keys = [line.split(" = ")[0] for line in lines if " = " in line and not line.startswith("#")]
    assert keys == [field.key for field in _engine.config_fields() if not field.ignored]
    with Engine.from_pretrained(tmp_path / "w", cache_max_entry_count=20, threads=1) as engine:
        assert engine.info.session_len == 99


def test_a_wrong_setting_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="token_budget"):
        convert(model, tmp_path / "w", settings={"token_budget": "-1"})
    assert [path.name for path in tmp_path.iterdir()] == ["a-model"]


def test_a_workspace_is_replaced_only_by_force_and_nothing_else_ever(model: Path, tmp_path: Path) -> None:
    root = convert(model, tmp_path / "w")
    (root / "mine").touch()
    with pytest.raises(ModelError, match="--force"):
        convert(model, root)
    assert (root / "mine").exists()
    convert(model, root, force=True)
    assert not (root / "mine").exists()
    other = tmp_path / "documents"
    other.mkdir()
    (other / "mine").touch()
    with pytest.raises(ModelError, match="is not a workspace"):
        convert(model, other, force=True)
    assert (other / "mine").exists()
    (tmp_path / "empty").mkdir()
    convert(model, tmp_path / "empty")


def test_a_failed_replacement_leaves_the_old_workspace(model: Path, tmp_path: Path) -> None:
    root = convert(model, tmp_path / "w")
    before = answers(root)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer"):
        convert(model, root, force=True)
    assert answers(root) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-model", "w"]


def test_impossible_conversions_are_rejected_by_name(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'hqq' is not supported; supported: auto, hf, compressed-tensors, awq"):
        convert(model, tmp_path / "w", model_format="hqq")
    with pytest.raises(ModelError, match=r"--model-format awq: the weights of .* are hf"):
        convert(model, tmp_path / "w", model_format="awq")
    with pytest.raises(InvalidRequestError, match="'int8'"):
        convert(model, tmp_path / "w", dtype="int8")
    convert(model, tmp_path / "w")
    with pytest.raises(ModelError, match="is already a workspace"):
        convert(tmp_path / "w", tmp_path / "v")


@pytest.mark.parametrize(
    ("path", "named"),
    [("nowhere", "does not exist"), ("a-model/config.json", "is a file"), ("empty", "neither a workspace")],
)
def test_a_path_that_leads_nowhere_is_explained(model: Path, tmp_path: Path, path: str, named: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=named):
        convert(tmp_path / path, tmp_path / "w")


def test_a_damaged_workspace_is_found_and_the_command_that_mends_it_named(model: Path, tmp_path: Path) -> None:
    weights = convert(model, tmp_path / "w") / workspace.WEIGHTS
    assert list(workspace.check(weights)) == []
    file = weights / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (difference,) = workspace.check(weights)
    assert "SHA-256" in difference
    assert f"charonia convert {model} --dst-path {tmp_path / 'w'} --force" in difference
    os.truncate(file, 1000)
    assert "has 1000 bytes" in next(iter(workspace.check(weights)))
    with pytest.raises(InvalidRequestError, match=r"1000 bytes.*charonia convert"):
        Engine.from_pretrained(tmp_path / "w")
    file.unlink()
    with pytest.raises(InvalidRequestError, match=r"missing.*charonia convert"):
        Engine.from_pretrained(tmp_path / "w")


@pytest.mark.parametrize(("key", "value"), [("format_version", 2), ("ranks", 2)])
def test_workspace_of_another_kind_is_rejected_with_the_command(
    model: Path, tmp_path: Path, key: str, value: int
) -> None:
    weights = convert(model, tmp_path / "w") / workspace.WEIGHTS
    manifest = json.loads((weights / "manifest.json").read_text())
    (weights / "manifest.json").write_text(json.dumps({**manifest, key: value}))
    with pytest.raises(InvalidRequestError, match="charonia convert"):
        Engine.from_pretrained(tmp_path / "w")
    if key == "format_version":
        with pytest.raises(ModelError, match=rf"format_version 2,.* charonia convert {model} --dst-path {tmp_path}/w "):
            workspace.read_manifest(weights)


def test_linked_workspace_names_its_missing_model(model: Path, tmp_path: Path) -> None:
    root = link_workspace(model, tmp_path / "w")
    shutil.rmtree(model)
    with pytest.raises(InvalidRequestError, match=r"model\.safetensors is missing"):
        Engine.from_pretrained(root)


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ways_to_several_ranks_answer_alike_and_as_one_rank_does(
    model: Path, tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = convert(model, tmp_path / "w", tp=ranks)
    assert workspace.read_manifest(root / workspace.WEIGHTS).ranks == ranks
    assert _engine.read_config_ini(root / workspace.WEIGHTS / "config.ini")["tensor_para_size"] == str(ranks)
    tokens, logprobs = answers(root)
    expected_tokens, expected_logprobs = answers(model)
    assert tokens == expected_tokens
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)
    assert answers(model, tensor_para_size=ranks) == (tokens, logprobs)
    assert answers(link_workspace(model, tmp_path / "l", settings={"tensor_para_size": str(ranks)})) == (
        tokens,
        logprobs,
    )
    monkeypatch.setenv("CHARONIA_TENSOR_PARA_SIZE", str(ranks))
    assert answers(model) == (tokens, logprobs)


def test_workspace_for_other_ranks_is_rejected_with_the_command(model: Path, tmp_path: Path) -> None:
    one, two = convert(model, tmp_path / "w"), convert(model, tmp_path / "v", tp=2)
    with pytest.raises(InvalidRequestError, match=r"charonia convert .* --tp 2 --force"):
        answers(one, tensor_para_size=2)
    with pytest.raises(InvalidRequestError, match=r"converted for tensor_para_size = 2, but the setting is now 1"):
        answers(two, tensor_para_size=1)
    with pytest.raises(ModelError, match=rf"charonia convert {model} --dst-path {one} --tp 2 --force"):
        prepare(str(one), tmp_path, {"tensor_para_size": "2"})
    (two / workspace.WEIGHTS / "rank-1.safetensors").unlink()
    assert "--tp 2 --force" in next(iter(workspace.check(two / workspace.WEIGHTS)))


def test_served_model_is_linked_for_its_ranks(model: Path, tmp_path: Path) -> None:
    one = prepare(str(model), tmp_path, {})
    two = prepare(str(model), tmp_path, {"tensor_para_size": "2"})
    assert one.is_dir() and two.is_dir() and one != two
    assert prepare(str(model), tmp_path, {"tensor_para_size": "2", "threads": "1"}) == two
    assert workspace.read_manifest(two / workspace.WEIGHTS).ranks == 2
    assert prepare(str(two), tmp_path, {}) == two
    assert answers(two)[0] == answers(one)[0]


def test_draft_model_is_linked_for_one_rank(model: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        given = {"tensor_para_size": "2", "speculative_model": str(model)}
        inference = prepare_draft(given, tmp_path, lambda _: None, held)
        weights = Path(inference["speculative_model"])
        assert inference == {**given, "speculative_model": str(weights), "speculative_method": "draft_model"}
        assert workspace.read_manifest(weights).ranks == 1
        assert workspace.is_held(weights.parents[1])
        for unused in ({"speculative_model": "m", "speculative_method": "ngram"}, {"speculative_method": "ngram"}):
            assert prepare_draft(unused, tmp_path, lambda _: None, held) == unused
        with pytest.raises(ModelError, match="converted for 2 ranks"):
            prepare_draft({"speculative_model": str(convert(model, tmp_path / "w", tp=2))}, tmp_path, print, held)


def test_an_error_names_the_draft_model_that_was_given(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = [token for token, id_ in vocabulary.items() if id_ in {300, 301}]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InvalidRequestError, match=f"speculative_model = {other}: its vocabulary differs"):
        Engine.from_pretrained(model, speculative_model=str(other))
    settings = ServeSettings(_env_file=None, model=str(model))  # type: ignore[call-arg]
    refused = pytest.raises(InvalidRequestError, match=f"^speculative_model = {other}: its vocabulary differs")
    with refused, contextlib.ExitStack() as held:
        inference = prepare_draft({"device": "cpu", "speculative_model": str(other)}, tmp_path, print, held)
        prepare_all(settings, tmp_path, inference, print, held)


def test_simultaneous_starts_share_one_new_workspace(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, others = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        others.append(prepare(str(model), tmp_path, {}).stat().st_ino)
        lock(descriptor, operation)

    def locked_out(*arguments: Any, **settings: Any) -> Path:
        [file] = (tmp_path / "workspaces").glob(".*.lock")
        with file.open("ab") as held, pytest.raises(BlockingIOError):
            lock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return link_workspace(*arguments, **settings)

    monkeypatch.setattr(fcntl, "flock", late)
    monkeypatch.setattr("charonia.weights.convert.link_workspace", locked_out)
    workspace = prepare(str(model), tmp_path, {})
    assert [workspace.stat().st_ino] == others

    shutil.rmtree(workspace)
    assert list((tmp_path / "workspaces").iterdir()) == []  # the lock is gone too
    file = tmp_path / "workspaces" / f".{workspace.name.rpartition('-')[0]}.lock"
    held = file.open("ab")
    lock(held, fcntl.LOCK_EX)
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr("charonia.serve.model._LOCK_S", 0)
        with pytest.raises(ModelError, match=f"fuser {file}") as error:
            prepare(str(model), tmp_path, {})
        assert error.value.status == 503
        patch.setattr("charonia.serve.model._LOCK_S", 1000)
        patch.setattr("charonia.serve.model.time.sleep", lambda _: held.close())
        assert prepare(str(model), tmp_path, {}, said.append).is_dir()
    assert said == [f"another charonia serve makes a workspace of this model: waiting for it ({file})"]


def test_workspace_is_made_again_if_the_parser_has_changed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = shutil.copytree(answers_dir(), tmp_path / "charonia_answers")
    monkeypatch.setattr("charonia.serve.model.answers_dir", lambda: package)
    first = prepare(str(model), tmp_path, {})
    assert prepare(str(model), tmp_path, {}) == first
    with (package / "parser.py").open("a", encoding="utf-8") as file:
        file.write("\n")
    assert prepare(str(model), tmp_path, {}) != first


def test_folders_of_the_same_name_are_served_beside_each_other(model: Path, tmp_path: Path) -> None:
    """A change also removes outdated records in a single one of them."""
    places = [tmp_path / place / "llama[8b]" for place in ("old", "new")]
    for place in places:
        shutil.copytree(model, place)
    one, two = (prepare(str(place), tmp_path, {}) for place in places)
    assert one != two and one.is_dir() and two.is_dir()
    os.utime(places[1] / "config.json", (0, 0))
    assert prepare(str(places[0]), tmp_path, {}) == one
    again = prepare(str(places[1]), tmp_path, {})
    assert again != two and again.is_dir() and one.is_dir() and not two.exists()


def test_a_workspace_that_is_served_stays_when_its_model_has_changed(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = shutil.copytree(model, tmp_path / "m")
    said: list[str] = []

    def change_and_prepare(held: contextlib.ExitStack | None = None) -> Path:
        os.utime(place / "config.json", (0, len(said)))
        said.append("changed")
        return prepare(str(place), tmp_path, {}, held=held)

    with contextlib.ExitStack() as older, contextlib.ExitStack() as newer:
        first = change_and_prepare(older)
        second = change_and_prepare(newer)
        assert prepare(str(place), tmp_path, {}, held=older) == second
        third = change_and_prepare()
        assert answers(first) == answers(second) and len({first, second, third}) == 3
        newer.close()
        fourth = change_and_prepare()
        assert first.is_dir() and second.is_dir() and not third.exists(), "the older server has both of them"
        older.close()
        assert prepare(str(place), tmp_path, {}) == fourth
        assert not first.exists() and not second.exists(), "they go with the next start, whatever has changed"
        with (fourth / workspace.LOCKED).open() as looks, contextlib.ExitStack() as end:
            fcntl.flock(looks, fcntl.LOCK_EX)  # like is_held(), for a moment
            monkeypatch.setattr("charonia.weights.workspace.time.sleep", lambda _: looks.close())
            assert workspace.hold(fourth, end) and workspace.is_held(fourth)
            end.close()
            (fourth / workspace.WEIGHTS / "manifest.json").rename(fourth / "away")
            assert not workspace.hold(fourth, end) and not workspace.is_held(fourth)
            change_and_prepare()

    made = convert(place, tmp_path / "w")
    with contextlib.ExitStack() as server:
        prepare(str(made), tmp_path, {}, held=server)
        assert caplog.messages == []
        convert(place, made, force=True)
    (warning,) = caplog.messages
    assert f"{made} is in use by a server" in warning and f"{made}/triton_models/ensemble/config.pbtxt" in warning
    convert(place, made, force=True)
    assert len(caplog.messages) == 1


TINY = SHAPES["tiny"].config()
# One config for each way in which a family's tensors differ from Llama's.
LAYOUTS: dict[str, dict[str, Any]] = {
    "interleaved": {**TINY, "model_type": "internlm2", "bias": True},
    "packed with a bias": {**TINY, "model_type": "qwen", "kv_channels": 16, "num_key_value_heads": None},
    "packed for slopes": {**TINY, "model_type": "baichuan", "model_max_length": 64, "max_position_embeddings": None},
    "packed also gate and up": {**TINY, "model_type": "phi3"},
    "norms of heads": {**TINY, "model_type": "qwen3", "head_dim": 16},
    "norms after, tied": {**TINY, "model_type": "gemma2", "head_dim": 16, "tie_word_embeddings": True},
    "experts": {**TINY, "model_type": "mixtral", "num_local_experts": 3},
    "experts and dense layers": {
        **{**TINY, "model_type": "qwen3_moe", "head_dim": 16, "moe_intermediate_size": 32},
        **{"num_experts": 3, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
    },
    "a gated shared expert": {
        **{**TINY, "model_type": "qwen2_moe", "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
        **{"num_experts": 3, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
    },
    "a shared expert and a router with biases": {
        **{**TINY, "model_type": "glm4_moe", "moe_intermediate_size": 32, "n_shared_experts": 2, "n_routed_experts": 4},
        **{"num_experts_per_tok": 2, "head_dim": 16},
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_converted_and_loads_and_answers_as_where_it_is(layout: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_random_model(folder, LAYOUTS[layout], weight_type="fp32", scale=0.2)
    tokens, logprobs = answers(folder)
    assert answers(convert(folder, tmp_path / "w")) == (tokens, logprobs)
    halves = answers(convert(folder, tmp_path / "v", tp=2))
    assert halves[0] == tokens and halves[1] == pytest.approx(logprobs, abs=1e-4)
    assert answers(folder, tensor_para_size=2) == halves


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_every_layout_hold_each_split_row_and_column_once(layout: str, ranks: int) -> None:
    spec = describe(LAYOUTS[layout], "m")
    tensors = split(spec.tensors, spec.config, ranks)
    whole = {name for name in spec.tensors if ".0." not in name.replace("layers.0.", "").replace("experts.0.", "")}
    whole -= {"output.weight"}
    assert all(tensors[name] == spec.tensors[name] for name in whole)
    output = [part for rank in range(ranks) for part in tensors[f"output.{rank}.weight"]]
    (undivided,) = spec.tensors.get("output.weight", spec.tensors["tok_embeddings.weight"])
    assert [row for part in output for row in rows_of(part, 0)] == rows_of(undivided, 0)
    for name in spec.tensors.keys() - whole - {"output.weight"}:
        place, module, kind = name[: -len(kind_of(name)) - 3], name.split(".")[-3], kind_of(name)
        if kind == "bias" and module in ("wo", "w2"):  # added after the sum over the ranks
            assert [f"{place}.{rank}.bias" in tensors for rank in range(ranks)] == [True] + [False] * (ranks - 1)
            continue
        shares = [tensors[f"{place}.{rank}.{kind}"] for rank in range(ranks)]
        dimension = 1 if module in ("wo", "w2") else 0
        covered = [rows_of(part, dimension) for parts in shares for part in parts]
        expected = [rows_of(part, dimension) for part in spec.tensors[name]]
        shared_heads = module == "w_qkv" and spec.config.kv_head_num < ranks
        held = {place for places in covered for place in places}
        assert held == {place for places in expected for place in places}
        assert shared_heads or sum(map(len, covered)) == sum(map(len, expected))


def kind_of(name: str) -> str:
    return name.split(".")[-1]


def rows_of(part: TensorPart, dimension: int) -> list[tuple[str, int]]:
    """Return the rows or columns that a part takes from its tensor."""
    begin, end = (part.rows, part.cols)[dimension] or (0, part.shape[dimension])
    return [(part.name, index) for index in range(begin, end)]


def fuse_experts(tensors: dict[str, Array], transposed: bool) -> None:
    """Convert layer 1's three experts to two tensors."""
    module = "model.layers.1.mlp.experts"

    def popped(kind: str) -> list[Array]:
        return [tensors.pop(f"{module}.{expert}.{kind}_proj.weight") for expert in range(3)]

    gate_up = np.stack([np.concatenate(pair) for pair in zip(popped("gate"), popped("up"), strict=True)])
    for name, values in (("gate_up_proj", gate_up), ("down_proj", np.stack(popped("down")))):
        tensors[f"{module}.{name}"] = np.ascontiguousarray(values.swapaxes(1, 2)) if transposed else values


# With 32, gate and up are square; with 64, down is.
@pytest.mark.parametrize("inter", [24, 32, 64])
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_that_are_one_tensor_are_read_as_if_each_had_its_own(
    transposed: bool, inter: int, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    layout = {**LAYOUTS["experts and dense layers"], "moe_intermediate_size": inter}
    write_random_model(folder, layout, weight_type="fp32", scale=0.2)
    expected, two = answers(folder), answers(folder, tensor_para_size=2)
    converted = convert(folder, tmp_path / "v", tp=2)
    rewrite(folder, lambda tensors: fuse_experts(tensors, transposed))
    assert answers(folder) == expected
    assert answers(folder, tensor_para_size=2) == two
    again = convert(folder, tmp_path / "w", tp=2)
    for rank in range(2):
        file = Path(workspace.WEIGHTS, f"rank-{rank}.safetensors")
        assert (again / file).read_bytes() == (converted / file).read_bytes()
    linked = link_workspace(folder, tmp_path / "l")
    assert (linked / workspace.WEIGHTS / "rank-0.safetensors").exists() == transposed
    assert answers(linked) == expected


def test_experts_in_one_tensor_have_the_shape_of_config_json(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_random_model(folder, LAYOUTS["experts and dense layers"], weight_type="fp32")
    rewrite(folder, lambda tensors: fuse_experts(tensors, False))
    edit_config(folder, moe_intermediate_size=40)
    said = r"experts\.gate_up_proj has shape \[3, 64, 64\] where config.json says \[3, 80, 64\]"
    with pytest.raises(ModelError, match=said):
        read_source(folder)
    edit_config(folder, moe_intermediate_size=32)

    def lose(tensors: dict[str, Array]) -> None:
        del tensors["model.layers.1.mlp.experts.down_proj"]

    rewrite(folder, lose)
    with pytest.raises(ModelError, match=r"9 tensors are missing: .*experts\.0\.gate_proj\.weight"):
        read_source(folder)


def test_router_tensors_stay_fp32_in_a_16_bit_workspace(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_random_model(folder, LAYOUTS["a shared expert and a router with biases"], weight_type="fp32", scale=0.2)
    biases = np.linspace(8, 8.01, 4, dtype=np.float32)  # all equal in bf16
    rewrite(folder, lambda tensors: tensors.update({"model.layers.1.mlp.gate.e_score_correction_bias": biases}))
    root = convert(folder, tmp_path / "w", dtype="bf16")
    source, made = open_checkpoint(folder), SafetensorsCheckpoint([root / workspace.WEIGHTS / "rank-0.safetensors"])
    ours, theirs = "layers.1.feed_forward.", "model.layers.1.mlp."
    for name, of in (("gate.weight", "gate.weight"), ("gate.bias", "gate.e_score_correction_bias")):
        assert np.array_equal(made.read(ours + name), source.read(theirs + of)), name
    assert made.tensors[f"{ours}shared.w1.0.weight"].dtype == "BF16"
    assert answers(root) == answers(folder, dtype="bf16")


def test_a_model_of_experts_alone_is_split_by_their_width() -> None:
    spec = describe({**LAYOUTS["experts"], "intermediate_size": 62}, "m")
    assert len(split(spec.tensors, spec.config, 2)) > len(spec.tensors)
    with pytest.raises(UnsupportedError, match=r"expert_inter_size = 62 is not a multiple of 4.*--tp 1 or 2"):
        split(spec.tensors, spec.config, 4)


def test_every_rank_has_rows_of_the_output_layer_or_the_model_is_not_split() -> None:
    shares = {(ranks, vocab): [len(range(*rows)) for rows in outputs(ranks, vocab)] for ranks, vocab in SHARES}
    assert shares == SHARES
    with pytest.raises(UnsupportedError, match=r"vocab_size = 12 leaves the last rank no rows.*--tp 1 or 2"):
        outputs(4, 12)


# (ranks, vocab_size) -> the rows of each rank. With several ranks, all shares except the last are multiples of 4.
SHARES = {(1, 13): [13], (2, 13): [8, 5], (4, 320): [80] * 4, (4, 13): [4, 4, 4, 1]}


def outputs(ranks: int, vocab: int) -> list[tuple[int, int]]:
    spec = describe({**TINY, "vocab_size": vocab, "tie_word_embeddings": True}, "m")
    parts = [split(spec.tensors, spec.config, ranks)[f"output.{rank}.weight"] for rank in range(ranks)]
    return [one.rows or (0, vocab) for (one,) in parts]


@pytest.mark.parametrize("linked", [False, True])
def test_an_output_layer_that_config_json_ties_is_used_where_it_differs(linked: bool, tmp_path: Path) -> None:
    """transformers 5 does the same. An output layer that equals the embedding is ignored."""
    untied, tied = tmp_path / "untied", tmp_path / "tied"
    write_random_model(untied, SHAPES["tiny"], weight_type="fp32", scale=0.2)
    shutil.copytree(untied, tied)
    edit_config(tied, tie_word_embeddings=True)
    spec = read_source(tied).spec
    assert not spec.config.tie_word_embeddings
    assert len(spec.notes) == 1 and "lm_head.weight differs from model.embed_tokens.weight" in spec.notes[0]
    made = (link_workspace if linked else convert)(tied, tmp_path / "w")
    assert answers(made) == answers(tied) == answers(untied)

    rewrite(tied, lambda tensors: tensors.__setitem__("lm_head.weight", tensors["model.embed_tokens.weight"]))
    spec = read_source(tied).spec
    assert spec.config.tie_word_embeddings and spec.notes == ()
    rewrite(tied, lambda tensors: tensors["lm_head.weight"].__setitem__((-1, -1), 3))
    assert not read_source(tied).spec.config.tie_word_embeddings
    rewrite(tied, lambda tensors: tensors.pop("lm_head.weight"))
    assert read_source(tied).spec.config.tie_word_embeddings


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_model_with_images_is_found_under_both_prefixes(prefix: str, tmp_path: Path) -> None:
    text = {**TINY, "model_type": "gemma3_text", "head_dim": 16, "tie_word_embeddings": True}
    text_only, both = tmp_path / "text", tmp_path / "both"
    write_random_model(text_only, text, weight_type="fp32", scale=0.2)
    shutil.copytree(text_only, both)
    (both / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 7]}))

    def rename(tensors: dict[str, Array]) -> None:
        for name in list(tensors):
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)
        place = "model." if prefix.startswith("model.") else ""
        tensors[f"{place}vision_tower.embeddings.weight"] = np.ones((3, 3), np.float32)
        tensors[f"{place}multi_modal_projector.mm_soft_emb_norm.weight"] = np.ones(3, np.float32)
        tensors["language_model.lm_head.weight"] = tensors[f"{prefix}embed_tokens.weight"]

    rewrite(both, rename)
    assert answers(both) == answers(text_only)
    weights = convert(both, tmp_path / "w") / workspace.WEIGHTS
    assert _engine.read_config_ini(weights / "config.ini")["end_id"] == "1,7,2"  # the last one is from the tokenizer
    rewrite(both, lambda tensors: tensors.__setitem__(f"{prefix}layers.0.mystery.weight", np.ones(3, np.float32)))
    with pytest.raises(UnsupportedError, match=r"unknown to family gemma3.*mystery"):
        convert(both, tmp_path / "v")


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_layers_that_predict_further_tokens_are_ignored_in_a_text_part_too(prefix: str, tmp_path: Path) -> None:
    text = {**TINY, "model_type": "glm4v_moe_text", "head_dim": 16, "attention_bias": False, "n_routed_experts": 4}
    text |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    write_random_model(tmp_path, {**text, "model_type": "glm4_moe"}, weight_type="fp32")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4v_moe", "text_config": text}))

    def rename(tensors: dict[str, Array]) -> None:
        tensors[f"model.layers.{TINY['num_hidden_layers']}.eh_proj.weight"] = np.ones((3, 3), np.float32)
        for name in list(tensors):
            tensors[name.replace("model.", prefix, 1)] = tensors.pop(name)

    rewrite(tmp_path, rename)
    assert read_source(tmp_path).spec.config.num_experts == 4


@pytest.mark.parametrize(("model_type", "part"), [("gemma3", "text_config"), ("internvl_chat", "llm_config")])
@pytest.mark.parametrize(("generated", "expected"), [(None, (7, 5)), (3, (3, 7, 5))])
def test_end_ids_of_the_text_part_and_beside_it_are_joined(
    model_type: str, part: str, generated: int | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    text = {**TINY, "model_type": "qwen2", "eos_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, part: text, "eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generated}))
    assert read_config(tmp_path).config.end_id == expected


@pytest.mark.parametrize(("dtype", "scale"), [("bf16", 7.0625), ("fp16", 7.0703125), ("fp32", 50**0.5)])
def test_gemmas_factor_of_the_embedding_is_rounded_with_the_weights(tmp_path: Path, dtype: str, scale: float) -> None:
    config = {**TINY, "model_type": "gemma2", "head_dim": 16, "hidden_size": 50}
    write_random_model(tmp_path / "m", config, weight_type=dtype)
    assert read_source(tmp_path / "m").spec.config.embedding_scale == pytest.approx(scale, rel=1e-7)


@pytest.mark.parametrize(("ranks", "key"), [(3, "head_num = 4"), (8, "head_num = 4")])
def test_model_that_cannot_be_split_is_rejected_with_the_possible_ranks(
    model: Path, tmp_path: Path, ranks: int, key: str
) -> None:
    with pytest.raises(UnsupportedError, match=rf"{key}.*--tp 1 or 2 or 4"):
        convert(model, tmp_path / "w", tp=ranks)
    assert [path.name for path in tmp_path.iterdir()] == ["a-model"]


def test_wrong_or_contradictory_ranks_are_rejected(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="tp = 2 and tensor_para_size = 4"):
        convert(model, tmp_path / "w", tp=2, settings={"tensor_para_size": "4"})
    with pytest.raises(InvalidRequestError, match="tensor_para_size = '0'"):
        convert(model, tmp_path / "w", tp=0)


def test_a_quantised_cache_of_latents_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    latents = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    config = {**TINY, "model_type": "deepseek_v2", "num_key_value_heads": 4, **latents, "first_k_dense_replace": 2}
    write_random_model(tmp_path / "m", {**config, "num_hidden_layers": 2})
    with pytest.raises(UnsupportedError, match=r"latents .* cannot be quantised: omit quant_policy"):
        convert(tmp_path / "m", tmp_path / "w", settings={"quant_policy": "16"})
    ini = convert(tmp_path / "m", tmp_path / "w") / workspace.WEIGHTS / "config.ini"
    ini.write_text(ini.read_text().replace("quant_policy = 0", "quant_policy = 8"))
    for model, given in (("m", {"quant_policy": "16"}), ("w", {})):
        settings = ServeSettings(model=str(tmp_path / model))
        with contextlib.ExitStack() as held, pytest.raises(UnsupportedError, match=r"latents .* cannot be quantised"):
            prepare_all(settings, tmp_path / "run", {"device": "cpu", **given}, lambda _: None, held)
