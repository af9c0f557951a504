"""Sizes for people."""

from __future__ import annotations


def spell_bytes(count: int) -> str:
    """Format a size with about three digits, in units of 1024, as the engine does."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    amount, unit = float(count), 0
    while amount >= 1000 and unit + 1 < len(units):
        amount, unit = amount / 1024, unit + 1
    decimals = 0 if unit == 0 or amount >= 100 else 1 if amount >= 10 else 2
    return f"{amount:.{decimals}f} {units[unit]}"
