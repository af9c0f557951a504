"""Builds the tokenizer of a GGUF file, in the files of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charonia.errors import ModelError, UnsupportedError
from charonia.text import prompt_ids, sentencepiece_model
from charonia.text.sentencepiece_model import Piece, SentencePieceModel

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type, which has SentencePiece's numbers
_ADDED = (_CONTROL, _USER_DEFINED)  # they are matched as a whole
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # in Phi-3; its other special tokens remove those after them
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # in Hugging Face's files, and here
# Tokens that end a turn. Many files name only the token that ends a text.
_TURN_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)

# Patterns that cut a text into pieces before bytes are merged, as in the tokenizer.json of the models.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASE_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_ENDS}"


_LLAMA3 = (_words(r"\p{N}{1,3}"),)
_QWEN2 = (_words(r"\p{N}"),)
_QWEN3_5 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_TEKKEN = (rf"{_CASES[0]}|{_CASES[1]}|\p{{N}}|{_CASE_ENDS}",)
_O200K = (rf"{_CASES[0]}{_CONTRACTIONS}?|{_CASES[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASE_ENDS}",)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# The letters with cases that the pattern of DeepSeek V2 lists.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK2 = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DIGITS = (r"\p{N}", _GPT2)  # each digit alone, then GPT-2's pattern
# By tokenizer.ggml.pre.
PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "olmo": (_GPT2,),
    "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "lfm2": _LLAMA3,
    "chatglm-bpe": _LLAMA3,
    "glm4": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "hunyuan": _QWEN2,
    "solar-open": _QWEN2,
    "qwen35": _QWEN3_5,
    "tekken": _TEKKEN,
    "gpt-4o": _O200K,
    "minimax-m2": _O200K,
    "deepseek-v3": _DEEPSEEK3,
    "deepseek-llm": _DEEPSEEK2,
    "hunyuan-dense": _DEEPSEEK3,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "mellum2": _DIGITS,
    "command-r": _DIGITS,
    "exaone": _DIGITS,
}
_WHOLE_PIECES = {"llama-bpe", "llama3", "llama-v3", "lfm2", "glm4", "tekken"}  # a piece that is a token is not merged
_BEGINS = {"llama-bpe", "llama3", "llama-v3", "lfm2", "tekken"}  # add the beginning token unless the file says not to
_COMPOSED = {"qwen2", "deepseek-r1-qwen", "qwen35", "command-r"}  # texts are normalised to NFC


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template.

    Raises UnsupportedError for a kind of tokenizer or a pre-tokenizer that is not known, and ModelError for missing
    values.
    """
    kind = metadata.get(f"{_PREFIX}model")
    makers = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4}
    if kind not in makers:
        raise UnsupportedError(
            f"the tokenizer of the GGUF file is of kind {kind!r}, which is not supported; supported: "
            f"{', '.join(makers)}. Use the model's Hugging Face folder"
        )
    tokens = _list(metadata, "tokens")
    tokenizer = makers[kind](metadata, tokens)
    ids = {role: metadata.get(f"{_PREFIX}{name}_token_id") for role, name in _ROLES.items()}
    named = {role: tokens[token] for role, token in ids.items() if isinstance(token, int) and 0 <= token < len(tokens)}
    _add_around(tokenizer, metadata, {role: (named[role], int(ids[role] or 0)) for role in named})
    content = json.loads(tokenizer.to_str())
    if kind == "llama" and _is_phi3(metadata):
        for token in content["added_tokens"]:
            token["rstrip"] = token["content"] not in _KEEP_SPACES
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    settings: dict[str, Any] = {f"{role}_token": token for role, token in named.items()}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if template := metadata.get(_TEMPLATE):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _is_phi3(metadata: Mapping[str, Any]) -> bool:
    """Whether special tokens remove the spaces and line breaks after them, which no metadata say."""
    name = str(metadata.get("general.name", "")).lower()
    return metadata.get("general.architecture") == "phi3" or "phi-3" in name or "phi3" in name


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a response: those that the file names, and tokens with a known text."""
    names = (f"{_PREFIX}{kind}_token_id" for kind in ("eos", "eot", "eom"))
    tokens, types = _list(metadata, "tokens"), metadata.get(f"{_PREFIX}token_type", [])
    named = [metadata[name] for name in names if isinstance(metadata.get(name), int)]
    ends = [token for token in named if 0 <= token < len(tokens)]
    special = {token: index for index, token in enumerate(tokens[: len(types)]) if types[index] in _ADDED}
    known = [text for text in _TURN_ENDS if text in special]
    if "<|return|>" in known and "<|call|>" in known and "<|end|>" in known:
        known.remove("<|end|>")  # in GPT-OSS it ends a message, and a response may have several
    return list(dict.fromkeys([*ends, *(special[text] for text in known)]))


def _list(metadata: Mapping[str, Any], key: str) -> list[Any]:
    value = metadata.get(f"{_PREFIX}{key}")
    if not isinstance(value, list) or not value:
        raise ModelError(f"the GGUF file has no {_PREFIX}{key}: use a file with a tokenizer")
    return value


def _types(metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    types = metadata.get(f"{_PREFIX}token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens, but {len(types)} values of {_PREFIX}token_type")
    return list(types)


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """Byte-level BPE, as in GPT-2."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get(f"{_PREFIX}pre", "default")
    if name not in PATTERNS:
        raise UnsupportedError(
            f"the GGUF file has the pre-tokenizer {name!r}, which is not supported; supported: "
            f"{', '.join(sorted(PATTERNS))}. Use the model's Hugging Face folder"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE_PIECES))
    if name in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[name]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added(metadata, tokens))
    return tokenizer


def _added(metadata: Mapping[str, Any], tokens: list[str]) -> list[AddedToken]:
    from tokenizers import AddedToken

    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, _types(metadata, tokens), strict=True)
        if kind in _ADDED
    ]


def _gemma4(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """BPE of characters, with SentencePiece's mark of spaces and with bytes for unknown characters."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = tokens[metadata.get(f"{_PREFIX}unknown_token_id", 3)]
    made = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(made)
    tokenizer.normalizer = normalizers.Replace(" ", sentencepiece_model.SPACE)
    steps = [decoders.Replace(sentencepiece_model.SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_tokens(_added(metadata, tokens))
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE, whose merges follow from the scores."""
    scores, types = _list(metadata, "scores"), _types(metadata, tokens)
    # Converters write the spaces of user-defined tokens as spaces.
    pieces = [
        Piece(token.replace(" ", sentencepiece_model.SPACE) if kind == _USER_DEFINED else token, score, kind)
        for token, score, kind in zip(tokens, scores, types, strict=True)
    ]
    unknown = metadata.get(f"{_PREFIX}unknown_token_id", 0)
    model = SentencePieceModel(
        pieces=pieces,
        type=sentencepiece_model.BPE,
        byte_fallback=True,
        unk_id=unknown,
        bos_id=metadata.get(f"{_PREFIX}bos_token_id", -1),
        eos_id=metadata.get(f"{_PREFIX}eos_token_id", -1),
        unk_piece=tokens[unknown],
        charsmap=b"",
        add_prefix=bool(metadata.get(f"{_PREFIX}add_space_prefix", True)),
        remove_extra_spaces=bool(metadata.get(f"{_PREFIX}remove_extra_whitespaces", False)),
        escape_spaces=True,
    )
    return sentencepiece_model.convert(model, legacy=True)


def _add_around(tokenizer: Tokenizer, metadata: Mapping[str, Any], named: Mapping[str, tuple[str, int]]) -> None:
    """Make the tokenizer add the beginning token before a text and the end token after it, if the file says so."""
    kind = metadata.get(f"{_PREFIX}model")
    begins = kind == "llama" or metadata.get(f"{_PREFIX}pre") in _BEGINS
    wanted = {
        # The first files of Gemma 4 say that it has no beginning token.
        "bos": kind == "gemma4" or metadata.get(f"{_PREFIX}add_bos_token", begins),
        "eos": metadata.get(f"{_PREFIX}add_eos_token", False),
    }
    bos, eos = (named.get(role) if wanted[role] else None for role in ("bos", "eos"))
    if bos or eos:
        tokenizer.post_processor = prompt_ids.around_texts(bos, eos)
