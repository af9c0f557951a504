"""The pages with scripted responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from browser_fixtures import browser, new_context
from free_ports import free_ports
from scripted import Scripted

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

__all__ = ["browser", "new_context"]


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Scripted]:
    server = Scripted(*free_ports(1))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: Scripted) -> Scripted:
    shared_server.script()
    return shared_server


@pytest.fixture
def page(server: Scripted, new_context: Callable[..., BrowserContext]) -> Page:
    """The chat page of the scripted server."""
    from chat import opened  # its dependencies may not be installed

    return opened(new_context(viewport={"width": 1200, "height": 800}).new_page(), server)
