"""emulated_serve.py LIBRARY serve ...: `charonia` with another library of the engine's Triton backend."""

from __future__ import annotations

import sys
from pathlib import Path

from charonia.cli import main
from charonia.serve import triton

library = Path(sys.argv.pop(1))
triton.backend_library = lambda: library
main()
