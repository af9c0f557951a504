"""How `charonia models` reaches the `charonia serve` that runs: by a socket in its run folder.

Only who may have started it gets an answer: the socket's file is its user's alone, and the kernel says who connects. So
there is no key for it, and no port.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from charonia.errors import CharoniaError
from charonia.serve.errors import ServeError

_FILE = "control.sock"
_MAX_LINE = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
Handle = Callable[[dict[str, Any]], Any]


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Of the socket in a folder: a name that is short, however long the folder's is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{_FILE}"
    finally:
        os.close(descriptor)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: str, handle: Handle) -> None:
        super().__init__(address, _Handler, bind_and_activate=False)
        self.handle = handle
        self.server_bind()
        Path(address).chmod(0o600)  # before it takes connections
        self.server_activate()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked has gone."""


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        asked = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(asked)[1] not in (0, os.getuid()):
            return
        assert isinstance(self.server, _Server)
        try:
            answer = {"answer": self.server.handle(json.loads(self.rfile.readline(_MAX_LINE)))}
        except (CharoniaError, ValueError, KeyError) as error:
            answer = {"error": str(error)}
        self.wfile.write(json.dumps(answer).encode() + b"\n")


@contextmanager
def answering(folder: Path, handle: Handle) -> Iterator[None]:
    """Answers what is asked by the socket in this folder, each in a thread, until the context ends."""
    with contextlib.suppress(FileNotFoundError):  # of a process that was killed: this one has the folder's lock
        (folder / _FILE).unlink()
    with _address(folder) as address:
        server = _Server(address, handle)
    thread = threading.Thread(target=server.serve_forever, name="control", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        (folder / _FILE).unlink(missing_ok=True)


def _folders(root: Path, port: int) -> list[Path]:
    beside: list[Path] = []
    with contextlib.suppress(PermissionError):  # of another user, which the first one says
        beside = sorted(root.glob(f"port-{port}-*"))
    return [root / f"port-{port}", *beside]


def ask(root: Path, port: int, **question: Any) -> Any:
    """What the `charonia serve` with this gRPC port under the run folder `root` answers. ServeError where there is
    none, or for its error."""
    for folder in _folders(root, port):
        try:
            with socket.socket(socket.AF_UNIX) as connection, _address(folder) as address:
                connection.connect(address)
                connection.sendall(json.dumps(question).encode() + b"\n")
                with connection.makefile("rb") as lines:
                    line = lines.readline()
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):  # the last: of one that was killed
            continue
        except PermissionError:
            raise ServeError(f"{folder} is another user's: only who started charonia serve may ask it") from None
        except ConnectionError:
            line = b""
        if not line:
            raise ServeError("charonia serve ended before it answered: see its log")
        answer = json.loads(line)
        if "error" in answer:
            raise ServeError(answer["error"])
        return answer["answer"]
    raise ServeError(
        f"no charonia serve with gRPC port {port} runs here with the run folder {root}: name its own with --grpc-port "
        "and --run-dir, or CHARONIA_GRPC_PORT and CHARONIA_RUN_DIR; in containers, ask inside of that container"
    )
