"""What GPUs can do at most, or that it is not known."""

from collections import Counter

import pytest

from holdfast.core.record.gpu_peak import GpuPeak, peak_of_ranks
from holdfast.logs import catalog_files

ROWS = (GpuPeak(names=("A", "A big"), flops=3.0, source=""), GpuPeak(names=("B",), flops=5.0, source=""))


@pytest.mark.parametrize(
    ("ranks", "sharing", "gpus", "peak"),
    [
        (8, 8, ["A"] * 8, 24.0),
        (2, 4, ["A big"] * 4, 6.0),  # two nodes on a host
        (1, 1, ["B"] * 8, 5.0),
        (2, 2, ["A", "B"], 0.0),
        (2, 2, ["A"], 0.0),
        (1, 2, ["A"], 0.0),
        (1, 1, ["A MIG 1g.5gb"], 0.0),
        (1, 1, [], 0.0),
    ],
)
def test_peaks(ranks: int, sharing: int, gpus: list[str], peak: float) -> None:
    assert peak_of_ranks(ranks, sharing, gpus, ROWS) == peak


def test_no_gpu_has_two_rows() -> None:
    rows = catalog_files.load_gpu_peaks()
    names = Counter(name for row in rows for name in row.names)
    assert names["NVIDIA H200"] == 1 and max(names.values()) == 1
    assert all(1e13 < row.flops < 1e16 and row.source for row in rows)
