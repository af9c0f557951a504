"""A copy of the installed package `charonia` whose library of structured output can be withheld and given."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from charonia import _engine
from charonia.serve.triton import BACKEND_LIBRARY, backend_library

ROOT = Path(__file__).resolve().parents[1]
LOG = "build/compile_grammar.log"


class SiteCopy:
    def __init__(self, folder: Path) -> None:
        """Made in `folder`, without the library."""
        package = folder / "charonia"
        backend = package / BACKEND_LIBRARY
        backend.parent.mkdir(parents=True)
        module = Path(str(_engine.__file__))
        # The engine looks beside the file that a link leads to.
        shutil.copy2(module, package)
        shutil.copy2(backend_library(), backend)
        for file in (ROOT / "charonia").iterdir():
            if file.suffix != ".so" and file.name != "__pycache__":
                (package / file.name).symlink_to(file)
        shutil.copy2(ROOT / "scripts" / "before_editable" / "sitecustomize.py", folder)
        self._given = module.with_name("libcharonia_grammar.so")
        self.library = package / self._given.name
        self.environment = {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """As scripts/setup.sh and scripts/compile_grammar.sh have it while they compile."""
        with Path(f"{self.library}.build").open("w") as marker:
            marker.write(f"{LOG}\n")
            marker.flush()
            fcntl.flock(marker, fcntl.LOCK_EX)  # who asks for it holds it for a moment
            yield

    def give(self) -> None:
        coming = self.library.with_suffix(".new")
        shutil.copy2(self._given, coming)
        coming.rename(self.library)
