"""The entry point of the `charonia` command, also `python -m charonia`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command. Ctrl-C during its imports ends it without a traceback."""
    try:
        from charonia.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
