"""Certificates for tests, as PEM files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass
class Pair:
    cert: Path
    key: Path


class Authority:
    """A certificate authority. `ca` is its file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, file: str, *names: str) -> Pair:
        """Issue a certificate for these names. A second one with the same file name replaces the first one."""
        pair = Pair(self._folder / f"{file}.pem", self._folder / f"{file}.key")
        issued = self._authority.issue_cert(*names)
        pair.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(pair.key))
        return pair
