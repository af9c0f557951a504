"""The log of a Triton Python model. Lines go to the server's own log, which gives them time and level; charonia convert
puts this file beside each such model's model.py.

No text of prompts or answers is in it unless CHARONIA_LOG_PROMPTS asks for that.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any

# generated: names of settings, from definitions/service_settings.toml by `make generate`
_TRUE_WORDS = ("1", "true", "yes", "on", "t", "y")
_ACCESS_LOG = "CHARONIA_ACCESS_LOG"
_LOG_FORMAT = "CHARONIA_LOG_FORMAT"
_LOG_FORMAT_TEXT = "text"
_LOG_FORMAT_JSON = "json"
_LOG_PROMPTS = "CHARONIA_LOG_PROMPTS"
# end of generated: names of settings


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in _TRUE_WORDS


class ModelLog:
    """`write_info` and `write_error` take a line. requests: each request has a line. prompts: and its text is in it."""

    def __init__(self, component: str, write_info: Callable[[str], None], write_error: Callable[[str], None]) -> None:
        self._component = component
        self._write_info = write_info
        self._write_error = write_error
        self._json = os.environ.get(_LOG_FORMAT) == _LOG_FORMAT_JSON
        self.requests = _is_on(_ACCESS_LOG)
        self.prompts = self.requests and _is_on(_LOG_PROMPTS)

    def request(self, message: str, request_id: str, fields: Mapping[str, Any], text: Mapping[str, str]) -> None:
        """A request's line. `text` holds what is of its prompt or answer."""
        if self.requests:
            self._write_info(self._line(message, request_id, {**fields, **(text if self.prompts else {})}))

    def failed(self, error: Exception, request_id: str) -> str:
        """Writes where an unexpected error came from; the text for the client. The error's own text may quote the
        request."""
        kind = type(error).__name__
        where = "".join(traceback.format_tb(error.__traceback__)).rstrip()
        said = {"error": kind, "traceback": where} | ({"error_text": str(error)} if self.prompts else {})
        self._write_error(self._line(f"a request failed ({kind})", request_id, said))
        return f"{self._component} failed ({kind}); the server's log says where"

    def _line(self, message: str, request_id: str, fields: Mapping[str, Any]) -> str:
        shown = request_id.partition("#")[0]  # the rest only makes it unique
        if self._json:
            head = {"component": self._component, "message": message, **({"request_id": shown} if shown else {})}
            return json.dumps({**head, **fields}, ensure_ascii=False)
        more = "".join(f" {name}={value!r}" for name, value in fields.items() if isinstance(value, str))
        return f"{self._component}: {message}" + (f" [{shown}]" if shown else "") + more
