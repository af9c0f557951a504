"""Writes the generated files."""

from __future__ import annotations

from definitions.outputs import ROOT, render


def main() -> None:
    """Write every file whose text changes, and print its name."""
    for path, text in render().items():
        file = ROOT / path
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
