"""Rounding of seconds to tenths such that the rounded parts add up to their rounded sum."""

from collections.abc import Mapping
from typing import TypeVar

K = TypeVar("K")


def in_tenths(seconds: float) -> float:
    """Return the seconds rounded to tenths, as the format `.1f` does."""
    return float(f"{seconds:.1f}")


def share_tenths(parts: Mapping[K, float], total: float | None = None) -> dict[K, float]:
    """Round the parts to tenths that add up to the rounded total. The parts with the largest remainders are rounded up.

    If the total is itself a sum of rounded rows, it may differ from the parts by more than rounding explains. The
    largest parts then take the rest of the difference.
    """
    whole = round(10 * in_tenths(sum(parts.values()) if total is None else total))
    shared = {key: int(10 * seconds + 1e-6) for key, seconds in parts.items()}
    by_loss = sorted(parts, key=lambda key: 10 * parts[key] - shared[key], reverse=True)
    for key in by_loss[: max(0, whole - sum(shared.values()))]:
        shared[key] += 1
    while shared and (left := whole - sum(shared.values())):
        largest = max(shared, key=lambda key: shared[key])
        if left < 0 and not shared[largest]:
            break
        shared[largest] += 1 if left > 0 else -1
    return {key: tenths / 10 for key, tenths in shared.items()}
