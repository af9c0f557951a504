"""Several models in one Triton: their names, their shares of the memory, and the requests of `charonia models`."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from charonia_gateway.settings import Settings
from test_plan import SMALL

from charonia.errors import InvalidRequestError, ServeError
from charonia.serve import control, drain, shares
from charonia.serve.models import Models, Served, Uses, added, asked_for, make_repository, option_values, with_labels
from charonia.settings import ServeSettings
from charonia.triton_models import source_dir
from charonia.weights.plan import Plan

HANG_S = 120
MIB = 1 << 20
PLAN = replace(
    SMALL,
    **{"weight_bytes": 100 * MIB, "activation_bytes": 100 * MIB, "kv_token_bytes": MIB // 64, "kv_block_bytes": MIB},
    **{"free_bytes": 2400 * MIB, "num_blocks": 1760},
)


def served(*names: str, workspace: Path = Path("nowhere")) -> list[Served]:
    return with_labels([(name, workspace) for name in names])


def test_the_first_model_has_the_names_of_one_and_the_others_labels() -> None:
    found = served("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", "a b", "a_b", "千")
    assert [one.label for one in found] == ["", "Qwen_Qwen3-0.6B", "a_b", "a_b-2", "model"]
    assert found[0].parts == ("preprocessing", "engine", "postprocessing", "ensemble")
    assert found[1].part("ensemble") == "ensemble.Qwen_Qwen3-0.6B"
    assert option_values(found[:2]) == "Qwen/Qwen3-0.6B=Qwen_Qwen3-0.6B"
    with pytest.raises(ServeError, match="two models are called 'a'"):
        served("a", "a")


def test_model_names_may_contain_separators() -> None:
    """The gateway parses the launcher's setting."""
    found = served("first", "x=y", "a/b=c=d")
    given = Settings(_env_file=None, model_name="first", more_models=option_values(found))
    assert given.models == {"first": "", "x=y": "x_y", "a/b=c=d": "a_b_c_d"}
    assert [one.name for one in served("a,b", "c")] == ["a,b", "c"]
    with pytest.raises(ServeError, match=r"called 'a,b', and only the first .* may have a comma.*second="):
        served("c", "a,b")


def test_models_are_named_by_arguments_or_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x=y").mkdir()
    monkeypatch.chdir(tmp_path)
    for model, more, expected in [
        (None, "", [(None, None)]),
        ("a", "", [(None, "a")]),
        ("n=a", "b, m=owner/b@c ,", [("n", "a"), (None, "b"), ("m", "owner/b@c")]),
        ("x=y", "", [(None, "x=y")]),  # a folder
    ]:
        settings = ServeSettings(_env_file=None, model=model, more_models=more)
        assert asked_for(settings) == expected
    named = ServeSettings(_env_file=None, model="a", model_name="n", more_models="b")
    assert asked_for(named) == [("n", "a"), (None, "b")]
    for wrong in ("=a", "n="):
        with pytest.raises(ServeError, match="names no model"):
            asked_for(ServeSettings(_env_file=None, model=wrong))
    (tmp_path / "a folder").mkdir()
    for text, *expected in [("a folder", None, "a folder"), ("n=a folder", "n", "a folder"), (" n = a ", "n", "a")]:
        assert asked_for(ServeSettings(_env_file=None, model=text)) == [tuple(expected)]
    for wrong in (". small=b", "m1 m2", "Qwen/A b=c", "n=a m=b", "n=a b"):
        with pytest.raises(ServeError, match=rf"'{wrong}' is no path, and has spaces, .* CHARONIA_MORE_MODELS"):
            asked_for(ServeSettings(_env_file=None, model=wrong))


def test_an_added_model_has_a_name_and_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert added("n=model") == ("n", str(tmp_path / "model"))
    assert added("n=owner/model") == ("n", "owner/model")
    assert added("n") == ("", "")


def test_the_repository_has_every_model_under_its_names(tmp_path: Path) -> None:
    two = served("first", "second", workspace=tmp_path)
    for part in two[0].parts:
        folder = tmp_path / "model_repository" / part
        (folder / "1").mkdir(parents=True)
        text = (source_dir() / "model_repository" / part / "config.pbtxt").read_text()
        (folder / "config.pbtxt").write_text(text)
    folder = '/a "folder" with \\'
    two[1] = replace(two[1], settings={"cache_size": "640", "session_dir": folder})
    made = make_repository(two, tmp_path / "made", 3)
    texts = {folder.name: (folder / "config.pbtxt").read_text() for folder in made.iterdir()}
    assert set(texts) == {*two[0].parts, *two[1].parts}
    assert all(re.search(rf'(?m)^name: "{re.escape(name)}"$', text) for name, text in texts.items())
    steps = re.compile(r'model_name: "([^"]*)"')
    assert steps.findall(texts["ensemble.second"]) == list(two[1].parts[:-1])
    assert steps.findall(texts["ensemble"]) == list(two[0].parts[:-1])
    assert 'key: "cache_size" value: { string_value: "640" }' in texts["engine.second"]
    assert r'key: "session_dir" value: { string_value: "/a \"folder\" with \\" }' in texts["engine.second"]
    assert texts["engine"] == (source_dir() / "model_repository" / "engine" / "config.pbtxt").read_text()
    for name in ("preprocessing", "preprocessing.second"):
        assert re.search(r"instance_group\s*\[\s*\{\s*count:\s*3\b", texts[name])
    assert (made / "engine.second" / "1").resolve() == tmp_path / "model_repository" / "engine" / "1"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A workspace whose config.ini does not set the cache."""
    weights = tmp_path / "workspace" / "triton_models" / "weights"
    weights.mkdir(parents=True)
    (weights / "config.ini").write_text("[llama]\n")
    return tmp_path / "workspace"


def blocks_of(
    config: Path, plans: list[Plan], given: list[float], inference: dict[str, str] | None = None
) -> list[int]:
    names = served(*(f"m{number}" for number in range(len(plans))), workspace=config)
    left = (made for made in plans for _ in range(2 if made.offload_bytes else 1))  # it is planned again
    divided = shares.divide(names, inference or {}, given, lambda *_: next(left))
    assert all(one.settings["cache_users"] == "0" and one.settings["max_batch_size"] == "64" for one in divided)
    sizes = [int(one.settings["cache_size"]) for one in divided]
    return [size // plan.kv_block_bytes for size, plan in zip(sizes, plans, strict=True)]


def test_free_memory_is_divided_by_the_shares(config: Path) -> None:
    # 2400 MiB minus twice 200: 2000 MiB. Each cache takes 0.8 of its share.
    assert blocks_of(config, [PLAN, PLAN], [1, 1]) == [800, 800]
    assert blocks_of(config, [PLAN, PLAN], [3, 1]) == [1200, 400]
    assert blocks_of(config, [PLAN, PLAN], [3, 1], {"cache_max_entry_count": "0.5"}) == [750, 250]


def test_unused_memory_of_a_model_goes_to_the_others(config: Path) -> None:
    small = replace(PLAN, num_blocks=64)  # 80 MiB of the free memory
    assert blocks_of(config, [PLAN, small], [1, 1]) == [1536, 64]


def test_given_cache_sizes_are_used(config: Path) -> None:
    plans = [replace(PLAN, num_blocks=512)] * 2
    assert blocks_of(config, plans, [1, 1], {"cache_max_entry_count": "512"}) == [512, 512]
    assert blocks_of(config, plans, [1, 1], {"cache_users": "8"}) == [512, 512]


def test_adapters_take_memory_of_the_first_model(config: Path) -> None:
    adapters = 500

    def plan(_: Path, inference: dict[str, str]) -> Plan:
        if not inference["lora_adapters"]:
            return PLAN
        # A model alone leaves 440 MiB beside its cache.
        fits = adapters <= 440
        return replace(PLAN, adapter_bytes=adapters * MIB, num_blocks=1760 if fits else 0, warnings=["adapters"])

    def blocks(divide: Callable[..., list[Served]]) -> list[int]:
        made = divide(served("a", "b", workspace=config), {"lora_adapters": "x=/x"}, [1, 1], plan)
        assert [one.settings["lora_adapters"] for one in made] == ["x=/x", ""]
        return [int(one.settings["cache_size"]) // MIB for one in made]

    assert blocks(shares.divide) == blocks(shares.rotate) == [600, 600]
    adapters = 2100  # 2400 MiB minus twice 200 for both models, or once for the first one
    with pytest.raises(ServeError, match=r"2\.15 GiB of weights and LoRA adapters"):
        blocks(shares.divide)
    assert blocks(shares.rotate) == [40, 880]
    adapters = 2300
    with pytest.raises(
        ServeError, match=r"fit together: a takes 2\.34 GiB of weights and LoRA adapters, 100 MiB for s"
    ):
        blocks(shares.rotate)


@pytest.mark.parametrize("key", ["session_dir", "kv_offload_path"])
def test_each_model_has_folders_of_its_own(config: Path, key: str) -> None:
    """Two models with the same folder name would read each other's sessions, and only one would store KV."""
    names = served("a", "b/c", workspace=config)
    folders = [one.settings.get(key) for one in shares.divide(names, {key: "/s"}, [1, 1], lambda *_: PLAN)]
    assert folders == ["/s", "/s/b_c"]
    assert all(key not in one.settings for one in shares.divide(names, {}, [1, 1], lambda *_: PLAN))
    (config / "triton_models" / "weights" / "config.ini").write_text(f"[llama]\n{key} = /w\n")
    written = shares.divide(names, {}, [1, 1], lambda *_: PLAN)
    assert [one.settings[key] for one in written] == ["/w", "/w/b_c"]
    assert key in shares.KEYS, "or the environment would win"


@pytest.mark.parametrize("key", ["session_dir", "kv_offload_path"])
def test_folders_that_cannot_be_written_are_found_before_triton_starts(config: Path, tmp_path: Path, key: str) -> None:
    names = served("a", "b/c", workspace=config)
    shares.check_folders(names, {})
    shares.check_folders(names, {key: str(tmp_path / "new" / "kv")})
    assert (tmp_path / "new" / "kv" / "b_c").stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "new" / "kv").iterdir()) == [tmp_path / "new" / "kv" / "b_c"]
    (tmp_path / "file").write_text("")
    variable = f"CHARONIA_{key.upper()}"
    for folder, reason in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "in", "Not a directory")):
        with pytest.raises(ServeError, match=rf"{key} = {folder} is not a folder .*\({reason}\): .*{variable}"):
            shares.check_folders(names, {key: str(folder)})


def test_folders_of_sessions_are_not_checked_without_sessions(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shares.check_folders(served("a", workspace=config), {"session_dir": str(tmp_path / "file"), "session_ttl_s": "0"})


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_does_not_prevent_a_start(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fails(dir: str) -> None:
        raise OSError(code, f"{dir} is full")

    monkeypatch.setattr("tempfile.TemporaryFile", fails)
    shares.check_folders(served("a", workspace=config), {"kv_offload_path": str(tmp_path)})


def test_memory_of_the_smallest_gpu_counts(config: Path) -> None:
    ranks = replace(PLAN, device="cuda", ranks=2, free_bytes=4800 * MIB, weight_bytes=200 * MIB, kv_block_bytes=2 * MIB)
    ranks = replace(ranks, activation_bytes=200 * MIB)
    assert blocks_of(config, [ranks, replace(PLAN, device="cuda")], [1, 1]) == [800, 800]


def test_models_that_do_not_fit_together_are_refused_with_the_numbers(config: Path) -> None:
    small = replace(PLAN, free_bytes=400 * MIB)
    with pytest.raises(ServeError, match=r"m0 takes 100 MiB of weights, 100 MiB for steps and 1\.00 MiB of keys") as at:
        blocks_of(config, [small, small], [1, 1])
    assert "m1 takes" in str(at.value) and "400 MiB are free" in str(at.value)
    alone = replace(PLAN, num_blocks=0, warnings=["the model does not fit: its weights take ..."])
    with pytest.raises(ServeError, match="m1 does not fit: the model does not fit"):
        blocks_of(config, [PLAN, alone], [1, 1])
    given = replace(PLAN, num_blocks=1500)
    with pytest.raises(ServeError, match=r"1\.46 GiB of keys and values"):
        blocks_of(config, [given, given], [1, 1], {"cache_max_entry_count": "1500"})
    with pytest.raises(ServeError, match=r"the share of m1 .* less than one block of 1\.00 MiB: raise it"):
        blocks_of(config, [PLAN, PLAN], [10_000, 1])


def test_weights_in_host_memory_must_fit_together(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model alone has been checked by its plan."""
    gemma = replace(PLAN, device="cuda", host_bytes=300 * MIB)
    monkeypatch.setattr("charonia._engine.free_host_memory", lambda: 600 * MIB)
    assert blocks_of(config, [gemma, PLAN, gemma], [1, 1, 1])
    monkeypatch.setattr("charonia._engine.free_host_memory", lambda: 600 * MIB - 1)
    with pytest.raises(ServeError, match=r"host memory, of which m0 takes 300 MiB, m2 takes 300 MiB, and 600 MiB are"):
        blocks_of(config, [gemma, PLAN, gemma], [1, 1, 1])


def test_kv_in_host_memory_must_fit_together(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model alone has been checked by its plan."""
    small = replace(PLAN, device="cuda", offload_bytes=200 * MIB)
    gemma = replace(small, host_bytes=300 * MIB)
    monkeypatch.setattr("charonia._engine.free_host_memory", lambda: 700 * MIB)
    assert blocks_of(config, [gemma, small], [1, 1])
    monkeypatch.setattr("charonia._engine.free_host_memory", lambda: 700 * MIB - 1)
    with pytest.raises(ServeError, match=r"m0 takes 500 MiB, m1 takes 200 MiB, .* lower kv_offload_memory"):
        blocks_of(config, [gemma, small], [1, 1])
    names = served("a", "b", workspace=config)
    assert shares.rotate(names, {}, [1, 1], lambda *_: gemma), "one model at a time"
    large = replace(gemma, offload_bytes=400 * MIB)
    with pytest.raises(ServeError, match=r"of which a takes 700 MiB, and 700 MiB are free"):
        shares.rotate(names, {}, [1, 1], lambda *_: large)


def test_kv_in_the_memory_of_a_cpu_takes_memory_of_the_caches(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia._engine.free_host_memory", lambda: 2400 * MIB)
    names = served("a", "b", workspace=config)

    def made(mebibytes: int, divide: Callable[..., list[Served]], plan: Plan = PLAN) -> list[tuple[int, int]]:
        found = divide(names, {}, [1, 1], lambda *_: replace(plan, offload_bytes=mebibytes * MIB))
        return [(int(one.settings["cache_size"]) // MIB, one.need_bytes // MIB) for one in found]

    # 2400 MiB minus twice 700: 1000 MiB. Each cache takes 0.8 of its share.
    assert made(500, shares.divide) == [(400, 1100)] * 2
    assert made(1100, shares.rotate) == [(440, 1740)] * 2, "one model at a time"
    with pytest.raises(ServeError, match=r"a takes 100 MiB of weights, 1\.17 GiB for steps, kv_offload_memory and"):
        made(1100, shares.divide)
    with pytest.raises(ServeError, match=r"a takes 100 MiB of weights, 2\.25 GiB for steps, kv_offload_memory and"):
        made(2200, shares.rotate)
    on_gpu = replace(PLAN, device="cuda")
    assert made(500, shares.divide, on_gpu) == [(800, 1000)] * 2


@pytest.mark.parametrize("text", ["a", "1,0", "1,-1", "1,inf", "1,nan", "1e308,1e308", "1,1e-310", ","])
def test_shares_are_numbers_above_0(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="CHARONIA_MODEL_SHARES="):
        shares.parse_shares(text, 2)


def test_each_model_has_a_share(config: Path) -> None:
    assert blocks_of(config, [PLAN, PLAN], shares.parse_shares("1000000,1e6", 2)) == [800, 800]
    assert shares.parse_shares("", 2) == [1, 1]
    assert shares.parse_shares("3, 0.5", 2) == [3, 0.5]
    with pytest.raises(InvalidRequestError, match="has 2 shares, and there are 3 models"):
        shares.parse_shares("3,1", 3)


def test_models_that_do_not_fit_together_may_be_loaded_in_turn(config: Path) -> None:
    names = served("a", "b", workspace=config)
    large = replace(PLAN, weight_bytes=1500 * MIB)
    with pytest.raises(ServeError, match="do not fit together"):
        shares.divide(names, {}, [1, 1], lambda *_: large)
    found = shares.rotate(names, {}, [3, 1], lambda *_: large)
    assert [int(one.settings["cache_size"]) // MIB for one in found] == [480, 160]  # 0.8 of 600 and of 200
    assert [one.need_bytes // MIB for one in found] == [2080, 1760] and {one.room_bytes // MIB for one in found} == {
        2400
    }
    both = shares.rotate(names, {}, [1, 1], lambda *_: PLAN)
    assert sum(one.need_bytes for one in both) <= both[0].room_bytes, "they fit together"
    given = {"cache_max_entry_count": "1500"}
    with pytest.raises(ServeError, match=r"a takes 1\.46 GiB of weights, .* 1\.46 GiB of keys and values"):
        shares.rotate(names, given, [1, 1], lambda *_: replace(large, num_blocks=1500))
    with pytest.raises(ServeError, match="a does not fit: too large"):
        shares.rotate(names, {}, [1, 1], lambda *_: replace(PLAN, num_blocks=0, warnings=["too large"]))


class Requests:
    """A double of Triton's metrics: running requests and ended ones, by engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
        self.running: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self._now = now
        monkeypatch.setattr(drain, "requests_of", self.read)
        monkeypatch.setattr("charonia.serve.models._LOOK_S", 0)

    def read(self, url: str) -> dict[str, tuple[float, float]]:
        engines = {*self.running, *self.ended}
        return {one: (self.running.get(one, 0), self.ended.get(one, 0)) for one in engines}

    def use(self, models: Models, engine: str) -> None:
        self._now[0] += 1
        self.ended.setdefault(engine, 0)
        models._uses.look([engine])
        self.ended[engine] += 1
        models._uses.look([engine])


def rotating(orders: drain.ModelControl, now: list[float], *sizes: int, room: int, idle_s: float = 0) -> Models:
    names = ("a", "b", "c", "d")[: len(sizes)]
    found = [replace(one, need_bytes=size, room_bytes=room) for one, size in zip(served(*names), sizes, strict=True)]
    models = Models(
        orders, found, alive=lambda: True, metrics_url="", limits=(HANG_S, HANG_S), on_demand=True, idle_s=idle_s
    )
    models._uses._clock = lambda: now[0]
    return models


def states(models: Models) -> str:
    """The names of the loaded models."""
    return "".join(one["name"] for one in models.describe() if one["state"] == "loaded")


def test_least_recently_used_idle_model_makes_room(orders: drain.ModelControl, monkeypatch: pytest.MonkeyPatch) -> None:
    Log(orders)
    now = [0.0]
    requests = Requests(monkeypatch, now)
    models = rotating(orders, now, 2, 2, 2, 3, room=4)
    assert states(models) == "ab" and models.options()[1:] == [
        f"--load-model={part}" for one in served("a", "b") for part in one.parts
    ]
    for engine in ("engine", "engine.b", "engine"):
        requests.use(models, engine)
    assert models.ensure("c", HANG_S) == "c is loaded" and states(models) == "ac"
    for engine in ("engine.c", "engine"):
        requests.use(models, engine)
    requests.running["engine.c"] = 1
    assert models.ensure("b", HANG_S) and states(models) == "bc", "c is older, and has a request"
    requests.use(models, "engine.b")
    with pytest.raises(ServeError, match="d does not fit next to c, which have requests") as full:
        models.ensure("d", 0)
    assert full.value.status == 503 and states(models) == "c" and len(models.wanted()) == 1
    requests.running["engine.c"] = 0
    assert models.ensure("d", HANG_S) and states(models) == "d"


def test_least_recent_engine_is_chosen_while_no_other_thread_can_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton was started again, so the metrics of a look in between have no engine."""
    found: list[dict[str, tuple[float, float]]] = [{"engine": (0, 1)}, {}]
    monkeypatch.setattr(drain, "requests_of", lambda url: found.pop(0))

    def clock() -> float:
        if not uses._lock.locked():  # as another thread may do now
            uses.look(["engine"])
        return 100.0

    uses = Uses("", clock)
    uses._seen["engine"] = (0.0, 1.0, 0.0)
    assert uses.least_recent(["engine"]) == "engine"


def test_model_that_was_just_loaded_serves_its_first_request(
    orders: drain.ModelControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two models in turn could unload each other before any request runs."""
    Log(orders)
    now = [0.0]
    requests = Requests(monkeypatch, now)
    models = rotating(orders, now, 2, 2, room=2)
    requests.use(models, "engine")
    requests.ended["engine.b"] = 7  # its metrics from before
    models.ensure("b", HANG_S)
    with pytest.raises(ServeError, match="a does not fit next to b"):
        models.ensure("a", 0)
    requests.ended["engine.b"] += 1  # before the first look at the metrics
    assert models.ensure("a", HANG_S) and states(models) == "a"
    now[0] += 60  # a was loaded, and no request came
    assert models.ensure("b", HANG_S) and states(models) == "b"


def test_failed_load_leaves_a_model_for_the_next_start(
    orders: drain.ModelControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, now = Log(orders), [0.0]
    requests = Requests(monkeypatch, now)
    models = rotating(orders, now, 2, 2, room=2)
    requests.use(models, "engine")
    log.failing = "engine.b"
    with pytest.raises(ServeError, match="no memory"):
        models.ensure("b", HANG_S)
    assert [one.name for one in models.wanted()] == ["a"] and states(models) == ""
    assert models.ensure("a", HANG_S) and states(models) == "a"


def test_request_that_arrives_while_its_model_is_unloaded_for_another_ends(
    orders: drain.ModelControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """drain_timeout_s, 0 here, is for orders of the operator."""
    log, now = Log(orders), [0.0]
    requests = Requests(monkeypatch, now)
    models = rotating(orders, now, 2, 2, room=2)
    models._drain_s = 0
    requests.use(models, "engine")
    looks = iter((False, False, True, True))
    was_cut: list[bool] = []
    monkeypatch.setattr(drain, "_LOOK_S", 0)
    monkeypatch.setattr(drain, "_are_idle", lambda *_: was_cut.append("engine" in log.orders) or next(looks, True))
    assert models.ensure("b", HANG_S) and states(models) == "b"
    assert len(was_cut) >= 4 and not any(was_cut)


def test_model_that_waits_for_memory_is_not_loaded_by_a_restarted_triton(
    orders: drain.ModelControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    requests = Requests(monkeypatch, now)
    models = rotating(orders, now, 2, 2, room=2)
    requests.running["engine"] = 1
    wanted: list[str] = []
    read = requests.read
    monkeypatch.setattr(
        drain, "requests_of", lambda url: wanted.extend(one.name for one in models.wanted()) or read(url)
    )
    with pytest.raises(ServeError, match="b does not fit next to a"):
        models.ensure("b", 0)
    assert set(wanted) == {"a"}


def test_model_that_the_operator_loads_gets_the_memory_of_an_idle_one(
    orders: drain.ModelControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    Log(orders)
    now = [0.0]
    requests = Requests(monkeypatch, now)
    models = rotating(orders, now, 2, 2, room=2)
    requests.running["engine"] = 1
    with pytest.raises(ServeError, match="b does not fit next to a, which have requests"):
        models.load("b")
    assert states(models) == "a" and [one.name for one in models.wanted()] == ["a"]
    requests.running["engine"] = 0
    assert models.load("b") == "b is loaded" and states(models) == "b"


def test_idle_model_is_unloaded_and_the_last_one_stays(
    orders: drain.ModelControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    Log(orders)
    now = [0.0]
    requests = Requests(monkeypatch, now)
    models = rotating(orders, now, 1, 1, room=2, idle_s=60)
    for engine in ("engine", "engine.b"):
        requests.use(models, engine)
    looks = 0

    def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        now[0] += 30
        requests.ended["engine.b"] += looks < 4
        if looks == 9:
            models.end()

    monkeypatch.setattr("charonia.serve.models.time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    models.watch()
    assert states(models) == "b"


def test_models_are_loaded_on_demand_only_if_allowed(orders: drain.ModelControl) -> None:
    with pytest.raises(ServeError, match="its operator loads it with charonia models load b"):
        make_models(orders).ensure("b", 0)


class Log:
    """A double of Triton's log that responds to each command. `failing` is never loaded or unloaded."""

    def __init__(self, one: drain.ModelControl, failing: str = "") -> None:
        self._control = one
        self.failing = failing
        self.orders: list[str] = []
        self.silent = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with os.fdopen(os.dup(self._control.descriptor)) as orders:
            for line in orders:
                order = line.strip()
                self.orders.append(order)
                if self.silent.is_set():
                    continue
                name = order.removeprefix("+")
                said = f"successfully {'loaded' if order != name else 'unloaded'} '{name}'"
                if order == self.failing:
                    continue
                if order == f"+{self.failing}":
                    self._control.see(f"E1121 07:33:19.8 1 charonia:0] \"loading '{name}': no memory\"")
                else:
                    self._control.see(f'I1121 07:33:19.8 1 model_lifecycle.cc:642] "{said}"')


@pytest.fixture
def orders() -> Iterator[drain.ModelControl]:
    one = drain.ModelControl()
    yield one
    one.close()


@pytest.fixture(autouse=True)
def _engines_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_are_idle", lambda *_: True)


def make_models(
    orders: drain.ModelControl, alive: bool = True, names: tuple[str, ...] = ("a", "b"), **more: Any
) -> Models:
    given = {"limits": (HANG_S, HANG_S), **more}
    return Models(orders, served(*names), alive=lambda: alive, metrics_url="http://127.0.0.1:9", **given)


def test_a_model_is_unloaded_and_loaded_by_its_parts(orders: drain.ModelControl) -> None:
    log, models = Log(orders), make_models(orders)
    assert models.options() == list(drain.OPTIONS)
    assert models.unload("b") == "b is unloaded"
    assert log.orders[0] == "ensemble.b" and set(log.orders) == set(served("a", "b")[1].parts)
    assert [one["state"] for one in models.describe()] == ["loaded", "unloaded"]
    assert models.labels() == [""]
    assert models.options()[1:] == [f"--load-model={part}" for part in served("a")[0].parts]
    assert models.unload("b") == "b is not loaded"
    with pytest.raises(ServeError, match="a is the only model that is loaded"):
        models.unload("a")
    log.orders.clear()
    assert models.load("b") == "b is loaded"
    assert log.orders == [f"+{part}" for part in served("a", "b")[1].parts]
    assert models.options() == list(drain.OPTIONS)


def test_first_model_is_loaded_and_unloaded_by_each_of_its_names(orders: drain.ModelControl) -> None:
    log, models = Log(orders), make_models(orders, names=("a,other", "b"))
    assert models.unload("other") == "other is unloaded"
    assert log.orders[0] == "ensemble" and [one["state"] for one in models.describe()] == ["unloaded", "loaded"]
    assert models.unload("a") == "a is not loaded"
    assert models.load("other") == "other is loaded" and models.load("a") == "a is loaded already"
    models.unload("b")
    with pytest.raises(ServeError, match="other is the only model that is loaded"):
        models.unload("other")


def test_a_model_is_added_and_forgotten_if_it_cannot_be_loaded(orders: drain.ModelControl) -> None:
    unloaded: list[bool] = []

    @contextmanager
    def make(name: str, location: str, others: Sequence[Served]) -> Iterator[Served]:
        *_, one = with_labels([*((other.name, other.workspace) for other in others), (name, Path(location))])
        try:
            yield one
        except ServeError:
            unloaded.append(orders.wait_unloaded([one.parts[0]], 0, lambda: True))
            raise

    log = Log(orders)
    models = make_models(orders, names=("a,other",), make=make)
    assert models.describe() == [{"name": "a", "state": "loaded", "ensemble": "ensemble"}]
    assert models.add("b/c", "/there") == "b/c is loaded"
    assert log.orders == [f"+{part}" for part in served("a", "b/c")[1].parts]
    assert models.describe()[1] == {"name": "b/c", "state": "loaded", "ensemble": "ensemble.b_c"}
    assert models.labels() == ["", "b_c"] and option_values(models.served()) == "b/c=b_c"
    for name in ("other", "b/c"):
        with pytest.raises(ServeError, match=f"a model is called '{name}' already"):
            models.add(name, "/there")
    log.failing = "engine.d"
    with pytest.raises(ServeError, match=r"engine\.d cannot be loaded: no memory"):
        models.add("d", "/there")
    assert unloaded == [True], "its files stay until Triton has unloaded its first part"
    assert [one["name"] for one in models.describe()] == ["a", "b/c"]
    assert models.options() == list(drain.OPTIONS), "a Triton that is started again loads all models"
    log.failing = ""
    assert models.add("d", "/there") == "d is loaded"


def test_drain_returns_when_the_engine_was_idle_twice_in_a_row(
    orders: drain.ModelControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton does not count responses of subscriptions as running calls."""
    now, idle = [0.0], iter((False, True, False, True, True))

    def are_idle(url: str, engines: list[str]) -> bool:
        now[0] += 1
        return next(idle)

    monkeypatch.setattr(drain, "_are_idle", are_idle)
    monkeypatch.setattr(orders, "_are_unloaded", lambda models: True)
    monkeypatch.setattr(drain, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None))
    orders.drain("", HANG_S, lambda: False)
    assert list(idle) == []


@pytest.mark.parametrize("hurried", [False, True])
def test_drain_unloads_a_busy_engine_after_its_time(
    orders: drain.ModelControl, monkeypatch: pytest.MonkeyPatch, hurried: bool
) -> None:
    log, now = Log(orders), [0.0]

    def are_idle(url: str, engines: list[str]) -> bool:
        now[0] += 1
        return False

    monkeypatch.setattr(drain, "_are_idle", are_idle)
    monkeypatch.setattr(drain, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None))
    orders.drain("", 3, lambda: hurried)
    assert now[0] == (0 if hurried else 3)
    assert log.orders[1:] == ([] if hurried else ["engine"])


@pytest.mark.parametrize(
    ("metrics", "idle"),
    [
        (None, False),
        (b"", False),
        (b'charonia_num_requests_running{model="engine.b"} 0\n', False),
        (b'charonia_num_requests_running{model="engine"} 0\ncharonia_num_requests_waiting{model="engine"} 0\n', True),
        (b'charonia_num_requests_running{model="engine"} 0\ncharonia_num_requests_waiting{model="engine"} 1\n', False),
    ],
)
def test_are_idle_reads_the_metrics(metrics: bytes | None, idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the fixture's double
    monkeypatch.setattr(drain, "fetch", lambda *_: metrics)
    assert drain._are_idle("", ["engine"]) is idle


def test_an_ensemble_with_calls_that_never_end_is_not_waited_for(
    orders: drain.ModelControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has still ended, and its memory is free."""
    monkeypatch.setattr(drain, "_IDLE_S", 0.1)
    monkeypatch.setattr("charonia.serve.models._LOST_S", 0.1)
    log = Log(orders, failing="ensemble.b")
    models = make_models(orders, limits=(0, HANG_S))
    assert models.unload("b").startswith("b takes no requests any more. Triton still counts calls")
    assert "engine.b" in log.orders
    assert [one["state"] for one in models.describe()] == ["loaded", "unloaded"]


def test_model_that_cannot_be_loaded_leaves_nothing_and_gives_the_reason(orders: drain.ModelControl) -> None:
    log, models = Log(orders), make_models(orders)
    models.unload("b")
    log.orders.clear()
    log.failing = "engine.b"
    with pytest.raises(ServeError, match=r"engine\.b cannot be loaded: no memory"):
        models.load("b")
    assert models.describe()[1]["state"] == "unloaded" and len(models.wanted()) == 1


def test_unread_orders_are_dropped_at_a_restart(orders: drain.ModelControl) -> None:
    orders.unload("engine.b")
    orders.restarted()
    with pytest.raises(BlockingIOError):
        os.read(orders.descriptor, 100)


def test_orders_need_a_ready_triton_and_a_known_model(orders: drain.ModelControl) -> None:
    with pytest.raises(ServeError, match="Triton is not ready") as not_ready:
        make_models(orders, alive=False).unload("b")
    with pytest.raises(
        ServeError, match="there is no model 'c': this server has a, x, b; charonia models load c=PATH adds"
    ) as unknown:
        make_models(orders, names=("a,x", "b")).load("c")
    assert (not_ready.value.status, unknown.value.status) == (503, 404)


def test_order_during_another_order_may_be_repeated_later(
    orders: drain.ModelControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("charonia.serve.models._UNLOAD_S", 0)
    log, models = Log(orders), make_models(orders, limits=(HANG_S, 0.5))
    models.unload("b")
    log.silent.set()
    late: list[ServeError] = []

    def load() -> None:
        with pytest.raises(ServeError, match=r"preprocessing\.b is not loaded after 0\.5 s") as error:
            models.load("b")
        late.append(error.value)

    loading = threading.Thread(target=load)
    loading.start()
    while "+preprocessing.b" not in log.orders:
        assert loading.is_alive()
    with pytest.raises(ServeError, match="another model is being loaded or unloaded") as busy:
        models.unload("a")
    loading.join(HANG_S)
    assert (busy.value.status, late[0].status) == (409, 503)


def test_a_load_is_given_up_when_the_server_ends(orders: drain.ModelControl) -> None:
    """It sends no commands to a Triton that does not support them."""
    models = make_models(orders)
    log = Log(orders, failing="nothing")
    models.unload("b")
    log.silent.set()
    said: list[str] = []

    def load() -> None:
        with pytest.raises(ServeError) as error:
            models.load("b")
        said.append(f"{error.value.status} {error.value}")

    loading = threading.Thread(target=load)
    loading.start()
    while "+preprocessing.b" not in log.orders:
        assert loading.is_alive()
    models.end()
    loading.join(HANG_S)
    assert said == ["503 Triton ended, or was to end, while it loaded preprocessing.b"]
    assert log.orders[-1] == "+preprocessing.b"
    for order in (models.load, models.unload):
        with pytest.raises(ServeError, match="charonia serve ends"):
            order("b")


def test_the_socket_answers_its_user(tmp_path: Path) -> None:
    folder = tmp_path / ("a long name " * 12) / "port-7"
    folder.mkdir(parents=True)

    def handle(question: dict[str, Any]) -> Any:
        if question["do"] == "fail":
            raise ServeError("it cannot be done")
        return [question]

    with control.answering(folder, handle):
        assert control.ask(folder.parent, 7, do="list", name="x") == [{"do": "list", "name": "x"}]
        with pytest.raises(ServeError, match="it cannot be done"):
            control.ask(folder.parent, 7, do="fail")
        assert (folder / "control.sock").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ServeError, match="no charonia serve with gRPC port 7 runs here"):
        control.ask(folder.parent, 7, do="list")


def test_run_folder_of_another_user_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "port-7"
    folder.mkdir(parents=True)
    user = os.geteuid()
    with control.answering(folder, lambda question: question):
        (tmp_path / "run").chmod(0)
        os.seteuid(65534 if user == 0 else user)  # root may read everything
        try:
            with pytest.raises(ServeError, match=r"is another user's: only who started charonia serve may ask it"):
                control.ask(tmp_path / "run", 7, do="list")
        finally:
            os.seteuid(user)
            (tmp_path / "run").chmod(0o700)
