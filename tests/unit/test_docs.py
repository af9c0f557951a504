"""The documentation agrees with the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("model", ["ensemble", "preprocessing", "engine", "postprocessing"])
def test_inputs_and_batch_dimensions_of_the_contract_equal_the_models(model: str) -> None:
    """The page marks required inputs, and only these. It names the batch dimension of a model with batching, and only
    there."""
    page = (ROOT / "docs" / "contracts.md").read_text(encoding="utf-8")
    section = re.split(r"^##+ ", page.partition(f"### {model} ")[2], maxsplit=1, flags=re.MULTILINE)[0]
    config = (ROOT / "model_repository" / model / "config.pbtxt").read_text(encoding="utf-8")
    inputs = re.findall(r'name: "(\w+)" data_type: \w+ dims: \[[^]]*\]([^}]*)', config.partition("\noutput [")[0])
    assert len(inputs) >= 2
    required = {name for name, more in inputs if "optional: true" not in more}
    assert required == set(re.findall(r"`(\w+)`[^`]*?\(\*required\*\)", section))
    (batch,) = re.findall(r"^max_batch_size: (\d+)", config, re.MULTILINE)
    assert ("have a batch dimension in front" in section) == (batch != "0")


def test_examples_of_the_python_api_run() -> None:
    """Each example prints something. They run in one process, in the order of the page."""
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(examples) >= 8
    script = "\nprint('--- next')\n".join(examples)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split("--- next\n")
    assert len(printed) == len(examples) and all(text.strip() for text in printed)
    assert printed[0].startswith("EngineInfo(demo, ") and printed[1].startswith("Output('")
    assert "Paris" in printed[2]


def anchors(page: Path) -> set[str]:
    """Return the valid anchors of links to a page, after `#`: the headings as GitHub spells them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_the_documentation_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "models" / "demo" / "README.md"]
    links = [
        (page, *target.partition("#")[::2])
        for page in pages
        for target in re.findall(r'(?:\]\(|src=")([^)"]+)', page.read_text(encoding="utf-8"))
        if "://" not in target
    ]
    assert any(anchor for _, _, anchor in links)
    for page, target, anchor in links:
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}#{anchor}"


# Words that must not be used. The field's words are: most likely, KV, backend, SM, L2, ProcessGroup, captured step,
# abort, deadline, suspect, child of, disconnected clients.
_NOT_OURS = re.compile(
    r"(?<![a-z])likeliest(?![a-z])|"
    r"\b(?:k/v|back[ -]end|multiprocessors?|second-level cache|LocalGroup|recorded step|give_up|begin_by|end_by|"
    r"in doubt|hangs behind|leavers)\b",
    re.IGNORECASE,
)
_MAY_HAVE_THEM = (
    "CHANGELOG.md",
    "charonia/quality/data/",
    "tests/unit/test_docs.py",
)


@pytest.mark.slow
def test_the_words_are_the_fields() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kinds = (".py", ".h", ".cpp", ".cu", ".md", ".toml", ".js", ".yml", ".sh")
    files = [name for name in listed.split("\0") if name.endswith(kinds) and not name.startswith(_MAY_HAVE_THEM)]
    assert len(files) > 500
    found = {name: words for name in files if (words := _NOT_OURS.findall((ROOT / name).read_text(encoding="utf-8")))}
    assert not found


def test_no_model_uses_tritons_dynamic_batcher() -> None:
    """The dynamic batcher can destroy a mutex that it holds (docs/decisions.md)."""
    configs = sorted((ROOT / "model_repository").glob("*/config.pbtxt"))
    assert len(configs) == 4
    assert not [config for config in configs if "dynamic_batching" in config.read_text(encoding="utf-8")]
