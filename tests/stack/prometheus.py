"""A real Prometheus with the configuration of the repository, with the tests' addresses and a shorter interval."""

from __future__ import annotations

import contextlib
import math
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from stack import HANG_S, answers, free_ports

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "monitoring" / "prometheus" / "prometheus.yml"


def configuration(targets: dict[str, str]) -> dict[str, Any]:
    """`targets`: host:port of each job. A job that the repository's configuration lacks is added."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    # scrape_interval also limits the time of a scrape.
    config["global"] = {"scrape_interval": "2s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(CONFIG.parent / file) for file in config["rule_files"]]
    # Without gateway-unchecked, whose targets get the job name `gateway`.
    jobs = {job["job_name"]: job for job in config["scrape_configs"] if "relabel_configs" not in job}
    assert set(jobs) <= set(targets)
    config["scrape_configs"] = []
    for name, target in targets.items():
        kept = {key: value for key, value in jobs.get(name, {}).items() if not key.endswith("_configs")}
        if "authorization" in kept:
            kept["authorization"] = {"credentials_file": str(CONFIG.parent / kept["authorization"]["credentials_file"])}
        config["scrape_configs"].append({**kept, "job_name": name, "static_configs": [{"targets": [target]}]})
    return config


@dataclass
class Prometheus:
    port: int

    def get(self, path: str, **params: str) -> Any:
        answer = httpx.post if path == "query" else httpx.get
        key = "data" if path == "query" else "params"
        reply = answer(
            f"http://127.0.0.1:{self.port}/api/v1/{path}", timeout=HANG_S, trust_env=False, **{key: params}
        ).json()
        assert reply["status"] == "success", (params, reply.get("error"))
        return reply["data"]

    def numbers(self, expr: str) -> list[float]:
        """The current results of a query. NaN, for example the quantile of no values, does not count."""
        result = self.get("query", query=expr)["result"]
        return [value for sample in result if math.isfinite(value := float(sample["value"][1]))]


@contextlib.contextmanager
def running(program: Path, folder: Path, targets: dict[str, str]) -> Iterator[Prometheus]:
    (port,) = free_ports(1)
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration(targets)), encoding="utf-8")
    options = {
        "config.file": file,
        "storage.tsdb.path": folder / "data",
        "web.listen-address": f"127.0.0.1:{port}",
        "log.level": "warn",
    }
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, *(f"--{name}={value}" for name, value in options.items())], stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + HANG_S
        while not answers(f"http://127.0.0.1:{port}/-/ready"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait(HANG_S)
