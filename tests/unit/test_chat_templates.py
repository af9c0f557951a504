"""client/charonia_answers with chat templates of released models: the formats of the templates, and the parsing of
calls that a template writes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from charonia_answers.events import CallArguments, CallBegin, CallEnd
from charonia_answers.formats import CALL_FORMATS, find_call_format, find_reasoning_format
from charonia_answers.parser import AnswerParser
from jinja2 import TemplateError
from jinja2.sandbox import SandboxedEnvironment
from released_templates import released_templates
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from charonia.text.prompt_ids import PromptError, encode_chat

# The templates of each format of calls. Other templates have no format of calls.
CALLS = {
    "hermes": """
        axolotl/exaone4 axolotl/falcon_h1 axolotl/qwen3 axolotl/qwen3_5 axolotl/qwen_25
        llama.cpp/Bielik-11B-v3.0-Instruct llama.cpp/MiMo-VL
        llama.cpp/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use llama.cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use
        llama.cpp/Qwen-QwQ-32B llama.cpp/Qwen-Qwen2.5-7B-Instruct llama.cpp/Qwen-Qwen3-0.6B llama.cpp/Reka-Edge
        llama.cpp/ibm-granite-granite-4.0 llama.cpp/ibm-granite-granite-4.1
        trl/qwen2_5 trl/qwen3 trl/qwen3_instruct_2507 trl/qwen3_vl""",
    "qwen3_coder": """
        llama.cpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 llama.cpp/Qwen3-Coder llama.cpp/Qwen3.5-4B
        llama.cpp/StepFun3.5-Flash trl/nemotron_3_5_lightning trl/nemotron_3_nano trl/nemotron_3_super
        trl/nemotron_3_ultra trl/qwen3_5_nothink trl/qwen3_5_think trl/qwen3_6 trl/qwen3_8""",
    "glm45": """
        llama.cpp/GLM-4.6 llama.cpp/GLM-4.7-Flash llama.cpp/Spark2.5 llama.cpp/inclusionai-ling-3.0-flash
        llama.cpp/poolside-Laguna-S-2.1 llama.cpp/poolside-Laguna-XS-2.1 llama.cpp/poolside-Laguna-XS.2 trl/glm4moe""",
    "llama3_json": """
        axolotl/llama3_2_vision llama.cpp/meta-llama-Llama-3.1-8B-Instruct llama.cpp/meta-llama-Llama-3.2-3B-Instruct
        llama.cpp/meta-llama-Llama-3.3-70B-Instruct trl/llama3_1 trl/llama3_2""",
    "mistral": "axolotl/mistral_v2v3 axolotl/mistral_v3_tekken llama.cpp/mistralai-Mistral-Nemo-Instruct-2407",
    "mistral_named": """
        llama.cpp/Mistral-Small-3.2-24B-Instruct-2506 llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512
        llama.cpp/unsloth-mistral-Devstral-Small-2507""",
    "deepseek_v3": """
        axolotl/deepseek_v3 llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Llama-8B
        llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B llama.cpp/llama-cpp-deepseek-r1 trl/deepseek_r1_distill
        trl/deepseekv3""",
    "deepseek_v31": "llama.cpp/deepseek-ai-DeepSeek-V3.1",
    "kimi_k2": "llama.cpp/Kimi-K2-Instruct llama.cpp/Kimi-K2-Thinking llama.cpp/moonshotai-Kimi-K2",
    "llama4_json": "axolotl/llama4",
    "lfm2": """
        llama.cpp/LFM2-8B-A1B llama.cpp/LFM2.5-8B-A1B llama.cpp/LFM2.5-Instruct trl/lfm2 trl/lfm2_2_5 trl/lfm2_2_5_v2
        trl/lfm2_2_5_vl trl/lfm2_v2""",
    "nemotron": "llama.cpp/NVIDIA-Nemotron-Nano-v2",
    "seed_oss": "llama.cpp/ByteDance-Seed-OSS",
    "granite3": "llama.cpp/ibm-granite-granite-3.3-2B-Instruct",
    "hunyuan_a13b": "llama.cpp/Apriel-1.6-15b-Thinker-fixed llama.cpp/unsloth-Apriel-1.5",
    "hunyuan_v3_open": "llama.cpp/tencent-Hy3",
    "phi4_mini": "llama.cpp/fireworks-ai-llama-3-firefunction-v2",
    "gemma4": """
        axolotl/gemma4 axolotl/gemma4_unified llama.cpp/google-gemma-4-31B-it
        llama.cpp/google-gemma-4-31B-it-interleaved trl/diffusion_gemma trl/gemma4 trl/gemma4_v2 trl/gemma4_v3
        trl/gemma4_v4 trl/gemma4_v5""",
}
# The templates of each format of reasoning.
REASONING = {
    "think": """
        axolotl/deepseek_v3 axolotl/exaone4 axolotl/phi_4 axolotl/qwen3 axolotl/qwen3_5
        llama.cpp/Bielik-11B-v3.0-Instruct llama.cpp/GLM-4.6 llama.cpp/GLM-4.7-Flash llama.cpp/HuggingFaceTB-SmolLM3-3B
        llama.cpp/Kimi-K2-Thinking llama.cpp/LFM2.5-8B-A1B llama.cpp/LFM2.5-Instruct llama.cpp/MiniMax-M2
        llama.cpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 llama.cpp/NVIDIA-Nemotron-Nano-v2 llama.cpp/Qwen-QwQ-32B
        llama.cpp/Qwen-Qwen3-0.6B llama.cpp/Qwen3.5-4B llama.cpp/Reka-Edge llama.cpp/Spark2.5
        llama.cpp/StepFun3.5-Flash llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Llama-8B
        llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B llama.cpp/deepseek-ai-DeepSeek-V3.1
        llama.cpp/deepseek-ai-DeepSeek-V3.2 llama.cpp/deepseek-ai-DeepSeek-V4
        llama.cpp/deepseek-ai-DeepSeek-V4-Flash-0731 llama.cpp/inclusionai-ling-3.0-flash
        llama.cpp/llama-cpp-deepseek-r1 llama.cpp/llama-cpp-rwkv-world llama.cpp/openbmb-MiniCPM5-1B
        llama.cpp/poolside-Laguna-S-2.1 llama.cpp/poolside-Laguna-XS-2.1 llama.cpp/poolside-Laguna-XS.2
        trl/deepseek_r1_distill trl/deepseekv3 trl/glm4moe trl/lfm2_2_5 trl/lfm2_2_5_v2 trl/lfm2_2_5_vl
        trl/nemotron_3_5_lightning trl/nemotron_3_nano trl/nemotron_3_super trl/nemotron_3_ultra trl/qwen3
        trl/qwen3_5_nothink trl/qwen3_5_think trl/qwen3_6 trl/qwen3_8""",
    "think_response": "llama.cpp/ibm-granite-granite-3.3-2B-Instruct",
    "hunyuan_v3_open": "llama.cpp/tencent-Hy3",
    "mistral": "llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512",
    "gemma4": CALLS["gemma4"],
    "thinking": "llama.cpp/Apriel-1.6-15b-Thinker-fixed llama.cpp/unsloth-Apriel-1.5",
    "seed": "llama.cpp/ByteDance-Seed-OSS",
}
# These templates do not write the `tool_calls` of messages.
WITHOUT_HISTORY = (
    "axolotl/falcon_h1",
    "llama.cpp/LFM2-8B-A1B",
    "llama.cpp/LFM2.5-Instruct",
    "llama.cpp/fireworks-ai-llama-3-firefunction-v2",
    "llama.cpp/ibm-granite-granite-3.3-2B-Instruct",
    "llama.cpp/llama-cpp-deepseek-r1",
    "trl/lfm2",
)
ONE_CALL = ("llama3_json",)  # templates of these formats reject messages with more than one call


def by_template(formats: dict[str, str]) -> dict[str, str]:
    return {template: name for name, templates in formats.items() for template in templates.split()}


@pytest.fixture(scope="module")
def templates() -> dict[str, str]:
    return released_templates()


@pytest.mark.slow  # downloads packages
def test_formats_of_released_templates(templates: dict[str, str]) -> None:
    calls, reasoning = by_template(CALLS), by_template(REASONING)
    assert calls.keys() | reasoning.keys() <= templates.keys()
    found_calls = {name: find_call_format(text) for name, text in templates.items()}
    assert {name: found.name for name, found in found_calls.items() if found} == calls
    found_reasoning = {name: find_reasoning_format(text) for name, text in templates.items()}
    assert {name: found.name for name, found in found_reasoning.items() if found} == reasoning


ARGUMENTS = {"city": "Paris", "note": 'a "b" it\'s <x> [1] {é}'}
PARAMETERS = {"type": "object", "properties": {name: {"type": "string", "description": "d"} for name in ARGUMENTS}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": {**PARAMETERS, "required": []}}}
]


def written(template: str, count: int) -> str:
    """Render a response with calls, and return the text after the prompt."""
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals |= {"strftime_now": lambda format: "today", "raise_exception": refuse}
    made = environment.from_string(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template))
    asked = [{"role": "user", "content": "hi"}]
    errors = []
    for as_text, content in ((False, ""), (False, None), (True, None), (True, "")):  # templates accept some of these
        arguments: Any = json.dumps(ARGUMENTS) if as_text else ARGUMENTS
        functions = [
            {"id": f"abcdef{number:03}", "type": "function", "function": {"name": "f", "arguments": arguments}}
            for number in range(count)
        ]
        answer = {"role": "assistant", "content": content, "tool_calls": functions}
        values = {"tools": TOOLS, "bos_token": "", "eos_token": "", "enable_thinking": False}
        try:
            prompts = [made.render(messages=asked, add_generation_prompt=begun, **values) for begun in (True, False)]
            whole = made.render(messages=[*asked, answer], add_generation_prompt=False, **values)
        except (TemplateError, TypeError) as error:
            errors.append(repr(error))
            continue
        # The prompt for a new response may begin reasoning that a response in the history does not have.
        text = whole.removeprefix(next((one for one in prompts if whole.startswith(one)), ""))
        if "Paris" in text:
            return text
    raise AssertionError(errors or "the template writes no call")


def refuse(message: str) -> None:
    raise TemplateError(message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        (name, count)
        for name, format in by_template(CALLS).items()
        for count in ((1,) if format in ONE_CALL else (1, 2))
        if name not in WITHOUT_HISTORY
    ],
)
def test_calls_as_a_released_template_writes_them_are_read(templates: dict[str, str], name: str, count: int) -> None:
    text = written(templates[name], count)
    for pieces in ([text], list(text)):
        parser = AnswerParser(
            CALL_FORMATS[by_template(CALLS)[name]],
            find_reasoning_format(templates[name]),
            names=["f"],
            texts={"f": dict.fromkeys(ARGUMENTS, False)},
        )
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
        assert [event.name for event in events if isinstance(event, CallBegin)] == ["f"] * count, text
        assert all(event.complete for event in events if isinstance(event, CallEnd))
        for number in range(count):
            shown = (event.text for event in events if isinstance(event, CallArguments) and event.index == number)
            assert json.loads("".join(shown)) == ARGUMENTS, text


# --- conversations that agents send


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def with_call(arguments: Any) -> list[dict[str, Any]]:
    """A conversation with one call in its history."""
    call = {"id": "call12345", "type": "function", "function": {"name": "get", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "call12345", "name": "get", "content": "5"}
    history = [message("user", "a"), {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    return [*history, message("assistant", "b"), message("user", "c")]


GET_FUNCTION = {
    "name": "get",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
}
GET_TOOLS = [{"type": "function", "function": GET_FUNCTION}]
PLAIN = [message("user", "a"), message("assistant", "b"), message("user", "c")]
ODD_ARGUMENTS = ['{"a": ', "", "null", "[1]", '"x"', "5", None, [1], 5, {"a": "x"}, json.dumps('{"a": "x"}')]
EMPTY = {"tool_calls": [], "refusal": None, "annotations": [], "audio": None, "function_call": None}
SYSTEMS = [
    [message("system", "FIRST"), *PLAIN],
    [message("system", "FIRST"), message("system", "SECOND"), message("user", "a")],
    [message("system", "FIRST"), *PLAIN[:2], message("system", "SECOND"), PLAIN[2]],
    [*PLAIN, message("system", "SECOND")],
]


# These expect the parts of a message, and show no text.
NO_TEXTS = ("trl/idefics3", "trl/smolvlm")


def odd_messages_that_fail(tokenizer: Any) -> list[str]:
    """Return what fails of the conversations that become odd by one message. A template may reject all calls."""

    def prompt(messages: list[dict[str, Any]], tools: Any = None) -> str:
        try:
            return encode_chat(tokenizer, messages, tools, unseen_tools=True).text
        except PromptError:
            return ""

    failed = []
    if plain := prompt(PLAIN):
        if prompt([PLAIN[0], {**PLAIN[1], **EMPTY}, PLAIN[2]]) != plain:
            failed.append("empty lists and nulls")
        for messages in SYSTEMS:
            text = prompt(messages)
            if not all(one["content"] in text for one in messages):
                failed.append(f"system messages of {messages}")
    if usual := prompt(with_call({"a": "x"}), GET_TOOLS):
        failed += [f"arguments {one!r}" for one in ODD_ARGUMENTS if not prompt(with_call(one), GET_TOOLS)]
        if prompt(with_call(json.dumps('{"a": "x"}')), GET_TOOLS) != usual:
            failed.append("arguments that are encoded twice")
        if usual != prompt(with_call({"a": "y"}), GET_TOOLS) and "INVALID_JSON" not in prompt(
            with_call('{"a": '), GET_TOOLS
        ):
            failed.append("arguments that are cut off are not shown")
    return failed


@pytest.mark.slow
def test_an_odd_message_in_the_history_does_not_end_the_conversation(templates: dict[str, str]) -> None:
    model = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token=" "))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # every character is a token
    failed = {}
    for name in sorted({*templates} - {*NO_TEXTS}):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=model, chat_template=templates[name], bos_token="<s>", eos_token="</s>"
        )
        if found := odd_messages_that_fail(tokenizer):
            failed[name] = found
    assert not failed
