"""The flag --since: a duration before the end of a run, or a time."""

import re
from datetime import UTC, datetime, timedelta

from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.core.record.job_account import Account

_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(s|m|min|h|d)")
_CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2})?")


def parse_since(text: str, account: Account) -> float:
    """Return the instant that --since names, by this host's clock. Raise UsageError if it is invalid or too late."""
    since = _find_instant(text.strip(), account.end_at)
    if since >= account.end_at:
        ended = datetime.fromtimestamp(account.end_at, UTC).astimezone()
        raise UsageError(f"--since {text} is after the end of the run, {ended:%Y-%m-%d %H:%M:%S}")
    return since


def _find_instant(text: str, end_at: float) -> float:
    if found := _DURATION.fullmatch(text):
        return end_at - float(found[1]) * _UNITS_S[found[2]]
    try:
        if not _CLOCK.fullmatch(text):
            return datetime.fromisoformat(text).astimezone().timestamp()
        end = datetime.fromtimestamp(end_at, UTC).astimezone()
        hours, minutes, seconds = (*map(int, text.split(":")), 0)[:3]
        at = end.replace(hour=hours, minute=minutes, second=seconds, microsecond=0)
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"--since {text}: write a duration (90s, 30m, 2h, 1d) or a time (14:02, 2026-11-18T14:02)"
        ) from None
    return (at if at <= end else at - timedelta(days=1)).timestamp()  # the last time that it was that late
