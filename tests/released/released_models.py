"""Released models (scripts/get_released.py), and llama.cpp with the same files."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from missing_tools import missing_tool

RELEASED = Path(__file__).resolve().parents[2] / "build" / "released"
sys.path.append(str(RELEASED / "packages"))


def released(name: str) -> Path:
    """The folder of a model. Skips the test if the folder does not exist."""
    if not (RELEASED / "made-of").is_file():
        missing_tool("the released models are not here: `python scripts/get_released.py` downloads them")
    return RELEASED / name


def llama_cpp(folder: Path) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """Starts llama.cpp's server in this process, with the model's GGUF file.

    Returns a function that sends a JSON body to a path of the server and returns its response.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(folder.with_suffix(".gguf"))
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 512, 1, 1
    params.port, params.warmup, params.fit_params, params.verbosity, params.use_jinja = 0, False, False, -1, True
    server = xllamacpp.Server(params)

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    return post
