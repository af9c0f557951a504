"""docs/models.md lists every language model that transformers knows: supported, or rejected with its name."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from transformers.models.auto import modeling_auto as auto

from charonia.errors import UnsupportedError
from charonia.families import COMPOSITES, FAMILIES, describe

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
THEIRS = sorted({*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
OURS = {name for family in FAMILIES for name in family.model_types} | {one.model_type for one in COMPOSITES}


def listed(heading: str) -> list[str]:
    """Return the types under a heading of the page."""
    section = re.search(rf"^{heading}:\n\n(.*?)\n\n", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert section is not None, f"{PAGE} has no paragraph behind '{heading}:'"
    return re.findall(r"`([^`]+)`", section[1])


@pytest.mark.parametrize(
    ("heading", "types"),
    [
        ("Supported types", sorted(OURS)),
        ("Types of transformers that are rejected", [name for name in THEIRS if name not in OURS]),
    ],
)
def test_the_page_lists_the_supported_and_the_rejected_types(heading: str, types: list[str]) -> None:
    right = textwrap.fill(", ".join(f"`{name}`" for name in types), 120, break_on_hyphens=False)
    assert listed(heading) == types, f"the paragraph behind '{heading}:' must be\n\n{right}\n"


def test_the_recipes_that_the_page_lists_are_of_supported_types() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("### Recipes of vLLM")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE)
    assert {model_type for model_type, _ in rows} - OURS == set()
    models = [model for _, listed in rows for model in listed.split(", ")]
    assert len(models) == len(set(models)) and f"These {len(models)} load by name" in section


@pytest.mark.parametrize("model_type", [name for name in THEIRS if name not in OURS])
def test_an_unsupported_type_is_rejected_by_name(model_type: str) -> None:
    text = {"model_type": f"{model_type}_text", "hidden_size": 64}
    with pytest.raises(UnsupportedError, match=re.escape(f"model family '{model_type}'")):
        describe({"model_type": model_type, "text_config": text}, "m")
