"""Two jobs beside each other: their ETTR, where their time went, what failed, and their pace."""

import msgspec

from holdfast.core.incident.cause_name import split_label
from holdfast.core.record.job_report import Report
from holdfast.core.record.release_pace import LEAST_STEPS, ReleasePace

_ALIKE = 1.25  # runs of which one is longer by more than this factor differ in length
_FEW = 5  # incidents: fewer say little about how often something fails


class ComparedJobs(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of two jobs. The first value of a pair is the first job's. None means unknown."""

    job_s: tuple[float, float]
    ettr: tuple[float | None, float | None]
    at_most: tuple[bool, bool]  # the true ETTR may be lower
    steps: tuple[int, int]  # new ones
    redone: tuple[int, int]
    incidents: tuple[int, int]
    mttr_s: tuple[float | None, float | None]
    classes: dict[str, tuple[int, int]]  # incidents by what they are booked as
    lost_s: dict[str, tuple[float, float]]  # by cause, the most first
    lost_share: dict[str, tuple[float, float]]  # of the job's time
    steps_s: tuple[float | None, float | None]  # of the newest release in steady training
    tokens_s: tuple[float | None, float | None]
    notes: tuple[str, ...]  # what has to be known to read the figures


def compare_jobs(one: Report, other: Report) -> ComparedJobs:
    causes = sorted({*one.lost_s, *other.lost_s}, key=lambda c: (-_lost(one, c) - _lost(other, c), c))
    labels = [[split_label(record)[0] for record in report.incidents] for report in (one, other)]
    paces = _newest_pace(one), _newest_pace(other)
    return ComparedJobs(
        job_s=(one.job_s, other.job_s),
        ettr=(one.ettr, other.ettr),
        at_most=(bool(one.at_most), bool(other.at_most)),
        steps=(sum(ran.steps for ran in one.releases), sum(ran.steps for ran in other.releases)),
        redone=(sum(ran.redone for ran in one.releases), sum(ran.redone for ran in other.releases)),
        incidents=(len(one.incidents), len(other.incidents)),
        mttr_s=(one.mttr_s, other.mttr_s),
        classes={label: (labels[0].count(label), labels[1].count(label)) for label in sorted({*labels[0], *labels[1]})},
        lost_s={cause: (_lost(one, cause), _lost(other, cause)) for cause in causes},
        lost_share={cause: (_share(one, cause), _share(other, cause)) for cause in causes},
        steps_s=(paces[0].steps_s if paces[0] else None, paces[1].steps_s if paces[1] else None),
        tokens_s=(paces[0].tokens_s if paces[0] else None, paces[1].tokens_s if paces[1] else None),
        notes=tuple(
            note for note in (*_length_notes(one, other), *_count_notes(one, other), _pace_note(*paces)) if note
        ),
    )


def _lost(report: Report, cause: str) -> float:
    return report.lost_s.get(cause, 0.0)


def _share(report: Report, cause: str) -> float:
    return _lost(report, cause) / report.job_s if report.job_s > 0 else 0.0


def _newest_pace(report: Report) -> ReleasePace | None:
    return report.paces[-1] if report.paces else None


def _length_notes(one: Report, other: Report) -> list[str]:
    short, long = sorted((one.job_s, other.job_s))
    notes = []
    if long > _ALIKE * short:
        notes.append(
            "the runs differ in length: compare shares and not seconds, and the start weighs more in the shorter"
        )
    if None in (one.ettr, other.ettr) and one.ettr != other.ettr:
        notes.append("of one run no step was seen, so its ETTR is not known, and the two cannot be compared by it")
    if one.code is None or other.code is None:
        notes.append("a run that has not ended is compared as it is now")
    return notes


def _count_notes(one: Report, other: Report) -> list[str]:
    few = max(len(one.incidents), len(other.incidents)) < _FEW and bool(one.incidents or other.incidents)
    return ["incidents are few: a difference in their number may be chance"] if few else []


def _pace_note(one: ReleasePace | None, other: ReleasePace | None) -> str:
    """Return a note on how fast the second job is compared with the first, or why that cannot be said."""
    if one is None or other is None:
        return "pace is not compared: a run has no steady training" if one or other else ""
    if min(one.steps, other.steps) < LEAST_STEPS:
        return f"pace is not compared: one was measured over fewer than {LEAST_STEPS} steady steps"
    if one.ranks != other.ranks:
        return f"pace is not compared: {one.ranks} and {other.ranks} ranks"
    if one.tokens_s is not None and other.tokens_s is not None:
        return f"the second is {other.tokens_s / one.tokens_s:.2f} times as fast as the first, by tokens/s"
    return f"the second is {other.steps_s / one.steps_s:.2f} times as fast as the first, by steps/s"
