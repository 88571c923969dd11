"""Prices: every one has a source, and curves are read off and drawn on as they say."""

from random import Random

import pytest

from holdfast.sim.scale import price_sheet
from holdfast.sim.scale.price_sheet import PriceDraws, read_curve

CURVE = ((2048, 46.0), (4096, 51.0), (8192, 54.0), (16384, 65.0))


def test_every_price_has_a_source_and_makes_sense() -> None:
    sheet = price_sheet.load_sheet()
    assert all(price.source for price in sheet.price) and all(share.source for share in sheet.share)
    assert all(row.by_gpus or 0 <= row.least_s <= row.most_s for row in sheet.price)
    names = [price.name for price in sheet.price] + [share.name for share in sheet.share]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("gpus", "seconds"),
    [(2048, 46.0), (16384, 65.0), (8192 * 2**0.5, 59.5), (32768, 76.0), (131072, 98.0)],
)
def test_a_curve_between_its_points_and_beyond(gpus: float, seconds: float) -> None:
    assert read_curve(CURVE, gpus) == pytest.approx(seconds)


def test_a_tiny_job_still_takes_its_time() -> None:
    assert read_curve(CURVE, 2) == pytest.approx(46.0 / 4)


def test_draws_stay_within_and_repeat() -> None:
    sheet = price_sheet.load_sheet()
    one, other = (PriceDraws(sheet, 9600, Random(3)) for _ in range(2))
    drawn = [one("boot") for _ in range(100)]
    assert drawn == [other("boot") for _ in range(100)]
    assert all(240 <= seconds <= 360 for seconds in drawn) and max(drawn) - min(drawn) > 30
    assert one("first_step", "first_step") == pytest.approx(2 * read_curve(CURVE, 9600))


def test_prices_and_shares_so_many_times() -> None:
    sheet = price_sheet.load_sheet()
    times = price_sheet.scale_sheet(sheet, {"person": 2.0, "first_step": 3.0, "probe_finds": 0.0})
    one = PriceDraws(times, 2048, Random(1))
    assert one("person") == 10800 and one("first_step") == pytest.approx(138.0) and one.share_value("probe_finds") == 0
    assert one("nccl_timeout") == 600
    with pytest.raises(ValueError, match="named hope"):
        price_sheet.scale_sheet(sheet, {"hope": 2.0})
