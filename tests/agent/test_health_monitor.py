"""The monitor: sources in threads, detectors in the loop, alarms to the agent; whatever a source does."""

import asyncio
import errno
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.agent import health_monitor
from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.health_monitor import HealthMonitor, MonitorPorts
from holdfast.agent.sources import tensor_activity
from holdfast.core.detect.health import HealthLimits
from holdfast.core.detect.user_log_rules import Rule, RuleLimits
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.observation import LinkTraffic, StepValues, StrainKind
from holdfast.wire import folder_use_lock, run_and_node_specs
from holdfast.wire.holder_messages import HolderRank
from holdfast.wire.rank_keeper_messages import ArenaRequest, CheckpointPolicy
from holdfast.wire.run_and_node_specs import NodeSpec
from tests.agent.fake_nvml import FakeNvml
from tests.fleet.places import TEMPLATE

PATIENCE_S = 20.0
FAST = HealthLimits(kernel_s=0.02, gpu_s=0.02, host_s=0.02, network_s=0.02, deadline_s=60.0)
XID = b"4,2,200,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"


class Scene:
    def __init__(self, folder: Path, limits: HealthLimits = FAST, rules: RuleLimits | None = None) -> None:
        self.root = folder / "root"
        (self.root / "dev").mkdir(parents=True, exist_ok=True)
        self.kmsg = self.root / "dev/kmsg"
        self.kmsg.touch()
        self.limits = msgspec.structs.replace(limits, root=str(self.root))
        self.settings = msgspec.structs.replace(TEMPLATE.settings, health=self.limits, rules=rules or RuleLimits())
        self.nodes = folder / "nodes"
        self.log_dir = str(folder / "logs")
        self.nvml = FakeNvml(2)
        self.held = [HolderRank(key="1:0", pid=4711)]
        self.heard: list[Alarm] = []
        self.traffic: list[tuple[LinkTraffic, ...]] = []
        self.logged: list[tuple[StepValues, str]] = []

    def monitor(self, node: str = "n0", **ties: Any) -> HealthMonitor:
        node_dir = self.nodes / node
        node_dir.mkdir(parents=True, exist_ok=True)
        made = MonitorPorts(
            self.heard.append,
            self.traffic.append,
            lambda told, source: self.logged.append((told, source)),
            lambda: self.held,
            lambda: 0.0,
            SystemClock(),
            **{"nvml": lambda: self.nvml, **ties},
        )
        return HealthMonitor(node_dir, self.spec(node), made)

    def spec(self, node: str) -> NodeSpec:
        return msgspec.structs.replace(TEMPLATE, node=node, settings=self.settings, log_dir=self.log_dir)

    def write(self, text: bytes) -> None:
        with self.kmsg.open("ab") as file:
            file.write(text)

    async def until(self, look: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not look():  # noqa: ASYNC110  (what is looked at knows no events)
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(*monitors: HealthMonitor) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(one.run()) for one in monitors]
        await asyncio.sleep(0.1)
        yield
        for task in started:
            task.cancel()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_monitor, "_LOOK_S", 0.02)
    monkeypatch.setattr(health_monitor, "_LOGS_S", 0.02)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_what_the_gpus_of_the_ranks_can_do(scene: Scene) -> None:
    monitor = scene.monitor()  # one rank, two GPUs
    assert monitor.peak_flops == 0.0
    opened = scene.root / f"proc/{scene.held[0].pid}/fd"
    opened.mkdir(parents=True)
    async with running(monitor):
        await scene.until(lambda: monitor._gpu_models)
        await asyncio.sleep(0.1)
        assert monitor.peak_flops == 0.0, "a rank that computes on the processor has no GPU's peak"
        (opened / "6").touch()  # cannot be read as a link, like one that was closed meanwhile
        (opened / "7").symlink_to("/dev/nvidia-uvm")
        await scene.until(lambda: monitor.peak_flops == 989.4e12)
    pace = msgspec.structs.replace(scene.settings.pace, peak_flops=1e9)
    scene.settings = msgspec.structs.replace(scene.settings, pace=pace)
    told = scene.monitor("n1")
    async with running(told):
        await scene.until(lambda: told.peak_flops == 1e9)


async def test_how_busy_the_tensor_cores_are(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_activity, "_LEAST_S", 0.0)
    taken = itertools.count()

    def take_sample(handle: int, sample: list[float]) -> list[float]:
        passed = float(next(taken))
        sample[:] = [(0.8, 0.2)[handle] * passed, passed]
        return sample

    scene.nvml.tensor_s = [(0.0, 0.0), (0.0, 0.0)]
    monkeypatch.setattr(scene.nvml, "nvmlGpmSampleGet", take_sample)
    monitor = scene.monitor()
    assert monitor.tensor_share is None
    async with running(monitor):
        await scene.until(lambda: monitor.tensor_share is not None)
        assert monitor.tensor_share == pytest.approx(0.5), "the mean of its GPUs"
        scene.nvml.broken = dict.fromkeys(range(2), scene.nvml.NVML_ERROR_GPU_IS_LOST)
        await scene.until(lambda: monitor.tensor_share is None)


async def test_what_goes_over_the_links(scene: Scene) -> None:
    statistics = scene.root / "sys/class/net/eth0/statistics"
    statistics.mkdir(parents=True)
    (statistics.parent / "device").mkdir()
    (statistics.parent / "carrier").write_text("1\n")
    for counter in ("rx_bytes", "tx_bytes"):
        (statistics / counter).write_text("1000\n")
    async with running(scene.monitor()):
        await scene.until(lambda: scene.traffic)
        assert scene.traffic[0] == (LinkTraffic(link="eth0", rdma=False, in_bytes_s=0.0, out_bytes_s=0.0),)
        (statistics / "rx_bytes").write_text("9000000\n")
        await scene.until(lambda: any(link.in_bytes_s > 1e6 for links in scene.traffic for link in links))


async def test_an_agent_that_starts_while_a_link_is_down_tells_of_it(scene: Scene) -> None:
    eth0 = scene.root / "sys/class/net/eth0"
    (eth0 / "device").mkdir(parents=True)
    (eth0 / "carrier").write_text("1\n")
    first = scene.monitor()
    assert not first.links_read
    async with running(first):
        await scene.until(lambda: first.links_read)
    assert not first.strains
    (eth0 / "carrier").write_text("0\n")
    second = scene.monitor()
    second._speaker = first._speaker  # the lock is the process's, which has ended with the agent
    assert not second.links_read, "nobody is to believe that all links are up"
    async with running(second):
        await scene.until(lambda: second.links_read)
        assert [(strain.kind, strain.sign) for strain in second.strains] == [(StrainKind.CUT, "net.down eth0")]


async def test_an_xid_in_the_kernels_log(scene: Scene) -> None:
    made = scene.monitor()
    async with running(made):
        await scene.until(lambda: made._kernel)
        scene.write(XID.replace(b"3b", b"3a"))
        await scene.until(lambda: scene.heard)
    [alarm] = scene.heard
    assert (alarm.kind, alarm.klass, alarm.hard, alarm.suspects) == (Kind.LINES, "gpu_lost_bus", True, ("n0",))


async def test_an_xid_that_both_tell_is_told_once(scene: Scene) -> None:
    made = scene.monitor()
    async with running(made):
        await scene.until(lambda: made._kernel and made._gpus)
        scene.nvml.xids = [(1, 79)]
        scene.write(XID)
        await scene.until(lambda: scene.heard)
        await asyncio.sleep(0.2)
    assert len(scene.heard) == 1


async def test_an_xid_that_only_nvml_tells(scene: Scene) -> None:
    scene.kmsg.unlink()
    made = scene.monitor()
    async with running(made):
        await scene.until(lambda: made._feeds["kernel log"].absent)
        scene.nvml.xids = [(1, 79)]
        await scene.until(lambda: scene.heard)
    assert scene.heard[0].hard


async def test_an_ecc_error_through_the_driver(scene: Scene) -> None:
    made = scene.monitor()
    async with running(made):
        await scene.until(lambda: ("gpu.ecc_uncorrected", "GPU 1") in made._health._last)
        scene.nvml.ecc[1][1, 0] = 1
        await scene.until(lambda: scene.heard)
    assert (scene.heard[0].klass, scene.heard[0].hard) == ("gpu_ecc_memory", True)


async def test_what_is_absent_is_said_once_and_quietly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(tmp_path)
    scene.kmsg.unlink()
    scene.nvml = FakeNvml(0)
    caplog.set_level("INFO", "holdfast.agent")
    async with running(scene.monitor()):
        await asyncio.sleep(0.3)
    assert scene.heard == []
    assert caplog.text.count(f"kernel log: /dev/kmsg: {os.strerror(errno.ENOENT)}") == 1
    assert caplog.text.count("GPUs: ") == 1
    assert not [r for r in caplog.records if r.levelname != "INFO"]


async def test_a_source_that_hangs_is_an_alarm_and_stops_no_other(tmp_path: Path) -> None:
    scene = Scene(tmp_path, msgspec.structs.replace(FAST, deadline_s=0.2))
    heal = threading.Event()

    class Hanging(FakeNvml):
        def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
            heal.wait(PATIENCE_S)
            return 0

    scene.nvml = Hanging(1)
    made = scene.monitor()
    async with running(made):
        await scene.until(lambda: scene.heard)
        scene.write(XID.replace(b"3b", b"3a"))
        await scene.until(lambda: len(scene.heard) > 1)
        [strain] = made.strains
        assert (strain.kind, strain.nodes) == (StrainKind.STANDS, ("n0",))
        heal.set()
        await scene.until(lambda: not made.strains)
    stuck, xid = scene.heard
    assert (stuck.klass, stuck.stance, stuck.hard) == ("gpu_driver_gsp_fault", Stance.NOTIFY, False)
    assert stuck.signature == "gpu.stuck_s GPUs"
    assert xid.hard


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_source_that_breaks_is_an_alarm(scene: Scene) -> None:
    def broken() -> object:
        raise ZeroDivisionError

    async with running(scene.monitor(nvml=broken)):
        await scene.until(lambda: scene.heard)
    assert scene.heard[0].reason.startswith("can no longer tell the state of its GPUs")


async def test_one_node_speaks_for_its_host(scene: Scene) -> None:
    for node in ("n0", "n1", "n2"):
        (scene.nodes / node).mkdir(parents=True)
        folder_use_lock.lock_shared(scene.nodes / node)
        if node != "n2":
            run_and_node_specs.publish_file(scene.nodes / node / "holder.pid", b"1\n")
    made = [scene.monitor(node) for node in ("n0", "n1")]
    async with running(*made):
        await scene.until(lambda: all(m._kernel for m in made) and any(m._speaker is not None for m in made))
        await asyncio.sleep(0.1)
        scene.nvml.broken[0] = scene.nvml.NVML_ERROR_GPU_IS_LOST
        scene.write(XID)
        await scene.until(lambda: len(scene.heard) >= 2)
        await asyncio.sleep(0.2)
    assert len(scene.heard) == 2, "the lost GPU and the Xid, once each"
    assert {alarm.suspects for alarm in scene.heard} == {("n0", "n1")}, "n2 has ended"


async def test_the_next_node_speaks_when_the_first_has_ended(scene: Scene) -> None:
    first, second = scene.monitor("n0"), scene.monitor("n1")
    assert first._speaks_for_host() and not second._speaks_for_host()
    assert first._speaker is not None
    os.close(first._speaker)
    assert second._speaks_for_host()


async def test_a_standby_that_speaks_watches_what_others_write_to(scene: Scene, tmp_path: Path) -> None:
    standby, other = scene.monitor("n0"), scene.monitor("n1")
    assert standby._speaks_for_host() and not other._speaks_for_host()
    storage = CheckpointPolicy(url=str(tmp_path / "ckpt"), every_steps=10)
    want = ArenaRequest(rank=0, world=1, generation=1, layout="", image_bytes=1, slots=4, share=(), storage=storage)
    run_and_node_specs.write_json(scene.nodes / "n1" / "want-0.json", want)
    assert str(tmp_path / "ckpt") in standby._watched_paths()


async def test_a_node_with_a_root_of_its_own_is_a_machine_of_its_own(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    limits = msgspec.structs.replace(FAST, root=str(tmp_path / "{node}"))
    scene.settings = msgspec.structs.replace(scene.settings, health=limits)
    for node in ("n0", "n1"):
        (tmp_path / node / "dev").mkdir(parents=True)
        (tmp_path / node / "dev/kmsg").touch()
    made = [scene.monitor(node) for node in ("n0", "n1")]
    async with running(*made):
        await scene.until(lambda: all(m._kernel for m in made))
        (tmp_path / "n1/dev/kmsg").write_bytes(XID)
        await scene.until(lambda: scene.heard)
    assert [alarm.suspects for alarm in scene.heard] == [("n1",)]


async def test_an_oom_kill_is_told_before_the_ranks_end(tmp_path: Path) -> None:
    scene = Scene(tmp_path, msgspec.structs.replace(FAST, kernel_s=3600.0))
    made = scene.monitor()
    async with running(made):
        await scene.until(lambda: made._kernel)
        await asyncio.sleep(0.1)
        scene.write(b"3,9,9,-;Out of memory: Killed process 4711 (python3) total-vm:1kB, anon-rss:1kB\n")
        ended_at = time.time()
        made.on_rank_exit(ended_at)
        [alarm] = scene.heard
    assert (alarm.klass, alarm.ranks, alarm.suspects) == ("host_oom_kill", (0,), ("n0",))
    assert alarm.at <= ended_at


async def test_thousands_of_alarms_a_second(scene: Scene) -> None:
    made = scene.monitor()
    async with running(made):
        await scene.until(lambda: made._kernel)
        scene.write(b"".join(f"4,2,200,-;nfs: server s{i} not responding\n".encode() for i in range(5000)))
        await scene.until(lambda: made._flood.dropped > 1000)
    assert len(scene.heard) == 20


async def test_rules_follow_what_ranks_write(tmp_path: Path) -> None:
    rules = RuleLimits(
        rule=(
            Rule(name="nan", kind="loss", pattern=r"loss=(\S+)"),
            Rule(name="pace", kind="hang", pattern=r"step (\d+)", every_s=0.3),
        )
    )
    scene = Scene(tmp_path, rules=rules)
    log = Path(scene.log_dir) / "gen-1/rank-0/stdout.log"
    log.parent.mkdir(parents=True)
    made = scene.monitor()
    async with running(made):
        await scene.until(lambda: made.logs and made._generation == 1)
        log.write_bytes(b"step 1 loss=nan\n")
        await scene.until(lambda: scene.heard)
        with log.open("ab") as file:
            file.write(bytes(range(256)) + b"x" * (10 << 20))
        await scene.until(lambda: len(scene.heard) == 2)
    assert {alarm.kind for alarm in scene.heard} == {Kind.LOSS, Kind.HANG}


async def test_lines_that_are_slow_to_look_at_do_not_hold_up_the_loop(tmp_path: Path) -> None:
    scene = Scene(tmp_path, rules=RuleLimits(rule=(Rule(name="slow", kind="loss", pattern=r"a.*(\d)"),)))
    log = Path(scene.log_dir) / "gen-1/rank-0/stdout.log"
    log.parent.mkdir(parents=True)
    made = scene.monitor()
    feed = made._feeds["ranks' logs"]
    gaps = []
    async with running(made):
        await scene.until(lambda: made.logs)
        log.write_bytes((b"a" * 1000 + b"\n") * 40)
        await scene.until(lambda: feed.behind)
        began = last = time.monotonic()
        while feed.behind:
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
    assert len(gaps) > 3
    assert max(gaps) < (last - began) / 2, "it was one gap"


async def test_a_progress_line_of_megatron_is_read(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    log = Path(scene.log_dir) / "gen-1/rank-0/stdout.log"
    log.parent.mkdir(parents=True)
    async with running(scene.monitor()):
        log.write_text(" iteration        7/     100 | lm loss: 2.5E+00 | loss scale: 1.0 | grad norm: 0.5 |\n")
        await scene.until(lambda: scene.logged)
    [(told, source)] = scene.logged
    assert (told.generation, told.rank, told.step, told.loss, told.grad_norm) == (1, 0, 7, 2.5, 0.5)
    assert source == "Megatron's lines ('lm loss')"
