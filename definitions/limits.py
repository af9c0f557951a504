"""What a request may hold at most: constants of the gateway, of what makes token ids and of what reads guides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from definitions.settings import engine_settings
from definitions.text import comment, with_region
from definitions.toml_files import entries

_SOURCE = "request_limits.toml"


@dataclass(frozen=True)
class Limit:
    """An entry of request_limits.toml, whose head says what each key means."""

    name: str
    value: int
    help: str


def constants(path: str) -> str:
    rows = (comment("#", one.help, 0) + f"MAX_{one.name.upper()} = {one.value}\n" for one in entries(_SOURCE, Limit))
    return with_region(path, "request limits", "".join(rows))


def settings(path: str, names: tuple[str, ...]) -> str:
    """Defaults of engine settings."""
    rows = (
        comment("#", f"default: {one.help}", 0) + f"{one.name.upper()} = {one.default}\n"
        for one in engine_settings()
        if one.name in names
    )
    return with_region(path, "engine settings", "".join(rows))


FILES: dict[str, Callable[[], str]] = {
    **{
        path: partial(constants, path)
        for path in ("charonia/text/prompt_ids.py", "gateway/charonia_gateway/schemas/fields.py")
    },
    "preprocessing/context_length.py": partial(settings, "preprocessing/context_length.py", ("guide_max_bytes",)),
}
