"""LoRA adapters on the command line, and the modules of a model that the manifest describes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from charonia_client.terminal import plain
from rich.console import Console
from safetensors.numpy import load_file, save_file
from triton_double import Double
from typer.testing import CliRunner

from charonia import Engine, SamplingParams, chat, cli
from charonia.bench.adapters import run_adapters
from charonia.bench.random_model import SHAPES, write_random_model
from charonia.engine_settings import Setting
from charonia.errors import CharoniaError, InvalidRequestError, ModelError, NotFoundError, ServeError
from charonia.families import describe
from charonia.serve.adapters import of_models
from charonia.serve.model import prepare_all
from charonia.serve.models import Served
from charonia.serve.shares import as_given, of_first_only
from charonia.settings import ServeSettings
from charonia.web import generate
from charonia.weights.adapted_modules import module_places
from charonia.weights.adapters import locate_adapter, lora_setting, split_adapter
from charonia.weights.plan import make_plan
from charonia.weights.tensor_parallel import split
from charonia.weights.workspace import WEIGHTS

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def test_setting_has_absolute_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).mkdir()
    assert lora_setting(["x=a", f"y/z={tmp_path / 'b'}"]) == f"x={tmp_path / 'a'},y/z={tmp_path / 'b'}"


@pytest.mark.parametrize("text", ["", "x", "x=", "=a"])
def test_text_without_name_or_adapter_is_rejected(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="NAME=ADAPTER"):
        split_adapter(text)


def test_path_with_a_comma_and_path_of_a_file_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a,b").mkdir()
    with pytest.raises(InvalidRequestError, match="comma"):
        lora_setting([f"x={tmp_path / 'a,b'}"])
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="is a file"):
        locate_adapter(tmp_path / "file")


def test_text_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/\xff"))
    folder.mkdir()
    for read in (locate_adapter, lambda path: lora_setting([f"x={path}"]), lambda path: lora_setting([f"{path}=x"])):
        with pytest.raises(InvalidRequestError, match=r"\\udcff.*' is not UTF-8: rename"):
            read(folder)


def test_only_the_first_model_has_adapters_and_a_draft_model(tmp_path: Path) -> None:
    settings = {"lora_adapters": "x=/x", "speculative_model": "/d", "speculative_method": "draft_model"}
    (tmp_path / WEIGHTS).mkdir(parents=True)
    (tmp_path / WEIGHTS / "config.ini").write_text("[llama]\n")
    first, second = (as_given(Served(label or "first", label, tmp_path), settings).settings for label in ("", "second"))
    assert first["lora_adapters"] == "x=/x" and second["lora_adapters"] == ""
    assert [first[key] for key in ("speculative_model", "speculative_method")] == ["/d", "draft_model"]
    assert [second[key] for key in ("speculative_model", "speculative_method")] == ["", "ngram"]
    assert "lora_adapters" not in as_given(Served("first", "", tmp_path), {}).settings
    assert of_first_only(settings) == {"lora_adapters", "speculative_model"}
    assert of_first_only({"speculative_model": "/d", "speculative_method": "ngram"}) == set()


def test_module_has_a_place_on_each_rank() -> None:
    spec = describe(LLAMA, "tiny")
    places = module_places(spec, split(spec.tensors, spec.config, 2))
    assert len(places) == 7 and all(name.startswith("model.layers.0.") for name in places)
    v = [(one["tensor"], one["first_row"], one["rows"]) for one in places["model.layers.0.self_attn.v_proj"]]
    # A rank has 32 rows of q, then 16 of k, then 16 of v.
    qkv = "layers.0.attention.w_qkv.{}.weight"
    assert v == [(qkv.format(0), 48, (0, 16)), (qkv.format(1), 48, (16, 32))]
    down = places["model.layers.0.mlp.down_proj"]
    assert [one["cols"] for one in down] == [(0, 48), (48, 96)] and down[0]["shape"] == [64, 96]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    write_random_model(folder, SHAPES["tiny"], scale=0.2)
    return folder


MOE = {
    **{"model_type": "qwen3_moe", "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4},
    "num_experts_per_tok": 2,
}
MLA = {
    **{"model_type": "deepseek_v2", "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16},
    **{"qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    **{"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    "num_hidden_layers": 2,
}


@pytest.mark.parametrize(
    ("config", "kinds", "refused"),
    [
        (MOE, "k_proj o_proj q_proj v_proj", "mlp.gate"),
        (MLA, "down_proj gate_proj kv_a_proj_with_mqa o_proj q_a_proj q_b_proj up_proj", "self_attn.kv_b_proj"),
    ],
)
def test_plan_and_engine_adapt_the_same_modules(
    config: dict[str, Any], kinds: str, refused: str, tmp_path: Path
) -> None:
    config = {**LLAMA, **config}
    write_random_model(tmp_path / "m", config, scale=0.2)
    spec = describe(config, "tiny")
    places = module_places(spec, split(spec.tensors, spec.config, 1))
    assert sorted({name.rpartition(".")[2] for name in places}) == kinds.split()
    settings: dict[str, Setting] = {"device": "cpu", "threads": 1}
    # Adapts all of them.
    measured = run_adapters(
        str(tmp_path / "m"), batch=1, rank=2, prompt=2, output=2, runs=1, settings=settings, console=Console(quiet=True)
    )
    assert list(measured)
    adapter = write_adapter(tmp_path / "a", module=f"model.layers.0.{refused}")
    settings["lora_adapters"] = f"x={adapter}"
    with pytest.raises(CharoniaError, match=f"{refused} cannot be adapted"):
        make_plan(tmp_path / "m", settings)


def write_adapter(
    folder: Path, hidden: int = SHAPES["tiny"].hidden, module: str = "model.layers.0.mlp.up_proj"
) -> Path:
    """Write an adapter of rank 4 for one module, by default of the tiny model."""
    at = f"base_model.model.{module}"
    rows = SHAPES["tiny"].intermediate
    shapes = {f"{at}.lora_A.weight": (4, hidden), f"{at}.lora_B.weight": (rows, 4)}
    folder.mkdir()
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    return folder


def test_plan_counts_the_adapters(model: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    two = make_plan(model, {"device": "cpu", "lora_adapters": f"x={folder},y={folder}"})
    assert two.num_blocks > 0
    asked = ["plan", str(model), "--device", "cpu", "--lora", f"x={folder}"]
    one = CliRunner().invoke(cli.app, [*asked, "--json"])
    assert one.exit_code == 0, one.output
    size = json.loads(one.output)["adapter_bytes"]
    assert two.adapter_bytes == 2 * size
    assert size >= 4 * (SHAPES["tiny"].hidden + SHAPES["tiny"].intermediate) * 2
    assert "LoRA adapters" in CliRunner().invoke(cli.app, asked).output
    assert make_plan(model, {"device": "cpu"}).adapter_bytes == 0


def test_files_of_requests_and_chats_use_adapters(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    random = np.random.default_rng(1)
    save_file({name: random.normal(size=one.shape).astype(np.float32) for name, one in load_file(file).items()}, file)
    settings = {"device": "cpu", "threads": "1", "lora_adapters": f"x={folder}"}
    with Engine.from_pretrained(model, **settings) as engine:
        greedy = SamplingParams(max_tokens=8, temperature=0)
        expected = [engine.generate("hello", greedy, lora=name)[0].text for name in ("x", "", "")]
        answer = engine.chat([{"role": "user", "content": "hello"}], greedy, lora="x").text
        assert repr(engine.adapters()[0]).startswith(f"AdapterInfo(x, {folder}, rank ")
        with pytest.raises(NotFoundError, match=r"^lora = y: there is no adapter of this name\. Loaded: x"):
            engine.generate("hello", greedy, lora="y")
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        chat.run(engine, greedy)
        assert capsys.readouterr().out == plain(answer) + "\n"
    assert expected[0] != expected[1]
    request = {"prompt": "hello", "max_tokens": 8, "temperature": 0}
    lines = [{**request, **given} for given in ({"model": "x"}, {"model": "small"}, {}, {"model": "y"})]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    served = ServeSettings(_env_file=None, model=str(model), run_dir=tmp_path / "run")  # type: ignore[call-arg]
    generate.generate(served, settings, tmp_path / "in", tmp_path / "out")
    written = map(json.loads, (tmp_path / "out").read_text().splitlines())
    answers = [one["response"] for one in sorted(written, key=lambda one: str(one["custom_id"]))]
    assert answers.pop()["status_code"] == 404
    assert [one["body"]["choices"][0]["text"] for one in answers] == expected


def test_serve_refuses_a_wrong_adapter_before_triton_starts(model: Path, tmp_path: Path) -> None:
    settings = ServeSettings(_env_file=None, model=str(model))  # type: ignore[call-arg]

    def prepare(folder: Path, **inference: str) -> None:
        given = {"device": "cpu", "lora_adapters": f"x={folder}", **inference}
        prepare_all(settings, tmp_path / "run", given, lambda _: None, contextlib.ExitStack())

    prepare(write_adapter(tmp_path / "right"))
    (tmp_path / "empty").mkdir()
    for folder, text in (
        (tmp_path / "missing", "not a folder"),
        (tmp_path / "empty", "adapter_model.safetensors"),
        (write_adapter(tmp_path / "other", hidden=8), "model that it was trained for"),
    ):
        with pytest.raises(CharoniaError, match=text):
            prepare(folder)
    with pytest.raises(ServeError, match=r"small does not fit: "):
        prepare(tmp_path / "right", cache_size="1TiB")


async def test_adapters_are_listed_with_their_model() -> None:
    models = [
        {"name": "a", "state": "loaded", "ensemble": "ensemble"},
        {"name": "b", "state": "unloaded", "ensemble": "ensemble.b"},
    ]
    async with Double() as triton:
        port = int(triton.target.rpartition(":")[2])
        settings = ServeSettings(_env_file=None, grpc_port=port)  # type: ignore[call-arg]
        triton.adapters = {"engine": {"sql": "/sql"}, "engine.b": {"other": "/other"}}
        warnings: list[str] = []
        found = await asyncio.to_thread(of_models, settings, models, warnings.append)
        sql = {"name": "sql", "state": "loaded", "ensemble": "ensemble", "parent": "a", "root": "/sql"}
        assert found == [sql] and not warnings
        # A model that was just unloaded hides no other model's adapters.
        gone = {"name": "c", "state": "loaded", "ensemble": "ensemble.c"}
        triton.unloaded = {"engine.c"}
        assert await asyncio.to_thread(of_models, settings, [gone, *models], warnings.append) == [sql]
        assert len(warnings) == 1 and warnings[0].startswith("the adapters of c are not listed: ")
