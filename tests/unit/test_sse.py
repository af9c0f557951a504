"""Events and lines of the gateway's streams."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from charonia_gateway.sse import event, line

EVERY_CHARACTER = "".join(chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF)


@pytest.mark.parametrize(("write", "prefix"), [(event, "data: "), (line, "")])
def test_text_with_any_character_is_one_line_to_every_reader_and_comes_back(
    write: Callable[[Any], bytes], prefix: str
) -> None:
    lines = [text for text in write({"text": EVERY_CHARACTER}).decode().splitlines() if text]
    assert len(lines) == 1
    assert lines[0].startswith(prefix)
    assert json.loads(lines[0].removeprefix(prefix)) == {"text": EVERY_CHARACTER}
