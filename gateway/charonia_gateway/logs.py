"""The format of the log: plain text, or one JSON object per line."""

from __future__ import annotations

import logging
import logging.config
import time
import traceback
from datetime import datetime, timezone
from typing import Any

from charonia_gateway.record import current_record
from charonia_gateway.settings import Settings

MAX_UNSERVED = 60  # lines in a minute


class RequestContext(logging.Filter):
    """Adds the request id and the trace id to records that are logged during a request. Removes the text of exceptions
    and keeps their traceback, because the text may quote the request. `prompts`: keep the text."""

    def __init__(self, prompts: bool = False) -> None:
        super().__init__()
        self._prompts = prompts

    def filter(self, record: logging.LogRecord) -> bool:
        if request := current_record.get():
            if record.exc_info and record.exc_info[1] is not None and not self._prompts:
                record.exc_text = without_text(record.exc_info[1])
                record.exc_info = None
            record.request_id = request.request_id
            if request.trace_id:
                record.trace_id = request.trace_id
        return True


class FewUnserved(logging.Filter):
    """Limits the lines about requests that had no valid key and named no model, and about broken connections: otherwise
    anybody could push the lines of served requests out of the log's files. The next line has the number of dropped
    lines."""

    def __init__(self) -> None:
        super().__init__()
        self._until = 0.0
        self._left = 0
        self._dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        served = record.name == "charonia_gateway.access" and (hasattr(record, "key") or hasattr(record, "model"))
        if served or not record.name.startswith(("charonia_gateway.access", "uvicorn")):
            return True
        now = time.monotonic()
        if now >= self._until:
            self._until, self._left = now + 60, MAX_UNSERVED
        if not self._left:
            self._dropped += 1
            return False
        self._left -= 1
        if self._dropped:
            record.msg, record.args = f"{record.getMessage()}, {self._dropped} such lines were dropped before", None
            self._dropped = 0
        return True


def without_text(error: BaseException) -> str:
    """The traceback of an exception and of its causes, with the types of the exceptions but without their texts."""
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        lines = "".join(traceback.format_tb(current.__traceback__))
        parts.append(f"Traceback (most recent call last):\n{lines}{type(current).__name__}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\n\nwhich led to:\n\n".join(reversed(parts))


class TextFormatter(logging.Formatter):
    """Appends the request id, if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        request_id = getattr(record, "request_id", None)
        if request_id is None:
            return line
        first, newline, rest = line.partition("\n")
        texts = ((name, getattr(record, name, None)) for name in ("prompt", "answers"))
        shown = "".join(f" {name}={text!r}" for name, text in texts if text is not None)
        return f"{first} [{request_id}]{shown}{newline}{rest}"


def json_formatter() -> logging.Formatter:
    """{"time": ..., "level": ..., "component": "gateway", "logger": ..., "message": ..., and the fields of the
    event}"""
    from pythonjsonlogger.json import JsonFormatter

    class Formatter(JsonFormatter):
        def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
            # Added first, so that a line begins with the most important fields.
            log_data["time"] = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
            log_data["level"] = record.levelname.lower()
            log_data["component"] = "gateway"
            super().add_fields(log_data, record, message_dict)

    # uvicorn repeats its messages with terminal colours.
    return Formatter(
        ["message", "name"],
        rename_fields={"name": "logger"},
        exc_info_as_array=False,
        reserved_attrs=[*logging.makeLogRecord({}).__dict__, "message", "asctime", "color_message", "taskName"],
        json_ensure_ascii=False,
    )


def configure_logging(settings: Settings) -> None:
    """Configure the logs of this process, including uvicorn's."""
    formatter: dict[str, Any] = {"()": TextFormatter, "fmt": "%(levelname)s:     %(message)s"}
    if settings.log_format == "json":
        formatter = {"()": json_formatter}
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "filters": {
                "request": {"()": RequestContext, "prompts": settings.log_prompts},
                "few_unserved": {"()": FewUnserved},
            },
            "formatters": {"line": formatter},
            "handlers": {
                "stderr": {
                    "class": "logging.StreamHandler",
                    "stream": "ext://sys.stderr",
                    "formatter": "line",
                    "filters": ["few_unserved", "request"],
                }
            },
            "root": {"level": settings.log_level.upper(), "handlers": ["stderr"]},
            # uvicorn's loggers use the root logger. The gateway writes its own access log.
            "loggers": {
                name: {"level": settings.log_level.upper(), "handlers": [], "propagate": True}
                for name in ("uvicorn", "uvicorn.error", "uvicorn.asgi")
            },
        }
    )
