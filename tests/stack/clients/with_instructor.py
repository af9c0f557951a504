"""instructor's modes, and its partial objects from a stream.

with_instructor.py GATEWAY MODEL: the model is the parrot of test_clients.py.
"""

from __future__ import annotations

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel

GATEWAY, MODEL = sys.argv[1:]


class add(BaseModel):
    """Adds."""

    a: int


class Confirmation(BaseModel):
    sure: bool
    by: Literal["mail", "phone"]


with OpenAI(base_url=f"{GATEWAY}/v1", api_key="none", max_retries=0) as openai:
    for mode, prompt in (
        (instructor.Mode.TOOLS, "<|text2|>"),
        (instructor.Mode.TOOLS_STRICT, "<|text2|>"),
        (instructor.Mode.JSON_SCHEMA, "<|text3|>"),
        (instructor.Mode.JSON, "<|text3|>"),
    ):
        client = instructor.from_openai(openai, mode=mode)
        asked = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_retries": 0, "temperature": 0}
        found = client.chat.completions.create(response_model=add, **asked)
        assert isinstance(found, add) and found.a == 7, (mode, found)
        *_, last = client.chat.completions.create_partial(response_model=add, **asked)
        # The function has another name in this mode, so a grammar forces the model's text.
        assert isinstance(last.a, int), (mode, last)

    # By default instructor forces a call of a function that is not strict. The model's own text is no call.
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "<|text1|>"}],
        "max_retries": 0,
        "max_tokens": 200,
    }
    made = instructor.from_openai(openai).chat.completions.create(response_model=Confirmation, **asked)
    assert isinstance(made, Confirmation), made
print("done")
