"""Generates the limits of requests: constants of the gateway, of preprocessing and of structured output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from definitions.sampling import parameters
from definitions.settings import engine_settings
from definitions.text import comment, with_region
from definitions.toml_files import entries

_SOURCE = "request_limits.toml"


@dataclass(frozen=True)
class Limit:
    """An entry of request_limits.toml. The head of the file explains the keys."""

    name: str
    value: int
    help: str


def limits() -> Iterator[Limit]:
    """Yield the limits of request_limits.toml, and the limit of a bias in logit_bias."""
    yield from entries(_SOURCE, Limit)
    (bias,) = (one for one in parameters() if one.type == "token_biases")
    if bias.max is None or bias.min != -bias.max or bias.max != int(bias.max):
        raise ValueError(f"[{bias.name}] needs integer bounds with min = -max")
    yield Limit(bias.name, int(bias.max), f"maximum of each bias in {bias.name}; the minimum is the negative value")


def constants(path: str, names: tuple[str, ...]) -> str:
    """names: limits for this file; empty: all."""
    rows = (
        comment("#", one.help, 0) + f"MAX_{one.name.upper()} = {one.value}\n"
        for one in limits()
        if not names or one.name in names
    )
    return with_region(path, "request limits", "".join(rows))


def settings(path: str, names: tuple[str, ...]) -> str:
    """Return constants with the defaults of engine settings."""
    rows = (
        comment("#", f"default: {one.help}", 0) + f"{one.name.upper()} = {one.default}\n"
        for one in engine_settings()
        if one.name in names
    )
    return with_region(path, "engine settings", "".join(rows))


def context_length(path: str) -> str:
    """Return the engine's defaults that preprocessing needs: settings and sampling parameters."""
    rows = (f'    "{one.name}": {one.default},\n' for one in parameters() if one.model)
    text = "DEFAULT_SAMPLING: dict[str, float] = {\n" + "".join(rows) + "}\n"
    return with_region(path, "sampling defaults", text, settings(path, ("guide_max_bytes",)))


FILES: dict[str, Callable[[], str]] = {
    **{
        path: partial(constants, path, names)
        for path, names in {
            "charonia/text/prompt_ids.py": (),
            "client/charonia_answers/scanners.py": ("depth",),
            "gateway/charonia_gateway/schemas/fields.py": (),
        }.items()
    },
    "preprocessing/context_length.py": partial(context_length, "preprocessing/context_length.py"),
}
