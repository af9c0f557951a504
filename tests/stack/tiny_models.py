# ruff: noqa: RUF001
"""Small models for the tests of the stack, created quickly and without PyTorch.

A *parrot* is a Llama whose layer does nothing and whose output weights map every token to one next token, so a greedy
response is a known chain of tokens. Its vocabulary splits texts in many scripts at any position, also within
characters, and no token occurs twice. The response to a start token `<|text0|>` is TEXTS[0], byte for byte. A *babbler*
has random weights: it generates random tokens, including bytes that are not valid characters.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

TokenizerKind = Literal["byte_level", "byte_fallback"]

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and 42 times it is happy. Isn't it?  Two spaces,\ttab\nline.",
    "敏捷的棕色狐狸跳过了懒狗。海螺是特里同吹响的贝壳,推理引擎在里面运行。你好,世界!",
    "الثعلب البني السريع يقفز فوق الكلب الكسول. مَرْحَبًا بِالعَالَمِ، كيف حالك؟",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👩🏽‍🚀 astronaut, ❤️‍🔥 heart, 🇨🇳🇩🇪 flags, 👍🏿 thumb 🦊",
    "हिन्दी में नमस्ते, ไทย สวัสดี, русский привет, ελληνικά, 한국어 안녕하세요, e\u0301 and é, 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀",
    " a text that begins with a space, then ends with one ",
]
EOS = "<|end|>"
CHAT_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "{{ message.content }}{% endfor %}"
)


def start_token(index: int) -> str:
    """The prompt for the response TEXTS[index] of a parrot."""
    return f"<|text{index}|>"


@dataclass(frozen=True)
class Vocabulary:
    """tokens: every token's string in the tokenizer's alphabet, without added tokens. chains: each text's tokens."""

    tokens: list[str]
    chains: list[list[str]]


def byte_alphabet() -> list[str]:
    """Byte-level BPE's character for each byte (GPT-2's bytes_to_unicode)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def cut_uniquely(symbols: list[str], used: set[str], rng: random.Random) -> list[str]:
    """Join symbols into pieces of 1 to 4 symbols that are not in `used`, and add the pieces to it."""
    pieces: list[str] = []
    begin = 0
    while begin < len(symbols):
        end = min(begin + rng.randint(1, 4), len(symbols))
        while end < len(symbols) and "".join(symbols[begin:end]) in used:
            end += 1
        piece = "".join(symbols[begin:end])
        while piece in used:  # the rest of the text is already used as a piece: join it with the previous piece
            used.discard(pieces[-1])
            piece = pieces.pop() + piece
        used.add(piece)
        pieces.append(piece)
        begin = end
    return pieces


def byte_level_vocabulary(texts: Sequence[str] = TEXTS) -> Vocabulary:
    rng = random.Random(0)
    alphabet = byte_alphabet()
    used = set(alphabet)
    chains = [cut_uniquely([alphabet[byte] for byte in text.encode()], used, rng) for text in texts]
    return Vocabulary(alphabet + [piece for chain in chains for piece in chain], chains)


def byte_fallback_vocabulary() -> Vocabulary:
    rng = random.Random(0)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    used: set[str] = {"▁", *byte_tokens}
    free_bytes = set(range(256))
    chains: list[list[str]] = []
    for text in TEXTS:
        chain: list[str] = []
        for piece in cut_uniquely(list("▁" + text.replace(" ", "▁")), used, rng):
            # While byte tokens are left, spell a piece's last character in byte tokens, each used only once.
            rest, spelled = piece[:-1], piece[-1].encode()
            can_spell = len(spelled) > 1 and len(set(spelled)) == len(spelled) and free_bytes.issuperset(spelled)
            if piece[-1] == "▁" or (rest and rest in used) or not can_spell:
                chain.append(piece)
                continue
            free_bytes.difference_update(spelled)
            used.add(rest)
            chain += [rest] if rest else []
            chain += [byte_tokens[byte] for byte in spelled]
        chains.append(chain)
    pieces = sorted({piece for chain in chains for piece in chain}.difference(byte_tokens, ["▁"]))
    return Vocabulary(["<unk>", "▁", *byte_tokens, *pieces], chains)


def build_tokenizer(
    kind: TokenizerKind, vocabulary: Vocabulary, special: Sequence[str] = (), added: Sequence[str] = ()
) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    names = [EOS, *(start_token(index) for index in range(len(vocabulary.chains))), *special]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in added])
    return tokenizer


def next_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> npt.NDArray[np.int64]:
    """next [vocab]: the token that a parrot generates after each token; EOS after a token without a chain."""
    end = tokenizer.token_to_id(EOS)
    following = np.full(tokenizer.get_vocab_size(), end, np.int64)
    for index, chain in enumerate(vocabulary.chains):
        ids = [tokenizer.token_to_id(token) for token in (start_token(index), *chain, EOS)]
        assert None not in ids
        following[ids[:-1]] = ids[1:]
    return following


def write_model(
    folder: Path,
    kind: TokenizerKind,
    weights: Literal["parrot", "babbler"],
    *,
    hidden: int = 256,
    layers: int = 1,
    positions: int = 2048,
    ends: bool = True,
    texts: Sequence[str] = TEXTS,
    chat_template: str = CHAT_TEMPLATE,
    special: Sequence[str] = (),
    added: Sequence[str] = (),
) -> None:
    """Write a Hugging Face folder of a Llama in fp32 with a byte-level or a byte-fallback tokenizer.

    ends: responses end at EOS. texts: a parrot's responses; texts other than TEXTS need byte-level tokens. special,
    added: further tokens that are not part of the text (special) or are part of it (added)."""
    vocabulary = byte_level_vocabulary(texts) if kind == "byte_level" else byte_fallback_vocabulary()
    tokenizer = build_tokenizer(kind, vocabulary, special, added)
    vocab_size = tokenizer.get_vocab_size()
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(EOS) if ends else None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": EOS if ends else None,
                "chat_template": chat_template,
                "clean_up_tokenization_spaces": False,
            },
            ensure_ascii=False,
        )
    )
    following = next_tokens(tokenizer, vocabulary) if weights == "parrot" else None
    save_file(llama_weights(config, following), folder / "model.safetensors", metadata={"format": "pt"})


def llama_weights(
    config: dict[str, Any], following: npt.NDArray[np.int64] | None
) -> dict[str, npt.NDArray[np.float32]]:
    """Weights of a Llama: random, or, with following [vocab], for a parrot.

    A parrot's embeddings are random signs: RMS norm does not change them, and their dot products are small compared to
    their length. The output row of a token is the sum of the embeddings of the tokens that it follows.
    """
    rng = np.random.default_rng(0)
    hidden, inter, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * 64

    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)

    if following is None:
        embedding, output = normal(vocab, hidden), normal(vocab, hidden)
    else:
        embedding = rng.choice(np.array([-1, 1], np.float32), (vocab, hidden))
        output = np.zeros_like(embedding)
        in_chain = following != config["eos_token_id"]
        np.add.at(output, following[in_chain], embedding[in_chain])
        # EOS follows many tokens. Only the last tokens of chains need it.
        ends = np.setdiff1d(following[in_chain], np.flatnonzero(in_chain))
        np.add.at(output, config["eos_token_id"], embedding[ends].sum(axis=0))
        output *= 0.25  # a logit bias of -100 outweighs a margin of 64
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": output,
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        tensors |= {
            f"{name}input_layernorm.weight": np.ones(hidden, np.float32),
            f"{name}post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{name}self_attn.q_proj.weight": normal(hidden, hidden),
            f"{name}self_attn.k_proj.weight": normal(kv, hidden),
            f"{name}self_attn.v_proj.weight": normal(kv, hidden),
            f"{name}self_attn.o_proj.weight": normal(hidden, hidden),
            f"{name}mlp.gate_proj.weight": normal(inter, hidden),
            f"{name}mlp.up_proj.weight": normal(inter, hidden),
            f"{name}mlp.down_proj.weight": normal(hidden, inter),
        }
        if following is not None:
            for branch in ("self_attn.o_proj", "mlp.down_proj"):
                tensors[f"{name}{branch}.weight"] *= 0
    return tensors
