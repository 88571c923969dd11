"""What a job cost, as one value that the report, the API and the metrics show alike."""

import msgspec

from holdfast.core.account import Account, Span, Use
from holdfast.model.verdict import Record


class Report(msgspec.Struct, frozen=True, kw_only=True):
    phase: str
    code: int | None
    ending: str
    generation: int
    step: int
    start_at: float
    wall_s: float
    ettr: float
    mttr_s: float | None
    spent_s: dict[str, float]  # by use
    lost_s: dict[str, float]  # by cause
    incidents: tuple[Record, ...]
    spans: tuple[Span, ...]


def report_of(account: Account) -> Report:
    return Report(
        phase=account.phase,
        code=account.code,
        ending=account.ending,
        generation=account.generation,
        step=account.step,
        start_at=account.start_at,
        wall_s=account.wall_s,
        ettr=account.ettr,
        mttr_s=account.mttr_s,
        spent_s={use.value: account.spent_s(use) for use in Use},
        lost_s=account.lost_s(),
        incidents=account.incidents,
        spans=account.spans,
    )
