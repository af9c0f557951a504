"""Loads, unloads and lists LoRA adapters of a running `charonia serve`, for `charonia models`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from charonia.errors import CharoniaError, ModelError, ServeError
from charonia.settings import ServeSettings

if TYPE_CHECKING:
    from charonia_client import Client

Result = TypeVar("Result")


def change(settings: ServeSettings, ensemble: str, name: str, folder: str) -> None:
    """Load the adapter `name` from a folder, or unload it if the folder is empty. ensemble: of its model in Triton.
    Raises CharoniaError."""

    async def ask(client: Client) -> list[dict[str, Any]]:
        return await (client.load_adapter(name, folder) if folder else client.unload_adapter(name))

    _ask(settings, ensemble, ask)


def of_models(
    settings: ServeSettings, models: Sequence[dict[str, Any]], warn: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The adapters of the models that are loaded, as models with `parent` and `root`, as /v1/models has them. models:
    of the `charonia serve`. `warn` is called for a model that does not answer, such as one that was just unloaded."""
    found: list[dict[str, Any]] = []
    for model in models:
        if model["state"] != "loaded":
            continue
        try:
            adapters = _ask(settings, model["ensemble"], lambda client: client.adapters())
        except CharoniaError as error:
            warn(f"the adapters of {model['name']} are not listed: {error}")
            continue
        shared = {"state": model["state"], "ensemble": model["ensemble"], "parent": model["name"]}
        found += ({"name": one["name"], **shared, "root": one["path"]} for one in adapters)
    return found


def _ask(settings: ServeSettings, ensemble: str, question: Callable[[Client], Awaitable[Result]]) -> Result:
    """Call a function with a client of this ensemble. Raises CharoniaError."""
    try:
        from charonia_client import CharoniaError as ClientError
        from charonia_client import Client, Tls
    except ImportError as error:
        raise ModelError("charonia models needs the client library: pip install charonia-client") from error

    tls = None
    if settings.grpc_tls_cert is not None:
        tls = Tls(ca=settings.triton_tls_ca, cert=settings.triton_tls_cert, key=settings.triton_tls_key)

    async def ask() -> Result:
        async with Client(f"localhost:{settings.grpc_port}", model=ensemble, tls=tls) as client:
            return await question(client)

    try:
        return asyncio.run(ask())
    except ClientError as error:
        raise ServeError(str(error)) from error
