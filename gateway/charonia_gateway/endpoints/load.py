"""How much work a request is, in tokens: estimated when it begins, corrected as its answer comes.

The estimates need not be right, only alike for all servers.
"""

from __future__ import annotations

from charonia_client import GenerateRequest

# What an answer without max_tokens is taken for, and the most that one with it is: many clients ask for as much as the
# context holds and mean a page.
_ANSWER_TOKENS = 256
_MAX_ANSWER_TOKENS = 2048


def _text_tokens(text: str) -> int:
    """English has about four characters in a token, most other scripts two or fewer."""
    return len(text) // (4 if text.isascii() else 2) + 1


def prompt_tokens(request: GenerateRequest) -> int:
    """Of text, token ids or messages; what a session has before them is not counted."""
    if request.text is not None:
        return _text_tokens(request.text)
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return sum(_text_tokens(message.get("content") or "") for message in request.messages or ())


def answer_tokens(request: GenerateRequest) -> int:
    """Of all answers of the request together."""
    each = _ANSWER_TOKENS if request.max_tokens is None else min(request.max_tokens, _MAX_ANSWER_TOKENS)
    return max(request.n or 1, request.best_of or 1) * each
