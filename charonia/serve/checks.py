"""Checks before anything is started. Each failure is one message, instead of a later one in a log."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import socket
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from charonia import _engine
from charonia.errors import ServeError
from charonia.serve.access import Port


def check_python() -> None:
    """Checks that libpython and NumPy 1 are installed, which the processes of the Python models need."""
    if int(version("numpy").split(".")[0]) >= 2:
        raise ServeError(
            f"NumPy {version('numpy')} is installed, and with NumPy 2 Triton's Python models answer with empty texts: "
            f"run {sys.executable} -m pip install 'numpy<2'"
        )
    library = f"libpython{sysconfig.get_config_var('LDVERSION')}.so.1.0"
    for place in (library, f"{sysconfig.get_config_var('LIBDIR')}/{library}"):
        try:
            ctypes.CDLL(place)
            return
        except OSError:
            continue
    package = f"libpython{sys.version_info.major}.{sys.version_info.minor}"
    raise ServeError(f"{library} is missing, and Triton's Python models need it: sudo apt-get install {package}")


def check_packages(*, own_triton: bool, gateway: bool, liveness: bool) -> None:
    """own_triton: the server comes from its package. gateway: it is started too. liveness: Triton is probed."""
    needed = {"pytriton": "nvidia-pytriton==0.7.0"} if own_triton else {}
    needed |= {"charonia_gateway": "charonia-gateway"} if gateway else {}
    needed |= {"grpc": "grpcio"} if liveness else {}
    for module, package in needed.items():
        if importlib.util.find_spec(module) is None:
            raise ServeError(
                f"package {package.split('=')[0]} is not installed, and serving needs it: "
                f"run {sys.executable} -m pip install {package}, or use make serve in a checkout"
            )


def check_device(inference: Mapping[str, str]) -> None:
    """Checks that a GPU can be used if device = cuda. inference: the inference parameters."""
    if inference.get("device") == "cuda" and (why := _engine.why_no_gpu()):
        raise ServeError(f"device = cuda: {why}. Fix this, or choose --device auto (CHARONIA_DEVICE)")


def option_of(variable: str) -> str:
    """The option of `charonia serve` for an environment variable."""
    return f"--{variable.removeprefix('CHARONIA_').lower().replace('_', '-')}"


def check_ports(ports: Sequence[Port], *, option: bool = True) -> None:
    """Checks that all ports are free and different. option: errors name the option of `charonia serve` too."""
    by_number: dict[int, str] = {}
    used: dict[int, str] = {}
    for address, number, address_name, name in ports:
        if number in by_number:
            raise ServeError(f"{by_number[number]} and {name} are both {number}; give them different ports")
        by_number[number] = name
        setting = f"{name} ({option_of(name)})" if option else name
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, number))
            except PermissionError:
                raise ServeError(f"port {number} needs root: set {setting} to a port from 1024 on") from None
            except socket.gaierror as error:
                raise ServeError(f"{address_name}={address} is no address of this machine ({error.strerror})") from None
            except (TypeError, UnicodeError):  # a label of it is empty, or too long
                raise ServeError(f"{address_name}={address} is no name of a host") from None
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise ServeError(
                        f"cannot listen on {address}:{number} ({error.strerror}): check {address_name}"
                    ) from None
                used[number] = setting
    if used:
        ports_are = f"port {next(iter(used))} is" if len(used) == 1 else f"ports {' and '.join(map(str, used))} are"
        raise ServeError(
            f"{ports_are} in use by another process: stop that one, or choose "
            f"{'another port' if len(used) == 1 else 'other ports'} with {' and '.join(used.values())}"
        )
