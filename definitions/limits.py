"""What a request may hold at most: constants of the gateway, of what makes token ids and of what reads guides."""

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
    """An entry of request_limits.toml, whose head says what each key means."""

    name: str
    value: int
    help: str


def limits() -> Iterator[Limit]:
    """Those of request_limits.toml, and what a bias of logit_bias may be."""
    yield from entries(_SOURCE, Limit)
    (bias,) = (one for one in parameters() if one.type == "token_biases")
    if bias.max is None or bias.min != -bias.max or bias.max != int(bias.max):
        raise ValueError(f"[{bias.name}] needs whole bounds of which one is minus the other")
    yield Limit(bias.name, int(bias.max), f"of each bias of {bias.name}, and the minimum is minus that")


def constants(path: str, names: tuple[str, ...]) -> str:
    """names: those that the file gets; empty: all."""
    rows = (
        comment("#", one.help, 0) + f"MAX_{one.name.upper()} = {one.value}\n"
        for one in limits()
        if not names or one.name in names
    )
    return with_region(path, "request limits", "".join(rows))


def settings(path: str, names: tuple[str, ...]) -> str:
    """Defaults of engine settings."""
    rows = (
        comment("#", f"default: {one.help}", 0) + f"{one.name.upper()} = {one.default}\n"
        for one in engine_settings()
        if one.name in names
    )
    return with_region(path, "engine settings", "".join(rows))


def context_length(path: str) -> str:
    """The engine's defaults that preprocessing needs: settings, and sampling parameters."""
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
