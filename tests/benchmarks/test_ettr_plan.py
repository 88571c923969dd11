"""The plan of faults: as many as asked for, in the shares of the study, and the same again for the same seed."""

from benchmarks._ettr_plan import SHARES, allotted, plan


def test_shares_are_exact_where_they_can_be() -> None:
    assert allotted(20) == {"rank crash": 12, "node loss": 4, "rank stopped": 3, "bad release": 1}
    assert allotted(100) == {kind: round(100 * share) for kind, share in SHARES.items()}


def test_every_kind_strikes_once_where_there_is_room() -> None:
    assert allotted(6) == {"rank crash": 3, "node loss": 1, "rank stopped": 1, "bad release": 1}
    assert allotted(4) == dict.fromkeys(SHARES, 1)
    for count in range(60):
        assert sum(allotted(count).values()) == count


def test_a_plan_is_its_seed() -> None:
    drawn = plan(1, duration_s=1200.0, every_s=60.0, ranks=4)
    assert drawn == plan(1, duration_s=1200.0, every_s=60.0, ranks=4)
    assert drawn != plan(2, duration_s=1200.0, every_s=60.0, ranks=4)
    assert len(drawn) == 20
    assert [strike.at_s for strike in drawn] == sorted(strike.at_s for strike in drawn)
    assert all(0 <= strike.at_s <= 1200 and strike.rank in range(4) for strike in drawn)
    assert {strike.kind for strike in drawn} == SHARES.keys()
