"""The file with further models, which `charonia serve` changes when it adds a model."""

from __future__ import annotations

from pathlib import Path

from charonia_gateway.files import FollowedFiles
from charonia_gateway.settings import parse_models


class ModelsFile(FollowedFiles):
    """`models`: label by name, as CHARONIA_GATEWAY_MORE_MODELS has them."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError if the file is missing or not valid."""
        self._path = path
        self.models: dict[str, str] = {}
        super().__init__(path)

    def _read(self) -> None:
        try:
            text = self._path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{self._path} cannot be read: {error.strerror}") from None
        self.models = parse_models(text)
