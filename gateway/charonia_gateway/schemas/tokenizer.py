"""Requests to the tokenizer only. Fields have vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from charonia_client import TokenizeRequest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from charonia_gateway.schemas.fields import (
    ADD_GENERATION_PROMPT,
    CONTINUE_FINAL_MESSAGE,
    MAX_TOOLS,
    ChatTemplate,
    OrText,
    TemplateVariables,
    TokenIds,
    check_prompt_end,
    template_end,
    wrong,
)
from charonia_gateway.schemas.requests import Messages, messages_of, to_template


class TokenizeBody(BaseModel):
    """POST /tokenize"""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    operation: ClassVar[str] = "tokenize"

    model: str | None = Field(None, description="a name that /v1/models lists; default: the first")
    prompt: str | None = Field(None, min_length=1, description="a text; send exactly one of prompt and messages")
    messages: Annotated[
        Annotated[Messages, Field(min_length=1)] | None,
        BeforeValidator(lambda value: None if value is None else messages_of(value)),
        OrText(),
    ] = Field(None, description="a conversation, which the chat template formats")
    tools: list[dict[str, Any]] | None = Field(
        None, fail_fast=True, max_length=MAX_TOOLS, description="passed to the model's chat template"
    )
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description="variables of the chat template, such as enable_thinking"
    )
    add_special_tokens: bool | None = Field(
        None,
        description="whether the tokenizer adds special tokens such as a beginning token; default: true for prompt, "
        "false for messages, because the chat template adds them",
    )
    return_token_strs: bool | None = Field(None, description="return `token_strs`")
    add_generation_prompt: bool | None = Field(None, description=ADD_GENERATION_PROMPT)
    continue_final_message: bool | None = Field(None, description=CONTINUE_FINAL_MESSAGE)
    chat_template: ChatTemplate = None

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt: send exactly one of prompt and messages")
        check_prompt_end(self.add_generation_prompt, self.continue_final_message)
        for name in ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
            if getattr(self, name) is not None and self.messages is None:
                raise wrong(f"{name}: only for a chat; send messages instead of prompt")
        return self

    def engine_request(self) -> TokenizeRequest:
        variables = template_end(self.add_generation_prompt, self.continue_final_message)
        return TokenizeRequest(
            text=self.prompt,
            messages=None if self.messages is None else to_template(self.messages),
            tools=self.tools,
            chat_template_kwargs={**variables, **(self.chat_template_kwargs or {})} or None,
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=self.add_special_tokens,
            with_strings=bool(self.return_token_strs),
        )


class DetokenizeBody(BaseModel):
    """POST /detokenize"""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    operation: ClassVar[str] = "detokenize"

    model: str | None = Field(None, description="a name that /v1/models lists; default: the first")
    tokens: TokenIds = Field(description="token ids")
