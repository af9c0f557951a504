"""scripts/check_advisories.sh against a database of advisories that knows one of them."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_advisories.sh"
ADVISORY = {
    "id": "TEST-2026-1",
    "modified": "2026-01-01T00:00:00Z",
    "published": "2026-01-01T00:00:00Z",
    "summary": "It reads more than it should.",
    "affected": [
        {
            "package": {"name": "jinja2", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.0"}]}],
        }
    ],
}


class Database(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["content-length"])))
        known = question["package"]["name"] == "jinja2"
        body = json.dumps({"vulns": [ADVISORY]} if known else {}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Database) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/query"
        server.shutdown()


def check(url: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CHARONIA_ADVISORIES_URL": url}
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=120)


def test_a_package_with_an_advisory_fails_with_the_version_that_mends_it(database: str, tmp_path: Path) -> None:
    clean, bad = tmp_path / "clean.txt", tmp_path / "bad.txt"
    clean.write_text("markupsafe==3.0.2\n")
    bad.write_text("jinja2==3.1.4\nmarkupsafe==3.0.2\n")
    result = check(database, bad, clean)
    assert result.returncode == 1
    assert all(part in result.stdout for part in ("jinja2", "3.1.4", "TEST-2026-1", "99.0")), result.stdout
    result = check(database, clean)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_package_of_the_images_is_looked_up(database: str) -> None:
    """jinja2 is a package of the server's image: so its file is read, hashes and markers included."""
    result = check(database)
    assert result.returncode == 1
    assert "TEST-2026-1" in result.stdout and result.stdout.count("docker/requirements/") >= 4


def test_a_database_that_does_not_answer_is_said_and_is_no_success(database: str) -> None:
    assert check(database, "--probe").returncode == 0
    result = check("http://127.0.0.1:9/v1/query", "--probe")
    assert result.returncode != 0 and "does not answer" in result.stderr
