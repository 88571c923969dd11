"""How a rank is told which batches to leave out, and which steps to make at a part of the learning rate.

HOLDFAST_SKIP="101-103,200-200" and HOLDFAST_EASE="0.5:101-200,0.25:300-310": first and last step, both included, by the
numbers that the script tells as done. Every script pays for the imports here, so there are few.
"""

SKIP = "HOLDFAST_SKIP"
EASE = "HOLDFAST_EASE"

Span = tuple[int, int]


def parse_skips(text: str) -> tuple[Span, ...]:
    """The steps to leave out; ValueError if that is not what the text says."""
    return tuple(_parse_span(part) for part in text.split(",") if part.strip())


def parse_eases(text: str) -> tuple[tuple[float, Span], ...]:
    """Factors and their steps, in the order told."""
    found = []
    for part in filter(str.strip, text.split(",")):
        factor, _, span = part.partition(":")
        if not 0.0 <= float(factor) <= 1.0:
            raise ValueError(f"{factor} is no part of a learning rate")
        found.append((float(factor), _parse_span(span)))
    return tuple(found)


def _parse_span(text: str) -> Span:
    first, _, last = text.partition("-")
    span = int(first), int(last)
    if not 0 <= span[0] <= span[1]:
        raise ValueError(f"{text.strip()} are no steps")
    return span
