"""Checks structured output with the JSON schemas of public packages: `python -m benchmarks.real_schemas`.

It downloads the packages of SOURCES from PyPI and npm to build/real_schemas, and adds the pydantic models of the
installed openai and anthropic packages. The demo model writes answers of random tokens. Tokens that close something are
more likely, so that most answers end. The package jsonschema validates every answer that has ended. Exit code 1 if an
answer is not valid.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from jsonschema.validators import validator_for  # type: ignore[import-untyped]
from pydantic import BaseModel
from rich.console import Console

from charonia import Engine, Guide, InvalidRequestError, SamplingParams
from charonia.bench.records import Record, print_records

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "models" / "demo" / "model"
# name==version is a package of PyPI, name@version a package of npm.
SOURCES = (
    "ansible-lint==26.10.1",
    "check-jsonschema==0.39.0",
    "cyclonedx-python-lib==11.12.0",
    "docker-compose==1.29.2",
    "nbformat==5.11.1",
    "validate-pyproject-schema-store==2026.10.23",
    "@angular/build@22.2.7",
    "@angular-devkit/build-angular@22.2.0",
    "@nx/js@23.3.1",
    "@nx/react@23.3.1",
    "@schematics/angular@22.2.7",
    "nx@24.0.6",
    "turbo@2.11.11",
)
MAX_BYTES = 1 << 20
_SEEDS = 4


@dataclass
class Case:
    """A schema and its results. refusal: why it was rejected."""

    source: str
    name: str
    schema: Any
    refusal: str = ""
    ended: int = 0
    cut_off: int = 0
    invalid: list[str] = field(default_factory=list)


def download(source: str, folder: Path) -> Path:
    """Download a package. Returns its file."""
    name = re.sub(r"[^\w.]+", "-", source).strip("-")
    into = folder / name
    if not into.exists():
        part = folder / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        if "==" in source:
            pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
            command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", str(part), source]
        else:
            command = ["npm", "pack", "--silent", "--pack-destination", str(part), source]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        part.rename(into)
    return next(into.iterdir())


def files_of(package: Path) -> Iterator[tuple[str, bytes]]:
    """The JSON files of a wheel or of an npm package."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as archive:
            for name in archive.namelist():
                if name.endswith(".json"):
                    yield name, archive.read(name)
    else:
        with tarfile.open(package) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.name.endswith(".json") else None
                if content is not None:
                    yield member.name, content.read()


def schemas_of(package: Path) -> Iterator[tuple[str, Any]]:
    for name, content in files_of(package):
        try:
            found = json.loads(content)
        except ValueError:
            continue  # a file with comments
        if not isinstance(found, dict) or len(content) > MAX_BYTES:
            continue
        if "json-schema.org" in str(found.get("$schema")) or (found.get("type") == "object" and "properties" in found):
            yield name, found


def models_of(*modules: ModuleType) -> Iterator[tuple[str, Any]]:
    """The schemas of pydantic models."""
    classes = {
        one
        for module in modules
        for one in vars(module).values()
        if inspect.isclass(one) and issubclass(one, BaseModel)
    }
    for one in sorted(classes, key=lambda one: one.__qualname__):
        yield one.__qualname__, one.model_json_schema()


def cases(folder: Path) -> list[Case]:
    import anthropic.types
    import anthropic.types.beta
    import openai.types.beta
    import openai.types.chat
    import openai.types.responses

    found = [Case(source, *one) for source in SOURCES for one in schemas_of(download(source, folder))]
    for name, models in (
        ("openai", models_of(openai.types.chat, openai.types.responses, openai.types.beta)),
        ("anthropic", models_of(anthropic.types, anthropic.types.beta)),
    ):
        found += [Case(name, *one) for one in models]
    once: dict[str, Case] = {}
    for case in found:
        once.setdefault(json.dumps(case.schema, sort_keys=True), case)
    return list(once.values())


def hasty(engine: Engine) -> SamplingParams:
    """Return parameters for random tokens. Tokens that end something are more likely."""
    bias: dict[int, float] = dict.fromkeys(engine.info.end_ids, 14.0)
    for token in range(engine.info.vocab_size):
        text = engine._open().token_bytes(token)
        if re.search(rb'["}\]]', text):
            bias[token] = 14.0 if re.search(rb"[}\]]", text) else 9.0
    return SamplingParams(max_tokens=1800, temperature=2.0, logit_bias=bias)


def run(engine: Engine, sampling: SamplingParams, case: Case) -> None:
    guide = Guide.json_schema(case.schema)
    for seed in range(_SEEDS):
        try:
            answer = engine.generate("x", replace(sampling, seed=seed), guide=guide)[0]
        except InvalidRequestError as error:
            case.refusal = str(error)
            return
        if answer.finish_reason != "stop":
            case.cut_off += 1
            continue
        case.ended += 1
        checker = validator_for(case.schema)(case.schema)
        wrong = next(checker.iter_errors(json.loads(answer.text)), None)
        if wrong is not None:
            case.invalid.append(f"{answer.text}: {wrong.message}")


def reason(refusal: str) -> str:
    """Return the part of a refusal that does not depend on the schema."""
    text = re.sub(r"^.*?the JSON schema,? ", "", refusal)
    if found := re.match(r"at (.*?): (.*)", text, re.DOTALL):
        path, text = found.groups()
        text = re.sub(r"the reference \S+ ", "the reference ", text)
        text = text.replace(path, "...")
    text = re.sub(r'"(\\.|[^"\\])*"', '"..."', text)
    text = re.sub(r"/\S*/\S*", "/...", text)
    advice = r", which oneOf|, and would be ignored|: (leave|put|describe|write|make|it has to|use|it is)"
    return re.split(advice, text)[0][:110]


def figures(found: list[Case]) -> list[Record]:
    out = []
    for source in [*dict.fromkeys(case.source for case in found), "all"]:
        some = [case for case in found if source in (case.source, "all")]
        taken = [case for case in some if not case.refusal]
        counts = {
            "schemas": len(some),
            "refused": len(some) - len(taken),
            "taken": len(taken),
            "answers": sum(case.ended + case.cut_off for case in taken),
            "ended": sum(case.ended for case in taken),
            "schemas with one": sum(case.ended > 0 for case in taken),
            "not valid": sum(len(case.invalid) for case in taken),
        }
        for name, count in counts.items():
            out.append(Record.of("real_schemas", name, "", count, case={"package": source}))
    return out


def main() -> int:
    found = cases(ROOT / "build" / "real_schemas")
    with (
        Engine.from_pretrained(DEMO, guide_max_bytes=MAX_BYTES) as engine,
        ThreadPoolExecutor(16) as pool,
    ):
        sampling = hasty(engine)
        for _ in pool.map(lambda case: run(engine, sampling, case), found):
            pass
    print_records(Console(), figures(found))
    for why, count in Counter(reason(case.refusal) for case in found if case.refusal).most_common():
        print(f"{count:5} {why}")
    invalid = [f"{case.source} {case.name}: {text}" for case in found for text in case.invalid]
    print("\n".join(invalid))
    return int(bool(invalid))


if __name__ == "__main__":
    sys.exit(main())
