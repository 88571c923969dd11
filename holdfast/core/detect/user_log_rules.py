"""Rule detector: user-defined hang, slow and loss rules, each made from one pattern for the script's own log lines.

The detector names no rank and no node, because the rank that writes a line rarely causes the trouble. The job restarts
and nobody is blamed. A rule judges a rank once the rank has written a line that matches the pattern. With `start_s`,
rank 0 must write the first matching line within that time after the launch.
"""

import re
from math import isfinite, nan
from typing import Literal

import msgspec

from holdfast.core.incident.alarm_rate_limit import cap_stance
from holdfast.core.log_analysis.regex_line_budget import allowed_chars
from holdfast.core.terminal_sanitizer import cut_words
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.observation import Line

_EVIDENCE_CHARS = 300
_KINDS = {"hang": Kind.HANG, "slow": Kind.SLOW, "loss": Kind.LOSS}
_CLASSES = {"hang": "process_hang", "slow": "", "loss": "nan_divergence"}


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule: a line that must appear, or a number in it that must stay within limits."""

    name: str
    kind: Literal["hang", "slow", "loss"]
    pattern: str  # its first group is the number
    every_s: float = 0.0  # hang: such a line must come at least so often
    start_s: float = 0.0  # hang: and the first one from rank 0 so long after the launch; 0: whenever it comes
    above: float | None = None  # slow, loss: the number must not be above this
    below: float | None = None  # nor below this
    times: int = 1  # so many lines in a row


class RuleLimits(msgspec.Struct, frozen=True, kw_only=True):
    stance: Stance = Stance.ACT  # the most that an alarm of this detector may be for
    rule: tuple[Rule, ...] = ()


class RuleDetector:
    def __init__(self, limits: RuleLimits) -> None:
        self.limits = limits
        self._patterns = [(rule, re.compile(rule.pattern), allowed_chars(rule.pattern)) for rule in limits.rule]
        self._seen_at: dict[tuple[str, int], float] = {}
        self._bad: dict[tuple[str, int], int] = {}  # lines in a row
        self._said: set[str] = set()  # rules that have had their alarm in this generation
        self._launched_at = 0.0
        self._has_rank_0 = False

    def on_launch(self, now: float, ranks: tuple[int, ...]) -> None:
        self._seen_at.clear()
        self._bad.clear()
        self._said.clear()
        self._launched_at, self._has_rank_0 = now, 0 in ranks

    def on_line(self, line: Line) -> tuple[Alarm, ...]:
        if line.rank < 0:
            return ()
        found = [(rule, m) for rule, pattern, chars in self._patterns if (m := pattern.search(line.text[:chars]))]
        return tuple(alarm for rule, m in found if (alarm := self._on_match(rule, m[1], line)))

    def _on_match(self, rule: Rule, text: str | None, line: Line) -> Alarm | None:
        key = (rule.name, line.rank)
        self._seen_at[key] = line.at
        value = _parse_value(text or "")
        if rule.kind == "hang" or not _is_beyond(rule, value):
            self._bad.pop(key, None)
            return None
        self._bad[key] = self._bad.get(key, 0) + 1
        if self._bad[key] < rule.times:
            return None
        times = f", {rule.times} times in a row" if rule.times > 1 else ""
        said = f"rule '{rule.name}': rank {line.rank} wrote {value:g}{times}"
        return self._make_alarm(rule, line.at, said, cut_words(line.text, _EVIDENCE_CHARS))

    def tick(self, now: float) -> tuple[Alarm, ...]:
        """Return alarms for hang rules whose next line is overdue. Call this about once a second while ranks run."""
        found = [self._check_late(rule, now) for rule, *_ in self._patterns if rule.kind == "hang"]
        return tuple(alarm for alarm in found if alarm)

    def _check_late(self, rule: Rule, now: float) -> Alarm | None:
        seen = {rank: at for (name, rank), at in self._seen_at.items() if name == rule.name}
        late = sorted(rank for rank, at in seen.items() if now > at + rule.every_s)
        if late:
            said = f"rule '{rule.name}': no such line from rank {late[0]} for {now - seen[late[0]]:.0f} s"
            return self._make_alarm(rule, now, said, "")
        if rule.start_s and self._has_rank_0 and 0 not in seen and now > self._launched_at + rule.start_s:
            said = f"rule '{rule.name}': no such line from rank 0 within {rule.start_s:g} s of the launch"
            return self._make_alarm(rule, now, said, "")
        return None

    def _make_alarm(self, rule: Rule, at: float, said: str, line: str) -> Alarm | None:
        if rule.name in self._said:
            return None
        self._said.add(rule.name)
        # Nobody is named, so a slow job would be restarted for nothing.
        most = Stance.NOTIFY if rule.kind == "slow" else Stance.ACT
        return Alarm(
            kind=_KINDS[rule.kind],
            at=at,
            suspects=(),
            klass=_CLASSES[rule.kind],
            reason=said,
            signature=f"rule {rule.name}",
            evidence=(line,) if line else (),
            stance=cap_stance(most, self.limits.stance),
        )


def _parse_value(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return nan


def _is_beyond(rule: Rule, value: float) -> bool:
    if rule.kind == "loss" and not isfinite(value):
        return True
    return (rule.above is not None and value > rule.above) or (rule.below is not None and value < rule.below)


def find_rule_fault(limits: RuleLimits) -> str:
    """Return one sentence about the first mistake in the rules; "" if there is none."""
    names = [rule.name for rule in limits.rule]
    for rule in limits.rule:
        where = f"rules.rule '{rule.name}'"
        try:
            groups = re.compile(rule.pattern).groups
        except re.error as e:
            return f"{where} has a bad pattern: {e}"
        if names.count(rule.name) > 1:
            return f"{where} is there twice; give each rule a name of its own"
        if not allowed_chars(rule.pattern):
            return f"{where} has too many repeats one after another; give them limits, as in .{{0,80}}"
        if not groups:
            return f"{where} needs a group around the number, as in 'loss=(\\S+)'"
        if rule.times < 1 or not 0 <= rule.every_s < float("inf") or not 0 <= rule.start_s < float("inf"):
            return f"{where}: times must be at least 1, every_s and start_s not negative"
        if rule.kind == "hang" and not rule.every_s:
            return f"{where} needs every_s: how often such a line is to come"
        if rule.kind == "slow" and rule.above is None and rule.below is None:
            return f"{where} needs above or below: what the number must not be"
    return ""
