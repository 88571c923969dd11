"""Processors that the kernel slows down, from a sysfs that tests make."""

from pathlib import Path

from holdfast.agent.sources.processor_throttling import ProcessorThrottling


def write(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def numbers(source: ProcessorThrottling) -> dict[str, float]:
    return {name: value for name, _, value in source.read_numbers()}


def test_events_since_the_last_reading(tmp_path: Path) -> None:
    cpus = tmp_path / "sys/devices/system/cpu"
    for cpu in range(4):
        write(cpus / f"cpu{cpu}/thermal_throttle/core_throttle_count", 5)
        write(cpus / f"cpu{cpu}/thermal_throttle/package_throttle_count", 7)
    source = ProcessorThrottling(tmp_path)
    assert numbers(source) == {"cpu.throttled": 0.0}, "what was before does not count"
    write(cpus / "cpu1/thermal_throttle/core_throttle_count", 6)
    write(cpus / "cpu3/thermal_throttle/package_throttle_count", 9)
    assert numbers(source) == {"cpu.throttled": 2.0}
    assert numbers(source) == {"cpu.throttled": 0.0}


def test_clocks_lower_than_at_the_start(tmp_path: Path) -> None:
    policies = tmp_path / "sys/devices/system/cpu/cpufreq"
    write(policies / "policy0/scaling_max_freq", 3_000_000)
    write(policies / "policy1/scaling_max_freq", 2_000_000)  # a person has capped it
    source = ProcessorThrottling(tmp_path)
    assert numbers(source) == {"cpu.capped": 0.0}
    write(policies / "policy1/scaling_max_freq", 1_500_000)
    assert numbers(source) == {"cpu.capped": 25.0}
    (policies / "policy1/scaling_max_freq").unlink()
    assert numbers(source) == {"cpu.capped": 0.0}, "a processor that is offline is not slow"


def test_a_machine_that_does_not_tell(tmp_path: Path) -> None:
    assert numbers(ProcessorThrottling(tmp_path)) == {}
