"""Small trained tokenizers of every kind, and texts that they treat differently."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from charonia.text.token_split import PATTERNS
from charonia.text.tokenizer import PROBES

TEXTS = [
    *PROBES,
    "",
    " ",
    "\n\n\n",
    "▁a ▁▁b",
    "Tab\tnewline\r\nend   ",
    "x=[1,22,333,4444,55555];\n\tif (x) { return 'don''t'; }",
    "ÅÇŠ ﬀ ① Ⅷ ㌔ ｆｕｌｌ",  # noqa: RUF001
    "Ὀδυσσεύς שָׁלוֹם 日本語テキスト 조선말",
    "<s>x</s> a<|im_start|>b <extra>",
    "👍🏽👩‍👩‍👧‍👦🇪🇺",
    "a" * 40,
]
TRAINING = [
    *TEXTS,
    "the quick brown fox jumps over the lazy dog",
    "Hello world, HELLO World, helloWorld",
    "don't we'll I'VE",
]
# The last ones are defaults of classes. transformers adds them to vocabularies that lack them.
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|endoftext|>", "<bos>", "<eos>", "<pad>", "<mask>"]
QWEN, LLAMA = (pattern for pattern in PATTERNS if pattern.startswith("(?i"))
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(
    *stages: Any,
    normalizer: Any = None,
    use_regex: bool = False,
    texts: Sequence[str] = TRAINING,
    size: int = 700,
    ignore_merges: bool = False,
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.normalizer = normalizer
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*stages, last]) if stages else last
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=SPECIAL
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def byte_fallback(
    normalizer: Any,
    pre_tokenizer: Any,
    *,
    strip: bool,
    texts: Sequence[str] = TRAINING,
    size: int = 700,
    alphabet: Sequence[str] = (),
    across_words: bool = False,
) -> Tokenizer:
    """BPE with ▁ for the space and <0xNN> for bytes, like converted SentencePiece models. across_words: some tokens
    contain a space."""
    learnt = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    learnt.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=not across_words)
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=list(alphabet),
        limit_alphabet=len(alphabet) + 8 if alphabet else 150,
        show_progress=False,
        special_tokens=special,
    )
    learnt.train_from_iterator(texts, trainer)
    definition = json.loads(learnt.to_str())
    definition["added_tokens"] = [token for token in definition["added_tokens"] if "<0x" not in token["content"]]
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, show_progress=False, special_tokens=SPECIAL, unk_token="<unk>", max_piece_length=8
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    return tokenizer


PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: byte_level(use_regex=True),
    "llama 3": lambda: byte_level(split(LLAMA)),
    "qwen": lambda: byte_level(split(QWEN), normalizer=normalizers.NFC()),
    "tekken": lambda: byte_level(split(TEKKEN)),
    "deepseek": lambda: byte_level(split(r"\p{N}{1,3}"), split("[一-龥]+"), split(QWEN)),
    "digits": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "lowercase": lambda: byte_level(
        pre_tokenizers.Punctuation(), normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "stripped": lambda: byte_level(
        pre_tokenizers.WhitespaceSplit(), normalizer=normalizers.Sequence([normalizers.Strip(), normalizers.NFD()])
    ),
    "llama 2": lambda: byte_fallback(PREPEND, None, strip=True),
    "metaspace": lambda: byte_fallback(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False), strip=True),
    "gemma": lambda: byte_fallback(
        normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"), strip=False
    ),
    "unigram": unigram,
}
