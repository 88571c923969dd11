"""The reasons of alarms about one rank or node, put into the plural for several of them."""

_PLURALS = {  # how reasons begin, of one and of several
    "has lost its machine, says its fleet": "have lost their machines, says their fleet",
    "is gone, says its fleet": "are gone, says their fleet",
    "left by itself": "left by themselves",
    "was killed": "were killed",
    "has ": "have ",
    "tells ": "tell ",
}


def plural_reason(reason: str) -> str:
    """Return what is said of several ranks or nodes if `reason` is said of one."""
    found = next((single for single in _PLURALS if reason.startswith(single)), "")
    return f"{_PLURALS[found]}{reason.removeprefix(found)}" if found else reason
