"""Finds the models that the user named, and makes workspaces of them that Triton can serve."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO

from charonia import _engine
from charonia.errors import InvalidRequestError, ModelError, ServeError, UnsupportedError, named_as_given
from charonia.gguf.folder_names import model_file
from charonia.serve import shares
from charonia.serve.models import Served, asked_for, with_labels
from charonia.settings import ServeSettings, env_name
from charonia.triton_models import answers_dir, source_dir
from charonia.weights import hub, workspace
from charonia.weights.built_in import DEMO, SMOLLM2, built_in
from charonia.weights.draft_model import METHOD, NO_MODEL, draft_of, draft_settings, reads_head
from charonia.weights.mtp import mtp_of
from charonia.weights.tensor_parallel import ranks_of

_LOCK_S = 600.0  # making a workspace takes less than a second, except if weights in .bin files are converted
_LOOK_EVERY_S = 0.1
_REJECTS = (InvalidRequestError, ModelError, UnsupportedError)
_MODEL_FILES = ("*.json", "[0-9]_*/config.json", "*.jinja", "*.model", "*.txt", "*.safetensors", "*.bin", "*.gguf")


def model_or_default(model: str | None, inference: Mapping[str, str], say: Callable[[str], None]) -> str:
    """The model, or the default one: SmolLM2, or the demo model if SmolLM2 cannot be served. `say` is called with the
    reason. Raises ServeError if there is none, and for SmolLM2 by name if it cannot be served with these settings."""
    smollm2, demo = built_in(SMOLLM2), built_in(DEMO)
    if model and not (smollm2 and workspace.existing(model) == smollm2):
        return model
    why = _why_no_smollm2(inference)
    if model:
        if why:
            raise ServeError(f"SmolLM2 {why}: change that setting, or name another model, such as MODEL={DEMO}")
        return model
    if not why and smollm2 is None:
        why = "has not been downloaded: .venv/bin/python scripts/get_smollm2.py does it"
    if not why:
        return str(smollm2)
    if demo is None:
        raise ServeError(
            "no model was named: give the command one, or set MODEL, to a model folder, a workspace or a hub id"
        )
    say(f"serving the demo model, because the default model SmolLM2 {why}")
    return str(demo)


def _why_no_smollm2(inference: Mapping[str, str]) -> str:
    """Why SmolLM2 cannot be served with these settings; empty if it can."""
    if (scheme := inference.get("quantization", "none")) != "none":
        return f"is quantised already, so it cannot be served with CHARONIA_QUANTIZATION={scheme}"
    if (ranks := ranks_of(inference)) > 1:
        return f"cannot be divided: CHARONIA_TENSOR_PARA_SIZE={ranks}"
    return ""


def prepare_all(
    settings: ServeSettings,
    run_dir: Path,
    inference: Mapping[str, str],
    say: Callable[[str], None],
    held: ExitStack,
) -> list[Served]:
    """The models to serve with their workspaces, in the order of the settings. The workspaces count as served until
    `held` is closed. Several models share the memory. Raises CharoniaError for models that do not exist, are not
    supported or do not fit."""
    found = []
    asked = asked_for(settings)
    if settings.chat_template is not None:
        if not settings.chat_template.expanduser().is_file():
            raise ServeError(f"{env_name('chat_template')}={settings.chat_template} is not a file")
        if len(asked) > 1:
            raise ServeError(
                f"{env_name('chat_template')}={settings.chat_template} is for one model, and {len(asked)} were named: "
                "convert a model with charonia convert --chat-template, and serve its workspace"
            )
    for name, model in asked:
        workspace_dir = prepare(model, run_dir, inference, say, held)
        if settings.chat_template is not None:
            from charonia.text.tokenizer import load_tokenizer, replace_chat_template  # no other start needs NumPy

            replace_chat_template(load_tokenizer(workspace_dir / workspace.TOKENIZER), settings.chat_template)
        found.append((name or model_name(workspace_dir), workspace_dir))
    given = shares.parse_shares(settings.model_shares, len(found))
    served = with_labels(found)
    if len(served) == 1:
        # The engine checks these settings too, but only after Triton has started.
        checked = inference.get("lora_adapters") or inference.get("kv_offload_memory")
        quantised = shares.setting_of(served[0], inference, "quant_policy") != "0"  # which latent attention rejects
        if checked or quantised or draft_of(inference) or mtp_of(inference) or reads_head(inference):
            made = _engine.plan_memory(served[0].workspace / workspace.WEIGHTS, dict(inference))
            if made["num_blocks"] == 0:
                raise ServeError(f"{served[0].name} does not fit: {made['warnings'][-1]}")
        return served
    return (shares.rotate if settings.models_autoload else shares.divide)(served, inference, given)


def prepare_draft(
    inference: Mapping[str, str], run_dir: Path, say: Callable[[str], None], held: ExitStack
) -> dict[str, str]:
    """The inference parameters with the workspace of their draft model, if they name one, which counts as served until
    `held` is closed. Until then, errors name the draft model as the user gave it. Raises CharoniaError."""
    draft = draft_of(inference)
    if draft is None:
        return dict(inference)
    if reads_head(inference):
        weights = _head_weights(draft, run_dir, inference, say, held)
    else:
        weights = prepare(draft, run_dir, {"tensor_para_size": "1"}, say, held) / workspace.WEIGHTS
    held.enter_context(named_as_given(weights, draft))
    return {**inference, **draft_settings(inference, weights)}


def _head_weights(
    head: str, run_dir: Path, inference: Mapping[str, str], say: Callable[[str], None], held: ExitStack
) -> Path:
    with workspace.located(head) as location:
        _say_pinned(head, location, say)
        if location.weights is None:
            made_for = {METHOD: inference[METHOD]}
            return _linked(location.path, run_dir / "workspaces", made_for, say, held) / workspace.WEIGHTS
        _say_notes(location.path, say)
        if not workspace.hold(location.path, held):
            raise ModelError(
                f"{location.path} cannot be held as a workspace while it is served: name the folder that charonia "
                "convert made, not a folder inside it. If it is that folder, it is being replaced: start again"
            )
        return location.weights


def model_name(workspace_dir: Path) -> str:
    """The name that config.ini gives the model."""
    config = workspace_dir / workspace.WEIGHTS / "config.ini"
    return str(_engine.read_config_ini(config).get("model_name") or workspace_dir.name)


def prepare(
    model: str | None,
    run_dir: Path,
    inference: Mapping[str, str],
    say: Callable[[str], None] = lambda _: None,
    held: ExitStack | None = None,
) -> Path:
    """The workspace of `model` (folder, workspace or hub id; None: the default model), linked in run_dir where there is
    none yet, for the ranks of `inference`. `say` is called with the commit of a hub id. The workspace counts as served
    until `held` is closed. Raises CharoniaError for a model that does not exist or is not supported."""
    if held is None:
        with ExitStack() as for_now:
            return prepare(model, run_dir, inference, say, for_now)
    named = model_or_default(model, inference, say)
    with workspace.located(named) as location:
        return _prepared(named, location, run_dir, inference, say, held)


def _say_pinned(named: str, location: workspace.Location, say: Callable[[str], None]) -> None:
    if pinned := hub.pinned_id(named, location.path):
        say(f"{named} is {pinned}: with MODEL={pinned} every server has the same files, whatever the hub has later")


def _prepared(
    named: str,
    location: workspace.Location,
    run_dir: Path,
    inference: Mapping[str, str],
    say: Callable[[str], None],
    held: ExitStack,
) -> Path:
    _say_pinned(named, location, say)
    if location.is_workspace:
        from charonia.weights.quality_record import update_manifest  # with Rich, which no other start needs

        if workspace.is_head(location.path):
            raise UnsupportedError(f"{location.path} {NO_MODEL}")
        if not (location.path / "model_repository" / "ensemble" / "config.pbtxt").is_file():
            raise ServeError(f"{location.path} has no model_repository: name the workspace, not a folder inside it")
        manifest = workspace.read_manifest(location.path / workspace.WEIGHTS)
        for name in workspace.TRITON_MODELS:
            if not (location.path / "model_repository" / name / "config.pbtxt").is_file():
                mend = workspace.convert_command(manifest.source, location.path, manifest.ranks)
                raise ModelError(f"{location.path} is of an older version, without Triton model {name!r}: run {mend}")
        if "tensor_para_size" in inference and ranks_of(inference) != manifest.ranks:
            mend = workspace.convert_command(manifest.source, location.path, ranks_of(inference))
            raise ModelError(
                f"{location.path} was converted for {manifest.ranks} ranks, and tensor_para_size is "
                f"{ranks_of(inference)}: run {mend}"
            )
        update_manifest(location.path / workspace.WEIGHTS)
        workspace.hold(location.path, held)
        _say_notes(location.path, say)
        return location.path
    made_for = {key: inference[key] for key in ("task",) if key in inference}
    made_for["tensor_para_size"] = str(ranks_of(inference))
    if mtp_of(inference):
        made_for[METHOD] = inference[METHOD]
    return _linked(location.path, run_dir / "workspaces", made_for, say, held)


def _say_notes(root: Path, say: Callable[[str], None]) -> None:
    for note in workspace.read_notes(root):
        say(f"warning: {note}")


def _linked(
    model: Path, folder: Path, settings: Mapping[str, str], say: Callable[[str], None], held: ExitStack
) -> Path:
    """A linked workspace. settings: tensor_para_size, task, and speculative_method = mtp; or for an EAGLE-3 head only
    speculative_method = eagle3.

    It is made again when the model or this package has changed. The old workspace stays while a server uses it, because
    that server reads it again when its Triton is restarted."""
    name = model.parent.name if model.name == "model" else model.name
    ranks, task = ranks_of(settings), settings.get("task", "auto")
    tp = (f"-tp{ranks}" if ranks > 1 else "") + (f"-{task}" if task != "auto" else "")
    tp += f"-{settings[METHOD]}" if METHOD in settings else ""
    # Folders with the same name elsewhere have other workspaces, which may be in use. A changed GGUF file has another
    # folder, and the same place.
    source = (model_file(model) or model).resolve()
    place = f"{name}{tp}-{hashlib.sha256(os.fsencode(source)).hexdigest()[:8]}"
    destination = folder / f"{place}-{_fingerprint(model)}"
    lock = folder / f".{place}.lock"
    if workspace.hold(destination, held):
        _say_notes(destination, say)
    else:
        with _alone(lock, say):
            if not workspace.hold(destination, held):
                from charonia.weights.convert import link_workspace  # with NumPy, which a start takes long to import

                _remove_outdated(folder, place, destination)
                if reads_head(settings):
                    held.push(partial(_discard, destination, lock))  # after the hold, which is released first
                link_workspace(model, destination, force=True, settings=settings, head=reads_head(settings))
                workspace.hold(destination, held)
    _if_alone(lock, lambda: _remove_outdated(folder, place, destination))
    return destination


def _discard(made: Path, lock: Path, kind: type[BaseException] | None, *_: object) -> None:
    """Remove the workspace of a head if the models or settings are rejected. After another error, such as a Triton that
    does not start, the next start uses it."""
    if kind is not None and issubclass(kind, _REJECTS):
        _if_alone(lock, lambda: workspace.remove_unheld(made))


def _remove_outdated(folder: Path, place: str, destination: Path) -> None:
    """Removes old workspaces that no server uses."""
    for other in folder.glob(f"{glob.escape(place)}-" + "[0-9a-f]" * 16):
        if other != destination:
            workspace.remove_unheld(other)


def _if_alone(lock: Path, remove: Callable[[], None]) -> None:
    """Removes, unless another process makes a workspace, which it does not hold yet."""
    with contextlib.suppress(OSError):  # a folder that is there may be read-only
        if taken := _taken(lock):
            with taken:
                remove()
                lock.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(lock: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Makes other servers wait that start with the same model and run folder, because they would replace the workspace.
    Raises ModelError after _LOCK_S."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _LOCK_S
    told = False
    while (taken := _taken(lock)) is None:
        if time.monotonic() >= deadline:
            raise ModelError(
                f"another process has been making a workspace of this model for {_LOCK_S / 60:g} minutes: end it "
                f"(`fuser {lock}` says which), or set CHARONIA_RUN_DIR to a folder of this server's own",
                503,
            )
        if not told:
            say(f"another charonia serve makes a workspace of this model: waiting for it ({lock})")
            told = True
        time.sleep(_LOOK_EVERY_S)
    with taken:
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _taken(lock: Path) -> IO[bytes] | None:
    """The locked file; None if another process has it. The process that has the lock removes the file, so the lock of a
    removed file does not count."""
    while True:
        file = lock.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError:  # a file system without locks: charonia serve has refused it
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                return file
        file.close()


def _fingerprint(model: Path) -> str:
    """Sixteen hex digits that change when a file of the model or of the code that links it does."""
    package = Path(__file__).resolve().parent.parent
    files = [file for pattern in _MODEL_FILES for file in model.glob(pattern)]
    files += [
        *package.rglob("*.py"),
        *answers_dir().glob("*.py"),
        *source_dir().glob("*processing/*.py"),
        *source_dir().glob("model_repository/*.py"),
        *source_dir().glob("model_repository/*/*"),
    ]
    digest = hashlib.sha256(str(model.resolve()).encode())
    for file in sorted(files):
        status = file.stat()
        digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
