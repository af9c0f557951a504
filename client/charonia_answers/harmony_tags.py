"""Grammars of GPT-OSS' format harmony (`harmony`)."""

from __future__ import annotations

from collections.abc import Sequence

from .tag_parts import Format, any_text, const, either, optional, sequence, star
from .tags import SPACE_AFTER_TOKEN, Function, ReasoningState, Tags

NEXT = "<|end|><|start|>assistant"  # ends a message that another one follows


class HarmonyTags(Tags):
    """Builds the formats of responses after `<|start|>assistant`. A response has one call at most, because the model
    ends a response with <|call|>."""

    def content(self, kind: str, guide: str, called: str) -> Format | None:
        made = super().content(kind, guide, called)
        return made and sequence([*self._markup("<|channel|>final<|message|>"), made])

    def forced(self, functions: Sequence[Function], *, several: bool) -> Format:
        kind = either([sequence(self._markup(" <|constrain|>json")), const(" json")])
        message = self._markup("<|message|>")
        channel = self._markup("<|channel|>commentary")
        orders = (
            (self._markup("<|channel|>commentary to=functions."), [kind, *message]),
            ([const(" to=functions.")], [*channel, kind, *message]),
        )
        return either([sequence([*before, self._named(functions, middle)]) for before, middle in orders])

    def free(self, functions: Sequence[Function], *, several: bool, continued: bool = False) -> Format:
        call = self.forced(functions, several=several)
        if continued:
            return sequence([any_text(), optional(sequence([*self._markup(NEXT), call]))])
        final = sequence([*self._markup("<|channel|>final<|message|>"), any_text()])
        preamble = self._message("commentary")
        return sequence([star(sequence([*preamble, star(sequence(self._message("analysis")))])), either([call, final])])

    def after_reasoning(self, format: Format, state: ReasoningState) -> Format:
        if state == "none":
            return format
        begun = [any_text(), *self._markup(NEXT)] if state == "open" else []
        return sequence([*begun, star(sequence(self._message("analysis"))), format])

    def _message(self, channel: str) -> list[Format]:
        """Return the format of a message that another message follows."""
        return [*self._markup(f"<|channel|>{channel}<|message|>"), any_text(), *self._markup(NEXT)]

    def _markup(self, text: str) -> list[Format]:
        return [one for one in super()._markup(text) if one is not SPACE_AFTER_TOKEN]
