"""Installs packages into this Python's environment like `pip install ARGUMENTS`, but with uv, ten times as fast.

    python scripts/install.py [--into PYTHON] ARGUMENTS      ARGUMENTS: those that pip and uv both support

--into: the Python of another environment, which needs no pip.

uv does not read pip's settings (pip.conf, PIP_*), so this script passes them on. It uses pip if a setting has no
equivalent in uv, if uv is not available for this machine, if uv fails, or with CHARONIA_INSTALLER=pip.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import zlib
from pathlib import Path

PINNED_UV = Path(__file__).resolve().parent.parent / "docker" / "requirements" / "uv.txt"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]

# pip's settings and the corresponding variables of uv. pip separates values by spaces.
OF_UV = {
    "cache-dir": "UV_CACHE_DIR",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "constraint": "UV_CONSTRAINT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}
SWITCHES = {"no-cache-dir": "UV_NO_CACHE"}
COMMAS = {"UV_FIND_LINKS"}  # uv separates these values by commas, others by spaces
# These affect pip's output and the location of its files, not the installed packages.
WITHOUT_EFFECT = {
    "break-system-packages",
    "compile",
    "config-file",
    "debug",
    "disable-pip-version-check",
    "log",
    "no-color",
    "no-compile",
    "no-input",
    "no-warn-script-location",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "resume-retries",
    "retries",
    "root-user-action",
    "verbose",
}
# Sections in the output of `pip config list`. Later sections override.
SECTIONS = ("global", "install", ":env:")


def settings_of_uv(config: str) -> dict[str, str]:
    """Return uv's environment variables for pip's settings, from the output of `pip config list`.

    Raises ValueError for a setting without an equivalent in uv.
    """
    values = {}
    for section in SECTIONS:
        for line in config.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(f"{section}."):
                values[name.removeprefix(f"{section}.")] = str(ast.literal_eval(value))
    env = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # like pip: the best version of all indexes
    for name, value in values.items():
        if name in OF_UV:
            variable = OF_UV[name]
            env[variable] = ("," if variable in COMMAS else " ").join(value.split())
            if name == "cache-dir":  # a separate folder from pip's files
                env[variable] = str(Path(value) / "uv")
        elif name in SWITCHES:
            if value.lower() in ("1", "true", "yes", "on", "y", "t"):
                env[SWITCHES[name]] = "1"
        elif name not in WITHOUT_EFFECT:
            raise ValueError(f"pip's setting {name}")
    return env


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def find_uv() -> str:
    """Return the path of uv in this environment; installs it if needed. Raises OSError if that fails."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        command = [*PIP, "--quiet", "install", "--only-binary", ":all:", "--no-compile"]
        command += ["--require-hashes", "--requirement", str(PINNED_UV)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0 or not uv.exists():
            raise OSError(f"uv cannot be installed: {last_line(done.stderr)}")
    return str(uv)


class Unfinished:
    """A marker file in the environment exists for each unfinished installation. While there is one, all packages are
    reinstalled, because uv considers a package installed before all of its files exist."""

    def __init__(self, python: str, arguments: list[str]) -> None:
        self._folder = Path(python).parent.parent
        self._own = self._folder / f"unfinished-{zlib.crc32(' '.join(arguments).encode()):08x}"
        self.any_before = any(self._folder.glob("unfinished-*"))

    def begin(self) -> None:
        self._own.touch()

    def end(self) -> None:
        self._own.unlink(missing_ok=True)


def install_with_uv(python: str, arguments: list[str], unfinished: Unfinished) -> None:
    """Raises OSError or ValueError, with the reason, if pip must install the packages instead."""
    if os.environ.get("CHARONIA_INSTALLER") == "pip":
        raise ValueError("CHARONIA_INSTALLER")
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    env = {**settings_of_uv(listed), **os.environ}
    if "--require-hashes" in arguments:  # the versions are pinned, and uv rejects constraints that pin no version
        env.pop("UV_CONSTRAINT", None)
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):  # otherwise Python compiles imported modules itself
        env["UV_COMPILE_BYTECODE"] = "1"
    again = ["--reinstall"] if unfinished.any_before else []
    command = [find_uv(), "pip", "install", "--quiet", *again, "--python", python, *arguments]
    unfinished.begin()
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        unfinished.any_before = True
        raise OSError(f"uv failed: {done.stderr.strip()}")


def install_with_pip(python: str, arguments: list[str], unfinished: Unfinished) -> int:
    of_other = [] if python == sys.executable else ["--python", python]
    bytecode = "--compile" if os.environ.get("PYTHONDONTWRITEBYTECODE") else "--no-compile"
    again = ["--force-reinstall"] if unfinished.any_before else []
    unfinished.begin()
    return subprocess.run([*PIP, "--quiet", *of_other, "install", bytecode, *again, *arguments]).returncode


def main() -> int:
    usage = "%(prog)s [-h] [--into PYTHON] ARGUMENTS"
    parser = argparse.ArgumentParser(
        usage=usage, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", default=sys.executable, metavar="PYTHON")
    given, arguments = parser.parse_known_args()
    if not arguments:
        parser.error("no packages are given")
    unfinished = Unfinished(given.into, arguments)
    try:
        install_with_uv(given.into, arguments, unfinished)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"setup: installing with pip, which takes longer ({error})", file=sys.stderr)
        if status := install_with_pip(given.into, arguments, unfinished):
            return status
    unfinished.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
