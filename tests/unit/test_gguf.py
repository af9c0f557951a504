"""GGUF files give the tokens of Hugging Face folders with the same weights, for every type of tensor."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_models import VOCAB, gguf_type, random_blocks, write_pair
from hub_double import HubDouble

from charonia import Engine, ModelError, Output, SamplingParams, UnsupportedError
from charonia.errors import as_given
from charonia.families import describe
from charonia.gguf import folder as gguf_folder
from charonia.gguf import reader
from charonia.gguf.config import ARCHITECTURES, hf_config
from charonia.gguf.reader import GgufFile, Tensor, read_gguf
from charonia.gguf.tokenizer import PATTERNS, end_ids
from charonia.serve.model import prepare
from charonia.weights import workspace
from charonia.weights.convert import convert, read_source
from charonia.weights.gguf_checkpoint import BLOCK_TYPES
from charonia.weights.hub import choose_gguf, download_gguf, is_gguf_id
from charonia.weights.plan import make_plan

MIXED = {
    "attn_q": "Q4_K",
    "attn_k": "Q5_0",
    "attn_v": "Q6_K",
    "attn_output": "Q5_1",
    "ffn_gate": "Q4_K",
    "ffn_up": "Q8_0",
    "else": "Q3_K",
}
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1)


@pytest.fixture(autouse=True)
def own_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHARONIA_RUN_DIR", str(tmp_path / "run"))


def generate(model: Path, **settings: str | int) -> list[Output]:
    random = np.random.default_rng(3)
    prompts = [random.integers(3, VOCAB, length).tolist() for length in (1, 7, 40)]
    with Engine.from_pretrained(model, threads=2, **settings) as engine:
        return engine.generate(prompts, GREEDY)


def compare(found: list[Output], expected: list[Output], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=tolerance)


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "F32", "F16", "BF16"])
def test_gguf_of_each_type_equals_its_dequantised_weights_in_fp32(kind: str, tmp_path: Path) -> None:
    file, folder = tmp_path / "m.gguf", tmp_path / "dense"
    write_pair(file, folder, {"else": kind})
    compare(generate(file, dtype="fp32"), generate(folder, dtype="fp32"), 1e-4)


@pytest.mark.parametrize(("kinds", "output"), [(MIXED, "Q6_K"), ({"token_embd": "F16", "else": "Q4_1"}, "")])
def test_gguf_of_mixed_types_equals_its_weights_linked_copied_and_on_2_ranks(
    kinds: Mapping[str, str], output: str, tmp_path: Path
) -> None:
    file, folder = tmp_path / "m.gguf", tmp_path / "dense"
    write_pair(file, folder, kinds, output=output)
    expected = generate(folder, dtype="fp32")
    linked = generate(file, dtype="fp32")
    compare(linked, expected, 1e-4)
    copied = generate(convert(file, tmp_path / "copy", dtype="fp32"))
    assert [one.logprobs for one in copied] == [one.logprobs for one in linked]
    compare(generate(file, dtype="fp32", tensor_para_size=2), expected, 1e-4)
    compare(generate(convert(file, tmp_path / "two", tp=2, dtype="fp32")), expected, 1e-4)
    # In bf16 only rounding differs.
    first, reference = generate(file)[0], expected[0]
    assert first.logprobs[0] == pytest.approx(reference.logprobs[0], abs=0.1)


def test_split_gguf_equals_the_whole_file(tmp_path: Path) -> None:
    write_pair(tmp_path / "m.gguf", tmp_path / "dense", MIXED)
    (tmp_path / "split").mkdir()
    write_pair(tmp_path / "split" / "m.gguf", tmp_path / "unused", MIXED, split=6)
    parts = sorted((tmp_path / "split").glob("*.gguf"))
    assert len(parts) > 2
    expected = [one.logprobs for one in generate(tmp_path / "m.gguf")]
    for named in (parts[0], parts[1], tmp_path / "split"):
        assert [one.logprobs for one in generate(named)] == expected
    parts[2].unlink()
    with pytest.raises(ModelError, match=parts[2].name):
        workspace.locate(parts[0])


def test_gguf_folder_is_made_once_and_again_for_a_changed_file(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_pair(file, tmp_path / "dense", {"else": "Q8_0"})
    first = workspace.locate(file).path
    assert workspace.locate(file).path == first
    write_pair(file, tmp_path / "dense2", {"else": "Q4_0"}, output="Q8_0")
    second = workspace.locate(file).path
    assert second != first
    assert not first.exists()
    assert second.name == "m"


def test_a_linked_workspace_of_a_changed_gguf_file_or_sampling_default_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_pair(file, tmp_path / "dense", {"else": "Q8_0"})
    first = prepare(str(file), tmp_path / "run", {})
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "eos_token_id": 7, "chat_format": "x"}')
    second = prepare(str(file), tmp_path / "run", {})
    assert (tmp_path / "run" / "workspaces").is_dir() and first != second and not first.exists()
    with Engine.from_pretrained(second, threads=1) as engine:
        assert engine.info.default_sampling.temperature == 0.25
    unpacked = workspace.locate(file).path
    assert json.loads((unpacked / "generation_config.json").read_text()) == {"temperature": 0.25}
    (tmp_path / "other.gguf").write_bytes(b"GGUF")  # the defaults may be its own
    assert not (workspace.locate(file).path / "generation_config.json").exists()


def test_other_paths_of_a_gguf_file_keep_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "m.gguf"
    write_pair(file, tmp_path / "dense", {"else": "Q8_0"})
    (tmp_path / "a" / "generation_config.json").write_text('{"temperature": 0.25}')
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c.gguf").symlink_to(file)
    folder = workspace.locate(file).path
    monkeypatch.chdir(tmp_path)
    assert workspace.locate("a/m.gguf").path == workspace.locate("b/m.gguf").path == folder
    assert workspace.locate("c.gguf").path.name == "c" and folder.is_dir()


def test_plan_of_a_gguf_file_counts_its_quantised_weights(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_pair(file, tmp_path / "dense", {"else": "Q8_0"})
    small, large = make_plan(file), make_plan(tmp_path / "dense")
    assert small.weight_type == "int8"
    assert small.group_size == 32
    assert small.weight_bytes < 0.45 * large.weight_bytes


def test_unsupported_gguf_types_and_architectures_are_named(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_pair(file, tmp_path / "dense", {"else": "Q8_0"})
    content = file.read_bytes()
    (tmp_path / "other.gguf").write_bytes(content.replace(b"llama", b"mamba"))
    (tmp_path / "linked.gguf").symlink_to("other.gguf")
    for name in ("other.gguf", "linked.gguf"):
        with pytest.raises(UnsupportedError, match=rf"^{tmp_path / name}: .*mamba"):
            workspace.locate(tmp_path / name)
    (tmp_path / "cut.gguf").write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match="complete GGUF"):
        workspace.locate(tmp_path / "cut.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"no model")
    with pytest.raises(ModelError, match="begin with GGUF"):
        workspace.locate(tmp_path / "empty.gguf")


def test_dense_and_quantised_weights_that_are_computed_together_are_rejected(tmp_path: Path) -> None:
    write_pair(tmp_path / "m.gguf", tmp_path / "dense", {"attn_v": "F16", "else": "Q8_0"})
    with pytest.raises(UnsupportedError, match=r"blk\.0\.attn_v\.weight is F16"):
        read_source(workspace.locate(tmp_path / "m.gguf").path)


def test_errors_name_the_gguf_file_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pair(tmp_path / "m.gguf", tmp_path / "dense", {"attn_v": "F16", "else": "Q8_0"})
    monkeypatch.chdir(tmp_path)
    for act in (
        lambda: Engine.from_pretrained("m.gguf"),
        lambda: make_plan("m.gguf"),
        lambda: convert("m.gguf", tmp_path / "w"),
        lambda: prepare("m.gguf", tmp_path / "run", {}),
    ):
        with pytest.raises(UnsupportedError, match=r"^m\.gguf: tensors are computed together"):
            act()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/run/gguf/m: no layers", "m.gguf: no layers"),
        ("/run/gguf/m/config.json: no layers", "m.gguf (config.json): no layers"),
        ("read /run/gguf/m/a/b.txt. Also '/run/gguf/m'.", "read m.gguf (a/b.txt). Also 'm.gguf'."),
        *[(text, text) for text in ("/run/gguf/m-2: x", "/run/gguf/m.gguf: x", "/run/gguf/mm", "/x/run/gguf/m: x")],
    ],
)
def test_only_whole_paths_are_named_as_given(text: str, expected: str) -> None:
    assert as_given(text, Path("/run/gguf/m"), "m.gguf") == expected


def test_errors_of_writing_name_the_gguf_file_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pair(tmp_path / "m.gguf", tmp_path / "dense", {"else": "Q8_0"})
    monkeypatch.chdir(tmp_path)
    tokenizer = workspace.locate("m.gguf").path / "tokenizer.json"

    def fails(*_: Any, **__: Any) -> None:
        raise ModelError(f"{tokenizer}: a fault")

    monkeypatch.setattr("charonia.weights.convert.build_token_table", fails)
    with pytest.raises(ModelError, match=r"^m\.gguf \(tokenizer\.json\): a fault"):
        convert("m.gguf", tmp_path / "w")


def test_errors_about_another_part_name_it_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pair(tmp_path / "m.gguf", tmp_path / "unused", MIXED, split=6)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    parts[1].write_bytes(parts[1].read_bytes()[:99])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=rf"^{parts[0].name}: {parts[1].name} is not a complete GGUF file"):
        workspace.locate(parts[0].name)


def test_reader_finds_the_places_of_the_package_gguf(tmp_path: Path) -> None:
    import gguf

    file = tmp_path / "m.gguf"
    write_pair(file, tmp_path / "dense", MIXED)
    ours, theirs = read_gguf(file), gguf.GGUFReader(file)
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.begin, mine.end - mine.begin) == (tensor.data_offset, tensor.n_bytes)
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents()


def test_random_blocks_have_finite_weights_of_every_type() -> None:
    from gguf.quants import dequantize

    for kind in BLOCK_TYPES:
        values = dequantize(random_blocks(np.random.default_rng(1), kind, 8, 256), gguf_type(kind))
        assert np.isfinite(values).all()
        assert 0.005 < values.std() < 0.5, kind


def test_docs_list_the_supported_types_architectures_and_pre_tokenizers() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = {row.split("|")[1].strip(): row for row in text.splitlines() if row.startswith("| ")}
    for names, row in ((BLOCK_TYPES, "types of tensors"), (ARCHITECTURES, "architectures"), (PATTERNS, "tokenizers")):
        listed = next(found for name, found in rows.items() if name.startswith(row))
        assert [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", listed)] == []


def test_turn_ends_that_the_file_does_not_name_are_end_ids() -> None:
    tokens = ["a", "<|im_end|>", "<|endoftext|>", "<|im_start|>"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 3, 3, 3]}
    assert end_ids({**metadata, "tokenizer.ggml.eos_token_id": 2}) == [2, 1]
    assert end_ids({**metadata, "tokenizer.ggml.eos_token_id": 4}) == [1, 2]  # the file has 4 tokens


FILES = [
    "README.md",
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "big/m-Q8_0-00001-of-00002.gguf",
    "big/m-Q8_0-00002-of-00002.gguf",
    "mmproj-m-Q4_K_M.gguf",
]


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("Q4_K_M", FILES[1:2]),
        ("q4_k_m", FILES[1:2]),
        ("m-Q4_K_S.gguf", FILES[2:3]),
        ("Q8_0", FILES[3:5]),
    ],
)
def test_a_hub_id_names_a_file_by_its_type_or_its_name(wanted: str, chosen: list[str]) -> None:
    assert is_gguf_id(f"owner/m:{wanted}")
    assert choose_gguf(f"owner/m:{wanted}", FILES, wanted) == chosen


def test_a_hub_id_that_names_no_gguf_file_lists_the_files() -> None:
    for wanted in ("Q5_K_M", "K_M"):
        with pytest.raises(ModelError, match="m-Q4_K_M, m-Q4_K_S"):
            choose_gguf(f"owner/m:{wanted}", FILES, wanted)


def test_a_folder_with_several_gguf_models_is_rejected(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_pair(tmp_path / name, tmp_path / f"{name}.dense", {"else": "Q8_0"})
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        workspace.locate(tmp_path)
    json.loads((workspace.locate(tmp_path / "a.gguf").path / "config.json").read_text())


def test_split_files_in_the_hubs_cache_are_links_with_other_names(tmp_path: Path) -> None:
    write_pair(tmp_path / "m.gguf", tmp_path / "unused", MIXED, split=6)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    parts = sorted(tmp_path.glob("*.gguf"))
    for index, part in enumerate(parts):
        (snapshot / part.name).symlink_to(part.rename(blobs / f"{index:064}"))
    source = read_source(workspace.locate(snapshot / parts[0].name).path)
    assert {info.file for info in source.checkpoint.tensors.values()} == set(blobs.iterdir())


def test_a_file_without_a_suffix_is_served_as_in_ollamas_folder(tmp_path: Path) -> None:
    write_pair(tmp_path / "m.gguf", tmp_path / "dense", {"else": "Q8_0"})
    file = (tmp_path / "m.gguf").rename(tmp_path / "sha256-0123")
    assert read_source(workspace.locate(file).path).checkpoint.tensors


def test_a_file_named_model_gets_the_name_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "SmolLM2").mkdir()
    write_pair(tmp_path / "SmolLM2" / "model.gguf", tmp_path / "dense", {"else": "Q8_0"})
    assert workspace.locate(tmp_path / "SmolLM2" / "model.gguf").path.name == "SmolLM2"


def test_a_downloaded_gguf_file_is_found_without_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "m-Q4_K_M.gguf").touch()

    def answer(*_: Any, dry_run: bool = False, **__: Any) -> str:
        if dry_run:
            raise huggingface_hub.errors.DryRunError
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert download_gguf("owner/m:Q4_K_M") == tmp_path / "m-Q4_K_M.gguf"


LOCATE = """
import sys
from charonia.errors import ModelError
from charonia.weights.convert import read_source
from charonia.weights.plan import make_plan
from charonia.weights.workspace import locate
print(len(read_source(locate("them/m:Q8_0").path).checkpoint.tensors))
try:
    locate("them/none:Q8_0")
except ModelError as error:
    print(error, file=sys.stderr)
for use in (locate, make_plan):
    try:
        use("them/m")
    except ModelError as error:
        print(error, file=sys.stderr)
"""


@pytest.mark.slow
def test_split_files_of_the_hub_are_read_and_a_missing_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "hub" / "Q8_0").mkdir(parents=True)
    write_pair(tmp_path / "hub" / "Q8_0" / "m-Q8_0.gguf", tmp_path / "unused", {"else": "Q8_0"}, split=6)
    (tmp_path / "hub" / "m-Q4_0.gguf").touch()
    with HubDouble({"them/m": tmp_path / "hub"}) as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", LOCATE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.stdout.split() == ["20"], done.stderr
    missing, *unnamed = [line for line in done.stderr.splitlines() if line.startswith("them/")]
    assert "the hub has no model of that name" in missing
    assert unnamed == ["them/m has GGUF files: name one of them, as in them/m:Q8_0; the repository has Q8_0, Q4_0"] * 2


def gguf_file(metadata: Mapping[str, bytes], infos: list[bytes]) -> bytes:
    """A file without data. metadata: type and value of each key."""
    values = b"".join(struct.pack("<Q", len(key)) + key.encode() + value for key, value in metadata.items())
    return b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(metadata)) + values + b"".join(infos) + bytes(64)


def info_of(name: str, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return struct.pack("<Q", len(name)) + name.encode() + shape + struct.pack("<IQ", kind, offset)


NESTED = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (gguf_file({"general.alignment": struct.pack("<II", 4, 0)}, []), "alignment is 0"),
        (gguf_file({"general.alignment": struct.pack("<IQ", 8, 1) + b"x"}, []), "alignment is 'x'"),
        (gguf_file({"a": NESTED}, []), "unknown type 9"),
        (gguf_file({"a": struct.pack("<IQ", 8, 1 << 40)}, []), "end after the file"),
        (gguf_file({"a": struct.pack("<IIQ", 9, 0, 1 << 62)}, []), "end after the file"),
        (gguf_file({"a": struct.pack("<IIQ", 9, 0, 200) + bytes(200)}, []), "more than 128 bytes"),
        (gguf_file({}, [info_of("t", [2]), info_of("t", [2])]), "same name"),
        (gguf_file({}, [info_of("t", [0, 2])]), "no elements"),
        (gguf_file({}, [info_of("t", [1 << 60] * 4)]), "ends at byte"),
        (gguf_file({}, [info_of("t", [2], offset=(1 << 64) - 8)]), "ends at byte"),
    ],
)
def test_hostile_headers_are_rejected(
    content: bytes, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MOST_HEADER", 128 if "128" in named else 64 << 20)
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=named):
        read_gguf(file)


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("llama.attention.head_count", 4, struct.pack("<I", 0)),
        ("llama.attention.head_count", 8, struct.pack("<Q", 1) + b"x"),
        ("llama.block_count", 4, struct.pack("<I", 4_000_000_000)),
        ("tokenizer.ggml.tokens", 9, struct.pack("<IQI", 4, 1, 7)),
        ("tokenizer.chat_template", 4, struct.pack("<I", 7)),
    ],
)
def test_metadata_of_a_wrong_type_or_size_are_rejected(key: str, kind: int, value: bytes, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_pair(file, tmp_path / "dense", {"else": "Q8_0"})
    content, name = file.read_bytes(), struct.pack("<Q", len(key)) + key.encode()
    (keys,) = struct.unpack_from("<Q", content, 16)
    # The first key with this name is renamed, and one with this value is added.
    other = content.replace(name, name[:-1] + b"?")
    file.write_bytes(other[:16] + struct.pack("<Q", keys + 1) + name + struct.pack("<I", kind) + value + other[24:])
    with pytest.raises(ModelError, match=r"metadata that cannot be used|layers|1 tokens"):
        workspace.locate(file)


def config_of(architecture: str, **values: Any) -> dict[str, Any]:
    """The config.json of a file with these metadata, and with a rope_freqs.weight if `frequencies` is one of them.
    tensors: further ones, because a file has at least one for each layer."""
    names: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (8, 8),
        **({"rope_freqs.weight": (4,)} if values.pop("frequencies", 0) else {}),
        **{f"blk.{layer}.any": (1,) for layer in range(values.pop("tensors", 0))},
    }
    given = {"block_count": 1, "embedding_length": 8, "attention.head_count": 1, "feed_forward_length": 8}
    given |= {"context_length": 64, **{key.replace("__", "."): value for key, value in values.items()}}
    tensors = {name: Tensor(name, "F32", shape, Path("m"), 0, 8) for name, shape in names.items()}
    metadata = {"general.architecture": architecture, "tokenizer.ggml.tokens": ["a"]}
    metadata |= {f"{architecture}.{key}": value for key, value in given.items()}
    return hf_config(GgufFile([Path("m")], metadata, tensors), lambda name: [1.0] * 4)


def test_linear_rope_scaling_has_its_factor_under_both_names_and_without_a_type() -> None:
    expected = {"rope_type": "linear", "factor": 4.0}
    assert config_of("llama", rope__scale_linear=4.0)["rope_scaling"] == expected
    assert config_of("llama", rope__scaling__factor=4.0)["rope_scaling"] == expected
    assert config_of("llama", rope__scaling__factor=4.0, rope__scaling__type="none")["rope_scaling"] is None
    assert config_of("llama")["rope_scaling"] is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rope__scaling__type": "dynamic"}, "dynamic"),
        ({"rope__scaling__type": "yarn", "rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"rope__scaling__factor": 4.0, "frequencies": True}, "and frequencies"),
        ({"rope__dimension_count": 4}, "4 of 8 columns"),
        ({"attention__causal": False}, "attention.causal = false"),
    ],
)
def test_attention_that_is_not_supported_is_rejected(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        config_of("llama", **values)


def test_gguf_with_pooling_of_the_last_token_gives_embeddings_of_its_weights(tmp_path: Path) -> None:
    write_pair(tmp_path / "m.gguf", tmp_path / "dense", {"else": "F32"}, pooling=gguf.PoolingType.LAST)
    found, expected = (Engine.from_pretrained(tmp_path / one, threads=2) for one in ("m.gguf", "dense"))
    with found, expected:
        ours, theirs = found.embed([[5, 6, 7], [9]]), expected.embed([[5, 6, 7], [9]])
    assert np.abs(ours - theirs).max() < 1e-5 and (ours**2).sum(axis=1) == pytest.approx(1)
    assert "architectures" not in config_of("qwen3", pooling_type=0)
    with pytest.raises(UnsupportedError, match="an embedding model or a reranker with pooling_type 4"):
        config_of("qwen3", pooling_type=4)


def test_mistral3_needs_a_yarn_multiplier_of_one_with_a_scale_or_neither() -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    scale, multiplier = {"attention__temperature_scale": 0.1}, {"rope__scaling__yarn_log_multiplier": 1.0}
    assert config_of("mistral3", **yarn, **scale, **multiplier)["model_type"] == "ministral3"
    for one in (scale, multiplier):
        with pytest.raises(UnsupportedError, match="yarn_log_multiplier"):
            config_of("mistral3", **yarn, **one)


def test_mistral3_has_no_window() -> None:
    assert [layer.window for layer in describe(config_of("mistral3"), "m").config.layers] == [0]


LATENTS = {
    "attention__kv_lora_rank": 4, "rope__dimension_count": 2, "attention__key_length": 6, "attention__value_length": 4,
    "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 8, "expert_group_count": 1,
}  # fmt: skip


def test_first_files_of_deepseek2_have_the_sizes_of_heads_and_no_latent_of_q() -> None:
    config = config_of("deepseek2", **LATENTS)
    assert (config["model_type"], config["q_lora_rank"]) == ("deepseek_v2", None)
    assert (config["qk_nope_head_dim"], config["v_head_dim"]) == (4, 4)
    absorbed = {"attention__key_length_mla": 5, "attention__value_length_mla": 3, "attention__q_lora_rank": 7}
    config = config_of("deepseek2", **LATENTS, **absorbed)
    assert (config["qk_nope_head_dim"], config["v_head_dim"], config["q_lora_rank"]) == (3, 3, 7)


def test_the_router_of_deepseek2_is_the_files() -> None:
    more = {"expert_gating_func": 2, "nextn_predict_layers": 1, "block_count": 2, "frequencies": True}
    sigmoid = config_of("deepseek2", **LATENTS, **more)
    assert (sigmoid["model_type"], sigmoid["num_hidden_layers"]) == ("deepseek_v3", 1)
    groups = config_of("deepseek2", **{**LATENTS, "expert_group_count": 2}, expert_group_used_count=1)
    with pytest.raises(UnsupportedError, match="topk_method 'group_limited_greedy'"):
        describe(groups, "m")
    for values, named in (({"expert_gating_func": 3}, "gating_func 3"), ({"attention__temperature_scale": 0.1}, "0.1")):
        with pytest.raises(UnsupportedError, match=named):
            config_of("deepseek2", **LATENTS, **values)


def test_older_files_of_deepseek2_have_the_groups_of_their_model() -> None:
    def older(experts: int, layers: int, gate: int) -> dict[str, Any]:
        own = {"expert_count": experts, "block_count": layers, "expert_gating_func": gate, "expert_group_count": None}
        return config_of("deepseek2", **{**LATENTS, **own}, tensors=layers)

    v3, lite = older(256, 61, 2), older(64, 27, 1)
    assert (v3["n_group"], v3["topk_group"]) == (8, 4)
    assert (lite["n_group"], lite["topk_method"]) == (1, "greedy")
    with pytest.raises(UnsupportedError, match="topk_method 'group_limited_greedy'"):
        describe(older(160, 60, 1), "m")
    for unknown in ((256, 61, 1), (64, 27, 2), (256, 60, 2), (384, 61, 2)):
        named = f"no known model has {unknown[0]} experts in {unknown[1]} layers with expert_gating_func {unknown[2]}"
        with pytest.raises(UnsupportedError, match=named):
            older(*unknown)


def test_groups_need_the_number_that_a_token_reads() -> None:
    with pytest.raises(ModelError, match=r"no deepseek2\.expert_group_used_count"):
        config_of("deepseek2", **{**LATENTS, "expert_group_count": 2})


@pytest.mark.parametrize("predicting", [-(10**10), -1, 2, 3])
@pytest.mark.parametrize("architecture", ["deepseek2", "glm4moe", "hy_v3", "qwen35"])
def test_layers_for_multi_token_prediction_that_the_file_cannot_have_are_rejected(
    architecture: str, predicting: int
) -> None:
    values = {**LATENTS, "block_count": 2, "nextn_predict_layers": predicting, "ssm__time_step_rank": 4}
    with pytest.raises(ModelError, match=f"nextn_predict_layers = {predicting}; it must be 0 to 1"):
        config_of(architecture, **values, tensors=2)


def test_yarn_of_deepseek2_and_mistral4_has_the_multiplier_of_its_architecture() -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__yarn_log_multiplier": 0.0707}
    scaling = config_of("deepseek2", **LATENTS, **yarn)["rope_scaling"]
    assert (scaling["mscale"], scaling["mscale_all_dim"]) == (0.707, 0.707)
    config = config_of("mistral4", **LATENTS, **yarn)
    rope = config["rope_parameters"]
    assert (rope["mscale"], rope["mscale_all_dim"], rope["llama_4_scaling_beta"]) == (1.0, 0.707, 0.1)
    plain = config_of("mistral4", **LATENTS)["rope_parameters"]
    assert plain == {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}


def test_layers_of_qwen35_for_multi_token_prediction_are_left_out() -> None:
    delta = {f"ssm__{name}": 4 for name in ("time_step_rank", "group_count", "state_size", "inner_size", "conv_kernel")}
    more = {"frequencies": True, "block_count": 2, "nextn_predict_layers": 1, "attention__head_count_kv": 1}
    config = config_of("qwen35", **delta, **more)
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 1


def test_first_files_of_gemma_2_have_the_models_caps_and_window() -> None:
    config = config_of("gemma2")
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)
    assert config["sliding_window"] == 4096


def test_a_window_pattern_that_is_the_same_in_every_layer_is_not_a_period() -> None:
    values = {"block_count": 2, "frequencies": True, "attention__sliding_window": 8}
    for has_window, expected in ((True, "sliding_attention"), (False, "full_attention")):
        config = config_of("gemma3", **values, attention__sliding_window_pattern=[has_window] * 2)
        assert config["layer_types"] == [expected] * 2


def test_groups_of_experts_are_those_of_the_file_and_another_gate_is_rejected() -> None:
    experts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8}
    config = config_of("glm4moe", **experts, expert_group_count=2, expert_group_used_count=1)
    assert (config["n_group"], config["topk_group"]) == (2, 1)
    with pytest.raises(UnsupportedError, match=r"gating_func 1, .* for glm4moe; supported: 2"):
        config_of("glm4moe", **experts, expert_gating_func=1)


def test_two_starts_at_the_same_time_use_the_folder_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, write, made = tmp_path / "m.gguf", gguf_folder._write, []
    write_pair(file, tmp_path / "dense", {"else": "Q8_0"})
    for old in (tmp_path / "run" / "gguf").iterdir():
        old.rename(tmp_path / old.name)

    def write_after_another(*arguments: Any) -> None:
        monkeypatch.setattr(gguf_folder, "_write", write)
        made.append(gguf_folder.unpack(file))
        (made[0] / "used").touch()
        write(*arguments)

    monkeypatch.setattr(gguf_folder, "_write", write_after_another)
    assert gguf_folder.unpack(file) == made[0]
    assert (made[0] / "used").exists()
