"""`triton_client`, the terminal chat, in a real pseudo-terminal and in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
import pytest
from pexpect.fdpexpect import fdspawn
from stack import HANG_S, Stack, free_ports

PROGRAM = Path(sys.executable).parent / "triton_client"
# Bracketed paste is turned on when the prompt is shown, and off when a message is read.
PROMPT = r"\x1b\[\?2004h"
TAKEN = r"\x1b\[\?2004l"
COST = re.compile(r"\[\d+ tokens, [\d.]+ tokens/s, prompt (\d+) tokens")


class Terminal(fdspawn):  # type: ignore[misc]
    """A program with a pseudo-terminal as its controlling terminal, so that Ctrl-C is a signal.

    pexpect.spawn is not used: it forks this process, and gRPC threads do not survive a fork.
    """

    def __init__(self, *command: str) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
        # Requests for the cursor position have no response here.
        env = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command], stdin=theirs, stdout=theirs, stderr=theirs, env=env
        )
        os.close(theirs)
        super().__init__(ours, encoding="utf-8", timeout=HANG_S)

    def exit_code(self) -> int:
        self.expect(pexpect.EOF)
        return self.process.wait(HANG_S)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.close()


@contextmanager
def chat(target: str, *arguments: str) -> Iterator[Terminal]:
    child = Terminal(str(PROGRAM), target, *arguments)
    try:
        child.expect("leaves")
        child.expect(PROMPT)
        yield child
    finally:
        child.end()


def leave(child: Terminal) -> None:
    child.send("exit\r")
    assert child.exit_code() == 0


def test_ctrl_c_interrupts_response_and_chat_continues(slow: Stack) -> None:
    with chat(slow.grpc, "--enter-sends") as child:
        child.send("Talk\r")
        # The response has begun: the remaining output of the prompt, before Ctrl-C is a signal again, is shorter.
        child.expect(TAKEN + ".{100}")
        child.send("\x03")
        child.expect("interrupted")
        child.expect(PROMPT)
        child.send("\x03")  # at the prompt, Ctrl-C shows how to leave
        child.expect("'exit' leaves")
        child.expect(PROMPT)
        leave(child)


def test_one_enter_sends_a_command(stack: Stack) -> None:
    with chat(stack.grpc) as child:
        child.send("/help\r")
        child.expect("begins a new conversation")
        child.expect(PROMPT)
        leave(child)


def piped(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *arguments], input=text, capture_output=True, text=True, timeout=HANG_S, check=False
    )


def test_messages_from_a_pipe_are_answered(stack: Stack) -> None:
    done = piped("Hello\n\nWhat is the\ncapital of France?\n\nexit\nnot read\n", stack.grpc, "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert len(COST.findall(done.stdout)) == 2
    assert piped("What is the capital of France?", stack.grpc).returncode == 0


def test_commands_change_the_conversation(stack: Stack) -> None:
    text = "/regen\nWhat is the\ncapital of France?\n\n/regen\n/system Be brief.\n/regen\n"
    text += "/clear\n/regen\n/nothing\n/help\n"
    done = piped(text, stack.grpc, "--temperature", "0")
    assert done.returncode == 0, done.stderr
    first, second, third = map(int, COST.findall(done.stdout))
    assert first == second < third, "the system message makes the prompt longer"
    assert done.stdout.count("there is no response yet") == 2 and "/nothing is not a command" in done.stdout
    assert "/system TEXT" in done.stdout


@pytest.mark.parametrize("place", ["environment", ".env"])
def test_make_chat_uses_configured_port(stack: Stack, tmp_path: Path, place: str) -> None:
    """In a separate folder with the Makefile and a `.env`, which the environment overrides."""
    shutil.copy(Path(__file__).resolve().parents[2] / "Makefile", tmp_path)
    port, elsewhere = stack.grpc.rpartition(":")[2], str(free_ports(1)[0])
    env = {name: value for name, value in os.environ.items() if not name.startswith(("CHARONIA_", "MAKE"))}
    if place == "environment":
        env["CHARONIA_GRPC_PORT"] = port
    (tmp_path / ".env").write_text(f"OTHER=a b\nCHARONIA_GRPC_PORT={elsewhere if place == 'environment' else port}\n")
    done = subprocess.run(
        ["make", "--old-file=setup", f"BIN={PROGRAM.parent}", "chat"],
        cwd=tmp_path,
        env=env,
        input="Hello\n\n",
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(COST.findall(done.stdout)) == 1


def test_error_is_printed_and_sets_exit_code_of_pipe(stack: Stack) -> None:
    done = piped("Hello\n\nHello\n", stack.grpc, "--max-tokens", "1000000")
    assert done.returncode == 1
    assert done.stdout.count("1000000") == 2


@pytest.mark.parametrize("target", ["localhost:0", "localhost:http", "http://localhost:1", "localhost:1/v1"])
def test_wrong_address_is_named(target: str) -> None:
    done = piped("", target)
    assert done.returncode == 2 and "is not HOST:PORT" in done.stderr


@pytest.mark.parametrize("scheme", ["", "dns:///", "ipv4:"])
def test_missing_server_is_reported_immediately(scheme: str) -> None:
    target = f"{scheme}127.0.0.1:{free_ports(1)[0]}"
    done = piped("Hello\n", target)
    assert done.returncode == 1
    assert target in done.stderr
