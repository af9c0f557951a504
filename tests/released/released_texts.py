"""Texts and chats for the tests of released models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# Four sentences in each of twelve languages.
SENTENCES: dict[str, list[str]] = json.loads((HERE / "texts.json").read_text(encoding="utf-8"))

FORMS: tuple[Callable[[list[str]], str], ...] = (
    *(lambda sentences, i=i: sentences[i] for i in range(4)),
    "\n\n".join,
    " 👩‍👩‍👧 ".join,
    lambda sentences: f" {sentences[0]}  ",
    lambda sentences: f"{sentences[1]} {sentences[1]}".upper(),
    lambda sentences: sentences[2][::-1],
    lambda sentences: f"\t{sentences[2]}\r\n\r\n   {sentences[3]}",
    lambda sentences: f"{sentences[0]} 7".replace(" ", "   "),
    lambda sentences: "".join(f"  {i}.   {sentence}\n" for i, sentence in enumerate(sentences, 9)),
    lambda sentences: f'```python\nfor i in range(  10):\n        print("{sentences[0]}", x[12:345])\n```',
    lambda sentences: json.dumps({"texts": sentences, "n": 1234567.89e-5}, ensure_ascii=False, indent=4),
    json.dumps,  # \u escapes
    lambda sentences: f"<|im_start|>user\n{sentences[3]}<|im_end|>\n<start_of_turn>model\n<bos>",
)
OTHERS = (
    "\u00a0\u3000",
    " ",
    "\n",
    "    \n\n\t\t  \r\n",
    "0",
    "3.14159 1,000,000 0x1F4A9 ½ ² Ⅻ ٣ 四",
    "e\u0301 \u00e9 \ufb01 \u200b\u200d\ufeff \U0001d518 \U00013000",
    "def f(x):\n\treturn {k: v**2 for k, v in x.items() if v != -1}  # ok\n",
)
TEXTS = [form(sentences) for sentences in SENTENCES.values() for form in FORMS] + list(OTHERS)


def long_text() -> str:
    """Return more than 4,000 tokens, independent of the repository's documents."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("charonia/quality/data/text.txt", "LICENSE")]
    return "\n\n".join([*texts, *("\n".join(sentences) for sentences in SENTENCES.values())])


Chat = list[dict[str, Any]]


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


CHATS: list[Chat] = [
    [turn("user", "What is the capital of France?")],
    [turn("system", "You answer in one short sentence."), turn("user", "Why is the sky blue?")],
    [
        turn("user", "My name is Ada."),
        turn("assistant", "Hello Ada, how can I help you?"),
        turn("user", "What is my name?"),
    ],
    [
        turn("system", "You are a helpful assistant.\n\nAnswer  with  3 items."),
        turn("user", "List colours."),
        turn("assistant", "1. Red\n2. Green\n3. Blue"),
        turn("user", "And 12 + 30?"),
        turn("assistant", "42"),
        turn("user", " Name a fruit, please! "),
    ],
    *([turn("user", sentences[1])] for sentences in SENTENCES.values()),
]
