"""The kernel's log, from a file that plays it."""

import os
from pathlib import Path

import pytest

from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.sources import SourceAbsent
from holdfast.agent.sources.kernel_log import KernelLogSource
from holdfast.model.observation import Line


def kmsg(root: Path) -> Path:
    path = root / "dev/kmsg"
    path.parent.mkdir(exist_ok=True)
    path.touch()
    return path


def add(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def texts(source: KernelLogSource) -> list[str]:
    return [signal.text for signal in source.read() if isinstance(signal, Line)]


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    path = kmsg(tmp_path)
    add(path, b"6,1,100,-;from before we came\n")
    source = KernelLogSource(lambda: 5.0, SystemClock(), tmp_path)
    assert texts(source) == []
    add(path, b"4,2,200,-;NVRM: Xid (PCI:0000:3b:00): 79\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00\n3,3,201,-;second\n")
    assert texts(source) == ["NVRM: Xid (PCI:0000:3b:00): 79", "second"]
    assert texts(source) == []
    source.close()


def test_a_line_in_two_pieces(tmp_path: Path) -> None:
    path = kmsg(tmp_path)
    source = KernelLogSource(lambda: 5.0, SystemClock(), tmp_path)
    add(path, b"4,2,200,-;half ")
    assert texts(source) == []
    add(path, b"a line\n")
    assert texts(source) == ["half a line"]
    source.close()


def test_garbage_and_endless_lines(tmp_path: Path) -> None:
    path = kmsg(tmp_path)
    source = KernelLogSource(lambda: 5.0, SystemClock(), tmp_path)
    add(path, b"\xff\xfe\x00\n" + b"x" * (10 << 20) + b"\n4,9,9,-;after\n")
    read = [line for _ in range(8) for line in texts(source)]
    assert read[-1] == "after" or any("skipped" in line for line in read)
    assert max(len(line) for line in read) <= 2 * 8192
    source.close()


def test_a_flood_is_cut_and_said(tmp_path: Path) -> None:
    path = kmsg(tmp_path)
    source = KernelLogSource(lambda: 5.0, SystemClock(), tmp_path)
    add(path, b"4,2,200,-;again and again\n" * 400_000)
    read = texts(source)
    assert read[-1].startswith("holdfast: ")
    assert texts(source) == [], "the next reading begins at the end"
    source.close()


def test_stamps_only_place_a_line_between_two_readings(tmp_path: Path) -> None:
    path = kmsg(tmp_path)
    clock = [100.0]
    source = KernelLogSource(lambda: clock[0], SystemClock(), tmp_path)
    clock[0] = 102.0
    add(path, b"4,2,1,-;stamped at boot\n4,3,999999999999999,-;stamped in the future\nwithout a stamp\n")
    assert [signal.at for signal in source.read()] == [100.0, 102.0, 102.0]
    source.close()


def test_nobody_may_read_it(tmp_path: Path) -> None:
    with pytest.raises(SourceAbsent, match="No such file"):
        KernelLogSource(lambda: 0.0, SystemClock(), tmp_path)


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="the kernel's log cannot be read here")
def test_the_real_one() -> None:
    source = KernelLogSource(lambda: 0.0, SystemClock())
    assert isinstance(source.read(), list)
    source.close()
