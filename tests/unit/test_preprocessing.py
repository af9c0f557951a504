"""preprocessing/prompt.py with real tokenizers of transformers. tests/stack tests the Triton model around it."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from charonia.weights.fingerprint import VERSION

ROOT = Path(__file__).resolve().parents[2]
# A workspace has both in one folder.
sys.path += [str(ROOT / "charonia" / "text"), str(ROOT / "preprocessing")]

import prompt  # noqa: E402
from context_length import DEFAULT_SAMPLING, GUIDE_MAX_BYTES, context_length, guide_max_bytes, model_info  # noqa: E402
from model_fingerprint import WEIGHTS_VERSION, fingerprint  # noqa: E402
from prepare import Fields, Preparation  # noqa: E402
from prompt_ids import (  # noqa: E402
    PromptError,
    TokenizerError,
    check_messages,
    encode,
    encode_bad_words,
    encode_chat,
    load_tokenizer,
)

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.values() | join }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(folder: Path, template: str | None) -> Path:
    """Byte-level, with two merges, a beginning token for plain text, and the roles as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "he", "Ġhe"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("Ġ", "he")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("chat"), TEMPLATE))


@pytest.fixture(scope="module")
def base_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("base"), None))


def build(tokenizer: Any, *, interactive: bool = False, special: bool | None = None, **fields: str) -> Any:
    texts = (fields.get(name) for name in ("text_input", "messages", "tools"))
    return prompt.build_prompt(tokenizer, *texts, interactive=interactive, special=special)


NAMED = '{"type": "function", "function": {"name": "weather"}}'
JSON_OTHERS = (" 5 ", "-5", "1.5", "true", "false", "null")


def nested(text: str, levels: int) -> str:
    """Return a message whose content is nested in `levels` lists."""
    return f'[{{"role": "user", "content": {"[" * levels}"{text}"{"]" * levels}}}]'


def with_arguments(arguments: str) -> str:
    """Return a conversation with a tool call."""
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}])


def test_text_is_encoded_as_the_tokenizer_does_with_its_beginning_token(tokenizer: Any) -> None:
    built = build(tokenizer, text_input="he said")
    assert built.token_ids == tokenizer("he said")["input_ids"]
    assert built.token_ids[0] == tokenizer.convert_tokens_to_ids("<s>")
    assert built.text == "he said"
    assert not built.strip_leading_space


def test_messages_get_the_chat_template_and_the_start_of_an_answer(tokenizer: Any) -> None:
    built = build(tokenizer, messages=json.dumps([{"role": "user", "content": "he"}]))
    assert built.text == "<|user|>he<|assistant|>"
    assert tokenizer.convert_ids_to_tokens(built.token_ids) == ["<|user|>", "he", "<|assistant|>"]
    assert built.strip_leading_space


def test_the_tokenizers_own_tokens_are_added_or_left_out_as_asked(tokenizer: Any) -> None:
    begin = tokenizer.convert_tokens_to_ids("<s>")
    assert begin not in build(tokenizer, text_input="he said", special=False).token_ids
    plain = build(tokenizer, messages="hi").token_ids
    assert build(tokenizer, messages="hi", special=True).token_ids == [begin, *plain]


def test_token_ids_are_taken_as_they_are_and_spell_their_text(tokenizer: Any) -> None:
    ids = tokenizer("he said")["input_ids"]
    built = prompt.build_prompt(tokenizer, None, None, None, token_ids=ids, with_text=True, interactive=True)
    assert (built.token_ids, built.continuation_ids, built.text) == (ids, ids, "<s>he said")
    assert not built.strip_leading_space
    assert prompt.build_prompt(tokenizer, None, None, None, token_ids=[10**9]).token_ids == [10**9]  # the engine's care


@pytest.mark.parametrize(
    ("ids", "said"), [([], "empty"), ([1, -1], r"\[1\]: -1 is not a token id"), ([10**9], "10+ is no")]
)
def test_token_ids_that_have_no_text_are_refused(tokenizer: Any, ids: list[int], said: str) -> None:
    with pytest.raises(PromptError, match=f"prompt_token_ids.*{said}"):
        prompt.build_prompt(tokenizer, None, None, None, token_ids=ids, with_text=True)


def test_the_tokenizer_is_described(tokenizer: Any, base_tokenizer: Any) -> None:
    info = prompt.tokenizer_info(tokenizer)
    assert (info["bos_token"], info["eos_token"], info["chat_template"]) == ("<s>", None, TEMPLATE)
    assert prompt.tokenizer_info(base_tokenizer)["chat_template"] is None
    assert prompt.token_strings(tokenizer, tokenizer("he")["input_ids"]) == ["<s>", "he"]
    assert prompt.token_strings(tokenizer, [-1, *tokenizer("he")["input_ids"], 10**9]) == ["", "<s>", "he", ""]


@pytest.mark.parametrize(
    "arguments", ['{"city": "Ky', "Kyiv", '{"city": NaN, x}', "[1]", "5", "[" * 300 + "]" * 300, "[" * 100_000]
)
def test_arguments_in_the_history_that_are_no_object_become_one(arguments: str) -> None:
    (message,) = check_messages(json.loads(with_arguments(arguments))[1:2])
    assert message["tool_calls"][0]["function"]["arguments"] == {"INVALID_JSON": arguments}


SYSTEM_FIRST = TEMPLATE
ALTERNATES = (
    "{% set system = messages[0].role == 'system' %}{% for m in messages[system | int :] %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ messages[0].content if system and loop.first }}{{ m.content }}{% endfor %}"
)
USERS = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "roles", "shown"),
    [
        (SYSTEM_FIRST, "susa", "<|system|>0<|user|>1\n\n2<|assistant|>3<|assistant|>"),
        (SYSTEM_FIRST, "ssu", "<|system|>0<|user|>1\n\n2<|assistant|>"),
        (ALTERNATES, "suasu", "<user>01<assistant>2<user>3\n\n4"),
        (ALTERNATES, "suas", "<user>01<assistant>2<user>3"),
        (USERS, "suasu", "<user>0\n\n1<assistant>2<user>3\n\n4"),
        (USERS, "su", "<user>0\n\n1"),
    ],
)
def test_a_system_message_that_a_template_rejects_becomes_the_users(
    tmp_path: Path, template: str, roles: str, shown: str
) -> None:
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = [{"role": names[role], "content": str(at)} for at, role in enumerate(roles)]
    assert build(load_tokenizer(write_tokenizer(tmp_path, template)), messages=json.dumps(messages)).text == shown


def test_an_error_in_config_json_names_this_file(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, None)
    (folder / "config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"^\S+config\.json is not valid JSON"):
        load_tokenizer(folder)


def test_text_that_the_tokenizer_cannot_encode_is_rejected() -> None:
    model = Tokenizer(models.WordLevel({"a": 0}, unk_token="?"))
    with pytest.raises(PromptError, match="text_input: the tokenizer cannot encode it"):
        encode(PreTrainedTokenizerFast(tokenizer_object=model), "text_input", "b", special=False)


def test_a_system_message_is_shown_although_its_text_is_elsewhere(tmp_path: Path) -> None:
    texts = (("user", "x"), ("assistant", "y"), ("system", "x"))
    messages = json.dumps([{"role": role, "content": text} for role, text in texts])
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, USERS))
    assert build(tokenizer, messages=messages).text == "<user>x<assistant>y<user>x"


def test_the_cost_of_system_messages_grows_with_the_size_of_the_chat(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, USERS))
    texts = [("user", "x" * 4_000_000), ("system", "x")] + 5_000 * [("user", "x" * 400), ("system", "x" * 400)]
    messages = [{"role": role, "content": text} for role, text in texts]
    begun = time.process_time()
    with pytest.raises(PromptError):
        encode_chat(tokenizer, messages, limit=100)
    assert time.process_time() - begun < 5


def test_a_call_of_a_custom_tool_is_a_call_of_a_function() -> None:
    call = {"id": "1", "type": "custom", "custom": {"name": "patch", "input": "x"}}
    (message,) = check_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    function = message["tool_calls"][0]["function"]
    assert (function["name"], function["arguments"]) == ("patch", {"input": "x"})


@pytest.mark.parametrize("arguments", ["", " ", "{}"])
def test_a_call_in_the_history_may_have_no_arguments(tokenizer: Any, arguments: str) -> None:
    assert (
        build(tokenizer, messages=with_arguments(arguments)).text
        == build(tokenizer, messages=with_arguments('{"city": ""}')).text
    )


@pytest.mark.parametrize("text", ["5 apples", "truely", "NaN", "-Infinity", "0x5", "5,"])
def test_a_text_that_only_looks_like_json_is_the_users_message(tokenizer: Any, text: str) -> None:
    assert build(tokenizer, messages=text).text == f"<|user|>{text}<|assistant|>"
    assert build(tokenizer, messages='"5"').text == "<|user|>5<|assistant|>"


def test_a_template_that_goes_too_deep_refuses_the_messages(tmp_path: Path) -> None:
    template = "{% macro walk(value) %}{{ walk([value]) }}{% endmacro %}{{ walk(messages) }}"
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "deep", template))
    with pytest.raises(PromptError, match="the model's chat template rejects them"):
        build(tokenizer, messages="hi")


@pytest.mark.parametrize("fails", ["messages[0].content.nothing.at_all()", "1 / 0", "2.0 ** 99999"])
def test_template_errors_name_the_messages(tmp_path: Path, fails: str) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "fails", f"{{{{ {fails} }}}}"))
    with pytest.raises(PromptError, match="the model's chat template rejects them"):
        build(tokenizer, messages="hi")


def call(id: str, city: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "f", "arguments": {"city": city}}}


# A conversation of an agent: reasoning with a text and two calls, and a text of the user after the results.
AGENTS = [
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "t", "reasoning_content": "r", "tool_calls": [call("i", "A"), call("j", "B")]},
    {"role": "tool", "tool_call_id": "i", "content": "1"},
    {"role": "tool", "tool_call_id": "j", "content": "2"},
    {"role": "user", "content": "v"},
]


@pytest.mark.parametrize(
    ("rejects", "text"),
    [
        ("m.tool_calls and m.tool_calls | length > 1", "|user|u|assistant|t(r)A|tool|1|assistant|B|tool|2|user|v|"),
        ("m.tool_call_id and m.tool_call_id | length != 9", "|user|u|assistant|t(r)AB|tool|1|tool|2|user|v|"),
        ("m.content and m.reasoning_content", "|user|u|assistant|(r\n\nt)AB|tool|1|tool|2|user|v|"),
        (
            "m.role == 'user' and loop.previtem is defined and loop.previtem.role == 'tool'",
            "|user|u|assistant|t(r)AB|tool|1|tool|2\n\nv|",
        ),
        ("'description' not in tools[0].function", "|user|u|assistant|t(r)AB|tool|1|tool|2|user|v|"),
        ("reasoning_effort", "|user|u|assistant|t(r)AB|tool|1|tool|2|user|v|"),
        (
            "m.role not in ('user', 'assistant') or loop.previtem is defined and loop.previtem.role == m.role",
            '|user|u|assistant|t\n<tool_call>\n{"name": "f", "arguments": {"city": "A"}}\n</tool_call>\n<tool_call>\n'
            '{"name": "f", "arguments": {"city": "B"}}\n</tool_call>(r)|user|<tool_response>\n1\n</tool_response>\n\n'
            "<tool_response>\n2\n</tool_response>\n\nv|",
        ),
    ],
)
def test_a_template_that_rejects_an_agents_messages_gets_another_form(tmp_path: Path, rejects: str, text: str) -> None:
    template = (
        f"{{% for m in messages %}}{{% if {rejects} %}}{{{{ raise_exception('no') }}}}{{% endif %}}|{{{{ m.role }}}}|"
        "{{ m.content }}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments.values() | join }}{% endfor %}{% endfor %}|"
    )
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "strict", template))
    tools = [{"type": "function", "function": {"name": "f"}}]
    for _ in range(2):  # the messages that a caller gave stay as they are
        made = encode_chat(tokenizer, AGENTS, tools, variables={"reasoning_effort": "high"}, unseen_tools=True)
        assert made.text == text


def test_message_of_a_developer_is_a_system_message() -> None:
    assert check_messages([{"role": "developer", "content": "s"}]) == [{"role": "system", "content": "s"}]
    with pytest.raises(PromptError, match=r"messages\[0\]\.content: missing"):
        check_messages([{"role": "developer"}])


@pytest.mark.parametrize("sent", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_names_that_templates_read(sent: str) -> None:
    messages = check_messages([{"role": "system", "content": "s"}, {"role": "assistant", sent: "r"}])
    assert (messages[1]["thinking"], messages[1]["reasoning_content"]) == ("r", "r")


def test_calls_that_a_template_drops_get_messages_of_their_own(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}|{{ m.role }}|{{ m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.values() | first }}{% endif %}{% endfor %}|"
    )
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "drops", template))
    odd_ids = json.loads(json.dumps(AGENTS).replace('"i"', "[1]").replace('"j"', "null"))
    for messages in (AGENTS, odd_ids):
        assert encode_chat(tokenizer, messages).text == "|user|u|assistant|tA|tool|1|assistant|B|tool|2|user|v|"


def test_results_that_a_template_drops_become_texts_of_the_user(tmp_path: Path) -> None:
    template = "{% for m in messages if m.role != 'tool' %}|{{ m.role }}|{{ m.content }}{% endfor %}|"
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "drops", template))
    text = encode_chat(tokenizer, AGENTS).text
    assert text.endswith("|user|<tool_response>\n1\n</tool_response>\n\n<tool_response>\n2\n</tool_response>\n\nv|")


def test_calls_that_a_template_never_shows_become_text(tmp_path: Path) -> None:
    template = "{% for m in messages %}|{{ m.role }}|{{ m.content }}{% endfor %}|"
    text = encode_chat(load_tokenizer(write_tokenizer(tmp_path / "drops", template)), AGENTS).text
    assert '"arguments": {"city": "A"}}\n</tool_call>' in text and "|user|<tool_response>\n1\n" in text


@pytest.mark.parametrize("messages", ["what is it", '"what is it"', '[{"role": "user", "content": "what is it"}]'])
def test_a_plain_string_is_the_users_message(tokenizer: Any, messages: str) -> None:
    assert build(tokenizer, messages=messages).text == "<|user|>what is it<|assistant|>"


def test_text_parts_are_joined(tokenizer: Any) -> None:
    content = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = [{"role": role, "content": content} for role in ("user", "assistant")]
    assert build(tokenizer, messages=json.dumps(messages)).text.startswith("<|user|>one \ntwo<|assistant|>one two")


def test_tools_and_tool_calls_reach_the_template(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Kyiv"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    text = build(tokenizer, messages=json.dumps(messages), tools=json.dumps(tools)).text
    assert text == f"<tools>{json.dumps(tools)}<|user|>hi<|assistant|>Kyiv<|tool|>sunny<|assistant|>"


# Places of tools in chat templates: in the first turn, after or instead of the system message, before the last message,
# in a separate variable, and, as in Phi-4-mini, in the system message.
_EACH = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
SHOWN = {
    "first": "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}" + _EACH,
    "behind system": "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.description }}{% endfor %}"
    "{% for message in messages if message.role != 'system' %}{{ message.content }}{% endfor %}",
    "last": "{% for message in messages %}{% if loop.last and tools %}[T]{{ tools | map(attribute='function') | list | "
    "tojson }}[/T]{% endif %}{{ message.content }}{% endfor %}",
    "variable": "{% if with_tools %}{{ tools | tojson }}{% endif %}" + _EACH,
    "phi": "{% for message in messages %}{% if message['role'] == 'system' and message['tools'] %}{{ '<|system|>' + "
    "message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}{% else %}{{ '<|' + message['role'] + '|>' + "
    "message['content'] }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("kind", SHOWN)
def test_tools_are_shown_where_the_template_looks_for_them(tmp_path: Path, kind: str) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "other", SHOWN[kind]))
    function = {"name": "weather", "description": "of a place", "parameters": {"type": "object", "title": "é"}}
    tools = json.dumps([{"type": "function", "function": function}])
    more = {"variables": '{"with_tools": true}'} if kind == "variable" else {}
    for system in ([], [{"role": "system", "content": "Be brief."}]):
        asked = json.dumps([*system, {"role": "user", "content": "hi"}])
        for _ in range(2):
            text = prompt.build_prompt(tokenizer, None, asked, tools, **more).text
            assert text.count("weather") == 1 and "of a place" in text and text.count("Be brief.") == len(system)
        if kind == "phi":
            assert f"<|tool|>{json.dumps([function], ensure_ascii=False)}<|/tool|>" in text
            own = json.dumps([{"role": "system", "content": "", "tools": "[mine]"}, {"role": "user", "content": "hi"}])
            assert "<|tool|>[mine]<|/tool|>" in prompt.build_prompt(tokenizer, None, own, tools).text
        if kind == "variable":
            with pytest.raises(PromptError, match=r"^tools: .*ignores tools"):
                prompt.build_prompt(tokenizer, None, asked, tools)


def test_tools_that_a_template_shows_in_another_form_are_taken(tmp_path: Path) -> None:
    shown = "{{ tool.name }}{% if tool.description %}: {{ tool.description }}{% endif %}"
    template = f"{{% for tool in tools or [] %}}{shown}{{% endfor %}}{_EACH}"
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "other", template))
    flat = {"type": "function", "name": "weather", "description": "of a place", "parameters": {}}
    assert build(tokenizer, messages="hi", tools=json.dumps([flat])).text == "weather: of a place<|user|>hi"
    with pytest.raises(PromptError, match=r"^tools: .*ignores tools"):
        build(tokenizer, messages="hi", tools=json.dumps([{"type": "function", "function": flat}]))


def test_tools_that_a_template_does_not_show_are_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "other", _EACH))
    tools = json.dumps([{"type": "function", "function": {"name": "weather"}}])
    assert build(tokenizer, messages="hi", tools="[]").text == "<|user|>hi"
    off = {"CHARONIA_TOOL_CALL_PARSER": "hermes", "CHARONIA_GENERIC_TOOLS": "0"}
    preparation = Preparation(tokenizer, off, None, GUIDE_MAX_BYTES)
    for choice in ("required", NAMED, "none"):
        made = preparation.prepare(Fields(messages="hi", tools=tools, tool_choice=choice))
        assert made.chat.text == "<|user|>hi" and bool(made.guide.text) == (choice != "none")
    remedy = (
        "send no tools, or start the server with CHARONIA_GENERIC_TOOLS = true and CHARONIA_TOOL_CALL_PARSER = hermes"
    )
    with pytest.raises(PromptError, match=f"^tools: the model's chat template ignores tools.*; {remedy}"):
        preparation.prepare(Fields(messages="hi", tools=tools))
    followed = {"CHARONIA_TOOL_CALL_PARSER": "hermes", "CHARONIA_GENERIC_TOOLS": "true"}
    Preparation(tokenizer, followed, None, GUIDE_MAX_BYTES).prepare(Fields(messages="hi", tools=tools))


def test_forced_calls_without_a_format_name_remedies_that_work(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "other", _EACH))
    tools = json.dumps([{"type": "function", "function": {"name": "weather"}}])
    asked = Fields(messages="hi", tools=tools, tool_choice="required")
    preparation = Preparation(tokenizer, {"CHARONIA_GENERIC_TOOLS": "false"}, None, GUIDE_MAX_BYTES)
    with pytest.raises(
        PromptError, match="send tool_choice = none, or start the server with CHARONIA_TOOL_CALL_PARSER = h"
    ):
        preparation.prepare(asked)
    preparation.prepare(replace(asked, tool_choice="none"))
    parser = {"CHARONIA_GENERIC_TOOLS": "false", "CHARONIA_TOOL_CALL_PARSER": "hermes"}
    Preparation(tokenizer, parser, None, GUIDE_MAX_BYTES).prepare(asked)


@pytest.mark.parametrize("parser", ["auto", "llama3_json", "pythonic"])
def test_tools_that_a_template_does_not_show_are_described(tmp_path: Path, parser: str) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "other", _EACH))
    preparation = Preparation(tokenizer, {"CHARONIA_TOOL_CALL_PARSER": parser}, None, GUIDE_MAX_BYTES)
    calls = preparation.formats.calls
    assert calls is not None and calls.name == ("hermes" if parser == "auto" else parser)
    function = {"name": "weather", "description": "of a place"}
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Oslo"}'}}
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    tools = json.dumps([{"type": "function", "function": function}])
    for choice in (None, "auto", "required", NAMED):
        made = preparation.prepare(Fields(messages=json.dumps(history), tools=tools, tool_choice=choice))
        system, user = made.chat.text.split("<|user|>hi")
        assert system.startswith("<|system|>Be brief.\n\n") and json.dumps(function) in system
        assert calls.write([("FUNCTION", {"PARAMETER": "VALUE"})]) in system
        shown = calls.write([("weather", {"place": "Oslo"})])
        assert user == f"<|assistant|>{shown}<|user|><tool_response>\nrain\n</tool_response>"
        assert bool(made.guide.text) == (choice in ("required", NAMED))
    made = preparation.prepare(Fields(messages=json.dumps(history), tools=tools, tool_choice="none"))
    assert "of a place" not in made.chat.text and not made.guide.text


def test_a_chat_template_from_a_file_replaces_the_models(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "other", _EACH)
    file = tmp_path / "own.jinja"
    file.write_text("{{ tools | tojson if tools }}{% for m in messages %}({{ m.content }}){% endfor %}")
    given = {"CHARONIA_CHAT_TEMPLATE": str(file)}
    preparation = Preparation(load_tokenizer(folder), given, None, GUIDE_MAX_BYTES)
    assert preparation.prepare(Fields(messages="hi")).chat.text == "(hi)"
    first = fingerprint(folder, folder, given, folder)
    assert first != fingerprint(folder, folder, {}, folder)
    for text, problem in (("{% for %}", "own.jinja is not valid Jinja: "), (None, "own.jinja cannot be read: ")):
        file.write_text(text) if text else file.unlink()
        assert fingerprint(folder, folder, given, folder) != first
        with pytest.raises(TokenizerError, match=problem):
            Preparation(load_tokenizer(folder), given, None, GUIDE_MAX_BYTES)


def test_a_template_without_a_system_message_gets_the_tools_in_the_users(tmp_path: Path) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "other", refuses + _EACH))
    tools = json.dumps([{"type": "function", "function": {"name": "weather"}}])
    made = Preparation(tokenizer, {}, None, GUIDE_MAX_BYTES).prepare(Fields(messages="hi", tools=tools))
    assert made.chat.text.startswith("<|user|>You can call") and made.chat.text.endswith("hi")


def test_a_templates_own_format_of_calls_is_described(tmp_path: Path) -> None:
    """The templates of DeepSeek's models show calls, and no tools."""
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "other", "{# [TOOL_CALLS] #}" + _EACH))
    tools = json.dumps([{"type": "function", "function": {"name": "weather"}}])
    made = Preparation(tokenizer, {}, None, GUIDE_MAX_BYTES).prepare(Fields(messages="hi", tools=tools))
    assert '[TOOL_CALLS][{"name": "FUNCTION", ' in made.chat.text


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "text_input, prompt_token_ids, messages: none was sent"),
        ({"text_input": "a", "messages": "b"}, "text_input, prompt_token_ids, messages: the request has 2 of them"),
        ({"text_input": ""}, "text_input: empty"),
        ({"text_input": "a", "tools": "[]"}, "tools: "),
        ({"messages": ""}, "messages: empty"),
        ({"messages": "[]"}, "messages: an empty list"),
        ({"messages": "{}"}, "messages: {} is not a conversation"),
        *(({"messages": text}, f"messages: {text.strip()} is not a conversation") for text in JSON_OTHERS),
        ({"messages": "5" * 5000}, "messages: not valid JSON (Exceeds the limit"),
        ({"messages": "[" * 100_000}, "messages: nested deeper than 200 levels"),
        ({"messages": "[" * 300 + "]" * 300}, "messages: nested deeper than 200 levels"),
        ({"messages": "[" * 100 + "]" * 100}, "messages[0]: [[["),
        ({"messages": nested("user", 500)}, "messages: nested deeper than 200 levels"),
        ({"messages": nested("7", 100)}, "messages[0].content[0]: parts of type 'list'"),
        ({"messages": "hi", "tools": "[" * 100_000}, "tools: nested deeper than 200 levels"),
        ({"messages": "hi", "tools": '[{"a": ' + "[" * 500 + "]" * 500 + "}]"}, "tools: nested deeper than 200"),
        *(
            (
                {"messages": json.dumps([{"role": "assistant", "tool_calls": [{"name": "flat"}, call]}])},
                f"messages[0].tool_calls[1]: {json.dumps(call)} names no function",
            )
            for call in ({"id": "a"}, {"function": "add"}, {"function": {"name": ""}}, {"function": {"name": 3}})
        ),
        ({"messages": '[{"role": "user"'}, "messages: not valid JSON"),
        ({"messages": '["hi"]'}, "messages[0]: "),
        ({"messages": '[{"content": "hi"}]'}, "messages[0].role: "),
        ({"messages": '[{"role": "user"}]'}, "messages[0].content: missing"),
        ({"messages": '[{"role": "user", "content": 3}]'}, "messages[0].content: 3 "),
        (
            {"messages": '[{"role": "user", "content": [{"type": "image_url"}]}]'},
            "messages[0].content[0]: parts of type 'image_url'",
        ),
        ({"messages": '[{"role": "user", "content": "\\ud83d"}]'}, "messages: "),
        ({"messages": "hi", "tools": "{}"}, "tools: not a list"),
        ({"messages": "hi", "tools": "["}, "tools: not valid JSON"),
    ],
)
def test_a_wrong_prompt_is_refused_naming_the_field(tokenizer: Any, fields: dict[str, str], named: str) -> None:
    with pytest.raises(PromptError) as error:
        build(tokenizer, **fields)
    assert str(error.value).startswith(named)
    assert "; " in str(error.value)


def test_messages_without_a_chat_template_are_refused_and_text_is_not(base_tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="no chat template; send a text"):
        build(base_tokenizer, messages="hi")
    assert build(base_tokenizer, text_input="hi").token_ids


def test_bytes_that_are_no_utf8_are_refused() -> None:
    with pytest.raises(PromptError, match=r"^stop_words: byte 1 is not valid UTF-8"):
        prompt.decode_utf8("stop_words", b"a\xff")


def test_bad_words_are_found_at_the_beginning_and_after_a_space(tokenizer: Any) -> None:
    sequences = encode_bad_words(tokenizer, ["he"])
    assert sorted(map(tokenizer.convert_ids_to_tokens, sequences)) == [["he"], ["Ġhe"]]


def test_token_lists_are_packed_with_their_ends() -> None:
    assert prompt.pack_token_lists([[5, 6], [7]]) == [[5, 6, 7], [2, 3, -1]]
    assert prompt.pack_token_lists([]) == [[], []]


@pytest.mark.parametrize(
    ("words", "says"), [(["a", ""], r"bad_words\[1\]: empty"), (["a" * 1000] * 66, "bad_words: 66000 bytes in all")]
)
def test_wrong_bad_words_are_rejected(tokenizer: Any, words: list[str], says: str) -> None:
    with pytest.raises(PromptError, match=says):
        encode_bad_words(tokenizer, words)


def test_logit_bias_becomes_ids_and_values() -> None:
    assert prompt.parse_logit_bias('{"3": 1.5, "7": -100}') == ([3, 7], [1.5, -100.0])
    assert prompt.parse_logit_bias("{}") == ([], [])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        '{"a": 1}',
        '{"-1": 1}',
        '{"3": "x"}',
        '{"3": true}',
        '{"3": 101}',
        '{"3": NaN}',
        '{"4294967296": 1}',
        f'{{"3": 1{"0" * 400}}}',
        f'{{"1{"0" * 5000}": 1}}',
    ],
)
def test_a_wrong_logit_bias_is_refused(text: str) -> None:
    with pytest.raises(PromptError, match=r"^logit_bias"):
        prompt.parse_logit_bias(text)


def turns(*contents: str) -> str:
    """Return messages of alternating roles, starting with the user."""
    roles = ("user", "assistant")
    return json.dumps([{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)])


def test_a_conversation_and_its_continuation_spell_the_whole_conversation(tokenizer: Any) -> None:
    first = build(tokenizer, messages=turns("Hello"), interactive=True)
    answer = tokenizer("he he", add_special_tokens=False)["input_ids"]
    second = build(tokenizer, messages=turns("And?"), interactive=True)
    whole = build(tokenizer, messages=turns("Hello", "he he", "And?"))
    assert first.token_ids + answer + second.continuation_ids == whole.token_ids
    assert second.token_ids == build(tokenizer, messages=turns("And?")).token_ids
    assert whole.continuation_ids == []


def test_system_message_begins_a_session_and_continues_none(tokenizer: Any) -> None:
    new = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "So?"}]
    built = build(tokenizer, messages=json.dumps(new), interactive=True)
    assert tokenizer.decode(built.continuation_ids) == "<|user|>So?<|assistant|>"
    assert tokenizer.decode(built.token_ids) == "<|system|>Be brief.<|user|>So?<|assistant|>"


def test_text_continues_without_a_beginning_token(tokenizer: Any) -> None:
    built = build(tokenizer, text_input="he said", interactive=True)
    assert built.continuation_ids == built.token_ids[1:]


def test_the_context_is_as_long_as_the_engine_takes_it_to_be(tmp_path: Path) -> None:
    ini, config = tmp_path / "config.ini", tmp_path / "config.pbtxt"
    parameter = 'parameters {{ key: "session_len" value: {{ string_value: "{}" }} }}\n'

    def length(environment: str = "") -> int | None:
        return context_length(tmp_path, config, {"CHARONIA_SESSION_LEN": environment})

    assert length() is None
    ini.write_text("[llama]\nmax_position_embeddings = 4096\n# a comment\nsession_len = 0\n")
    assert (length(), length("512")) == (4096, 512)
    ini.write_text("[llama]\nmax_position_embeddings = 4096\nsession_len = 1024\n")
    assert (length(), length("0")) == (1024, 4096)
    config.write_text("#" + parameter.format(7) + parameter.format(2048))
    assert (length(), length("512")) == (2048, 512)
    config.write_text("#" + parameter.format(7))
    assert length() == 1024
    assert guide_max_bytes(tmp_path, config, {}) == GUIDE_MAX_BYTES
    config.write_text(parameter.format(7).replace("session_len", "guide_max_bytes"))
    assert (guide_max_bytes(tmp_path, config, {}), length()) == (7, 1024)
    assert guide_max_bytes(tmp_path, config, {"CHARONIA_GUIDE_MAX_BYTES": "9"}) == 9


def test_model_info_has_the_sampling_defaults_of_the_engine(tmp_path: Path) -> None:
    ini, config = tmp_path / "config.ini", tmp_path / "config.pbtxt"

    def defaults(environment: str = "") -> dict[str, float]:
        info = model_info(tmp_path, config, {"CHARONIA_GENERATION_CONFIG": environment}, 10)
        found: dict[str, float] = info["default_sampling_parameters"]
        return found

    own = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert own == DEFAULT_SAMPLING
    assert model_info(tmp_path, config, {}, 10)["task"] is None
    ini.write_text("[llama]\ngroup_size = 0\nvocab_size = 12\nmodel_task = embed\n")
    assert defaults() == own
    info = model_info(tmp_path, config, {}, 10)
    assert (info["vocab_size"], info["task"]) == (12, "embed")
    ini.write_text("[llama]\ngeneration_config = auto\ndefault_temperature = 0.6\ndefault_top_k = 20\n")
    assert defaults() == {**own, "temperature": 0.6, "top_k": 20}
    assert defaults("none") == own
    config.write_text('parameters { key: "generation_config" value: { string_value: "none" } }\n')
    assert defaults() == own
    assert defaults("auto")["top_k"] == 20


def test_marks_of_thinking_are_the_tokens_of_a_response(tmp_path: Path) -> None:
    """They are empty for a prompt that is no chat. In harmony the second one begins the next message."""
    template = TEMPLATE + "{% if thinks %}<think>\n{% endif %}{# <think> #}"
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template))
    spelled = [encode(tokenizer, "", mark, special=False) for mark in ("<think>", "</think>")]
    messages = json.dumps([{"role": "user", "content": "x"}])
    thinks = Fields(messages=messages, chat_template_kwargs='{"thinks": true}')
    preparation = Preparation(tokenizer, {}, None, 1000)
    assert list(preparation.prepare(Fields(messages=messages)).thinking) == spelled
    made = preparation.prepare(thinks)
    assert made.in_reasoning and list(made.thinking) == spelled
    assert preparation.prepare(Fields(messages=turns("x", "so"), continue_final_message=True)).thinking == ([], [])
    assert preparation.prepare(Fields(text_input="x")).thinking == ([], [])
    harmony = {"CHARONIA_TOOL_CALL_PARSER": "harmony", "CHARONIA_REASONING_PARSER": "harmony"}
    marks = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
    spelled = [encode(tokenizer, "", mark, special=False) for mark in marks]
    assert list(Preparation(tokenizer, harmony, None, 1000).prepare(thinks).thinking) == spelled


def test_input_of_an_embedding_is_its_tokens_alone(tokenizer: Any) -> None:
    made = Preparation(tokenizer, {}, None, 1000).prepare(Fields(text_input="x", pooling="any"))
    assert made.chat.token_ids == encode(tokenizer, "", "x", special=True)
    assert not made.in_reasoning and made.thinking == ((), ())


def test_a_begun_answer_is_the_prompts_end(tokenizer: Any) -> None:
    whole = build(tokenizer, messages=turns("hi"))
    begun = prompt.build_prompt(tokenizer, None, turns("hi", "The answer"), None, continues=True)
    assert begun.text == whole.text + "The answer" and begun.num_begun == len("The answer")
    assert begun.token_ids[: len(whole.token_ids)] == whole.token_ids and not begun.strip_leading_space
    call = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    for messages, more, says in (
        (turns("hi"), {}, "the last message is not an assistant's"),
        (json.dumps([{"role": "assistant", "content": "x"}]), {}, "after other messages"),
        (turns("hi", ""), {}, "has tool calls, or no text"),
        (
            json.dumps([*json.loads(turns("hi")), {"role": "assistant", "tool_calls": call}]),
            {},
            "has tool calls, or no text",
        ),
        (turns("hi", "x"), {"interactive": True}, "a session continues after complete responses"),
    ):
        with pytest.raises(PromptError, match=f"^continue_final_message: .*{says}"):
            prompt.build_prompt(tokenizer, None, messages, None, continues=True, **more)
    with pytest.raises(PromptError, match=r"^continue_final_message: there are no messages"):
        prompt.build_prompt(tokenizer, "x", None, None, continues=True)


def test_template_shows_the_time_of_the_request(tmp_path: Path) -> None:
    template = "{{ strftime_now('%d %b %Y, %H:%M') }} " + _EACH
    preparation = Preparation(load_tokenizer(write_tokenizer(tmp_path / "other", template)), {}, None, GUIDE_MAX_BYTES)

    def shown(time: str | None) -> str:
        return preparation.prepare(Fields(messages="hi", prompt_time=time)).chat.text

    assert shown("2020-02-29T23:59:59") == "29 Feb 2020, 23:59 <|user|>hi"
    assert shown(None).endswith("<|user|>hi") and "2020" not in shown(None)
    with pytest.raises(PromptError, match=r"^prompt_time: \"midnight\" is not a time; send a local time such as 20"):
        shown("midnight")


def test_fingerprint_changes_exactly_with_settings_that_change_tokens(tmp_path: Path) -> None:
    weights, tokenizer, config = tmp_path / "weights", tmp_path / "tokenizer", tmp_path / "config.pbtxt"
    for folder in (weights, tokenizer):
        folder.mkdir()
    (weights / "config.ini").write_text("[llama]\nmodel_name = a\nweight_type = bf16\nmax_batch_size = 3\n")
    assert WEIGHTS_VERSION == VERSION
    (weights / "manifest.json").write_text('{"weights": "2-a", "source": "here"}')
    (tokenizer / "tokenizer.json").write_text("{}")

    def now(**environment: str) -> str:
        return fingerprint(weights, config, environment, tokenizer)

    def written(file: Path, text: str) -> str:
        file.write_text(text)
        return now()

    first = now()
    (weights / "config.ini").write_text("[llama]\nmodel_name = b\nweight_type = bf16\nquant_policy = 0\n")
    assert written(weights / "manifest.json", '{"weights": "2-a", "files": {"a": {"sha256": "b"}}}') == first
    for same in (
        {"CHARONIA_MAX_BATCH_SIZE": "7"},
        {"CHARONIA_QUANT_POLICY": "0"},
        {"CHARONIA_JUMP_FORWARD": "FALSE", "CHARONIA_TOOL_CALL_PARSER": "auto"},
        {"CHARONIA_DEVICE": "cpu", "CHARONIA_REPRODUCIBLE": "true"},  # the engine reports its arithmetic
    ):
        assert now(**same) == first, same
    found = [
        first,
        now(CHARONIA_QUANT_POLICY="8"),
        now(CHARONIA_TENSOR_PARA_SIZE="2"),
        now(CHARONIA_JUMP_FORWARD="true"),
        now(CHARONIA_TOOL_CALL_PARSER="hermes"),
        now(CHARONIA_ENGINE_BUILD="b"),
        written(weights / "manifest.json", '{"weights": "2-b"}'),
        written(weights / "manifest.json", '{"weights": "2-b", "layers": [{"window": 8}]}'),
        written(weights / "manifest.json", '{"weights": "2-b", "tensors": {"w": {"quantization": {}}}}'),
        written(weights / "manifest.json", '{"weights": "2-b", "tensors": {"w": {"quantization": {"zeros": true}}}}'),
        written(weights / "manifest.json", '{"files": {"a": {"sha256": "c"}}}'),
        # An older version had no part of many scales in `weights`.
        written(weights / "manifest.json", '{"weights": "a", "files": {"a": {"sha256": "d"}}}'),
        written(weights / "manifest.json", '{"weights": "a", "files": {"/a": {"bytes": 1}}}'),
        written(weights / "manifest.json", '{"weights": "a", "files": {"/b": {"bytes": 1}}}'),
        written(weights / "manifest.json", '{"weights": "b", "files": {"/b": {"bytes": 1}}}'),
        written(weights / "config.ini", "[llama]\nweight_type = int4\n"),
        written(tokenizer / "tokenizer_config.json", "{}"),
        written(tokenizer / "tokenizer.model", "x"),
        written(tokenizer / "chat_template.jinja", "{{ x }}"),
        written(config, 'parameters { key: "quant_policy" value: { string_value: "4" } }'),
    ]
    assert len(set(found)) == len(found)


def test_a_request_for_another_task_reaches_the_engine_without_a_template(base_tokenizer: Any) -> None:
    """The engine's error names the model's task."""
    fields = Fields(messages='[{"role": "user", "content": "hi"}]')
    preparation = Preparation(base_tokenizer, {}, None, GUIDE_MAX_BYTES, "embed")
    assert preparation.prepare(fields).chat.token_ids == [0]
    with pytest.raises(PromptError, match="template"):
        Preparation(base_tokenizer, {}, None, GUIDE_MAX_BYTES, "generate").prepare(fields)
