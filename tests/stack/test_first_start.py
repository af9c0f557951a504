"""A server that is still compiling structured output, as after the first start of a checkout."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from charonia_client import Client, GenerateRequest, Guide, Unsupported
from site_copy import SiteCopy
from stack import DEMO_MODEL, HANG_S, Stack, running

QUESTION = [{"role": "user", "content": "What is seven plus five?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
GUIDED: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "[0-9]{3}"}},
    {"tools": [TOOL], "tool_choice": "required"},
]


async def ask_triton_for_what_it_lacks(target: str) -> None:
    request = GenerateRequest(text="x", max_tokens=4, guide=Guide("regex", "[0-9]{3}"))
    async with Client(target) as client:
        with pytest.raises(Unsupported, match=r"^structured output is missing"):
            async for _ in client.generate(request):
                pass


def test_only_guided_requests_wait_for_structured_output(tmp_path: Path) -> None:
    site = SiteCopy(tmp_path / "site")
    command = (sys.executable, "-m", "charonia", "serve")
    with (
        running(Stack(DEMO_MODEL, tmp_path / "run", site.environment, command=command)) as stack,
        httpx.Client(base_url=stack.gateway, timeout=HANG_S) as http,
    ):

        def ask(path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
            return http.post(path, json={"model": "demo", "messages": QUESTION, "max_tokens": 60, **fields})

        def until_said(text: str) -> None:
            deadline = time.monotonic() + HANG_S
            while text not in stack.log_file.read_text():
                assert time.monotonic() < deadline, stack.log()
                time.sleep(0.1)

        until_said("warning: structured output is missing")
        for fields in GUIDED:
            for stream in (False, True):
                lacking = ask(stream=stream, **fields)
                assert lacking.status_code == 501, lacking.text
                assert lacking.headers["x-should-retry"] == "false"
                error = lacking.json()["error"]
                assert (error["type"], error["code"]) == ("server_error", "not_installed")
                assert error["message"].startswith("structured output is missing: there is no libcharonia_grammar.so")
        asyncio.run(ask_triton_for_what_it_lacks(stack.grpc))
        assert ask().status_code == 200
        assert http.get("/health/ready").status_code == 200
        with site.compiling():
            until_said("Structured output is still being compiled")
            for fields in GUIDED:
                for stream in (False, True):
                    pending = ask(stream=stream, **fields)
                    assert pending.status_code == 503, pending.text
                    assert pending.headers["Retry-After"] == "20"
                    error = pending.json()["error"]
                    assert error["code"] == "not_ready_yet"
                    assert error["message"].startswith("structured output is still being compiled")
            tool = {"name": "f", "input_schema": {"type": "object"}}
            anthropic = ask("/v1/messages", tools=[tool], tool_choice={"type": "any"})
            assert (anthropic.status_code, anthropic.headers["Retry-After"]) == (503, "20"), anthropic.text
            assert anthropic.json()["error"]["type"] == "overloaded_error"
            # The server works.
            assert ask().status_code == 200
            assert http.get("/health/ready").status_code == 200
            site.give()
            answer = ask(structured_outputs={"regex": "[0-9]{3}"})
        assert answer.status_code == 200, answer.text
        assert re.fullmatch("[0-9]{3}", answer.json()["choices"][0]["message"]["content"])
        until_said("Structured output is ready")
        for fields in GUIDED:
            assert ask(**fields).status_code == 200
