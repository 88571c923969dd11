"""The time of day on this machine's clock, for sentences that people read."""

from datetime import UTC, datetime


def clock_text(at: float) -> str:
    """Return an instant, in seconds since 1970, as the time of day here, such as 14:32:10."""
    return datetime.fromtimestamp(at, UTC).astimezone().strftime("%H:%M:%S")
