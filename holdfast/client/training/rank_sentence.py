"""Says a sentence of ours among what a rank prints; training goes on if nobody can take it."""

import sys


def say(sentence: str) -> None:
    try:
        print(f"holdfast: {sentence}", file=sys.stderr, flush=True)
    except (AttributeError, OSError, ValueError):  # the disk of the logs is full, or the script has closed the stream
        return
