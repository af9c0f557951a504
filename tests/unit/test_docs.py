"""What the documentation says is what the code has."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_configuration_page_is_the_engines_table() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "configuration_docs.py"))
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == script["document"]()


def test_links_of_the_documentation_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "models" / "demo" / "README.md"]
    links = [
        (page, target)
        for page in pages
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
        if "://" not in target
    ]
    assert links
    missing = [f"{page.name}: {target}" for page, target in links if not (page.parent / target).exists()]
    assert not missing
