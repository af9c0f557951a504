"""Settings of all tests."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xdist.scheduler import Scheduling

# A fork beside gRPC's threads can abort in gRPC's own handlers. Children here use no gRPC of their parent.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# The servers of the tests run on this machine, where no proxy can reach them.
for name in ("no_proxy", "NO_PROXY"):
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost")))
# Programs write plain text of the default width here, also if the environment asks for something else.
for name in ("CLICOLOR_FORCE", "COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "LINES", "PY_COLORS", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)
gc.disable()  # until the tests are collected
# With this module jsonschema would check IRIs, which no test needs. Its import takes longer than jsonschema's.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # makes its import fail

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# Each httpx client, also in the libraries of OpenAI and Anthropic, would read the certificates of all authorities. That
# takes 26 ms of a core even for http://127.0.0.1.
with contextlib.suppress(ImportError):  # some environments have only the packages of some tests
    import httpx

    httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)

# The same examples in every run, without time limits: the result depends only on the code, not on the day or on other
# load. `pytest --hypothesis-profile=default` searches for other examples.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

# A background process of a shell ignores a terminal's signals, and under nohup SIGHUP; so do its children. The programs
# under test must not.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Restore them. `charonia serve` in this process leaves signals ignored at its end, and then child processes ignore
    them too."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [(number, signal.getsignal(number)) for number in numbers]
    yield
    for number, handler in before:
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def all_proposals() -> Iterator[None]:
    """Engines of this process choose all proposals, so that no test depends on the measured times of steps."""
    from charonia import _engine

    _engine.choose_all_proposals_for_tests(True)
    yield
    _engine.choose_all_proposals_for_tests(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder: stack, gpu and docker. Tests of `make test` are marked fast."""
    root = Path(__file__).parent
    for item in items:
        folder, *rest = item.path.relative_to(root).parts
        if folder in ("stack", "gpu", "docker"):
            item.add_marker(folder)
        if rest == ["test_smoke.py"] or (folder == "unit" and item.get_closest_marker("slow") is None):
            item.add_marker("fast")


def pytest_collection_finish() -> None:
    """Exclude the objects of all test modules from garbage collection, because they live until the end."""
    gc.freeze()
    gc.enable()


# The tests of a file run in one process. So do the tests of all files that use the same servers, because a server takes
# three seconds of a core to start. Other files need not be listed here.
_SAME_SERVERS = {
    "demo": (
        "access benchmark choices demo_served demo_tools deploy gateway_doors gateway_openai lm_eval logs malformed "
        "messages monitoring_live openapi page_served prompt_logprobs responses structured_output timings tracing"
    ),
    "small": (
        "client_chat client_server drain ensemble gateway_errors gateway_leaving gateway_subscribed limits "
        "sampling_fields sessions subscriptions tokenizer"
    ),
    "caller": "clients tools",
}
_SERVERS = {f"tests/stack/test_{name}.py": one for one, names in _SAME_SERVERS.items() for name in names.split()}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    if config.getvalue("dist") != "loadfile":  # the user chose another distribution
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByServers(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return _SERVERS.get(file, file)

    return ByServers(config, log)
