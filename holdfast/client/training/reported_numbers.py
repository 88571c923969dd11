"""Reads numbers that a script reports, be they tensors; it imports nothing, because every script loads it."""


def is_on_host(value: object) -> bool:
    """Return whether the value can be read without waiting for a device."""
    if value is None or type(value) is float or type(value) is int:
        return True
    return str(getattr(value, "device", "cpu")) == "cpu"


def read_number(value: object) -> float | None:
    if value is None:
        return None
    return float(value.item() if hasattr(value, "item") else value)  # type: ignore[arg-type]
