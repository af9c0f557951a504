"""`python -m definitions` writes the committed files, `python -m definitions cpp` those that a build needs."""

from __future__ import annotations

import sys

from definitions.outputs import COMMITTED, CPP, ROOT, render


def main() -> None:
    """Write every file whose text changes, and print its name."""
    for path, text in render(CPP if sys.argv[1:] == ["cpp"] else COMMITTED).items():
        file = ROOT / path
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
