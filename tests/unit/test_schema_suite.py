"""The official JSON-Schema-Test-Suite: a schema is rejected, or its grammar accepts no invalid value.

The package jsonschema has the suite in its sources.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance
import pytest

from charonia import InvalidRequestError, _engine

pytestmark = pytest.mark.slow

SOURCES = "jsonschema==4.26.0"
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
MAX_ORDERS = 24  # of the properties of a value
BYTES = llguidance.LLTokenizer("byte")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        ":all:",
        "--dest",
        str(folder),
    ]
    if subprocess.run([*pip, SOURCES], check=False, capture_output=True).returncode:
        if os.environ.get("CI"):
            raise RuntimeError(f"{SOURCES} cannot be downloaded")
        pytest.skip(f"{SOURCES} cannot be downloaded")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return archive.with_name(archive.name.removesuffix(".tar.gz")) / "json" / "tests"


def spellings(value: Any) -> Iterator[str]:
    """The value as JSON, with its properties in several orders."""

    def orders(one: Any) -> Iterator[Any]:
        if isinstance(one, dict):
            for names in itertools.permutations(one):
                for inner in itertools.product(*(list(orders(one[name])) for name in names)):
                    yield dict(zip(names, inner, strict=True))
        elif isinstance(one, list):
            for inner in itertools.product(*map(list, map(orders, one))):
                yield list(inner)
        else:
            yield one

    for one in itertools.islice(orders(value), MAX_ORDERS):
        yield json.dumps(one, ensure_ascii=False)


def accepts(matcher: llguidance.LLMatcher, text: str) -> bool:
    matcher.reset()
    tokens = list(text.encode(errors="surrogatepass"))
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("draft", DRAFTS)
def test_grammars_of_the_official_suite_accept_no_invalid_value(suite: Path, draft: str) -> None:
    counts = dict.fromkeys(("rejected", "taken", "valid", "accepted"), 0)
    wrong = []
    files = [*sorted((suite / draft).glob("*.json")), *sorted((suite / draft / "optional" / "format").glob("*.json"))]
    for file in files:
        for case in json.loads(file.read_text()):
            schema = case["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            try:
                checked = _engine.schema_for_llguidance(json.dumps(schema))
            except InvalidRequestError:
                counts["rejected"] += 1
                continue
            matcher = llguidance.LLMatcher(BYTES, llguidance.LLMatcher.grammar_from_json_schema(checked), log_level=0)
            if matcher.is_error():
                counts["rejected"] += 1
                continue
            counts["taken"] += 1
            for test in case["tests"]:
                accepted = any(accepts(matcher, text) for text in spellings(test["data"]))
                if test["valid"]:
                    counts["valid"] += 1
                    counts["accepted"] += accepted
                elif accepted:
                    wrong.append((file.name, case["description"], test["description"], schema, test["data"]))
    print(draft, counts)
    assert not wrong, "\n".join(map(str, wrong))
    assert counts["taken"] > 100, counts
    assert counts["accepted"] > counts["valid"] // 2, counts
