"""Whether the kernel does TLS is asked of the kernel, and what it gains can be measured."""

from pathlib import Path

from benchmarks import _door_ktls

LOADED = Path("/proc/sys/net/ipv4/tcp_available_ulp")


def test_the_kernel_is_asked() -> None:
    why = _door_ktls.missing_ktls()
    there = "tls" in LOADED.read_text().split() if LOADED.exists() else False  # loaded by our question, if it can be
    assert (why == "") is there


def test_bytes_go_over_both_kinds_of_links(tmp_path: Path) -> None:
    gain = _door_ktls.measure_gain(tmp_path, 4 << 20, 1)
    assert gain.speed > 0 and gain.sender_cpu >= 0
    assert gain.links == 0 or not _door_ktls.missing_ktls()
