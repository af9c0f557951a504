"""Token tables: the joined bytes of a text's tokens are the text, and equal the output of the tokenizer's decoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizer_kinds import KINDS, SPECIAL
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from charonia.errors import ModelError, UnsupportedError
from charonia.text.token_table import TokenTable, build_token_table
from charonia.text.tokenizer import load_tokenizer

# Scripts that a byte-level or byte-fallback tokenizer splits into bytes, and characters without a glyph.
TEXTS = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("aZ 9.,\n\t ▁é中文字عربيабв👩‍👧🏽🇪🇺\u0301\u200d<0x41>"),
    ),
    max_size=40,
).filter(lambda text: not any(token in text for token in SPECIAL))


BYTE_LEVEL, SENTENCEPIECE, METASPACE = (
    PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), eos_token="</s>", unk_token="<unk>")
    for kind in ("gpt2", "llama 2", "metaspace")
)
BYTE_LEVEL.add_tokens([AddedToken("<think>", special=False), AddedToken("café société", special=False)])
BYTE_LEVEL_TABLE = build_token_table(BYTE_LEVEL, len(BYTE_LEVEL))
SENTENCEPIECE_TABLE = build_token_table(SENTENCEPIECE, len(SENTENCEPIECE))
METASPACE_TABLE = build_token_table(METASPACE, len(METASPACE))


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@given(TEXTS)
def test_byte_level_tokens_joined_are_the_text(text: str) -> None:
    assert BYTE_LEVEL_TABLE.text(encode(BYTE_LEVEL, text)) == text.encode()


@given(TEXTS)
def test_byte_level_tokens_joined_equal_the_decoded_text(text: str) -> None:
    ids = encode(BYTE_LEVEL, text)
    assert BYTE_LEVEL_TABLE.text(ids).decode() == BYTE_LEVEL.decode(ids)


@given(TEXTS)
def test_sentencepiece_tokens_joined_are_the_text_after_one_space(text: str) -> None:
    expected = (" " + text).replace("▁", " ") if text else ""
    assert SENTENCEPIECE_TABLE.text(encode(SENTENCEPIECE, text)).decode() == expected


@given(TEXTS)
def test_sentencepiece_tokens_joined_and_stripped_equal_the_decoded_text(text: str) -> None:
    ids = encode(SENTENCEPIECE, text)
    assert SENTENCEPIECE_TABLE.strip_leading_space
    assert SENTENCEPIECE_TABLE.text(ids).decode().removeprefix(" ") == SENTENCEPIECE.decode(ids)


@given(TEXTS)
def test_metaspace_tokens_joined_are_the_text_after_at_most_one_space(text: str) -> None:
    assert METASPACE_TABLE.strip_leading_space
    joined = METASPACE_TABLE.text(encode(METASPACE, text)).decode()
    shown = text.replace("▁", " ")
    assert joined == (shown if shown.startswith(" ") or not text else " " + shown)


@pytest.mark.parametrize(
    ("tokenizer", "table"),
    [(BYTE_LEVEL, BYTE_LEVEL_TABLE), (SENTENCEPIECE, SENTENCEPIECE_TABLE)],
    ids=["byte-level", "sentencepiece"],
)
def test_any_tokens_that_make_valid_text_decode_equally(tokenizer: PreTrainedTokenizerFast, table: TokenTable) -> None:
    generator = np.random.default_rng(0)
    plain = [i for i, special in enumerate(table.special) if not special]
    compared = 0
    for _ in range(2000):
        ids: list[int] = generator.choice(plain, 3).tolist()
        try:
            text = table.text(ids).decode()
        except UnicodeDecodeError:
            continue
        compared += 1
        assert (text.removeprefix(" ") if table.strip_leading_space else text) == tokenizer.decode(ids)
    assert compared > 100


def test_added_tokens_stand_for_themselves_and_special_ones_are_no_text() -> None:
    ids = encode(BYTE_LEVEL, "a<think>café société</s>")
    assert BYTE_LEVEL_TABLE.text(ids).decode() == "a<think>café société"
    end = BYTE_LEVEL.convert_tokens_to_ids("</s>")
    assert BYTE_LEVEL_TABLE.special[end] and BYTE_LEVEL_TABLE.tokens[end] == b"</s>"
    assert not BYTE_LEVEL_TABLE.special[BYTE_LEVEL.convert_tokens_to_ids("<think>")]


def test_an_added_token_of_the_byte_alphabet_means_its_own_text() -> None:
    """The decoder maps its letters to bytes, which are no text."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS["gpt2"]())
    tokenizer.add_tokens(["société"])
    assert build_token_table(tokenizer, len(tokenizer)).tokens[-1].decode() == "société"


def test_byte_tokens_are_one_byte() -> None:
    assert SENTENCEPIECE_TABLE.tokens[SENTENCEPIECE.convert_tokens_to_ids("<0xE4>")] == b"\xe4"


def test_larger_vocabulary_is_padded_with_empty_special_tokens() -> None:
    table = build_token_table(BYTE_LEVEL, len(BYTE_LEVEL) + 7)
    assert len(table.tokens) == len(BYTE_LEVEL) + 7
    assert table.tokens[-7:] == [b""] * 7 and all(table.special[-7:])


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(ModelError, match="vocab_size is 100"):
        build_token_table(BYTE_LEVEL, 100)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder(), decoders.Strip(" ", 2, 0), None])
def test_an_unknown_decoder_is_refused(decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(UnsupportedError, match="decoder"):
        build_token_table(PreTrainedTokenizerFast(tokenizer_object=tokenizer), 1)


def test_file_has_offsets_bytes_flags_and_the_leading_space_rule(tmp_path: Path) -> None:
    TokenTable([b"a", b"", b"\xe4\xb8"], [False, True, False], True).save(tmp_path / "t.safetensors")
    with safe_open(tmp_path / "t.safetensors", framework="np") as file:
        assert file.metadata() == {"strip_leading_space": "1"}
        assert file.get_tensor("offsets").tolist() == [0, 1, 1, 3]
        assert file.get_tensor("bytes").tobytes() == b"a\xe4\xb8"
        assert file.get_tensor("special").tolist() == [0, 1, 0]


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tiktoken.model").write_bytes(b"IQ== 0")
    with pytest.raises(ModelError, match=r"needs the model.s own code \(tiktoken.model, Kimi K2\)"):
        load_tokenizer(tmp_path)
