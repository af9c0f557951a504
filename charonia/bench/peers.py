"""Compares Charonia on the CPU with llama.cpp, OpenVINO GenAI, CTranslate2 and transformers, on one random model.

Each engine runs in its own process (peer_worker.py). The peers have their own Python environments, which the first run
creates. All engines are loaded, and run one after the other in each round. If a peer cannot be installed or run, the
reason is printed, and the others are measured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import IO, Any

from charonia import _engine
from charonia.bench.random_model import GptOssShape, parse_shape, write_random_model
from charonia.bench.records import Record
from charonia.errors import InvalidRequestError, ModelError

_WORKER = Path(__file__).with_name("peer_worker.py")
_MAX_POSITIONS = 65536
_DECODE_PROMPT = 32  # tokens
# Packages that pip installs for each kind of engine. llama.cpp is compiled for this processor.
_PACKAGES = {
    "charonia": (),
    "transformers": ("torch", "transformers", "accelerate"),
    "llama_cpp": ("llama-cpp-python", "gguf", "transformers", "torch"),
    "openvino": ("openvino-genai", "optimum-intel", "nncf", "torch"),
    "ctranslate2": ("ctranslate2", "transformers", "torch"),
}
_BUILD = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"}


class PeerError(Exception):
    """An engine cannot be measured. The message says why."""


@dataclass(frozen=True)
class Peer:
    """An engine with weights of `bits`. variant: the name of the format in the engine. option: passed to its worker."""

    kind: str
    bits: int
    variant: str = ""
    option: str = ""

    @property
    def name(self) -> str:
        return "_".join(filter(None, (self.kind, self.variant, self.option)))


ENGINES = (
    *(Peer("charonia", bits, name) for bits, name in ((16, ""), (8, "w8a8"), (8, "w8a16"), (8, "fp8"), (4, "w4a16"))),
    *(Peer("llama_cpp", bits, name) for bits, name in ((16, ""), (8, "q8_0"), (4, "q4_0"), (4, "q4_K_M"))),
    Peer("openvino", 16),
    # OpenVINO's inference precision: each one is fast on processors where the other one is slow.
    *(Peer("openvino", bits, f"int{bits}", hint) for bits in (8, 4) for hint in ("bf16", "f32")),
    Peer("transformers", 16),
    Peer("ctranslate2", 8, "int8"),
)  # fmt: skip
# For GPT-OSS' architecture, with experts as in its own files.
GPT_OSS_ENGINES = (Peer("charonia", 4, "mxfp4"), Peer("llama_cpp", 4, "mxfp4"))
# For a GGUF file that both engines read. The file determines the bits.
GGUF_ENGINES = (Peer("charonia", 0, "gguf"), Peer("llama_cpp", 0, "gguf"))


@dataclass
class Result:
    """The measurements of an engine: seconds of each round, by the tokens of the prompt and by the batch. missing: why
    the engine was not measured, or why it ended."""

    peer: Peer
    label: str
    missing: str = ""
    info: dict[str, float] = field(default_factory=dict)
    prefill_s: dict[int, list[float]] = field(default_factory=dict)
    decode_s: dict[int, list[float]] = field(default_factory=dict)
    peak_mb: float = 0.0

    @property
    def is_ours(self) -> bool:
        return self.peer.kind == "charonia"


class _Worker:
    """A process of peer_worker.py. It ends when the `with` block ends."""

    def __init__(self, python: Path, arguments: Sequence[object], threads: int, log: Path) -> None:
        self._log = log
        # Idle threads of one engine must not spin while another engine is measured.
        own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [python, _WORKER, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                text=True, env={**os.environ, **own, "TOKENIZERS_PARALLELISM": "false"},
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin: IO[str] = self._process.stdin
        self._stdout: IO[str] = self._process.stdout

    def answer(self) -> dict[str, float]:
        """Read the next line of JSON; libraries may print other lines. Raises PeerError if the process ended."""
        for line in self._stdout:
            if line.startswith("{"):
                found: dict[str, float] = json.loads(line)
                return found
        code = self._process.wait()
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
        raise PeerError(f"it ended with status {code}: {lines[-1]}")

    def run(self, batch: int, prompt: int, new: int) -> tuple[float, float]:
        """Return the seconds until the last sequence's first token, and from there until all `new` tokens are there."""
        try:
            self._stdin.write(json.dumps({"batch": batch, "prompt": prompt, "new": new}) + "\n")
            self._stdin.flush()
        except BrokenPipeError:
            pass  # answer() says why the process ended
        found = self.answer()
        return found["first_s"], found["rest_s"]

    def peak_mb(self) -> float:
        """Return the peak resident memory."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        return next(float(line.split()[1]) * 1024 / 1e6 for line in status.splitlines() if line.startswith("VmHWM:"))

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()


def run_peers(
    *,
    shape: str,
    bits: int,
    gguf: Path | None,
    prompts: Sequence[int],
    batches: Sequence[int],
    peers: Sequence[str],
    tokens: int,
    threads: int,
    rounds: int,
    install: bool,
    folder: Path,
    say: Callable[[str], None],
) -> tuple[list[Result], list[float]]:
    """gguf: measure this file instead of a random model. peers: only these peers; all if empty. tokens: of each decode.
    folder: for environments and models. Returns the results and the memory's read bandwidth, in bytes per second,
    before and after each round."""
    of_shape = GPT_OSS_ENGINES if isinstance(parse_shape(shape), GptOssShape) else ENGINES
    engines = list(GGUF_ENGINES) if gguf else [one for one in of_shape if one.bits == bits]
    if not engines:
        valid = " or ".join(map(str, dict.fromkeys(one.bits for one in of_shape)))
        raise InvalidRequestError(f"--bits {bits} is not valid: expected {valid} with --shape {shape}")
    known = [one.name for one in engines if one.kind != "charonia"]
    for name in peers:
        if name not in known:
            raise InvalidRequestError(f"--peer {name} is not known: with --bits {bits} expected {', '.join(known)}")
    folder.mkdir(parents=True, exist_ok=True)
    results = [Result(one, one.name) for one in engines if one.kind == "charonia" or not peers or one.name in peers]
    with ExitStack() as stack:
        workers: dict[str, _Worker] = {}
        for result in results:
            try:
                python, result.label = _environment(result.peer, folder, install, say)
                say(f"{result.label}: making and loading the model")
                model = gguf.absolute() if gguf else _model(result.peer, shape, python, folder)
                longest, log = max(*prompts, _DECODE_PROMPT) + tokens, folder / f"{result.peer.name}.log"
                arguments = ["run", result.peer.kind, model, threads, longest, max(batches), result.peer.option]
                worker = stack.enter_context(_Worker(python, arguments, threads, log))
                result.info = worker.answer()
                for batch in batches:
                    worker.run(batch, _DECODE_PROMPT, 4)
                workers[result.peer.name] = worker
            except PeerError as error:
                result.missing = str(error)
                if result.is_ours:
                    raise ModelError(f"{result.label} cannot run {shape}: {error}") from error
        limits = [_engine.measure_read_bandwidth(threads)]
        for number in range(rounds):
            for result in results:
                if worker_of := workers.get(result.peer.name):
                    say(f"round {number + 1} of {rounds}: {result.label}")
                    try:
                        _measure(worker_of, result, prompts, batches, tokens)
                    except PeerError as error:
                        result.missing = str(error)
                        del workers[result.peer.name]
            limits.append(_engine.measure_read_bandwidth(threads))
        for result in results:
            if worker_of := workers.get(result.peer.name):
                result.peak_mb = worker_of.peak_mb()
    return results, limits


def _measure(worker: _Worker, result: Result, prompts: Sequence[int], batches: Sequence[int], tokens: int) -> None:
    for prompt in prompts:
        result.prefill_s.setdefault(prompt, []).append(worker.run(1, prompt, 2)[0])
    for batch in batches:
        result.decode_s.setdefault(batch, []).append(worker.run(batch, _DECODE_PROMPT, tokens)[1])


def _environment(peer: Peer, folder: Path, install: bool, say: Callable[[str], None]) -> tuple[Path, str]:
    """Return the Python that runs the engine, and a label with the version. Makes the environment if it is missing or
    has other packages."""
    packages = _PACKAGES[peer.kind]
    if not packages:
        return Path(sys.executable), peer.name
    place = folder / peer.kind
    python, stamp, wanted = place / "bin" / "python", place / "installed.txt", "\n".join(packages)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        if not install:
            raise PeerError(f"it is not installed with {', '.join(packages)}, and --no-install was given")
        say(f"installing {', '.join(packages)} into {place}")
        venv.create(place, clear=True, with_pip=True)
        _call(
            [python, "-m", "pip", "--quiet", "install", *packages], "pip install failed", env={**os.environ, **_BUILD}
        )
        if peer.kind == "llama_cpp":  # only its source has the converter to GGUF
            pip = [python, "-m", "pip", "--quiet", "download", "--no-deps", "--no-binary", packages[0]]
            _call([*pip, "--dest", place / "source", packages[0]], "pip download failed")
            shutil.unpack_archive(next((place / "source").glob("*.tar.gz")), place / "source", filter="data")
        if peer.kind == "openvino":  # this dependency does not fit PyTorch's CPU build
            _call([python, "-m", "pip", "--quiet", "uninstall", "--yes", "torchvision"], "pip uninstall failed")
        stamp.write_text(wanted, encoding="utf-8")
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    main = "transformers" if peer.kind == "transformers" else packages[0]
    return python, f"{peer.name} {_call([python, '-c', code, main], 'it is not installed completely').strip()}"


def _model(peer: Peer, shape: str, python: Path, folder: Path) -> Path:
    """Return the model in the engine's format; converts it once."""
    scheme = peer.variant if peer.kind == "charonia" or peer in GPT_OSS_ENGINES else ""
    source = _once(
        folder / "models" / f"{shape}{scheme and '-'}{scheme}",
        lambda place: write_random_model(
            place, replace(parse_shape(shape), max_positions=_MAX_POSITIONS), scheme=scheme, quick=True
        ),
    )
    if peer.kind in ("charonia", "transformers"):
        return source

    def convert(variant: str, source: Path) -> Path:
        return _once(
            folder / "models" / f"{shape}-{peer.kind}{variant and '-'}{variant}",
            lambda place: _call(
                [python, _WORKER, "convert", peer.kind, source, variant, place], "converting the model failed"
            ),
        )

    if peer.kind == "llama_cpp" and peer.variant and not scheme:
        source = convert("", source)  # llama.cpp quantises its own 16-bit file
    return convert(peer.variant, source)


def _once(place: Path, make: Callable[[Path], Any]) -> Path:
    if not (place / "made").exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        make(place)
        (place / "made").touch()
    return place


def _call(command: Sequence[object], failure: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=env)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        reason = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])
        raise PeerError(f"{failure} with status {done.returncode}: {reason}")
    return done.stdout


def peer_records(shape: str, results: Sequence[Result], limits: Sequence[float], tokens: int) -> list[Record]:
    """Make the records of all measured engines. Shares of the read limit use the best bandwidth measurement. If an
    engine does not report the bytes that a step reads, the first engine's value is used."""
    measured = [result for result in results if not result.missing]
    peers = [result for result in measured if not result.is_ours]
    found = []
    for result in measured:
        read = 1e6 * result.info.get("weight_mb_per_step", results[0].info["weight_mb_per_step"])

        def record(name: str, unit: str, values: Sequence[float], label: str = result.label) -> None:
            found.append(Record.of(f"peers, {shape}", name, unit, values, case={"engine": label}))

        for prompt, seconds in result.prefill_s.items():
            record(f"prefill of {prompt}", "tokens/s", [prompt / one for one in seconds])
            if result.is_ours and peers:
                best = min(median(peer.prefill_s[prompt]) for peer in peers)
                record(f"prefill of {prompt}", "times the best peer", [best / median(seconds)])
        for batch, seconds in result.decode_s.items():
            steps = [(tokens - 1) / one for one in seconds]
            record(f"decode, batch {batch}", "tokens/s", [batch * one for one in steps])
            record(f"decode, batch {batch}", "% of the read limit", [100 * read * one / max(limits) for one in steps])
            if result.is_ours and peers:
                best = min(median(peer.decode_s[batch]) for peer in peers)
                record(f"decode, batch {batch}", "times the best peer", [best / median(seconds)])
        record("peak memory", "MB", [result.peak_mb])
    return found
