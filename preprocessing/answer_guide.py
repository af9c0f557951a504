"""Makes the guide that the engine receives for a request: the guide of the caller, or a structural tag for forced
calls, for strict functions, and for a text after reasoning."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from answer_formats import CALLS_VARIABLE, GENERIC_VARIABLE, AnswerFormats, is_continued
from charonia_answers.formats import is_closed, is_open
from charonia_answers.harmony import REASONING
from charonia_answers.harmony_tags import HarmonyTags
from charonia_answers.lark import lark_of
from charonia_answers.tag_parts import Format, NoTagError, either
from charonia_answers.tags import Function, ReasoningState, Tags, check_name, guide_format
from prompt_ids import PromptError, is_too_deep, parse_json, show

_CHOICES = 'send "auto", "none", "required", {"type": "function", "function": {"name": ...}} or allowed_tools'
_ALLOWED = 'send {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}, with at '
_ALLOWED += 'least one tool {"type": "function", "function": {"name": ...}}'
# Keywords of JSON Schema whose values are schemas: in an object, in a list, or one schema. Other keywords have values
# that are not schemas.
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties")
_ANNOTATIONS = frozenset(("title", "description", "markdownDescription", "default", "example", "examples", "$comment"))
_GUIDE = "guided_decoding_guide"


@dataclass(frozen=True)
class ToolChoice:
    """name: the only function that may be called, if kind is "function". allowed: the names of the functions that may
    be called; None: all. The prompt has all functions, so that its beginning is the same for each choice."""

    kind: Literal["auto", "none", "required", "function"]
    name: str = ""
    allowed: tuple[str, ...] | None = None

    @property
    def forced(self) -> bool:
        return self.kind in ("required", "function")


_KNOWN: Mapping[str, ToolChoice] = {
    one.kind: one for one in (ToolChoice("auto"), ToolChoice("none"), ToolChoice("required"))
}


@dataclass(frozen=True)
class Guide:
    """The tensors guided_decoding_guide_type and guided_decoding_guide. type: "" if there is no guide."""

    type: str = ""
    text: str = ""


def read_tool_choice(text: str | None) -> ToolChoice:
    if text is None or text in _KNOWN:
        return _KNOWN["auto" if text is None else text]
    if text.lstrip().startswith("{"):
        value = parse_json("tool_choice", text, _CHOICES)
        if value.get("type") == "allowed_tools":
            return _allowed_tools(value)
        name = _named(value)
        if name is not None:
            return ToolChoice("function", name)
    raise PromptError("tool_choice", f"{show(text)} is not supported", _CHOICES)


def _named(tool: Any) -> str | None:
    """Return the name of a function in {"type": "function", "function": {"name": ...}}; None for another value."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _allowed_tools(value: Mapping[str, Any]) -> ToolChoice:
    allowed = value.get("allowed_tools")
    mode, tools = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    names = [_named(tool) for tool in tools] if isinstance(tools, list) else []
    if mode not in ("auto", "required") or not names or None in names:
        raise PromptError(
            "tool_choice", "allowed_tools has no mode, or its tools are not a list of functions", _ALLOWED
        )
    return ToolChoice(mode, allowed=tuple(name for name in names if name is not None))


class AnswerGuides:
    """Makes the guides of one model. tokens: ids of its special tokens. max_bytes: the engine's guide_max_bytes. A
    longer guide is not parsed, because parsing takes time and the engine rejects it."""

    def __init__(self, formats: AnswerFormats, tokens: Mapping[str, int], max_bytes: int) -> None:
        self._formats = formats
        self._max_bytes = max_bytes
        made = HarmonyTags if formats.reasoning is REASONING else Tags
        self._tags = made(formats.calls, formats.reasoning, tokens)

    def make(
        self,
        prompt: str | None,
        functions: Sequence[Mapping[str, Any]],
        choice: ToolChoice,
        parallel: bool,
        given: Guide,
        *,
        num_begun: int = 0,
        any_arguments: bool = False,
    ) -> Guide:
        """Return the guide for the engine. prompt: the rendered chat; None: the request is not a chat. functions: the
        functions that may be called. given: the caller's guide. num_begun: number of characters at the prompt's end
        that belong to a begun message. any_arguments: arguments of forced calls follow only the schemas of strict
        functions. Raises PromptError."""
        if num_begun:
            self._check_begun(prompt or "", functions, choice, given, num_begun)
        names = [one["name"] for one in functions if isinstance(one.get("name"), str)]
        if len(set(names)) < len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise PromptError("tools", f"two functions have the name {show(twice)}", "give each function its own name")
        if choice.forced and not functions:
            raise PromptError("tool_choice", f"{show(choice.name or choice.kind)} without tools", "send tools")
        if choice.allowed is not None:
            functions = self._allowed(functions, choice.allowed)
        # The grammar of strict functions allows calls of these functions only.
        strict = choice.allowed is not None or any(function.get("strict") for function in functions)
        if prompt is None or not (choice.forced or strict or given.type) or (given.text and not given.type):
            return self._for_engine(given)
        if given.type and not choice.forced and self._is_beyond(given):
            return given
        state = "none" if num_begun else self._reasoning_state(prompt)
        try:
            if choice.forced or strict:
                harmony = self._formats.reasoning is REASONING
                continued = num_begun > 0 if harmony else is_continued(prompt, num_begun)
                format: Format | None = self._with_calls(
                    functions, choice, parallel, given, continued=continued, any_arguments=any_arguments
                )
            else:
                format = self._of_given(functions, parallel, given, state)
        except NoTagError as error:
            raise PromptError("tools", str(error), "leave it or strict out" if strict else "leave it out") from None
        if format is None:
            return self._for_engine(given)
        field = "tools" if choice.forced or strict else _GUIDE
        made = self._grammars(self._tags.after_reasoning(format, state), field)
        if re.search("[\ud800-\udfff]", made):
            raise PromptError(field, "text that is not valid Unicode", "send whole characters, no lone surrogates")
        if strict or (choice.forced and not any_arguments):
            self._check_size("the grammar of functions", len(made.encode()))
        return Guide("structural_tag", made)

    @staticmethod
    def _allowed(functions: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Mapping[str, Any]]:
        offered = [function.get("name") for function in functions]
        if unknown := next((name for name in names if name not in offered), None):
            raise PromptError("tool_choice", f"allowed_tools: {show(unknown)} is not among tools", "name some of them")
        return [function for function in functions if function.get("name") in names]

    def _for_engine(self, given: Guide) -> Guide:
        """Convert the caller's guide for the engine: structural tags and EBNF become Lark grammars."""
        if given.type not in ("ebnf_grammar", "structural_tag") or not given.text or self._is_beyond(given):
            return given
        if given.type == "ebnf_grammar":
            try:
                return Guide(given.type, lark_of(given.text))
            except NoTagError as error:
                raise PromptError(
                    _GUIDE, f"the grammar is not valid: {error}", "send a grammar in Lark or EBNF"
                ) from None
        format = guide_format(given.type, given.text, _GUIDE)
        if format is None:
            problem = "the structural tag is not valid"
            raise PromptError(_GUIDE, problem, 'send {"format": {...}} or {"structures": [...], "triggers": [...]}')
        return Guide(given.type, self._grammars(format, _GUIDE))

    def _grammars(self, format: Format, field: str) -> str:
        try:
            return self._tags.guide(format, field)
        except NoTagError as error:
            raise PromptError(field, str(error), "send a supported tag") from None

    def _check_size(self, what: str, size: int) -> None:
        if size > self._max_bytes:
            problem = f"{what}: {size} bytes, but guide_max_bytes is {self._max_bytes}"
            raise PromptError("tools", problem, "send fewer or smaller functions")

    def _is_beyond(self, given: Guide) -> bool:
        """Whether the engine rejects a guide because of its size or depth."""
        if len(given.text.encode(errors="surrogatepass")) > self._max_bytes:
            return True
        if given.type not in ("json_schema", "choice", "structural_tag"):
            return False
        try:
            return is_too_deep(json.loads(given.text))
        except ValueError:
            return False
        except RecursionError:
            return True

    def _check_begun(
        self, prompt: str, functions: Sequence[Mapping[str, Any]], choice: ToolChoice, given: Guide, num_begun: int
    ) -> None:
        """Raise PromptError if the begun message cannot be continued. A begun message is content. So it must not
        contain unfinished reasoning or calls, and calls cannot be forced. A guide is rejected too, because it describes
        the whole response."""
        field, remedy = "continue_final_message", "leave one of them out"
        if choice.forced:
            raise PromptError(field, "calls are forced, but a begun message is text before calls", remedy)
        if given.type:
            raise PromptError(field, "a guide describes the whole response, but the response has begun", remedy)
        before, begun = prompt[: len(prompt) - num_begun], prompt[len(prompt) - num_begun :]
        reasoning, calls = self._formats.reasoning, self._formats.calls
        marks = [(reasoning.begin, reasoning.end)] if reasoning else []
        marks += [(begin, calls.end) for begin in calls.begin] if calls and functions else []
        for begin, end in marks:
            if begin in begun and not (end and begun.rfind(end) > begun.rfind(begin)):
                raise PromptError(
                    field, f"the begun message contains {begin}, so a text cannot follow", "end the message before it"
                )
        if reasoning is not None and is_open(before, reasoning):
            problem = "the chat template begins a response with reasoning, but a begun message is text after it"
            remedy = (
                "end the conversation with the user's message, or turn reasoning off if the chat template allows it "
            )
            remedy += '(chat_template_kwargs = {"enable_thinking": false})'
            raise PromptError(field, problem, remedy)

    def _with_calls(
        self,
        functions: Sequence[Mapping[str, Any]],
        choice: ToolChoice,
        parallel: bool,
        given: Guide,
        *,
        continued: bool,
        any_arguments: bool,
    ) -> Format | None:
        """Return the format if calls are forced or a function is strict. continued: the response continues a begun
        message. any_arguments: as in `make`. Returns None for a wrong guide, as `_of_given` does."""
        if self._formats.calls is None:
            what = "calls cannot be forced" if choice.forced else "no function can be strict"
            what = what if choice.allowed is None else "calls cannot be limited to allowed_tools"
            problem = f"{what}: the model's format of calls is not known"
            remedy = f"send tool_choice = none, or start the server with {CALLS_VARIABLE} = hermes or another format "
            remedy += "(charonia serve --tool-call-parser)"
            remedy += f", or with {GENERIC_VARIABLE} = true" if choice.forced else ""
            field = "tool_choice" if choice.forced or choice.allowed is not None else "tools"
            raise PromptError(field, problem, remedy)
        if given.type == "structural_tag":
            what = "calls are forced" if choice.forced else "a function is strict"
            what = what if choice.allowed is None else "tool_choice has allowed_tools"
            raise PromptError(_GUIDE, f"a structural tag, but {what}, which needs its own tag", "send one of them")
        if choice.kind == "function":
            functions = [function for function in functions if function.get("name") == choice.name]
            if not functions:
                raise PromptError("tool_choice", f"{show(choice.name)} is not among tools", "name one of them")
        made = self._functions(functions, with_schemas=choice.forced and not any_arguments)
        if choice.forced:
            return self._tags.forced(made, several=parallel and choice.kind == "required")
        if not given.type:
            return self._tags.free(made, several=parallel, continued=continued)
        content = self._beside_calls(given, strict=True)
        return content and either([self._tags.forced(made, several=parallel), content])

    def _of_given(
        self, functions: Sequence[Mapping[str, Any]], parallel: bool, given: Guide, state: ReasoningState
    ) -> Format | None:
        """Return the format of the caller's guide, or of a call instead of it. Returns None if the guide needs no
        change, or if it is wrong: the engine reports the error."""
        calls = bool(functions) and self._formats.calls is not None and given.type != "structural_tag"
        if not calls and (self._formats.reasoning is None or state == "none"):
            return None
        if not calls:
            return self._tags.content(given.type, given.text, _GUIDE)
        content = self._beside_calls(given, strict=False)
        return content and either([self._tags.forced(self._functions(functions), several=parallel), content])

    def _beside_calls(self, given: Guide, *, strict: bool) -> Format | None:
        try:
            return self._tags.answer(given.type, given.text, _GUIDE, strict=strict)
        except NoTagError as error:
            raise PromptError(_GUIDE, str(error), "send tool_choice = none, or no tools") from None

    def _functions(self, functions: Sequence[Mapping[str, Any]], *, with_schemas: bool = False) -> list[Function]:
        """with_schemas: also with the schemas of functions that are not strict."""
        assert self._formats.calls is not None
        made: list[Function] = []
        size = 0
        for function in functions:
            name = function.get("name")
            if not isinstance(name, str):
                raise PromptError("tools", f"a function's name is {show(name)}", "send a string")
            try:
                check_name(self._formats.calls, name)
            except NoTagError as error:
                raise PromptError("tools", f"function {show(name)} cannot be called: {error}", "rename it") from None
            follows = function.get("strict") or (with_schemas and function.get("parameters"))
            schema = _parameters(name, function) if follows else None
            if schema is not None and self._formats.calls.syntax in ("xml", "gemma", "pythonic"):  # it is parsed
                text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
                size += len(text.encode(errors="surrogatepass"))
            made.append(Function(name, schema))
        self._check_size("schemas of functions", size)
        return made

    def _reasoning_state(self, prompt: str) -> ReasoningState:
        reasoning = self._formats.reasoning
        if reasoning is None or is_closed(prompt, reasoning):
            return "none"
        return "open" if is_open(prompt, reasoning) else "possible"


def _parameters(name: str, function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or not _is_of_objects(parameters):
        problem = f"the parameters of function {show(name)} are not the schema of an object"
        raise PromptError("tools", problem, 'send {"type": "object", "properties": {...}}')
    made: Mapping[str, Any] = _without_annotations(parameters)
    return made


def _is_of_objects(schema: Any) -> bool:
    """Whether only objects follow a schema. Considers the type in the schema, or in the schema that it refers to."""
    root = schema
    for _ in range(100):
        if not isinstance(schema, dict):
            return False
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema.get("type", "object" if "properties" in schema else None) == "object"
        schema = root
        for key in reference.split("/")[1:]:
            schema = schema.get(key) if isinstance(schema, dict) else None
    return False


def _without_annotations(schema: Any) -> Any:
    """Return the schema without annotations for human readers, which would make the guide larger."""
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    for key, value in kept.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            kept[key] = {name: _without_annotations(inner) for name, inner in value.items()}
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            kept[key] = [_without_annotations(inner) for inner in value]
        elif key in _SCHEMAS:
            kept[key] = _without_annotations(value)
    return kept
