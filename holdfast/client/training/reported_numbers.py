"""Reads numbers that a script reports, tensors included; imports nothing, because every script loads it."""

MOST_STEP = 1 << 53  # as far as nodes and controllers count
MOST_WORK = 1e30  # FLOPs of one step; the largest models train with less in all


def is_on_host(value: object) -> bool:
    """Return whether the value can be read without waiting for a device."""
    if value is None or type(value) is float or type(value) is int:
        return True
    return str(getattr(value, "device", "cpu")) == "cpu"


def read_number(value: object) -> float | None:
    if value is None:
        return None
    return float(value.item() if hasattr(value, "item") else value)  # type: ignore[arg-type]


def read_amount(value: object) -> float | None:
    """Return an amount of work; None if it is negative or absurdly large, or if reading it would wait for a device."""
    amount = (read_number(value) or 0.0) if is_on_host(value) else -1.0
    return amount if 0 <= amount <= MOST_WORK else None
