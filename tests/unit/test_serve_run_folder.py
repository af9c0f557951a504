"""Two launchers never share a folder: the second one names the owner, and changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from charonia import doctor
from charonia.errors import ServeError
from charonia.serve import checks
from charonia.serve.control import ask
from charonia.serve.launcher import serve
from charonia.serve.run_folder import held, running
from charonia.settings import read_settings

HOLD = """
import sys
from pathlib import Path
from charonia.serve.launcher import serve
from charonia.serve.run_folder import held
with held(Path(sys.argv[1]), 33337) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_second_launcher_on_a_port_names_the_first_and_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked before the ports, because the ports are still free while the first launcher starts."""
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    folder = Path(first.stdout.readline().strip())
    backend = folder / "backends" / "charonia"
    backend.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(checks, "check_packages", lambda **_: None)
    monkeypatch.setattr(checks, "check_python", lambda: None)
    # Without the lock, the process would reach this line.
    monkeypatch.setattr(checks, "check_ports", lambda *_: pytest.fail("it goes on"))
    with pytest.raises(ServeError) as caught:
        serve(read_settings(run_dir=tmp_path, grpc_port=33337))
    assert f"process {first.pid} holds {folder}" in str(caught.value)
    assert "CHARONIA_GRPC_PORT" in str(caught.value)
    found = list(doctor.examine(read_settings(run_dir=tmp_path, grpc_port=33337)))[-1]
    assert found == ("ports", "note", f"charonia serve, process {first.pid}, runs with gRPC port 33337")
    assert sorted(tmp_path.rglob("*")) == before
    # The folder is free after the process has ended in any way.
    first.kill()
    first.communicate()
    assert running(tmp_path, 33337) is None
    with held(tmp_path, 33337) as again:
        assert again == folder
        assert (again / "lock").read_text().split()[0] == str(os.getpid())


def test_other_ports_and_other_machines_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers of one image share the volume with the run folder, and each has its own ports."""
    with held(tmp_path, 1) as one, held(tmp_path, 2) as two:
        assert (one.name, two.name) == ("port-1", "port-2")
        with pytest.raises(ServeError, match="but one with another port does: add --grpc-port 1 or --grpc-port 2, or"):
            ask(tmp_path, 3, do="list")
        monkeypatch.setattr("socket.gethostname", lambda: "another-container")
        with held(tmp_path, 1) as elsewhere:
            assert elsewhere.name == "port-1-2"
            with pytest.raises(ServeError, match="port-1-2"), held(tmp_path, 1):
                pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServeError, match="CHARONIA_RUN_DIR"), held(tmp_path / "file", 1):
        pass


def test_running_server_is_found_without_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that starts at that moment would find the lock taken."""
    with held(tmp_path, 1):
        monkeypatch.setattr("fcntl.flock", lambda *_: pytest.fail("it takes the lock"))
        assert running(tmp_path, 1) == str(os.getpid())
        assert running(tmp_path, 2) is None
    assert running(tmp_path, 1) is None
