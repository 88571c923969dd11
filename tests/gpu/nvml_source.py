"""GPUs of a real machine through NVML: every reading as JSON, what each costs, and whether any is missing.

    python -m tests.gpu.nvml_source

It needs a GPU and nvidia-ml-py, and starts no CUDA itself. It fails if a reading is missing that every data-centre GPU
of NVIDIA gives; NVLink is not among these, as a machine with one GPU has none. Where the GPU tells how much its tensor
cores work, another process multiplies matrices for a while, and the readings must rise with it and fall after it.
"""

import json
import statistics
import subprocess
import sys
import time

from holdfast.agent.sources import SourceAbsent, tensor_activity
from holdfast.agent.sources.gpu import GpuSource, load_nvml
from holdfast.core.detect.health import HealthDetector, HealthLimits
from holdfast.logs import catalog_files
from holdfast.model.observation import Gauge, Line

ROUNDS = 50
SETTLE_S = 1.2  # until tensor cores can be told: a reading is of the time since the one before
MUST = frozenset(
    "gpu.lost gpu.ecc_uncorrected gpu.ecc_uncorrected_ever gpu.ecc_corrected gpu.ecc_corrected_ever gpu.rows_remapped "
    "gpu.rows_pending gpu.rows_failed gpu.pcie_width_missing gpu.pcie_gen_missing gpu.pcie_replays gpu.temperature "
    "gpu.power_w gpu.clock_reasons gpu.slowed gpu.utilization gpu.memory_used".split()
)


def costs_ms(source: GpuSource) -> dict[str, float]:
    """Median milliseconds of each reading of the first GPU."""
    found = {}
    for name, ask in source.gpus[0].asks.items():
        took = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            ask()
            took.append(1e3 * (time.perf_counter() - began))
        found[name] = round(statistics.median(took), 4)
    return found


MULTIPLY = """
import time, torch
square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
print("multiplying", flush=True)
until = time.monotonic() + {seconds}
while time.monotonic() < until:
    for _ in range(20):
        square @ square
    torch.cuda.synchronize()
"""


def tensor_percent(source: GpuSource) -> float | None:
    """Of the first GPU, since the last reading."""
    name = source.gpus[0].name
    return next(
        (g.value for g in source.read() if isinstance(g, Gauge) and (g.name, g.of) == (tensor_activity.GAUGE, name)),
        None,
    )


def watch_tensor_cores(source: GpuSource) -> dict[str, float | None]:
    """Percentages before, while and after another process multiplies matrices."""
    found = {"idle": tensor_percent(source)}
    with subprocess.Popen([sys.executable, "-c", MULTIPLY.format(seconds=6)], stdout=subprocess.PIPE) as load:
        assert load.stdout
        load.stdout.readline()
        time.sleep(SETTLE_S)
        tensor_percent(source)
        time.sleep(3.0)
        found["multiplying"] = tensor_percent(source)
    tensor_percent(source)
    time.sleep(2.0)
    found["after"] = tensor_percent(source)
    return found


def main() -> int:
    began = time.perf_counter()
    try:
        source = GpuSource(load_nvml(), time.time)
    except SourceAbsent as e:
        print(f"no GPU to read: {e}", file=sys.stderr)
        return 2
    opened_ms = 1e3 * (time.perf_counter() - began)
    time.sleep(SETTLE_S)
    took, signals = [], source.read()
    cpu_s = time.process_time()
    for _ in range(ROUNDS):
        began = time.perf_counter()
        signals = source.read()
        took.append(1e3 * (time.perf_counter() - began))
    cpu_ms = 1e3 * (time.process_time() - cpu_s) / ROUNDS
    gauges = [signal for signal in signals if isinstance(signal, Gauge)]
    readings = {gpu.name: {g.name: g.value for g in gauges if g.of == gpu.name} for gpu in source.gpus}
    missing = {gpu: sorted(MUST - set(read)) for gpu, read in readings.items() if MUST - set(read)}
    health = HealthDetector(HealthLimits(), catalog_files.load_health())
    alarms = [alarm.reason for gauge in gauges if (alarm := health.on_gauge(gauge, ("here",)))]
    record = {
        "gpus": {gpu.name: gpu.bus for gpu in source.gpus},
        "readings": readings,
        "xids": [signal.text for signal in signals if isinstance(signal, Line)],
        "tells_xids": source._events is not None,
        "opened_ms": round(opened_ms, 1),
        "reading_ms": {"median": round(statistics.median(took), 3), "max": round(max(took), 3)},
        "reading_cpu_ms": round(cpu_ms, 3),
        "part_of_a_core": cpu_ms / 1e3 / HealthLimits().gpu_s,
        "each_ms": costs_ms(source),
        "tells_tensor_cores": all(tensor_activity.GAUGE in gpu.asks for gpu in source.gpus),
        "missing": missing,
        "alarms": alarms,
    }
    rises = True
    if record["tells_tensor_cores"]:
        seen = record["tensor_percent"] = watch_tensor_cores(source)
        rises = (seen["multiplying"] or 0) > 50 > 5 > max(seen["idle"] or 0, seen["after"] or 0)
    print(json.dumps(record, indent=1))
    return 1 if missing or not readings or not rises else 0


if __name__ == "__main__":
    sys.exit(main())
