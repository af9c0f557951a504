"""How `charonia models` reaches the running `charonia serve`: by a socket in its run folder.

Only the user who started the server can connect, because the socket's file belongs to that user alone. So it needs no
key and no port.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from charonia.errors import CharoniaError, ServeError
from charonia.serve import run_folder

_FILE = "control.sock"
_MAX_LINE = 1 << 16
Handle = Callable[[dict[str, Any]], Any]


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """A short name of the socket in a folder, because the kernel limits the length of such names."""
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
        Path(address).chmod(0o600)  # before it accepts connections
        self.server_activate()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a client that has disconnected."""


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        try:
            answer = {"answer": self.server.handle(json.loads(self.rfile.readline(_MAX_LINE)))}
        except Exception as error:  # of a model's files, for example: the client must get an answer
            text = str(error) if isinstance(error, CharoniaError | ValueError) else f"{type(error).__name__}: {error}"
            answer = {"error": text, "status": getattr(error, "status", 400)}
        self.wfile.write(json.dumps(answer).encode() + b"\n")


@contextmanager
def answering(folder: Path, handle: Handle) -> Iterator[None]:
    """Answers requests on the socket in this folder, each in its own thread, until the context ends."""
    (folder / _FILE).unlink(missing_ok=True)  # left by a killed process: this process has the folder's lock
    with _address(folder) as address:
        server = _Server(address, handle)
    threading.Thread(target=server.serve_forever, name="control", daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        (folder / _FILE).unlink(missing_ok=True)


def ask(root: Path, port: int, **question: Any) -> Any:
    """Returns the answer of the `charonia serve` with this gRPC port under the run folder `root`. Raises ServeError
    with its error, or if no such server runs."""
    folders = [root / f"port-{port}"]
    with contextlib.suppress(PermissionError):  # another user's folder: the loop reports it
        folders += sorted(root.glob(f"port-{port}-*"))
    for folder in folders:
        try:
            with socket.socket(socket.AF_UNIX) as connection, _address(folder) as address:
                connection.connect(address)
                connection.sendall(json.dumps(question).encode() + b"\n")
                with connection.makefile("rb") as lines:
                    line = lines.readline()
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):  # the last: the server was killed
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
    wrong = f"no charonia serve with gRPC port {port} runs here with the run folder {root}"
    if others := [other for other in run_folder.ports(root) if other != port]:
        listed = " or ".join(f"--grpc-port {other}" for other in others)
        raise ServeError(f"{wrong}, but one with another port does: add {listed}, or set CHARONIA_GRPC_PORT")
    raise ServeError(
        f"{wrong}: name its own with --grpc-port and --run-dir (make serve has --run-dir run), or CHARONIA_GRPC_PORT "
        "and CHARONIA_RUN_DIR; in containers, ask inside of that container"
    )
