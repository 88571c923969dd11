"""Formats ranks and nodes for a sentence: ranks as ranges, and only the first few of many."""

from collections.abc import Iterable, Sequence

_SHOWN = 8  # ranks or nodes in a sentence


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a sentence, as `rank 3` or `ranks 0-5, 7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(words[:_SHOWN])}{more}"


def format_nodes(nodes: Iterable[str]) -> str:
    """Format nodes for a sentence in their order, as `n0, n1`. Of many nodes, name the first few and count the rest."""
    names = list(nodes)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
