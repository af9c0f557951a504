"""Files of API keys for tests of the gateway."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from charonia_gateway import keys

PAST = datetime.now(timezone.utc) - timedelta(days=1)
FUTURE = PAST + timedelta(days=9)


class KeyFile:
    """A file with keys, and the keys by their names."""

    def __init__(self, path: Path, **made: dict[str, Any]) -> None:
        self.path = path
        self.texts: dict[str, str] = {}
        for name, fields in made.items():
            self.add(name, **fields)

    def add(self, name: str, **fields: Any) -> str:
        text, id = keys.new_key()
        made = keys.Key(id=id, name=name, sha256=keys.hash_of(text), created=PAST, **fields)
        with keys.changing(self.path) as held:
            held.keys.append(made)
        self.texts[name] = text
        return text

    def revoke(self, name: str) -> None:
        with keys.changing(self.path) as held:
            held.keys = [one.model_copy(update={"revoked": PAST}) if one.name == name else one for one in held.keys]

    def bearer(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.texts[name]}"}
