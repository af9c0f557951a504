"""The size of the chat page and the time that it takes to load, in Chromium on this machine.

The gateway runs without a Triton. Each load has an empty cache.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from charonia.bench.records import Record
from charonia.errors import CharoniaError

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Response

ROOT = Path(__file__).resolve().parents[1]
START_S = 300
# What the page fetches with the first formula and the first block of code.
LATER = {
    "formulas": 'await Promise.all([fetch("page/libraries/katex/dist/katex.min.css"), '
    'fetch("page/libraries/katex/dist/katex.min.js")])',
    "colours of code": 'await fetch("page/libraries/@highlightjs/cdn-assets/es/highlight.min.js")',
}


@dataclass
class Load:
    """Bytes: of bodies, as sent and unpacked. Milliseconds from the beginning of the navigation: to the first text on
    the screen, and until a message can be sent."""

    requests: int = 0
    sent_bytes: int = 0
    unpacked_bytes: int = 0
    paint_ms: float = 0
    usable_ms: float = 0


@contextlib.contextmanager
def gateway() -> Iterator[str]:
    """Its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CHARONIA_")}
    env = {**inherited, "CHARONIA_GATEWAY_PORT": str(port), "CHARONIA_GATEWAY_LOG_LEVEL": "critical"}
    env["CHARONIA_GATEWAY_WORKERS"] = "1"
    process = subprocess.Popen([sys.executable, "-m", "charonia_gateway", "--triton-endpoints", "127.0.0.1:9"], env=env)
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health/live").status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise CharoniaError("the gateway did not start")
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def count(load: Load, responses: list[Response]) -> None:
    for response in responses:
        load.requests += 1
        load.sent_bytes += response.request.sizes()["responseBodySize"]
        load.unpacked_bytes += len(response.body())


def measure(browser: Browser, url: str) -> tuple[Load, dict[str, Load]]:
    """One load, and what comes later."""
    page = browser.new_page()
    seen: list[Response] = []
    page.on("response", lambda response: seen.append(response))  # Playwright marks what it is given
    page.goto(url)
    page.locator("#composer").wait_for()
    load = Load()
    load.usable_ms = page.evaluate("performance.now()")
    page.wait_for_load_state("networkidle")
    load.paint_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    files = [one for one in seen if "/page/" in one.url or one.url.rstrip("/") == url]
    count(load, files)
    later: dict[str, Load] = {}
    for name, script in LATER.items():
        seen.clear()
        page.evaluate(f"async () => {{ for (const one of [{script}].flat()) await one.arrayBuffer(); }}")
        count(later.setdefault(name, Load()), list(seen))
    page.close()
    return load, later


def run_page_load(loads: int) -> tuple[str, list[Record]]:
    """The browser's version, and of so many loads the figures."""
    from playwright.sync_api import sync_playwright

    chromium = subprocess.run([ROOT / "scripts" / "get_chromium.sh"], capture_output=True, text=True)
    if chromium.returncode:
        raise CharoniaError(chromium.stderr.strip())
    with gateway() as url, sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium.stdout.strip(), args=arguments)
        measured = []
        for _ in range(loads):
            with contextlib.closing(browser.new_context()) as context:
                measured.append(measure(context, url))  # type: ignore[arg-type]  # it makes pages too
        version = browser.version
        browser.close()
    return f"Chromium {version}", figures(measured)


def figures(measured: Sequence[tuple[Load, dict[str, Load]]]) -> list[Record]:
    """Sizes are the last load's; all have the same."""
    last, later = measured[-1]
    found = []
    for of, load in {"the page": last, **later}.items():
        sizes = (("requests", "", load.requests), ("sent", "kB", load.sent_bytes / 1e3),
                 ("unpacked", "kB", load.unpacked_bytes / 1e3))  # fmt: skip
        found += [Record.of("page_load", name, unit, value, case={"of": of}) for name, unit, value in sizes]
    times = {
        "first text on the screen": [load.paint_ms for load, _ in measured],
        "a message can be written": [load.usable_ms for load, _ in measured],
    }
    return found + [
        Record.of("page_load", name, "ms", values, case={"of": "the page"}) for name, values in times.items()
    ]
