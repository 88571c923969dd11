"""What known messages are taken for."""

import time

import msgspec
import pytest

from holdfast.core.detect import lines
from holdfast.core.detect.lines import LineDetector, LineLimits, MachineUse
from holdfast.logs import catalog_files
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.observation import Line

CATALOG = catalog_files.load_lines()
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
OOM = "Out of memory: Killed process 4711 (python3) total-vm:82312kB, anon-rss:65536kB, file-rss:0kB"
LIMITS = LineLimits()
OWNED = MachineUse(node="n1", suspects=("n0", "n1"), disks=frozenset({"nvme0n1"}), ranks={4711: 3})


def hear(
    *texts: str, owned: MachineUse = OWNED, rank: int = -1, limits: LineLimits = LIMITS, every_s: float = 1.0
) -> list[Alarm]:
    detector = LineDetector(limits, CATALOG)
    found = (detector.on_line(Line(text=t, at=i * every_s, rank=rank), owned) for i, t in enumerate(texts))
    return [alarm for alarm in found if alarm]


@pytest.mark.parametrize("row", CATALOG.rows, ids=lambda row: row.say)
def test_a_row_is_sound(row: lines.LineRow) -> None:
    assert lines.find_row_fault(row) == ""
    assert [r for r, _ in CATALOG.match_line(row.sample, rank=row.rank)] == [row]
    assert CATALOG.may_match(row.sample.encode(), rank=row.rank)


def test_a_fatal_xid_names_the_host() -> None:
    [alarm] = hear("usb 1-1: new device", XID)
    assert (alarm.kind, alarm.at, alarm.suspects, alarm.ranks) == (Kind.LINES, 1.0, ("n0", "n1"), ())
    assert (alarm.klass, alarm.hard, alarm.stance) == ("gpu_lost_bus", True, Stance.ACT)
    assert (alarm.reason, alarm.evidence) == ("has lost the GPU at 0000:3b:00 (Xid 79)", (XID,))


@pytest.mark.parametrize(
    ("xid", "stance", "hard"),
    [(48, "act", True), (95, "act", True), (119, "act", True), (63, "notify", False), (31, "notify", False),
     (43, "observe", False), (45, "observe", False), (999, "observe", False)],
)  # fmt: skip
def test_xids(xid: int, stance: str, hard: bool) -> None:
    [alarm] = hear(f"NVRM: Xid (PCI:0000:3b:00 GPU-I:05): {xid}, pid=1, name=python, whatever")
    assert (alarm.stance, alarm.hard) == (Stance(stance), hard)


def test_an_nvlink_may_recover_once() -> None:
    xid = "NVRM: Xid (PCI:0000:3b:00): 74, pid=99, NVLink: fatal error detected on link 6"
    assert hear(xid) == []
    assert hear(xid, xid)[0].hard
    assert hear(xid, xid, every_s=400.0) == []


def test_a_gpu_of_somebody_else_is_told_only() -> None:
    others = MachineUse(node="n1", suspects=("n1",), gpus=frozenset({"0000:af:00"}))
    [alarm] = hear(XID, owned=others)
    assert (alarm.stance, alarm.hard) == (Stance.NOTIFY, False)


def test_a_disk_is_acted_on_if_the_job_uses_it() -> None:
    error = "I/O error, dev {}, sector 819200 op 0x1:(WRITE) flags 0x800 phys_seg 1 prio class 2"
    assert hear(error.format("nvme0n1")) == []
    [ours] = hear(*[error.format("nvme0n1")] * 2)
    assert (ours.stance, ours.hard) == (Stance.ACT, True)
    [theirs] = hear(*[error.format("sdz")] * 2)
    assert (theirs.stance, theirs.hard) == (Stance.NOTIFY, False)


def test_an_oom_kill_of_a_rank_is_no_fault_of_the_machine() -> None:
    [alarm] = hear(OOM)
    assert (alarm.suspects, alarm.ranks, alarm.klass) == (("n1",), (3,), "host_oom_kill")
    assert (alarm.stance, alarm.hard, alarm.group) == (Stance.ACT, False, "framework")
    [(row, _)] = CATALOG.match_line(OOM, rank=False)
    assert row.hint and alarm.reason.endswith(f"; {row.hint}")


def test_an_oom_kill_of_nobody_in_this_job_is_not_told() -> None:
    assert hear(OOM.replace("4711", "4712")) == []
    bereaved = msgspec.structs.replace(OWNED, bereaved=True)
    [other] = hear(OOM.replace("4711", "4712"), owned=bereaved)
    assert (other.stance, other.ranks) == (Stance.NOTIFY, ())


def test_one_node_speaks_for_its_host_but_each_for_its_ranks() -> None:
    mute = MachineUse(node="n1", suspects=("n0", "n1"), speaks=False, ranks={4711: 3}, bereaved=True)
    assert hear(XID, owned=mute) == []
    assert hear(OOM.replace("4711", "1"), owned=mute) == []
    [alarm] = hear(OOM, owned=mute)
    assert alarm.ranks == (3,)
    speaker = MachineUse(node="n0", suspects=("n0", "n1"), elsewhere=frozenset({4711}), bereaved=True)
    assert hear(OOM, owned=speaker) == [], "n1 tells it"


def test_what_a_rank_prints_is_never_acted_on() -> None:
    assert hear(XID, rank=2) == [], "a script may quote anything"
    [alarm] = hear("RuntimeError: CUDA error: uncorrectable ECC error encountered", rank=2)
    assert (alarm.stance, alarm.hard, alarm.ranks) == (Stance.NOTIFY, False, (2,))


def test_the_same_is_said_once_in_a_while() -> None:
    assert len(hear(*[XID] * 1000)) == 1
    assert len(hear(*[XID] * 10, every_s=4000.0)) == 10


@pytest.mark.parametrize("stance", list(Stance))
def test_shadow_mode(stance: Stance) -> None:
    assert hear(XID, limits=LineLimits(stance=stance))[0].stance is stance


def test_hostile_lines() -> None:
    began = time.perf_counter()
    assert hear("x" * (10 << 20), "\x00\udcff" * 5000, "NVRM: Xid " + "(" * (10 << 20)) == []
    assert len(hear(XID + "y" * (10 << 20))[0].evidence[0]) == 300
    thousands = [f"NVRM: Xid (PCI:0000:{i:02x}:00): 79, lost" for i in range(10_000)]
    hear(*thousands)
    assert time.perf_counter() - began < 30


@pytest.mark.parametrize(
    "text",
    ["step 26 loss nan", "loss: nan", "epoch 1 | train_loss=nan | lr 0.1", "{'loss': nan, 'step': 3}", "Loss = nan"],
)
def test_a_loss_that_a_rank_prints_is_told_after_three_lines(text: str) -> None:
    detector = lines.LineDetector(lines.LineLimits(), CATALOG)
    found = [detector.on_line(Line(text=text, at=float(at), rank=1), OWNED) for at in range(5)]
    assert [alarm is not None for alarm in found] == [False, False, True, False, False]
    assert found[2] and (found[2].klass, found[2].stance, found[2].hard) == ("nan_divergence", Stance.NOTIFY, False)
    assert found[2].reason.startswith("prints a loss of nan; nothing is done about what a rank prints")


@pytest.mark.parametrize(
    "text",
    ["val loss nan", "eval loss: nan", "val_loss=nan", "loss 0.3 grad nan", "nano loss 2", "loss nanoseconds 3",
     "number of nan iterations: 0", "loss scale nan"],
)  # fmt: skip
def test_lines_that_are_no_bad_training_loss(text: str) -> None:
    assert not CATALOG.match_line(text, rank=True)
