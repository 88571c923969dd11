"""How long one may act on a lease, and that a suspend counts."""

import time

import pytest

from holdfast.journal import lease_term
from holdfast.journal.journal_errors import LeaseLostError
from holdfast.journal.lease_term import LeaseTerm, boot_time


def test_it_counts_from_before_it_was_asked_for_and_ends_before_others_may_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(lease_term, "boot_time", lambda: now)
    term = LeaseTerm("the lease of r", 30.0, 5.0)
    with pytest.raises(LeaseLostError):
        term.check()  # it has not begun
    term.begin(100.0)
    now = 124.9
    term.check()
    assert term.left_s == pytest.approx(0.1)
    now = 125.0
    with pytest.raises(LeaseLostError) as over:
        term.renew(110.0)
    assert str(over.value) == (
        "the lease of r has not been renewed for 25 s, so another controller may have it by now; this one ends"
    )
    with pytest.raises(LeaseLostError):
        term.check()
    term.begin(124.0)
    now = 140.0
    term.renew(139.0)
    now = 163.9
    term.check()


def test_the_clock_goes_on_while_the_machine_sleeps() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= boot_time() <= time.clock_gettime(time.CLOCK_BOOTTIME)
