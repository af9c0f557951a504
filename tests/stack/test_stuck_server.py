"""A Triton that does not take a response any more (engine/triton/send_watch.h) is ended by the backend, told apart from
other deaths, and started again. That it takes none is made so in its process, before the call is Triton's."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from stack import HANG_S, SLOW, Stack, running
from tiny_models import write_model

# While the file CHARONIA_TEST_STUCK exists, a response that the engine sends is not taken.
_STUCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void* TRITONBACKEND_ResponseSend(void* response, unsigned flags, void* error) {
  static void* (*sends)(void*, unsigned, void*);
  if (!sends) sends = (void* (*)(void*, unsigned, void*))dlsym(RTLD_NEXT, "TRITONBACKEND_ResponseSend");
  Dl_info caller;
  if (dladdr(__builtin_return_address(0), &caller) && strstr(caller.dli_fname, "triton_charonia")) {
    while (access(getenv("CHARONIA_TEST_STUCK"), F_OK) == 0) usleep(20000);
  }
  return sends(response, flags, error);
}
"""


@pytest.fixture
def stuck(tmp_path: Path) -> dict[str, str]:
    """The environment of a server that is stuck while the file in it exists."""
    source, library = tmp_path / "stuck.c", tmp_path / "stuck.so"
    source.write_text(_STUCK)
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", library, source], check=True)
    return {"LD_PRELOAD": str(library), "CHARONIA_TEST_STUCK": str(tmp_path / "stuck")}


def test_a_server_that_takes_no_response_is_ended_and_started_again(stuck: dict[str, str], tmp_path: Path) -> None:
    model = tmp_path / "babbler"
    write_model(model, "byte_level", "babbler")
    env = {**SLOW, **stuck, "CHARONIA_MAX_RESTARTS": "1", "CHARONIA_HANG_TIMEOUT_S": "600"}
    file = Path(stuck["CHARONIA_TEST_STUCK"])
    with running(Stack(model, tmp_path / "run", env)) as stack, httpx.Client(timeout=HANG_S) as client:
        ask = {"model": "babbler", "prompt": "talk", "max_tokens": 4}
        assert client.post(f"{stack.gateway}/v1/completions", json=ask).status_code == 200
        file.touch()
        assert client.post(f"{stack.gateway}/v1/completions", json=ask).status_code == 503
        deadline = time.monotonic() + HANG_S
        while "exit code 70" not in stack.log():
            assert time.monotonic() < deadline, stack.log()
            time.sleep(0.1)
        file.unlink()
        stack.until_ready()
        assert client.post(f"{stack.gateway}/v1/completions", json=ask).status_code == 200
        log = stack.log()
    assert "Triton has not taken a response for 30 s" in log
    assert "(restart 1 of at most 1 in 10 minutes)" in log
