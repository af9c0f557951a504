"""Several models in one Triton: their names, their shares of the memory, and the requests of `charonia models`."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
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
from charonia.serve.models import Models, Served, added, asked_for, make_repository, option_values, with_labels
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
    with pytest.raises(ServeError, match=r"'\. small=b' names several models: .* CHARONIA_MORE_MODELS"):
        asked_for(ServeSettings(_env_file=None, model=". small=b"))


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
    left = iter(plans)
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


def test_each_model_has_a_folder_of_its_own_for_its_sessions(config: Path) -> None:
    """Two models with the same folder name would read each other's files."""
    names = served("a", "b/c", workspace=config)
    folders = [
        one.settings.get("session_dir") for one in shares.divide(names, {"session_dir": "/s"}, [1, 1], lambda *_: PLAN)
    ]
    assert folders == ["/s", "/s/b_c"]
    assert all("session_dir" not in one.settings for one in shares.divide(names, {}, [1, 1], lambda *_: PLAN))
    (config / "triton_models" / "weights" / "config.ini").write_text("[llama]\nsession_dir = /w\n")
    written = shares.divide(names, {}, [1, 1], lambda *_: PLAN)
    assert [one.settings["session_dir"] for one in written] == ["/w", "/w/b_c"]
    assert "session_dir" in shares.KEYS, "or the environment would win"


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


def test_order_during_another_order_may_be_repeated_later(orders: drain.ModelControl) -> None:
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
