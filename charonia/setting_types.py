"""Types of settings that pydantic does not have."""

from __future__ import annotations

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError


def off_or_at_least(least: float) -> AfterValidator:
    """A number that is 0 (off) or at least `least`."""

    def check(value: float) -> float:
        # NaN must fail, so the comparison is not `<`.
        if value == 0 or value >= least:
            return value
        raise PydanticCustomError("off_or_at_least", f"it must be 0 (off) or at least {least:g}")

    return AfterValidator(check)
