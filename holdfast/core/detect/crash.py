"""crash: a rank ended badly; its code and last words say how, and whose fault that is likely to be."""

from holdfast.core.story import ending
from holdfast.core.words.judging import Case, judge
from holdfast.core.words.prefixes import Said, said_of
from holdfast.core.words.rows import UNKNOWN
from holdfast.core.words.rows import Catalog as Catalog
from holdfast.core.words.sieve import sifted
from holdfast.core.words.tracebacks import traces_of
from holdfast.model.alarm import Alarm, Kind
from holdfast.model.diagnosis import Diagnosis
from holdfast.model.signal import Exit

_MUTE = (-9, -15)  # SIGKILL and SIGTERM leave no time for last words: what was said before is about something else
_EVIDENCE = 12  # lines kept in the journal
_LINE_CHARS = 400
_ENOUGH = 0.5  # confidence below which no class is named
_RAISED_CHARS = 200
PROBABLY = "probably the OOM killer: "
_ITS_OWN, _SCRIPT = "SystemExit", "script"  # nobody but the script itself raises it


def alarm_of(exit: Exit, catalog: Catalog) -> Alarm:
    heard = (*(() if exit.code in _MUTE else exit.words), *((exit.latched,) if exit.latched else ()))
    lines = said_of(sifted("\n".join(heard).encode("utf-8", "replace"), catalog), 0, exit.rank)
    found = judge(_case(exit, lines), catalog)
    return _alarm(exit, found, exit.latched or _raised(lines))


def unjudged(exit: Exit, catalog: Catalog) -> Alarm:
    """What is known where its words cannot be judged in time: how it ended, and what it latched."""
    return _alarm(exit, judge(_case(exit, []), catalog), exit.latched)


def _case(exit: Exit, lines: list[Said]) -> Case:
    return Case(lines=lines, codes={exit.rank: exit.code}, starved=exit.starved, pressed=exit.pressed)


def _alarm(exit: Exit, found: Diagnosis, raised: str) -> Alarm:
    reason = ending(exit.code) + (f" ({raised[:_RAISED_CHARS]})" if raised and exit.code > 0 else "")
    if exit.code == _MUTE[0]:
        guess = f"{PROBABLY}{exit.pressed}" if exit.pressed else "sender unknown"
        reason += " (the kernel killed for want of memory)" if exit.starved else f" ({guess})"
    klass = found.klass if found.klass != UNKNOWN and found.confidence >= _ENOUGH else ""
    return Alarm(
        kind=Kind.CRASH,
        at=exit.at,
        suspects=(exit.node,),
        ranks=(exit.rank,),
        generation=exit.generation,
        code=exit.code,
        klass=klass,
        group=found.group if klass else _SCRIPT if raised.startswith(_ITS_OWN) else "",
        action=found.action if klass else "",
        confidence=found.confidence if klass else 0.0,
        hint=found.hint if klass else "",
        reason=reason,
        signature=f"{klass or 'exit'} {exit.code} {found.origin}".rstrip(),
        evidence=_evidence(found.evidence if klass else (), exit.words),
    )


def _raised(lines: list[Said]) -> str:
    """The exception that ended it."""
    traces = list(traces_of(lines))
    return traces[-1].last.said.text if traces else ""


def _evidence(found: tuple[str, ...], words: tuple[str, ...]) -> tuple[str, ...]:
    """The lines it rests on, where they are not among the last ones."""
    last = tuple(line[:_LINE_CHARS] for line in words[-_EVIDENCE:])
    earlier = tuple(line for line in found if line in words and line not in last)
    return (*earlier, *last[len(earlier) :])
