"""Types of settings that pydantic does not have."""

from __future__ import annotations

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError


def off_or_at_least(least: float) -> AfterValidator:
    """For numbers that 0 turns off and that are too small to be of use below `least`."""

    def check(value: float) -> float:
        # Not a comparison with `<`, which NaN would pass.
        if value == 0 or value >= least:
            return value
        raise PydanticCustomError("off_or_at_least", f"it must be 0 (off) or at least {least:g}")

    return AfterValidator(check)
