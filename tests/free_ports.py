"""Ports for the servers that tests start."""

from __future__ import annotations

import random
import socket

_taken: list[socket.socket] = []  # until this process ends


def free_ports(count: int) -> list[int]:
    """Return free TCP ports below the range of outgoing connections.

    They are reserved until this process ends: it binds the UDP ports with the same numbers, so that other test runs on
    this machine do not choose them.
    """
    found: list[int] = []
    for port in random.sample(range(20000, 32000), 1000):
        taken = socket.socket(type=socket.SOCK_DGRAM)
        try:
            taken.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            taken.close()
            continue
        _taken.append(taken)
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"{count} free ports were not found")
