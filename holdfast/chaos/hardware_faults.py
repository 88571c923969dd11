"""Faults of machines, injected through fake kernel logs and a fake GPU driver."""

import itertools
import time
from pathlib import Path

import msgspec

from holdfast.chaos.injection_records import CannotInject, InjectedFault, RemoveFile
from holdfast.chaos.injection_scene import InjectionReport, InjectionScene
from holdfast.chaos.job_observer import JobObserver

NVML = "HOLDFAST_CHAOS_NVML"  # where the fake driver finds what it is to say
# By the kinds of faults; priority, number and microseconds are put before them, as the kernel does.
LINES = {
    "xid": "NVRM: Xid (PCI:0000:3a:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    "aer": "nvme 0000:5e:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Receiver ID)",
    "mce": "mce: [Hardware Error]: CPU 12: Machine Check: 0 Bank 7: be00000000010090",
}
READINGS = {  # what a driver would say, by the names of its calls
    "lost": {"broken": 15},
    "ecc": {"ecc": 1},
    "hot": {"nvmlDeviceGetTemperature": 95, "nvmlDeviceGetCurrentClocksThrottleReasons": 0x40},
    "narrow": {"nvmlDeviceGetCurrPcieLinkWidth": 4},
    "nvlink": {"nvmlDeviceGetNvLinkState": 0},
    "hung": {"hangs": 1},
}
_count = itertools.count(1)


def write_kernel_line(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    """Write a line to one node's kernel log, where the line catalog should recognize a class of failure."""
    status = scene.read_status()
    node = scene.choose_node(fault, status).node
    log = _machine_root(scene.sight, node) / "dev/kmsg"
    if not log.exists() or log.is_char_device():
        raise CannotInject(f"{log} is not a log of this job; chaos never writes to the host's log")
    text = fault.text or LINES[fault.kind.partition(".")[2]]
    head = f"3,{next(_count)},{time.monotonic_ns() // 1000},-;"
    with log.open("a") as file:
        for _ in range(fault.count or 1):
            file.write(f"{head}{text}\n")
    filled = msgspec.structs.replace(fault, node=node, text=text)
    return InjectionReport(what=f"the kernel of {node} said: {text}", fault=filled, nodes=(node,))


def set_gpu_reading(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    """Set what the fake GPU driver of one node reports until this is undone."""
    status = scene.read_status()
    node = scene.choose_node(fault, status).node
    root = _machine_root(scene.sight, node)
    if NVML not in Path(f"/proc/{scene.sight.agent_pid(node)}/environ").read_text(errors="replace"):
        raise CannotInject("the job has no simulated GPUs; only a job that chaos starts with machines = true has them")
    reading = fault.reading or "lost"
    if reading not in READINGS:
        raise CannotInject(f"there is no reading '{reading}'; there are {', '.join(READINGS)}")
    path = root / "nvml.json"
    scene.keep_undo(RemoveFile(str(path)))
    part = root / ".nvml.json"
    part.write_bytes(msgspec.json.encode(READINGS[reading]))
    part.replace(path)
    filled = msgspec.structs.replace(fault, node=node, reading=reading)
    return InjectionReport(what=f"GPU 0 of {node} reads: {reading}", fault=filled, nodes=(node,))


def _machine_root(sight: JobObserver, node: str) -> Path:
    root = sight.run.settings.health.root
    if "{node}" not in root:
        raise CannotInject("all nodes of this job share the host's kernel; start it with --set health.root=DIR/{node}")
    return Path(root.replace("{node}", node))
