"""Converts Qwen 1's vocabulary, a file of byte strings with ranks (tiktoken's format), to a fast tokenizer.

Byte-pair encoding by ranks repeatedly joins the neighbours whose joined bytes are the token with the lowest rank
(Sennrich et al. 2016). A list of merges in the order of ranks is equivalent. The merge of a token is the last step of
encoding its bytes with the tokens of lower rank.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charonia.errors import ModelError
from charonia.text.token_table import byte_alphabet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FILE = "qwen.tiktoken"
# The pattern that Qwen's code uses to split a text before encoding the pieces.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205)))
# ChatML, with the default system message of Qwen's code.
_CHAT_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def read_ranks(file: Path) -> dict[bytes, int]:
    """Return the rank of each token, which is also its id. Raises ModelError if the file is damaged."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ModelError(f"{file} line {number} is not a token and a rank: download it again") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ModelError(f"{file} does not contain every byte and every rank once: download it again")
    return ranks


def _merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """Return the two tokens that are merged to this one; None if tokens of lower rank do not reduce it to two."""
    own = ranks[token]
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(first + second, own) for first, second in itertools.pairwise(parts)]
        lowest = min(joined)
        if lowest >= own:
            return None
        place = joined.index(lowest)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]


def load_tiktoken(folder: Path, chat: bool) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder with `qwen.tiktoken`. chat: whether it gets Qwen's chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ranks = read_ranks(folder / FILE)
    letters = {byte: letter for letter, byte in byte_alphabet().items()}

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    by_rank = sorted(ranks, key=ranks.__getitem__)
    pairs = [_merge(token, ranks) for token in by_rank if len(token) > 1]
    merges = [(spell(pair[0]), spell(pair[1])) for pair in pairs if pair is not None]
    tokenizer = Tokenizer(models.BPE({spell(token): rank for token, rank in ranks.items()}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _SPECIAL])
    settings: dict[str, Any] = {"chat_template": _CHAT_TEMPLATE} if chat else {}
    make: Any = PreTrainedTokenizerFast  # its constructor has no type hints
    made: PreTrainedTokenizerFast = make(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", clean_up_tokenization_spaces=False, **settings
    )
    return made
