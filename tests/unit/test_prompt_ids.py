"""A prompt has the same token ids in Python and on the server: a workspace's files run without this package."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_preprocessing import TEMPLATE, write_tokenizer
from test_tiktoken_vocabulary import vocabulary
from test_tiktoken_vocabulary import write as write_vocabulary

from charonia.api.prompts import encode
from charonia.text.prompt_ids import PromptError, PromptTooLongError, check_length, encode_bad_words, encode_chat
from charonia.text.tokenizer import copy_tokenizer, load_tokenizer
from charonia.weights.convert import link_workspace

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "model"
# Reads a list of {"folder", "prompts": [{text_input | messages, tools, interactive}], "bad_words"}, and writes the
# result of the served model for each.
SERVED = """
import json, sys
from pathlib import Path
sys.modules["charonia"] = None  # importing it fails
sys.path.insert(0, sys.argv[1])
import prompt, prompt_ids
assert Path(prompt_ids.__file__).parent == Path(sys.argv[1])
answers = []
for given in json.load(sys.stdin):
    tokenizer = prompt_ids.load_tokenizer(Path(given["folder"]))
    made = []
    for asked in given["prompts"]:
        messages, tools = (json.dumps(asked[key]) if key in asked else None for key in ("messages", "tools"))
        interactive = asked.get("interactive", False)
        built = prompt.build_prompt(tokenizer, asked.get("text_input"), messages, tools, interactive=interactive)
        made.append([built.token_ids, built.continuation_ids, built.strip_leading_space])
    answers.append([made, prompt_ids.encode_bad_words(tokenizer, given["bad_words"])])
json.dump(answers, sys.stdout)
"""
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Kyiv"}'}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "he said\n the café"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 中文 <|im_end|> "}],
    [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TEXTS = ["he said", " leading and trailing ", "\n", "中文 🙂", "<|im_start|>user"]
BAD_WORDS = ["he", " he", "the", "he", "\nx", "中", "[1, 2]"]


KINDS = ("demo", "qwen.tiktoken", "plain", "without a class", "with code of its own")


def write_model(kind: str, folder: Path) -> Path:
    if kind == "demo":
        return DEMO
    if kind == "qwen.tiktoken":
        write_vocabulary(folder, vocabulary())
        (folder / "generation_config.json").write_text('{"chat_format": "chatml"}')
        return folder
    write_tokenizer(folder, TEMPLATE)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if kind == "without a class":
        del config["tokenizer_class"]
    if kind == "with code of its own":
        config["auto_map"] = {"AutoTokenizer": ["own.Own", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Case:
    tokenizer: Any  # from the model's own folder
    prompts: list[dict[str, Any]]
    served: list[Any]  # for each prompt: token_ids, continuation_ids, strip_leading_space
    served_bad_words: list[list[int]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    root = tmp_path_factory.mktemp("models")
    workspace = link_workspace(DEMO, root / "workspace")
    tokenizers, given = [], []
    for number, kind in enumerate(KINDS):
        folder = write_model(kind, root / str(number))
        tokenizer = load_tokenizer(folder)
        copy_tokenizer(folder, tokenizer, root / f"copy-{number}")
        # The templates of the demo model and of Qwen 1 do not print tool calls.
        chats = CHATS if tokenizer.chat_template == TEMPLATE else CHATS[:3]
        prompts: list[dict[str, Any]] = [{"text_input": text} for text in TEXTS]
        prompts += [{"messages": chat} for chat in chats]
        prompts += [{**prompt, "interactive": True} for prompt in prompts]
        if kind != "qwen.tiktoken":  # its template ignores tools
            prompts.append({"messages": CHATS[0], "tools": TOOLS})
        tokenizers.append(tokenizer)
        given.append({"folder": str(root / f"copy-{number}"), "prompts": prompts, "bad_words": BAD_WORDS})
    command = [sys.executable, "-c", SERVED, str(workspace / "triton_models" / "preprocessing" / "1")]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    return {
        kind: Case(tokenizer, asked["prompts"], *answer)
        for kind, tokenizer, asked, answer in zip(KINDS, tokenizers, given, answers, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_python_and_the_served_model_make_the_same_ids(cases: dict[str, Case], kind: str) -> None:
    case = cases[kind]
    assert case.served_bad_words == encode_bad_words(case.tokenizer, BAD_WORDS)
    for asked, made in zip(case.prompts, case.served, strict=True):
        if "tools" in asked:  # not supported by the Python API
            here = encode_chat(case.tokenizer, asked["messages"], asked["tools"])
        else:
            prompt = asked.get("text_input") or asked["messages"]
            here = encode(lambda: case.tokenizer, prompt, interactive=asked.get("interactive", False))
        assert made == [here.token_ids, here.continuation_ids, here.strip_leading_space], asked


def test_tools_reach_the_template(cases: dict[str, Case]) -> None:
    plain = encode_chat(cases["plain"].tokenizer, CHATS[0])
    assert cases["plain"].served[-1][0] != plain.token_ids


class Letters:
    """A tokenizer with a token for each letter. It counts tokenized letters."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        self.seen += len(text)
        return {"input_ids": [ord(letter) for letter in text]}


def test_text_beyond_the_context_is_tokenized_only_to_its_end() -> None:
    letters = Letters()
    with pytest.raises(PromptTooLongError, match=r"does not fit: it has more than 50000 tokens .*\(session_len\)"):
        check_length(letters, "prompt", "a" * 8_000_000, 50_000)
    assert letters.seen <= 2 * 50_000 + (1 << 15)
    check_length(letters, "prompt", "a" * 200_000, 50_000)  # the engine counts these


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_text_that_fits_is_never_rejected_as_too_long(cases: dict[str, Case], kind: str) -> None:
    """Texts with long tokens or without tokens of their own: the limit is the smallest that they fit into."""
    tokenizer = cases[kind].tokenizer
    rng = random.Random(0)
    samples = [
        *("he said " * 20_000, " " * 100_000, "\n" * 100_000, "-" * 100_000, "中文" * 40_000, "e\u0301" * 60_000),
        "<|im_start|>" * 20_000,
        "".join(rng.choice(TEXTS) for _ in range(20_000)),
        "".join(chr(rng.randrange(0x20, 0xD800)) for _ in range(80_000)),
    ]
    for text in samples:
        count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        check_length(tokenizer, "prompt", text, count)


def test_bad_words_are_bounded_and_each_is_sent_once() -> None:
    assert encode_bad_words(Letters(), ["ab", "ab", "c"]) == [[97, 98], [32, 97, 98], [99], [32, 99]]
    with pytest.raises(PromptError, match="send at most 1000"):
        encode_bad_words(Letters(), ["a"] * 1001)
    with pytest.raises(PromptError, match=r"bad_words\[1\]: 1026 bytes; send at most 1024"):
        encode_bad_words(Letters(), ["a", "é" * 513])
