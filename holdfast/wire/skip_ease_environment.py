"""Environment variables that tell a rank which batches to skip and which steps to make at a lower learning rate.

Examples are HOLDFAST_SKIP="101-103,200-200" and HOLDFAST_EASE="0.5:101-200,0.25:300-310". Each range has a first and a
last step and includes both. Steps are numbered as the script reports them. Every script imports this module, so it
imports little.
"""

SKIP = "HOLDFAST_SKIP"
EASE = "HOLDFAST_EASE"

Span = tuple[int, int]


def parse_skips(text: str) -> tuple[Span, ...]:
    """Return the ranges of steps to skip. Raise ValueError if the text is malformed."""
    return tuple(_parse_span(part) for part in text.split(",") if part.strip())


def parse_eases(text: str) -> tuple[tuple[float, Span], ...]:
    """Return pairs of factor and range of steps, in the order given. Raise ValueError if the text is malformed."""
    found = []
    for part in filter(str.strip, text.split(",")):
        factor, _, span = part.partition(":")
        if not 0.0 <= float(factor) <= 1.0:
            raise ValueError(f"{factor} is not a factor from 0 to 1")
        found.append((float(factor), _parse_span(span)))
    return tuple(found)


def _parse_span(text: str) -> Span:
    first, _, last = text.partition("-")
    span = int(first), int(last)
    if not 0 <= span[0] <= span[1]:
        raise ValueError(f"{text.strip()} is not a range of steps")
    return span
