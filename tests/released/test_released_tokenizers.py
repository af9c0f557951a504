"""Token ids and prompts of chats of released models equal those of llama.cpp, tokenizers and transformers."""

from __future__ import annotations

from pathlib import Path

from released_models import llama_cpp
from released_texts import CHATS, TEXTS
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from charonia.api.prompts import encode
from charonia.text.tokenizer import load_tokenizer


def test_token_ids_of_200_texts_in_12_languages_equal_the_references(folder: Path) -> None:
    assert len(set(TEXTS)) == 200
    post = llama_cpp(folder)
    ours = load_tokenizer(folder)
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        expected = post("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
        assert theirs.encode(text).ids == expected, text
        assert encode(lambda: ours, text).token_ids == expected, text


def test_chat_template_gives_text_and_ids_of_the_references(smollm2: Path) -> None:
    post = llama_cpp(smollm2)
    ours = load_tokenizer(smollm2)
    theirs = AutoTokenizer.from_pretrained(smollm2)
    for chat in CHATS:
        encoded = encode(lambda: ours, chat)
        assert encoded.text == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert encoded.text == post("/apply-template", {"messages": chat})["prompt"]
        assert encoded.token_ids == post("/tokenize", {"content": encoded.text, "parse_special": True})["tokens"]
