"""Converts SentencePiece's tokenizer.model to a fast tokenizer with the same ids (Kudo and Richardson 2018).

The conversion of transformers is not used, because it depends on the class that a folder names and on the version.
"""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from charonia.errors import ModelError
from charonia.json_files import read_json
from charonia.text import prompt_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

FILE = "tokenizer.model"
SPACE = "\u2581"
_UNIGRAM, BPE = 1, 2  # TrainerSpec.model_type
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # SentencePiece.type
# Field numbers in sentencepiece_model.proto: ModelProto, SentencePiece, TrainerSpec and NormalizerSpec.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _SUFFIX, _BYTE_FALLBACK, _UNK_ID, _BOS_ID, _EOS_ID, _UNK_PIECE = 3, 24, 35, 40, 41, 42, 45
_CHARSMAP, _ADD_PREFIX, _REMOVE_SPACES, _ESCAPE_SPACES = 2, 3, 4, 5


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    type: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The parts of a tokenizer.model that affect encoding. The index of a piece is its id. An id below 0 means none."""

    pieces: list[Piece]
    type: int
    byte_fallback: bool
    unk_id: int
    bos_id: int
    eos_id: int
    unk_piece: str
    charsmap: bytes
    add_prefix: bool
    remove_extra_spaces: bool
    escape_spaces: bool


def read_model(file: Path) -> SentencePieceModel | None:
    """Parse a tokenizer.model. Returns None if the file has another format, for example tiktoken's.

    Raises ModelError if the file is damaged.
    """
    data = file.read_bytes()
    if data[:1] != bytes([_PIECE << 3 | 2]):  # a SentencePiece model starts with its pieces
        return None
    try:
        parts = list(_fields(data))
        pieces = [dict(_fields(value)) for key, value in parts if key == _PIECE]
        specs = dict(parts)
        trainer, normalizer = (dict(_fields(specs[key])) for key in (_TRAINER, _NORMALIZER))
        if trainer.get(_SUFFIX):
            raise ModelError(
                f"{file} has spaces after words (treat_whitespace_as_suffix), which is not supported: a "
                "tokenizer.json is needed"
            )
        return SentencePieceModel(
            [
                Piece(
                    piece[_TEXT].decode(),
                    struct.unpack("<f", piece.get(_SCORE, bytes(4)))[0],
                    piece.get(_TYPE, _NORMAL),
                )
                for piece in pieces
            ],
            trainer.get(_MODEL_TYPE, _UNIGRAM),
            bool(trainer.get(_BYTE_FALLBACK, 0)),
            trainer.get(_UNK_ID, 0),
            trainer.get(_BOS_ID, 1),
            trainer.get(_EOS_ID, 2),
            trainer.get(_UNK_PIECE, b"<unk>").decode(),
            normalizer.get(_CHARSMAP, b""),
            *(bool(normalizer.get(key, 1)) for key in (_ADD_PREFIX, _REMOVE_SPACES, _ESCAPE_SPACES)),
        )
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise ModelError(f"{file} is not a SentencePiece model ({error}): download it again") from error


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message in protobuf's wire format: number and value, an int or bytes. Raises ValueError."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value - (1 << 64) if value >> 63 else value

    while position < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"wire type {kind} at byte {position}")
        size = varint() if kind == 2 else 8 if kind == 1 else 4
        position += size
        if not 0 <= size <= position <= len(data):
            raise ValueError(f"{size} bytes at byte {position - size}, of {len(data)}")
        yield key >> 3, data[position - size : position]


def load_sentencepiece(folder: Path, model: SentencePieceModel) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder without tokenizer.json. `model`: the result of read_model.

    Special tokens and the chat template come from the folder's JSON files.
    """
    settings_file = folder / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.is_file() else {}
    with TemporaryDirectory() as name:
        whole = Path(name)
        for file in folder.iterdir():
            if file.suffix in (".json", ".jinja") and not file.name.endswith(".index.json"):
                shutil.copyfile(file, whole / file.name)
        if (folder / "additional_chat_templates").is_dir():
            shutil.copytree(folder / "additional_chat_templates", whole / "additional_chat_templates")
        convert(model, legacy=settings.get("legacy") is not False).save(str(whole / "tokenizer.json"))
        tokenizer = prompt_ids.load_tokenizer(whole)
    for kind, token_id in (("bos", model.bos_id), ("eos", model.eos_id), ("unk", model.unk_id)):
        key = f"{kind}_token"
        if getattr(tokenizer, key) is None and key not in settings and 0 <= token_id < len(model.pieces):
            setattr(tokenizer, key, model.pieces[token_id].text)
    default = prompt_ids.class_name(settings) in prompt_ids.BEGINNING_CLASSES
    prompt_ids.set_beginning(tokenizer, bool(settings.get("add_bos_token", default)))
    return tokenizer


def convert(model: SentencePieceModel, legacy: bool) -> Tokenizer:
    """Build the tokenizer. legacy: whether the prefix is also added to each piece of text after a special token."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    defined = [piece.text for piece in model.pieces if piece.type == _USER_DEFINED]
    made: Any
    if model.type == BPE:
        vocabulary = {piece.text: token_id for token_id, piece in enumerate(model.pieces)}
        made = models.BPE(
            vocabulary,
            _merges(model),
            unk_token=model.unk_piece,
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
            ignore_merges=bool(defined),  # user-defined symbols have no merges; they are matched as a whole
        )
    elif model.type == _UNIGRAM:
        made = models.Unigram(
            [(piece.text, piece.score) for piece in model.pieces], model.unk_id, byte_fallback=model.byte_fallback
        )
    else:
        raise ModelError(f"tokenizer.model is of type {model.type}; supported: 1 (unigram) and 2 (BPE)")
    tokenizer = Tokenizer(made)
    normal: list[Any] = []
    if model.charsmap:
        normal.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_spaces:
        normal += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_prefix and legacy:
        normal.append(normalizers.Prepend(SPACE))
    if model.escape_spaces:
        normal.append(normalizers.Replace(" ", SPACE))
    tokenizer.normalizer = normalizers.Sequence(normal)
    splits: list[Any] = []
    if model.add_prefix and not legacy:
        # A single Metaspace omits the prefix if the text starts with a space. Here the first one adds a space (no
        # normalized text starts with one), and the second one replaces spaces.
        splits = [
            pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="first", split=False),
            pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=False),
        ]
    if defined:
        longest_first = sorted(defined, key=len, reverse=True)
        splits.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated"))
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if model.add_prefix else steps)
    control = [piece.text for piece in model.pieces if piece.type == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in control])
    return tokenizer


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Return merges in SentencePiece's order: highest score first. SentencePiece merges ordinary pieces only."""
    ranks = {
        piece.text: (-piece.score, token_id) for token_id, piece in enumerate(model.pieces) if piece.type == _NORMAL
    }
    merges = [
        (rank, token[:cut], token[cut:])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    return [(left, right) for _, left, right in sorted(merges)]
