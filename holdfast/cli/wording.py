"""Numbers in words, as all commands write them."""


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def incidents(count: int, failures: int) -> str:
    """An incident may have failed more than once before its next step: the same in status, report and at the end."""
    return counted(count, "incident") + (f" ({counted(failures, 'failure')})" if failures > count else "")


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")
