"""Faults come as often as they should, in order, and the same from the same seed."""

from random import Random

from holdfast.sim.fault_source import DAY_S, HARSH, FaultRates, NodeCut, NodeLoss, RankCrash, draw_faults


def test_rates_are_kept() -> None:
    rates = FaultRates(loss=0.2, crash=0.3, defect=0.1, cut=0.4)
    found = list(draw_faults(Random(1), rates, 100, 100 * DAY_S))
    node_days = 100 * 100
    counts = {
        "loss": sum(isinstance(fault, NodeLoss) for _, fault in found),
        "crash": sum(isinstance(fault, RankCrash) and not fault.defective for _, fault in found),
        "defect": sum(isinstance(fault, RankCrash) and fault.defective for _, fault in found),
        "cut": sum(isinstance(fault, NodeCut) for _, fault in found),
    }
    for kind, count in counts.items():
        assert abs(count / node_days / getattr(rates, kind) - 1) < 0.1, (kind, count)


def test_they_come_in_order_and_end_in_time() -> None:
    times = [at for at, _ in draw_faults(Random(2), HARSH, 10, DAY_S)]
    assert times == sorted(times)
    assert 0 < times[0]
    assert times[-1] < DAY_S


def test_the_same_seed_gives_the_same_faults() -> None:
    first, again, other = (list(draw_faults(Random(seed), HARSH, 10, DAY_S)) for seed in (3, 3, 4))
    assert first == again != other


def test_no_rates_no_faults() -> None:
    assert list(draw_faults(Random(1), FaultRates(loss=0.0, crash=0.0), 1000, 1000 * DAY_S)) == []
