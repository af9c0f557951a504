"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer, which runs next to the engine in Triton."""

from __future__ import annotations

from typing import Annotated, Any

from charonia_client import BadRequest, TokenizeRequest
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from charonia_gateway.body import IGNORED_HEADER, ignored_fields
from charonia_gateway.context import Gateway, GatewayState
from charonia_gateway.documentation import describe, describe_errors
from charonia_gateway.schemas.responses import PromptBody, TokenizerInfo, TokensBody
from charonia_gateway.schemas.tokenizer import DetokenizeBody, TokenizeBody
from charonia_gateway.sse import while_connected

router = APIRouter(tags=["tokenizer"])


@router.post(
    "/tokenize",
    summary="The tokens of a text or of a conversation",
    **describe(
        TokenizeBody,
        TokensBody,
        {
            "a text": {"prompt": "Once upon a time", "return_token_strs": True},
            "a conversation": {"messages": [{"role": "user", "content": "Hello"}]},
        },
        stream=None,
    ),
)
async def tokenize(request: Request, gateway: GatewayState) -> JSONResponse:
    """Tokenize `prompt` or `messages` in the same way as a request for a response."""
    body = await gateway.read(request, TokenizeBody)
    found = await while_connected(request, gateway.engine_of(body.model).pool.tokenize(body.engine_request()))
    answer = {
        "count": len(found.token_ids),
        "max_model_len": found.context_length,
        "tokens": found.token_ids,
        "token_strs": found.strings,
    }
    return JSONResponse(answer, headers=_headers(body))


@router.post(
    "/detokenize",
    summary="The text of tokens",
    **describe(DetokenizeBody, PromptBody, {"a text": {"tokens": [72, 101, 108]}}, stream=None),
)
async def detokenize(request: Request, gateway: GatewayState) -> JSONResponse:
    """The text includes the names of special tokens."""
    body = await gateway.read(request, DetokenizeBody)
    return JSONResponse({"prompt": await _text(gateway, request, body)}, headers=_headers(body))


async def _text(gateway: Gateway, request: Request, body: DetokenizeBody) -> str:
    if not body.tokens:
        return ""
    engine_request = TokenizeRequest(prompt_token_ids=body.tokens)
    try:
        return (await while_connected(request, gateway.engine_of(body.model).pool.tokenize(engine_request))).text
    except BadRequest as error:
        raise BadRequest(str(error).replace("prompt_token_ids", "tokens", 1)) from None


def _headers(body: TokenizeBody | DetokenizeBody) -> dict[str, str]:
    ignored = ignored_fields(body)
    return {IGNORED_HEADER: ", ".join(ignored)} if ignored else {}


@router.get(
    "/tokenizer_info",
    summary="Describe the tokenizer",
    response_model=TokenizerInfo,
    responses=describe_errors({404: "no such model", 503: "no server can be reached"}),
)
async def tokenizer_info(
    gateway: GatewayState,
    model: Annotated[str | None, Query(description="a name that /v1/models lists; default: the first")] = None,
) -> dict[str, Any]:
    """The tokenizer's class, special tokens and chat template, for clients that count tokens themselves."""
    return await (await gateway.find(model)).pool.tokenizer_info()
