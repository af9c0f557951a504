"""The text that new messages add to a conversation, according to the chat template."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from charonia.api.prompts import encode
from charonia.text.prompt_ids import PromptError, encode_chat, encode_continuation

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUMBERED = (
    "{% for message in messages %}[{{ loop.index }}]{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
FORGETFUL = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<u>{{ message['content'] }}{% endif %}{% endfor %}"
)
STRICT = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% endfor %}<assistant>"
)


def tokenizer(template: str) -> Any:
    """Every character is a token."""
    characters = sorted({chr(code) for code in range(32, 127)} | {"\n"})
    model = Tokenizer(models.WordLevel({char: index for index, char in enumerate(characters)}, unk_token=" "))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=model, chat_template=template)


def text(template: str, messages: list[dict[str, str]]) -> str:
    one = tokenizer(template)
    return "".join(one.convert_ids_to_tokens(encode_chat(one, messages, interactive=True).continuation_ids))


def test_it_begins_where_the_answer_ended() -> None:
    added = text(CHATML, [{"role": "user", "content": " more  "}])
    assert added == "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_several_messages_and_a_system_message_at_the_head() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert text(STRICT, messages) == "<user>a<assistant>b<user>c<assistant>"
    with pytest.raises(PromptError, match="send a user message"):
        text(STRICT, messages[:1])


def test_a_template_that_hides_or_numbers_turns_is_refused() -> None:
    with pytest.raises(PromptError, match="does not print an earlier response"):
        text(FORGETFUL, [{"role": "user", "content": "a"}])
    with pytest.raises(PromptError, match="differently after more turns"):
        text(NUMBERED, [{"role": "user", "content": "a"}])
    with pytest.raises(PromptError, match="roles must alternate"):
        text(STRICT, [{"role": "assistant", "content": "a"}])


def test_turn_has_the_whole_prompt_and_the_added_part() -> None:
    one = tokenizer(CHATML)
    messages = [{"role": "user", "content": "hi"}]
    turn = encode(lambda: one, messages, interactive=True)
    assert turn.continuation_ids == encode_continuation(one, messages)
    assert "".join(one.convert_ids_to_tokens(turn.token_ids)).startswith("<|im_start|>user")
    ids = encode(lambda: one, [3, 4], interactive=True)
    assert (ids.token_ids, ids.continuation_ids) == ([3, 4], [3, 4])
