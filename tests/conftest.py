"""Settings of all tests."""

from __future__ import annotations

import contextlib
import functools
import gc
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xdist.scheduler import Scheduling

gc.disable()  # until the tests are collected
# With it jsonschema checks IRIs, which no test asks for; its import takes longer than jsonschema's.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # Python's way to say that it cannot be imported

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# Each client of httpx, and so of OpenAI's and Anthropic's libraries, would read the certificates of all authorities:
# 26 ms of a core, for http://127.0.0.1.
with contextlib.suppress(ImportError):  # some environments have what some of the tests need
    import httpx

    httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)

# The same examples in every run, and no limits on time: whether a change passes depends on the change alone, not on the
# day or on what else the machine does. `pytest --hypothesis-profile=default` looks for others.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

# What a shell starts in the background ignores a terminal's keys, and under nohup its end; so does what it starts in
# turn. The programs tested here must not.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks each test by its folder: stack, gpu and docker; the tests that `make test` runs are fast."""
    root = Path(__file__).parent
    for item in items:
        folder, *rest = item.path.relative_to(root).parts
        if folder in ("stack", "gpu", "docker"):
            item.add_marker(folder)
        if rest == ["test_smoke.py"] or (folder == "unit" and item.get_closest_marker("slow") is None):
            item.add_marker("fast")


def pytest_collection_finish() -> None:
    """What the modules of all tests hold stays to the end: the collector does not go through it again and again."""
    gc.freeze()
    gc.enable()


# A file's tests run in one process. So do those of all files that want the same servers, each of which takes three
# seconds of a core to start. Files that are not named here work as well.
_SAME_SERVERS = {
    "demo": (
        "access benchmark choices demo_served demo_tools deploy gateway_doors gateway_openai lm_eval logs malformed "
        "messages monitoring_live openapi page_served prompt_logprobs responses structured_output timings tracing"
    ),
    "small": (
        "client_chat client_server drain ensemble gateway_errors gateway_leaving gateway_subscribed limits "
        "sampling_fields sessions subscriptions tokenizer"
    ),
}
_SERVERS = {f"tests/stack/test_{name}.py": one for one, names in _SAME_SERVERS.items() for name in names.split()}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    if config.getvalue("dist") != "loadfile":  # who asks for anything else gets it
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByServers(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return _SERVERS.get(file, file)

    return ByServers(config, log)
