"""Tokens and times of the choices of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from charonia_client import GenerateRequest, GenerateResponse


class Usage:
    """Sums over all choices. A prompt with several choices counts once."""

    def __init__(self, choices_per_prompt: int, choices: int, *, prompt_only: bool = False) -> None:
        self._per_prompt = choices_per_prompt
        self._last: list[GenerateResponse | None] = [None] * choices
        self._running = choices
        self._prompt_only = prompt_only  # generated tokens do not count

    def see(self, index: int, response: GenerateResponse) -> None:
        before = self._last[index]
        if response.finish_reason and not (before and before.finish_reason):
            self._running -= 1
        self._last[index] = response

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons of the choices that have ended."""
        return [last.finish_reason for last in self._last if last and last.finish_reason]

    @property
    def ended(self) -> bool:
        """Whether all choices have ended."""
        return not self._running

    def to_json(self) -> dict[str, Any]:
        # Any choice of a prompt has the prompt's length. The first choice may not have a part yet.
        groups = (self._last[at : at + self._per_prompt] for at in range(0, len(self._last), self._per_prompt))
        prompts = [reported[0] for group in groups if (reported := [last for last in group if last])]
        prompt_tokens = sum(last.num_input_tokens for last in prompts)
        completion_tokens = sum(last.num_output_tokens for last in self._last if last and not self._prompt_only)
        reasoning_tokens = sum(last.num_reasoning_tokens for last in self._last if last)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(last.num_cached_tokens for last in prompts)},
            **({"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}} if reasoning_tokens else {}),
        }

    def timings(self) -> dict[str, Any] | None:
        """The engine's times. For several choices: the shortest wait, the first token of any choice, and the last end.
        The names are llama.cpp's, and also queue_ms, first_token_ms and total_ms. None before the engine's first
        part."""
        usage = self.to_json()
        return _timings(
            [last for last in self._last if last],
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
        )

    def timings_so_far(self, part: GenerateResponse) -> dict[str, Any] | None:
        """The times of the part's choice up to this part, or of all choices if all have ended."""
        if self.ended:
            return self.timings()
        return _timings([part], part.num_input_tokens, part.num_cached_tokens)


def _timings(choices: list[GenerateResponse], prompt_tokens: int, cached: int) -> dict[str, Any] | None:
    reported = [last for last in choices if last.timings]
    times = [last.timings for last in reported if last.timings]
    if not times:
        return None
    computed = prompt_tokens - cached
    queue_ms = min(time.queue_ms for time in times)
    first_token_ms = min((time.first_token_ms for time in times if time.first_token_ms > 0), default=0.0)
    total_ms = max(time.total_ms for time in times)
    # A response without tokens spent all its time on the prompt.
    prompt_ms = max((first_token_ms or total_ms) - queue_ms, 0.0)
    predicted_ms = max(total_ms - first_token_ms, 0.0) if first_token_ms else 0.0
    # The time of a choice's first token counts for the prompt.
    drafts = {
        "draft_n": sum(last.num_proposed_tokens for last in reported),
        "draft_n_accepted": sum(last.num_accepted_tokens for last in reported),
    }
    later_tokens = sum(max(last.num_output_tokens - 1, 0) for last in reported)
    return {
        "queue_ms": round(queue_ms, 3),
        "first_token_ms": round(first_token_ms, 3),
        "total_ms": round(total_ms, 3),
        "cache_n": cached,
        "prompt_n": computed,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_second": _per_second(computed, prompt_ms),
        "predicted_n": sum(last.num_output_tokens for last in reported),
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_second": _per_second(later_tokens, predicted_ms),
        **(drafts if drafts["draft_n"] else {}),
    }


def _per_second(tokens: int, ms: float) -> float | None:
    return round(tokens * 1000 / ms, 3) if tokens and ms > 0 else None


def estimated_tokens(request: GenerateRequest) -> int:
    """Estimate the tokens of a request's prompt, without its session's history. Exact for token ids."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    texts = [message.get("content") or "" for message in request.messages or ()]
    texts = texts if request.text is None else [request.text]
    # English has about four characters in a token, most other scripts two or fewer.
    return sum(len(text) // (4 if text.isascii() else 2) + 1 for text in texts)
