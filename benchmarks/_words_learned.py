"""What learned words add to the rules, on logs that neither had learned from: figures with bootstrap intervals."""

import random
from collections.abc import Callable, Sequence

from rich.table import Table

from benchmarks._report import Findings
from benchmarks._words_corpus import EVICT, Judged, reliability, score
from benchmarks._words_learning import ROUNDS, Unseen, judge_unseen, read_lessons
from holdfast.logs.learned_words import PATH

DRAWS = 2000
LEAST = 0.02  # points of class that learned words must add to be worth their file
MOST_BYTES = 300_000
WAYS = ("rules", "words", "both")
RIGHT: dict[str, Callable[[Judged], bool]] = {
    "klass": lambda case: case.right,
    "group": lambda case: case.found.group == case.label.group,
    "action": lambda case: case.found.action == case.label.action,
}


def measure_learned(table: Table, findings: Findings) -> None:
    """Judge each round by what was learned from the other rounds, and again from earlier rounds only."""
    lessons = read_lessons()
    for name, earlier in (("others", False), ("earlier", True)):
        found = judge_unseen(lessons, earlier=earlier)
        for one in (*ROUNDS, ""):
            mine = [case for case in found if case.both.name[0] in one] if one else found
            _add_shares(table, findings, f"{name}_{one or 'all'}", mine)
        _add_gains(table, findings, name, found)
        for way in ("rules", "both"):
            sure = [tenth for tenth in reliability([getattr(case, way) for case in found]) if tenth.below > 0.95]
            findings.figures[f"{name}_{way}_sure"] = sum(tenth.count for tenth in sure)
            findings.figures[f"{name}_{way}_sure_right"] = round(sum(tenth.right for tenth in sure), 4)
            table.add_row(f"{name}: 90% sure by {way}, and right", f"{sure[0].count}, {sure[0].right:.1%}", ">= 90%")
    findings.figures["learned_bytes"] = PATH.stat().st_size
    findings.goals["size of what is learned"] = PATH.stat().st_size < MOST_BYTES


def _add_shares(table: Table, findings: Findings, name: str, found: Sequence[Unseen]) -> None:
    for way in WAYS:
        total = score([getattr(case, way) for case in found])
        shares = {what: round(getattr(total, what), 4) for what in RIGHT}
        findings.figures |= {f"{name}_{way}_{what}": share for what, share in shares.items()}
        findings.figures[f"{name}_{way}_evicted"] = total.evicted
        findings.figures[f"{name}_{way}_evicted_right"] = round(total.evict_precision * total.evicted)
        shown = " ".join(f"{what} {share:.1%}" for what, share in shares.items())
        table.add_row(f"{name}, {total.logs} logs: {way}", shown, "")


def _add_gains(table: Table, findings: Findings, name: str, found: Sequence[Unseen]) -> None:
    rng = random.Random(1)
    for what, right in RIGHT.items():
        gains = [int(right(case.both)) - int(right(case.rules)) for case in found]
        drawn = sorted(sum(rng.choices(gains, k=len(gains))) / len(gains) for _ in range(DRAWS))
        low, gain, high = drawn[DRAWS // 40], sum(gains) / len(gains), drawn[-DRAWS // 40]
        findings.figures |= {f"{name}_gain_{what}": round(gain, 4), f"{name}_gain_{what}_low": round(low, 4)}
        findings.figures[f"{name}_gain_{what}_high"] = round(high, 4)
        findings.goals[f"{what} gained, {name}"] = gain >= (LEAST if what == "klass" else 0.0)
        table.add_row(f"{name}: {what} gained by words", f"{gain:+.1%} ({low:+.1%} to {high:+.1%})", "")
    worse = [case for case in found if case.both.found.action == EVICT != case.rules.found.action]
    findings.goals[f"words evict nobody, {name}"] = not worse
