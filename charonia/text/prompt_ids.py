"""Converts requests to token ids: texts, chat messages and tools (with the chat template), and words that a response
must not contain. Also loads the tokenizer.

The Python API imports this module, and `charonia convert` copies it next to the Triton model `preprocessing`, so that
both produce the same ids. Therefore it imports nothing of charonia.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]

# generated: request limits, from definitions/ by `make generate`
# nesting levels of JSON, because recursive functions need Python's stack for each level; the gateway has the same limit
MAX_DEPTH = 200
# number of bad_words of a request, because the engine compares each with the end of every sequence at every step
MAX_BAD_WORDS = 1000
# bytes of all bad words of a request, because tokenizing them takes the time of a prompt that is six times as long
MAX_BAD_WORDS_BYTES = 65536
# bytes of a bad word in UTF-8, because each is tokenized three times; stop words have the same limit
MAX_BAD_WORD_BYTES = 1024
# maximum of each bias in logit_bias; the minimum is the negative value
MAX_LOGIT_BIAS = 100
# end of generated: request limits
# Number of characters that are tokenized together in a text that may be too long.
_SLICE = 1 << 15
_MAX_SHOWN = 80  # characters of a wrong value in an error message
# Marks a response in a rendered chat. The text that a template writes after the mark is the text after a response. No
# template changes the mark, because it has neither spaces nor markup, and no user text contains it.
_ANSWER = "charoniaXanswerXendsXhere"
# Name of a test function. A chat template that prints this name prints tools.
_TEST_TOOL = "charoniaXtool"
_TEST_DEFINITION = {
    "type": "function",
    "function": {"name": _TEST_TOOL, "description": "", "parameters": {"type": "object"}},
}
# The name of the argument that holds arguments that are not a JSON object. The name is Anthropic's.
INVALID = "INVALID_JSON"
# Names for a message's reasoning, the usual one first.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
# The beginning of a response's content in GPT-OSS' format harmony, after the end of the prompt.
_HARMONY_CONTENT = "<|channel|>final<|message|>"
# Efforts that GPT-OSS has not learned, and the nearest that it has learned.
_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
# The prompt of Qwen3-Reranker, from its model card, with the default instruction. Its messages have the roles query,
# document and system, for another instruction.
QWEN3_PAIRS = """\
{%- macro text(role) -%}
{{ messages | selectattr("role", "equalto", role) | map(attribute="content") | first }}
{%- endmacro -%}
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer \
can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ text("system") or "Given a web search query, retrieve relevant passages that answer the query" }}
<Query>: {{ text("query") }}
<Document>: {{ text("document") }}<|im_end|>
<|im_start|>assistant
<think>

</think>{{ "\\n\\n" }}"""
# Where a chat template expects tools: in its variable, or as a text in the system message; "": it ignores tools.
_ToolPlace = Literal["variable", "system message", ""]
# Writes calls, each a name and its arguments, as a model does.
WriteCalls = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]


# Sizes of Mistral's Tekken vocabulary.
_TEKKEN_TOKENS = 131_072
_TEKKEN_SPECIAL_TOKENS = 1000
# Special tokens that chat templates and end ids use.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# Tokenizer classes (without "Fast") that follow add_bos_token before transformers 5, with true as the default.
BEGINNING_CLASSES = (
    "LlamaTokenizer",
    "CodeLlamaTokenizer",
    "GemmaTokenizer",
    "CohereTokenizer",
    "InternLMTokenizer",
    "InternLM2Tokenizer",
)
# Set to true in a process that uses transformers for tokenizers only. Then transformers does not import PyTorch, which
# takes two seconds and 250 MB of memory, and which no tokenizer needs.
tokenizers_alone = False


@dataclass(frozen=True)
class Encoded:
    """A prompt. strip_leading_space: whether the response is a separate text (a chat turn), not a continuation.

    continuation_ids: the tokens that the prompt adds to a session with a history; only for requests with a session.
    text: the text that was tokenized. num_begun: number of characters at its end that belong to an unfinished response.
    """

    token_ids: list[int]
    strip_leading_space: bool = False
    continuation_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_begun: int = 0


class TokenizerError(ValueError):
    """The folder has no tokenizer, or an unusable one."""


class PromptError(ValueError):
    """A part of the request is wrong. The text names the field, the problem, and the remedy."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")


class PromptTooLongError(PromptError):
    """The prompt has more tokens than the context. The engine raises an equal error for long lists of ids."""

    def __init__(self, limit: int) -> None:
        ValueError.__init__(
            self,
            f"the prompt does not fit: it has more than {limit} tokens and the context (session_len) holds {limit}, "
            "one of them to be generated. Shorten the prompt",
        )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the fast tokenizer of a Hugging Face folder or of a workspace's `tokenizer` folder.

    Follows tokenizer.json, whatever class tokenizer_config.json names. Does not run code of the model, and does not
    download. A tokenizer.model must have been converted before, except a file in tiktoken's format.
    Raises TokenizerError if the folder has no tokenizer, or one that cannot be loaded.
    """
    # Disables transformers' advice to install PyTorch, because a tokenizer does not need it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    with _without_torch() if tokenizers_alone else contextlib.nullcontext():
        from transformers import PreTrainedTokenizerFast

    described = (folder / "tokenizer.json").is_file()
    if not described and not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        if (folder / "tiktoken.model").is_file():
            raise TokenizerError(
                f"{folder} has a tokenizer that needs the model's own code (tiktoken.model, Kimi K2), which Charonia "
                "does not run: add a tokenizer.json, for example from a copy of the model that has one"
            )
        raise TokenizerError(f"{folder} has no tokenizer: expected tokenizer.json or tokenizer.model")
    settings = _json_object(folder / "tokenizer_config.json")
    try:
        tokenizer: Any
        if described:
            # AutoTokenizer would choose a class, and most classes replace the normalizer, pre-tokenizer and decoder.
            repair: dict[str, Any] = {"fix_mistral_regex": True} if _is_tekken(folder) else {}
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, **repair)
            # transformers compares model_max_length with lengths without checking its type.
            if not isinstance(tokenizer.model_max_length, int | float):
                raise TokenizerError(f"model_max_length is {show(tokenizer.model_max_length)}; it must be a number")
            _name_special_tokens(tokenizer, folder, settings)
            _set_beginning(tokenizer, settings)
        else:
            tokenizer = load_by_class(folder)
    except TokenizerError:
        raise
    except Exception as error:  # transformers may raise any error
        raise TokenizerError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TokenizerError(
            f"{folder} has only a slow tokenizer ({type(tokenizer).__name__}); a tokenizer.json is needed: "
            "convert it with transformers' save_pretrained"
        )
    return tokenizer


def set_chat_template(tokenizer: Any, file: Path) -> None:
    """Replace the chat template. Raises TokenizerError for a file that cannot be read, or is no template."""
    import jinja2

    try:
        tokenizer.chat_template = file.expanduser().read_text(encoding="utf-8")
        render_chat(tokenizer, [{"role": "user", "content": "x"}])
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"the chat template {file} cannot be read: {error}") from error
    except PromptError as error:  # a template may reject this message
        if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
            raise TokenizerError(f"the chat template {file} is not valid Jinja: {error.__cause__}") from error


def load_by_class(folder: Path) -> Any:
    """Load a tokenizer with the class that transformers chooses from the config files. May raise any error."""
    with _without_torch() if tokenizers_alone else contextlib.nullcontext():
        from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False, local_files_only=True)


def _is_tekken(folder: Path) -> bool:
    """Whether tokenizer.json has the vocabulary of Mistral's Tekken: 1,000 special tokens, then all bytes in order.

    Files from before transformers 5 have a wrong split pattern. transformers corrects it only on request.
    """
    config = _json_object(folder / "config.json")
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else None)
    if size != _TEKKEN_TOKENS or "istral" not in str(config.get("model_type")):
        return False
    vocabulary = (_json_object(folder / "tokenizer.json").get("model") or {}).get("vocab")
    first_byte = chr(256)  # byte 0 in the alphabet of byte-level BPE
    return isinstance(vocabulary, dict) and vocabulary.get(first_byte) == _TEKKEN_SPECIAL_TOKENS


def _name_special_tokens(tokenizer: Any, folder: Path, settings: Mapping[str, Any]) -> None:
    """Set special tokens that the folder does not name to the defaults of its class, if the vocabulary has them."""
    missing = [name for name in _NAMED_TOKENS if getattr(tokenizer, name) is None and name not in settings]
    named = settings.get("tokenizer_class") or _json_object(folder / "config.json").get("tokenizer_class")
    if not missing or named in (None, "PreTrainedTokenizerFast", "TokenizersBackend"):
        return
    import inspect

    import transformers

    found = getattr(transformers, str(named), None)
    if not isinstance(found, type):
        return
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    parameters = inspect.signature(found).parameters
    for name in missing:
        token = parameters[name].default if name in parameters else None
        if isinstance(token, str) and token in added:
            setattr(tokenizer, name, token)
        elif isinstance(token, str) and token in vocabulary:
            tokenizer.add_special_tokens({name: token})


def _set_beginning(tokenizer: Any, settings: Mapping[str, Any]) -> None:
    """Add the beginning token to texts, or remove it, according to add_bos_token of tokenizer_config.json.

    transformers 5 ignores add_bos_token if there is a tokenizer.json. Earlier versions followed it for the classes in
    BEGINNING_CLASSES, and models from that time (DeepSeek's) rely on it.
    """
    wanted = settings.get("add_bos_token")
    if class_name(settings) in BEGINNING_CLASSES and isinstance(wanted, bool):
        set_beginning(tokenizer, wanted)


def class_name(settings: Mapping[str, Any]) -> str:
    """Return the class that tokenizer_config.json names, without "Fast"; empty if it names none."""
    return str(settings.get("tokenizer_class") or "").removesuffix("Fast")


def set_beginning(tokenizer: Any, wanted: bool) -> None:
    """Make the tokenizer add the beginning token to texts, or not. Changes nothing if it also adds other tokens."""
    if tokenizer.bos_token_id is None:
        return
    backend, bos = tokenizer.backend_tokenizer, (str(tokenizer.bos_token), tokenizer.bos_token_id)
    added = backend.num_special_tokens_to_add(False)
    if wanted and not added:
        backend.post_processor = around_texts(bos, None)
    elif not wanted and added == 1 and backend.encode("a").ids[:1] == [bos[1]]:
        backend.post_processor = around_texts(None, None)


def around_texts(first: tuple[str, int] | None, last: tuple[str, int] | None) -> Any:
    """Return a post-processor that adds the tokens before and after each text, also of a pair, as transformers does.
    first, last: a token with its id; None: no token."""
    from tokenizers import processors

    before, after = ([one[0]] if one else [] for one in (first, last))
    single, second = ([*before, text, *after] for text in ("$A", "$B"))
    special = [one for one in (first, last) if one]
    return processors.TemplateProcessing(single=single, pair=[*single, *second], special_tokens=special)


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Hide PyTorch from imports in this context. transformers caches that it is missing."""
    if "torch" in sys.modules:
        yield
        return
    collects = gc.isenabled()
    gc.disable()  # imported objects are never garbage
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes Python's import fail
    try:
        from transformers.utils.import_utils import is_torch_available

        is_torch_available()  # caches its result
        import_models()
        yield
    finally:
        del sys.modules["torch"]
        if collects:
            gc.enable()


def import_models() -> None:
    """Import transformers.models faster. transformers reads the sources of all its models once when it is imported, and
    once again here, which takes a third of a second. This function reuses the first result."""
    import transformers
    from transformers.utils import import_utils

    utils: Any = import_utils
    read: Any = getattr(utils, "define_import_structure", None)
    if not hasattr(read, "cache_info") or not read.cache_info().currsize:
        return  # this version reads the sources only when transformers.models is imported

    def found(*_: Any) -> dict[frozenset[str], dict[str, set[str]]]:
        whole = read(Path(transformers.__file__).parent / "models", prefix="models")  # same call as in the package
        modules = "models."
        return {
            needed: {name.removeprefix(modules): names for name, names in one.items() if name.startswith(modules)}
            for needed, one in whole.items()
        }

    utils.define_import_structure = found
    try:
        import transformers.models
    finally:
        utils.define_import_structure = read


def has_own_code(folder: Path) -> bool:
    """Whether the tokenizer names code of the model. Charonia does not run such code. Raises TokenizerError."""
    return "auto_map" in _json_object(folder / "tokenizer_config.json")


def _json_object(file: Path) -> dict[str, Any]:
    """Read a JSON object; returns an empty one if there is no file. Raises TokenizerError."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} must hold a JSON object")
    return content


def parse_json(field: str, text: str, remedy: str) -> Any:
    """Parse JSON. Raises PromptError if the text is not valid JSON, or nested deeper than MAX_DEPTH."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise PromptError(field, f"not valid JSON ({error})", remedy) from None
    except RecursionError:
        raise _too_deep(field) from None
    if is_too_deep(value):
        raise _too_deep(field)
    return value


def is_too_deep(value: Any) -> bool:
    """Whether JSON is nested deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return False
    return True


def _inner(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep(field: str) -> PromptError:
    return PromptError(field, f"nested deeper than {MAX_DEPTH} levels", "send values that are nested less deeply")


def show(value: Any) -> str:
    """Format a wrong value for an error message. A long value is cut."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def encode_text(
    tokenizer: Any,
    field: str,
    text: str,
    *,
    special: bool = True,
    interactive: bool = False,
    limit: int | None = None,
) -> Encoded:
    """Encode a text. special: whether to add the tokens that the tokenizer adds, such as its beginning token.

    field: the name in error messages. interactive: whether the text may continue a session. limit: see check_length.
    """
    check_length(tokenizer, field, text, limit)
    token_ids = encode(tokenizer, field, text, special=special)
    added = encode_inner(tokenizer, field, text) if interactive else []
    return Encoded(token_ids, False, added, text)


def has_pair_template(tokenizer: Any) -> bool:
    """Whether the chat template has the roles query and document, as templates of rerankers have."""
    return all(re.search(f"[\"']{role}[\"']", str(tokenizer.chat_template)) for role in ("query", "document"))


def encode_pair(tokenizer: Any, messages: Sequence[Any], limit: int | None = None) -> Encoded:
    """Encode a query and a document for a reranker, with its chat template, or as transformers encodes a pair.

    messages: one with role query, one with role document, and, for a template, one with role system, the instruction.
    """
    checked = check_messages(messages)
    texts = {message["role"]: message["content"] for message in checked}
    if set(texts) - {"system"} != {"query", "document"} or len(texts) != len(checked) or not all(texts.values()):
        roles = ", ".join(show(message["role"]) for message in checked)
        raise PromptError(
            "messages",
            f"the roles are {roles}, or a text is empty",
            "send one message each with the roles query and document, and at most one with the role system",
        )
    if has_pair_template(tokenizer):
        if "system" in texts and not _shows_instruction(tokenizer):
            raise _no_instruction("the reranker's chat template does not print an instruction")
        text = render_chat(tokenizer, checked)
        check_length(tokenizer, "messages", text, limit)
        return Encoded(encode(tokenizer, "messages", text, special=False), text=text)
    if "system" in texts:
        raise _no_instruction("this reranker has no template for an instruction")
    query, document = texts["query"], texts["document"]
    check_length(tokenizer, "messages", query + document, limit)
    for name, text in texts.items():
        encode(tokenizer, name, text, special=False)  # its errors name the text
    ids = [int(token) for token in tokenizer(query, document, return_attention_mask=False)["input_ids"]]
    return Encoded(ids, text=f"{query}\n{document}")


def _shows_instruction(tokenizer: Any) -> bool:
    texts = {"system": _ANSWER, "query": "x", "document": "x"}
    return _ANSWER in render_chat(tokenizer, [{"role": role, "content": text} for role, text in texts.items()])


def _no_instruction(problem: str) -> PromptError:
    return PromptError("messages", problem, "leave the instruction out")


def encode_ids(
    tokenizer: Any, field: str, token_ids: Sequence[int], *, with_text: bool = False, interactive: bool = False
) -> Encoded:
    """Return the ids unchanged, and with `with_text` also their text with special tokens. Without `with_text`, the
    engine checks whether the ids are in the vocabulary."""
    ids = list(token_ids)
    if not ids:
        raise PromptError(field, "empty", "send at least one token id")
    text = ""
    if with_text:
        for position, token in enumerate(ids):
            if not 0 <= token < len(tokenizer):
                raise PromptError(
                    f"{field}[{position}]", f"{token} is not a token id", f"send ids from 0 to {len(tokenizer) - 1}"
                )
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return Encoded(ids, False, ids if interactive else [], text)


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Any],
    tools: Any = None,
    *,
    special: bool = False,
    interactive: bool = False,
    limit: int | None = None,
    variables: Mapping[str, Any] | None = None,
    continues: bool = False,
    unseen_tools: bool = False,
    write_calls: WriteCalls | None = None,
) -> Encoded:
    """Encode a chat with the model's template, which writes special tokens itself. special: whether the tokenizer adds
    its own special tokens too. messages, tools: in OpenAI's format. write_calls: the format of calls; tools that the
    template ignores are described in the system message. None: such tools are rejected, except with unseen_tools.

    interactive: whether the messages may continue a session; see `encode_continuation`. limit: see check_length.
    variables: additional template variables. continues: the last message is an unfinished response, so the prompt ends
    with its text.
    """
    checked = check_messages(messages)
    begun = ""
    if continues:
        begun = _begun_answer(checked, interactive=interactive)
        checked = checked[:-1]
    variables = _known_effort(tokenizer, check_variables(variables or {}))
    if continues:
        variables["add_generation_prompt"] = True
    history = _with_shown_calls(tokenizer, checked, write_calls or _as_hermes)
    new = list(itertools.dropwhile(lambda message: message["role"] == "system", history))
    checked = _with_accepted_systems(tokenizer, history, variables)
    shown = None if tools is None else check_tools(tools)
    if shown:
        place = _tool_place(tokenizer, checked, variables)
        if not place and _are_shown(tokenizer, checked, shown, variables):
            place = "variable"
        if place or (unseen_tools and write_calls is None):
            checked, shown = _with_tools(checked, shown, place)
        elif write_calls is not None:
            described = _with_described_tools(history, shown, write_calls)
            checked, shown = _with_accepted_systems(tokenizer, described, variables), None
        else:
            raise PromptError(
                "tools",
                "the model's chat template ignores tools, so the model would not see them",
                "send no tools, or start the server with CHARONIA_GENERIC_TOOLS = true and "
                "CHARONIA_TOOL_CALL_PARSER = hermes",
            )
    text = render_chat(tokenizer, checked, shown, variables)
    text += _HARMONY_CONTENT + begun if continues and _is_harmony(tokenizer) else begun
    check_length(tokenizer, "messages", text, limit)
    added: list[int] = []
    if interactive:
        if not new:
            raise PromptError("messages", "all of them are system messages", "send a user message")
        added = encode_continuation(tokenizer, _with_accepted_systems(tokenizer, new, variables), variables)
    ids = encode(tokenizer, "messages", text, special=special)
    return Encoded(ids, not continues, added, text, len(begun))


def _is_harmony(tokenizer: Any) -> bool:
    return _HARMONY_CONTENT in str(tokenizer.chat_template)


def _known_effort(tokenizer: Any, variables: dict[str, Any]) -> dict[str, Any]:
    """Return the variables with an effort that the model has learned. GPT-OSS always reasons: as little as possible if
    enable_thinking is false."""
    effort = variables.get("reasoning_effort", "none" if variables.get("enable_thinking") is False else None)
    known = _HARMONY_EFFORTS.get(str(effort)) if _is_harmony(tokenizer) else None
    return {**variables, "reasoning_effort": known} if known else variables


def _begun_answer(messages: Sequence[Message], *, interactive: bool) -> str:
    """Return the text of the last message, an unfinished response."""
    field, last = "continue_final_message", messages[-1]
    if interactive:
        remedy = "leave one of continue_final_message and interactive out"
        raise PromptError(field, "a session continues after complete responses only", remedy)
    if last["role"] != "assistant" or len(messages) < 2:
        raise PromptError(
            field, "the last message is not an assistant's after other messages", "send the unfinished response last"
        )
    if last.get("tool_calls") or not last["content"]:
        raise PromptError(field, "the unfinished response has tool calls, or no text", "send only its text")
    return str(last["content"])


def check_messages(messages: Sequence[Any]) -> list[Message]:
    """Return the messages in the form that chat templates expect.

    Content may be a string, null or a list of OpenAI's text parts. The parts of a response are joined directly, other
    parts with newlines. Empty lists and null count as absent. The arguments of a tool call, a JSON string in OpenAI's
    format, become an object, because templates iterate over their items. Other arguments, as in a truncated response,
    become the value of INVALID_JSON.
    """
    if not messages:
        raise PromptError("messages", "the list is empty", "send at least one message")
    return [_check_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _check_message(field: str, message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise PromptError(field, f"{show(message)} is not an object", 'send {"role": ..., "content": ...}')
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise PromptError(f"{field}.role", "missing or not a string", 'send "system", "user", "assistant" or "tool"')
    if message["role"] == "developer":  # OpenAI's name for it
        message = {**message, "role": "system"}
    if message.get("content") is None and message["role"] in ("system", "user"):
        raise PromptError(f"{field}.content", "missing", "send the message's text as a string")
    checked = {name: value for name, value in message.items() if value is not None and value != []}
    # Templates read different names. New versions of transformers add the same names.
    reasoning = next((checked[name] for name in _REASONING_NAMES if name in checked), None)
    if reasoning is not None:
        checked = {"thinking": reasoning, **checked, "reasoning_content": reasoning}
    checked["content"] = _joined(f"{field}.content", message.get("content"), message["role"])
    if "tool_calls" in checked:
        checked["tool_calls"] = _check_calls(f"{field}.tool_calls", checked["tool_calls"])
    return checked


def _joined(field: str, content: Any, role: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    remedy = 'send a string or a list of {"type": "text", "text": ...}'
    if not isinstance(content, Sequence):
        raise PromptError(field, f"{show(content)} is not a text", remedy)
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise PromptError(f"{field}[{number}]", f"parts of type {kind!r} are not supported", remedy)
        texts.append(part["text"])
    return ("" if role == "assistant" else "\n").join(text for text in texts if text)


def _check_calls(field: str, calls: Any) -> list[Any]:
    if not _are_objects(calls):
        raise PromptError(field, "not a list of objects", "send the tool calls of the model's response")
    checked = []
    for number, call in enumerate(calls):
        if isinstance(custom := call.get("custom"), Mapping):  # OpenAI's tools without a schema
            arguments = {"input": custom.get("input")}
            call = {"id": call.get("id"), "type": "function", "function": {**custom, "arguments": arguments}}
        function = call.get("function", call)  # some templates expect the function's fields in the call itself
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            remedy = 'send {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
            raise PromptError(f"{field}[{number}]", f"{show(call)} names no function", remedy)
        function = {**function, "arguments": _arguments(function.get("arguments"))}
        checked.append({**call, "function": function} if "function" in call else function)
    return checked


def _arguments(value: Any) -> dict[str, Any]:
    """Return a call's arguments as an object."""
    found = value
    if isinstance(value, str):
        try:
            # Some models and servers write empty arguments as an empty string, and some encode JSON twice.
            found = json.loads(value.strip() or "{}")
            found = json.loads(found) if isinstance(found, str) else found
        except (ValueError, RecursionError):
            pass
    if found is None:
        return {}
    if isinstance(found, Mapping) and not is_too_deep(found):
        return dict(found)
    return {INVALID: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}


def _with_accepted_systems(tokenizer: Any, messages: list[Message], variables: Mapping[str, Any]) -> list[Message]:
    """Return the messages with their system messages in a form that the chat template shows. Many templates reject or
    drop a system message after the first message, and some reject all. Such a message becomes a text of the user at
    the same place, or a part of the first system message."""
    late = [message for message in messages[1:] if message["role"] == "system"]
    if not late and (messages[0]["role"] != "system" or _shows_system(tokenizer, variables)):
        return messages
    # Marks instead of the texts of the system show which of them the template prints.
    marks = {f"{at}x" for at, one in enumerate(messages) if one["role"] == "system" and one["content"]}
    marked = [
        {**one, "content": f"{_ANSWER}{at}x" if f"{at}x" in marks else one["content"]}
        for at, one in enumerate(messages)
    ]
    accepted = []
    for number, candidate in enumerate(_system_forms(marked)):
        with contextlib.suppress(PromptError):
            shown = render_chat(tokenizer, candidate, variables=variables)
            if marks.issubset(re.findall(rf"{_ANSWER}(\d+x)", shown)):
                return _system_forms(messages)[number]
            accepted.append(number)
    return _system_forms(messages)[accepted[0] if accepted else 0]


def _system_forms(messages: list[Message]) -> list[list[Message]]:
    """Return the messages unchanged, and with their system messages as texts of the user or of one system message."""
    first = messages[:1] if messages[0]["role"] == "system" else []
    texts = [one["content"].strip() for one in messages if one["role"] == "system"]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    others = [one for one in messages if one["role"] != "system"]
    return [messages, [*first, *_as_user(messages[len(first) :])], [merged, *others], _as_user(messages)]


def _as_user(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the role user for system messages. Neighbouring messages of the user become one."""
    made: list[Message] = []
    for is_user, group in itertools.groupby(messages, lambda message: message["role"] in ("system", "user")):
        if is_user:
            first, *others = group
            texts = [first["content"], *(message["content"] for message in others)]
            made.append({**first, "role": "user", "content": "\n\n".join(texts)})
        else:
            made += group
    return made


_shown_systems: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()


def _shows_system(tokenizer: Any, variables: Mapping[str, Any]) -> bool:
    """Whether the template shows a first system message. Cached per template."""
    known = _shown_systems.setdefault(tokenizer, {})
    key = str(tokenizer.chat_template)
    if key not in known:
        messages = [{"role": "system", "content": _ANSWER}, {"role": "user", "content": "x"}]
        try:
            known[key] = _ANSWER in render_chat(tokenizer, messages, variables=variables)
        except PromptError:
            known[key] = False
    return known[key]


_call_changes: WeakKeyDictionary[Any, dict[str, Callable[[list[Message]], list[Message]]]] = WeakKeyDictionary()


def _with_shown_calls(tokenizer: Any, messages: list[Message], write: WriteCalls) -> list[Message]:
    """Return the messages with their calls in a form that the template shows. gpt-oss' template drops all but the first
    call of a message, and some templates drop all calls, or results. Cached per template."""
    if not any("tool_calls" in message or message["role"] == "tool" for message in messages):
        return messages
    known = _call_changes.setdefault(tokenizer, {})
    key = str(tokenizer.chat_template)
    if key not in known:
        known[key] = _probe_calls(tokenizer)
    change = known[key]
    return _with_all_calls_as_text(messages, write) if change is _with_all_calls_as_text else change(messages)


def _probe_calls(tokenizer: Any) -> Callable[[list[Message]], list[Message]]:
    ids = ("charonia1", "charonia2")  # Mistral's templates accept ids of nine letters and digits
    name = _TEST_TOOL
    calls = [{"id": id, "type": "function", "function": {"name": name, "arguments": {"a": f"{id}a"}}} for id in ids]
    results = [{"role": "tool", "tool_call_id": id, "name": name, "content": f"{id}r"} for id in ids]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        text = render_chat(tokenizer, [{"role": "user", "content": "x"}, answer, *results])
    except PromptError:  # the caller's messages will show the error
        return list
    # Some templates show certain arguments only, and always the name.
    is_shown = f"{ids[0]}a" in text or name in text.partition(f"{ids[0]}r")[0]
    if not is_shown or not all(f"{id}r" in text for id in ids):
        return _with_all_calls_as_text
    return _with_single_calls if f"{ids[0]}a" in text and f"{ids[1]}a" not in text else list


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """Return the tools, in OpenAI's format, in the form that chat templates expect."""
    if not _are_objects(tools):
        remedy = 'send a JSON list such as [{"type": "function", "function": {"name": ..., "parameters": {...}}}]'
        raise PromptError("tools", "not a list of objects", remedy)
    return list(tools)


_tool_places: WeakKeyDictionary[Any, dict[tuple[str, bool], _ToolPlace]] = WeakKeyDictionary()


def _tool_place(tokenizer: Any, messages: Sequence[Message], variables: Mapping[str, Any]) -> _ToolPlace:
    """Return where the template expects tools. Cached per template; searched again with variables if not found."""
    has_system = messages[0]["role"] == "system"
    known = _tool_places.setdefault(tokenizer, {})
    key = str(tokenizer.chat_template), has_system
    if key not in known:
        known[key] = _probe_tool_place(tokenizer, has_system, {})
    return known[key] or (_probe_tool_place(tokenizer, has_system, variables) if variables else "")


def _are_shown(
    tokenizer: Any, messages: list[Message], tools: list[dict[str, Any]], variables: Mapping[str, Any]
) -> bool:
    """Whether the prompt of these messages changes with the tools. The template may not accept the test messages."""
    with_them = render_chat(tokenizer, messages, tools, variables)
    try:
        return with_them != render_chat(tokenizer, messages, None, variables)
    except PromptError:  # a template that needs tools
        return True


def shows_tools(tokenizer: Any) -> bool:
    """Whether the chat template shows the tools of a request without a system message."""
    return bool(_tool_place(tokenizer, [{"role": "user", "content": "x"}], {}))


def _with_described_tools(messages: list[Message], tools: list[dict[str, Any]], write: WriteCalls) -> list[Message]:
    """Return the messages with a description of the tools, and of the format of calls, in the system message."""
    functions = [tool.get("function", tool) for tool in tools]
    lines = [
        "You can call the functions below. <tools> has one function on each line, in JSON.",
        "<tools>",
        *(json.dumps(function, ensure_ascii=False) for function in functions),
        "</tools>",
        "If you need a function, call it in this form, with its name and its arguments:",
        write([("FUNCTION", {"PARAMETER": "VALUE"})]),
        "The user then sends you the result of the call. If you need no function, answer the user in your own words.",
    ]
    has_system = messages[0]["role"] == "system"
    first = messages[0] if has_system else {"role": "system", "content": ""}
    texts = [first["content"], "\n".join(lines)]
    return [{**first, "content": "\n\n".join(text for text in texts if text)}, *messages[has_system:]]


def _probe_tool_place(tokenizer: Any, has_system: bool, variables: Mapping[str, Any]) -> _ToolPlace:
    messages = [{"role": role, "content": "x"} for role in (["system", "user"] if has_system else ["user"])]
    places: tuple[_ToolPlace, ...] = ("variable", "system message")
    for place in places:
        try:
            text = render_chat(tokenizer, *_with_tools(messages, [_TEST_DEFINITION], place), variables)
        except PromptError:  # the template rejects the test messages; the caller's messages will show the error
            return "variable" if place == "variable" else ""
        if _TEST_TOOL in text:
            return place
    return ""


def _with_tools(
    messages: list[Message], tools: list[dict[str, Any]], place: _ToolPlace
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """Return messages and tools, with the tools in the place that the template expects."""
    if place != "system message":
        return messages, tools
    functions = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    has_system = messages[0]["role"] == "system"
    first = messages[0] if has_system else {"role": "system", "content": ""}
    # The caller may have put the tools there already.
    return [{**first, "tools": first.get("tools") or functions}, *messages[has_system:]], None


# Arguments of apply_chat_template that are not template variables. Callers must not set them.
_RESERVED = frozenset(
    [
        *("chat_template", "continue_final_message", "conversation", "max_length", "messages"),
        *("padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs"),
        *("tools", "truncation"),
    ]
)


def check_variables(variables: Any) -> dict[str, Any]:
    """Check variables of a chat template, such as enable_thinking."""
    remedy = 'send a JSON object of the chat template\'s variables, such as {"enable_thinking": false}'
    if not isinstance(variables, Mapping):
        raise PromptError("chat_template_kwargs", f"{show(variables)} is not an object", remedy)
    if reserved := sorted(_RESERVED.intersection(variables)):
        raise PromptError("chat_template_kwargs", f"the variable {reserved[0]!r} cannot be set", "remove it")
    return dict(variables)


def _are_objects(value: Any) -> bool:
    return (
        isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(item, Mapping) for item in value)
    )


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render checked messages with the chat template. The text ends where the response begins, or after the last
    message with the variable add_generation_prompt = False."""
    if tokenizer.chat_template is None:
        raise PromptError(
            "messages",
            "this model's tokenizer has no chat template",
            "send a text (/v1/completions, or the tensor text_input), or give the server a template (--chat-template)",
        )
    given = list(messages), list(tools) if tools else None, dict(variables or {})
    try:
        return _render(tokenizer, *given)
    except PromptError:
        for form in _other_forms(*given):
            with contextlib.suppress(PromptError):
                return _render(tokenizer, *form)
        raise


_shown_time: ContextVar[datetime | None] = ContextVar("_shown_time", default=None)


@contextlib.contextmanager
def shown_time(text: str | None) -> Iterator[None]:
    """Chat templates show this local time, such as 2026-11-28T21:45:00. None: the time of the clock."""
    try:
        time = None if text is None else datetime.fromisoformat(text)
    except ValueError:
        remedy = "send a local time such as 2026-11-28T21:45:00"
        raise PromptError("prompt_time", f"{show(text)} is not a time", remedy) from None
    before = _shown_time.set(time)
    try:
        yield
    finally:
        _shown_time.reset(before)


def _set_clock(template: str) -> None:
    """Replace the template's function strftime_now. transformers passes no function as a variable, and caches compiled
    templates. A version of it without this function shows the time of the clock."""
    from transformers.utils import chat_template_utils

    compiled = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compiled and "strftime_now" in template:
        compiled(template).globals["strftime_now"] = _strftime_now


def _strftime_now(format: str) -> str:
    return (_shown_time.get() or datetime.now()).strftime(format)


# The messages, tools and variables that a template gets.
_Form = tuple[list[Message], list[Any] | None, dict[str, Any]]


def _other_forms(messages: list[Message], tools: list[Any] | None, variables: dict[str, Any]) -> Iterator[_Form]:
    """Yield forms of a conversation for a template that rejects it: with each change alone, with most changes, and with
    the calls as text."""
    for change in (_with_json_arguments, _with_text_as_reasoning, *_CHANGES):
        if (changed := change(messages)) != messages:
            yield changed, tools, variables
    # Some templates need a description and parameters, some a list, and some accept only certain efforts.
    complete = [_complete_tool(tool) for tool in tools or ()]
    yield messages, complete, variables
    others = {name: value for name, value in variables.items() if name != "reasoning_effort"}
    if others != variables:
        yield messages, tools, others
    changed = messages
    for change in _CHANGES:
        changed = change(changed)
    yield changed, complete, others
    if (as_text := _with_all_calls_as_text(messages)) != messages:
        yield as_text, complete, others


def _with_json_arguments(messages: list[Message]) -> list[Message]:
    """DeepSeek's templates expect arguments as JSON text."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        return {**call, "function": function} if "function" in call else function

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _with_text_as_reasoning(messages: list[Message]) -> list[Message]:
    """gpt-oss' templates accept either a text or reasoning with a call."""
    made = []
    for message in messages:
        if message.get("reasoning_content") and message["content"] and "tool_calls" in message:
            joined = f"{message['reasoning_content']}\n\n{message['content']}"
            message = {**message, "thinking": joined, "reasoning_content": joined, "content": ""}
        made.append(message)
    return made


def _with_single_calls(messages: list[Message]) -> list[Message]:
    """Llama 3's templates accept one call in a message. Each call is followed by its result."""
    made: list[Message] = []
    at = 0
    while at < len(messages):
        message, results = messages[at], defaultdict(list)
        calls = message.get("tool_calls", ())
        at += 1
        if len(calls) < 2:
            made.append(message)
            continue
        while at < len(messages) and messages[at]["role"] == "tool":
            results[str(messages[at].get("tool_call_id"))].append(messages[at])
            at += 1
        for number, call in enumerate(calls):
            made.append({**(message if number == 0 else {"role": "assistant", "content": ""}), "tool_calls": [call]})
            made += results.pop(str(call.get("id")), [])
        made += itertools.chain(*results.values())
    return made


def _with_short_ids(messages: list[Message]) -> list[Message]:
    """Mistral's templates accept ids of nine letters and digits."""

    def short(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        return {name: hashlib.sha256(str(fields[name]).encode()).hexdigest()[:9]} if name in fields else {}

    made = []
    for message in messages:
        calls = [{**call, **short(call, "id")} for call in message.get("tool_calls", ())]
        made.append({**message, **short(message, "tool_call_id"), **({"tool_calls": calls} if calls else {})})
    return made


def _joined_turns(messages: list[Message]) -> list[Message]:
    """Mistral's and Gemma's templates expect turns that alternate. A user's text after a result joins the result."""
    turns: list[list[Message]] = []
    for message in messages:
        before = turns[-1][-1] if turns else {"role": ""}
        same = before["role"] == message["role"] != "tool" or (before["role"], message["role"]) == ("tool", "user")
        if same and message["role"] != "system" and "tool_calls" not in before:
            turns[-1].append(message)
        else:
            turns.append([message])
    return [_joined_messages(turn) for turn in turns]


def _joined_messages(turn: list[Message]) -> Message:
    texts = [message["content"] for message in turn if message["content"]]
    return {**turn[-1], **turn[0], "content": "\n\n".join(texts)} if len(turn) > 1 else turn[0]


_CHANGES = (_with_single_calls, _with_short_ids, _joined_turns)


def _as_hermes(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Write calls in the format hermes of charonia_answers, which this module cannot import."""
    written = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)


def _with_all_calls_as_text(messages: list[Message], write: WriteCalls = _as_hermes) -> list[Message]:
    """Some templates have no form for calls."""
    return _joined_turns([_with_calls_as_text(message, write) for message in messages])


def _with_calls_as_text(message: Message, write: WriteCalls) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [call.get("function", call) for call in message.get("tool_calls", ())]
    if not calls:
        return message
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    texts = [message["content"], write([(call["name"], call["arguments"]) for call in calls])]
    return {**kept, "content": "\n".join(text for text in texts if text)}


def _complete_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    function = {"description": "", "parameters": {"type": "object", "properties": {}}, **function}
    return {**tool, "function": function} if "function" in tool else function


# For each call, GPT-OSS' template searches all later messages for a final response: 20 s for 3,000 calls.
_LATER_FINAL = re.compile(
    r"(for future_message in )loop_messages\[loop\.index:\]( %\}\s*\{%- if future_message\.role == 'assistant' and "
    r"\"tool_calls\" not in future_message %\}\s*\{%- set future_final_message\.found = true %\}\s*\{%- endif %\}\s*"
    r"\{%- endfor %\})"
)
_LAST_FINAL = "charoniaXlastXfinal"


@functools.lru_cache
def _looking_at_last_final(template: str) -> str | None:
    """Return GPT-OSS' template with the change of `_with_last_final`. None for other templates."""
    last = f"[loop_messages[loop.length - {_LAST_FINAL}]] if 0 < {_LAST_FINAL} <= loop.length - loop.index else []"
    changed, found = _LATER_FINAL.subn(rf"\1({last})\2", template)
    return changed if found else None


def _with_last_final(template: Any, messages: Sequence[Message]) -> dict[str, Any]:
    """Return variables that make GPT-OSS' template look at the last final response alone. {} for other templates."""
    changed = _looking_at_last_final(template) if isinstance(template, str) else None
    if changed is None:
        return {}
    from_end = (
        number
        for number, one in enumerate(reversed(messages), 1)
        if one["role"] == "assistant" and "tool_calls" not in one
    )
    return {"chat_template": changed, _LAST_FINAL: next(from_end, 0)}


def _render(tokenizer: Any, messages: list[Message], tools: list[Any] | None, variables: dict[str, Any]) -> str:
    import jinja2

    try:
        given = _with_last_final(tokenizer.chat_template, messages)
        _set_clock(given.get("chat_template") or tokenizer.get_chat_template(None, tools))
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                **{"add_generation_prompt": True, **variables},
                **given,
            )
        )
    # A template may raise any of these for unexpected values, such as a number instead of a list of calls.
    except (
        jinja2.TemplateError,
        TypeError,
        LookupError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise PromptError(
            "messages", f"the model's chat template rejects them ({error})", "change the roles or their order"
        ) from error


def encode_continuation(
    tokenizer: Any, new: Sequence[Message], variables: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the ids that new messages add to a conversation that ends with a response.

    These are the tokens of the text that the chat template writes after a response: the end of its turn, the messages,
    and the beginning of the next response. Raises PromptError if this text depends on the earlier messages. new: does
    not begin with a system message, because the conversation has already begun.
    """

    def after_answer(turns: int) -> str:
        before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * (turns - 1)
        marked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
        parts = render_chat(tokenizer, [*before, *marked, *new], variables=variables).split(_ANSWER)
        if len(parts) != 2:
            raise _cannot_continue("does not print an earlier response exactly once and unchanged")
        return parts[1]

    text = after_answer(1)
    if after_answer(2) != text:
        raise _cannot_continue("writes new messages differently after more turns")
    return encode_inner(tokenizer, "messages", text)


def _cannot_continue(what: str) -> PromptError:
    return PromptError(
        "messages",
        f"the model's chat template {what}, so a session cannot continue with only the new messages",
        "send the whole conversation, without interactive (over REST: without session_id)",
    )


def check_length(tokenizer: Any, field: str, text: str, limit: int | None) -> None:
    """Raises PromptTooLongError for a text that is far longer than `limit` tokens, the length of the context, without
    tokenizing all of it. Time and memory are bounded by `limit`, not by the text. None: no limit.

    A text with at most four characters per token goes to the engine, which counts exactly. For a longer text, slices
    are tokenized until they have twice the limit. A cut changes only the tokens next to it, so the whole text exceeds
    the limit too. A limit in bytes would not work: vocabularies have tokens of 128 or more spaces, and some tokenizers
    remove spaces after special tokens, or map any run of unknown characters to one token. The check can be wrong only
    for such a run of more than a slice.
    """
    if limit is None or len(text) <= max(_SLICE, 4 * limit):
        return
    count = 0
    for begin in range(0, len(text), _SLICE):
        count += len(_token_ids(tokenizer, field, text[begin : begin + _SLICE], special=False))
        if count > 2 * limit:
            raise PromptTooLongError(limit)


def encode(tokenizer: Any, field: str, text: str, *, special: bool) -> list[int]:
    """Return at least one id. special: whether to add the tokens that the tokenizer adds around a text, such as its
    beginning token. A chat template writes these tokens itself."""
    ids = _token_ids(tokenizer, field, text, special=special)
    if not ids:
        raise PromptError(field, "it has no tokens", "send a text that is not empty")
    return ids


def _token_ids(tokenizer: Any, field: str, text: str, *, special: bool) -> list[int]:
    try:
        ids = tokenizer(text, add_special_tokens=special, return_attention_mask=False)["input_ids"]
    except UnicodeEncodeError as error:
        raise PromptError(field, f"a lone surrogate at character {error.start}", "send whole characters") from None
    except TypeError:  # the Rust tokenizer's error for the same
        raise PromptError(
            field, "text that is not valid Unicode", "send whole characters, no lone surrogates"
        ) from None
    except Exception as error:  # the Rust tokenizer's errors have no type of their own
        raise PromptError(field, f"the tokenizer cannot encode it ({error})", "remove unusual characters") from error
    return [int(token) for token in ids]


def encode_inner(tokenizer: Any, field: str, text: str) -> list[int]:
    """Return the tokens of a text that continues another one, without the prefix that some tokenizers add."""
    return _after_newline(tokenizer, field, text) or encode(tokenizer, field, text, special=False)


def _after_newline(tokenizer: Any, field: str, text: str) -> list[int]:
    """Return the tokens of a text after a newline; [] if they cannot be separated from the newline's tokens."""
    newline = [int(token) for token in tokenizer("\n", add_special_tokens=False)["input_ids"]]
    both = encode(tokenizer, field, "\n" + text, special=False)
    return both[len(newline) :] if both[: len(newline)] == newline else []


def encode_bad_words(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """Return the token sequences of the words at the start of a text, after a space, and after a newline.

    A tokenizer may produce other sequences for a word inside another word; these are not found.
    """
    if len(words) > MAX_BAD_WORDS:
        raise PromptError("bad_words", f"{len(words)} words", f"send at most {MAX_BAD_WORDS}")
    total = sum(len(word.encode("utf-8", "surrogatepass")) for word in words)
    if total > MAX_BAD_WORDS_BYTES:
        raise PromptError("bad_words", f"{total} bytes in all", f"send at most {MAX_BAD_WORDS_BYTES}")
    sequences: list[list[int]] = []
    for index, word in enumerate(words):
        field = f"bad_words[{index}]"
        if not word:
            raise PromptError(field, "empty", "remove it")
        size = len(word.encode("utf-8", "surrogatepass"))
        if size > MAX_BAD_WORD_BYTES:
            raise PromptError(field, f"{size} bytes", f"send at most {MAX_BAD_WORD_BYTES} bytes")
        spellings = [encode(tokenizer, field, text, special=False) for text in (word, " " + word)]
        spellings.append(_after_newline(tokenizer, field, word))
        sequences.extend(ids for ids in spellings if ids)
    return [list(ids) for ids in dict.fromkeys(map(tuple, sequences))]
