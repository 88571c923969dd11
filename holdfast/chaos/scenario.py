"""Scenarios: lists of faults, from a TOML file or drawn at random from a seed."""

import math
import random
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from holdfast.chaos.fault_catalog import KINDS
from holdfast.chaos.injection_records import MOMENTS, NEUTRAL, InjectedFault, given_fields
from holdfast.chaos.network_switch import PORTS
from holdfast.decoding import from_toml

WEEK = 7 * 24 * 60.0  # minutes, more than any walk lasts
_MIB = 1 << 20  # at most, of a small disk
_GAP_S = 20.0  # between two faults of a walk, on average
# What a walk draws from unless it is told otherwise: faults that every job with a standby comes back from.
WALK = {"rank.kill": 6, "rank.segv": 2, "rank.stop": 2, "agent.kill": 2, "controller.kill": 2, "node.kill": 2}


class BadScenario(Exception):
    """A scenario is not valid. The message says in one sentence what is wrong and how to fix it."""


class ScenarioJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job that is started for the scenario and ends with it."""

    run: tuple[str, ...]  # what would stand after `holdfast run`
    machines: bool = False  # each node is a machine of its own: kernel's log and GPUs that can be told what to say
    disk_mib: int = 0  # {disk} in `run` is a file system of this size, for checkpoints; the run directory is not on it
    shm_mib: int = 0  # and /dev/shm is one of this size
    hosts: int = 0  # so many hosts with networks of their own join one job


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fault: tuple[InjectedFault, ...] = ()
    seed: int = 0
    patience_s: float = 90.0  # for the job to come back from one fault
    job: ScenarioJob | None = None


def read_scenario(path: Path) -> Scenario:
    try:
        found = msgspec.convert(from_toml(path.read_text()), Scenario)
    except OSError as e:
        raise BadScenario(f"{path} cannot be read: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise BadScenario(f"{path} is not TOML: {e}") from None
    except msgspec.ValidationError as e:
        raise BadScenario(f"{path}: {e}; docs/CHAOS.md has the format") from None
    if not found.fault:
        raise BadScenario(f"{path} has no [[fault]]; docs/CHAOS.md has the format")
    if not 0 < found.patience_s < math.inf:
        raise BadScenario(f"{path}: patience_s must be a number of seconds above 0, not {found.patience_s}")
    if found.job and (why := _job_mistake(found.job)):
        raise BadScenario(f"{path}: [job]: {why}")
    for number, fault in enumerate(found.fault, 1):
        if why := fault_mistake(fault):
            raise BadScenario(f"{path}: fault {number}: {why}")
    return found


def _job_mistake(job: ScenarioJob) -> str:
    for name, most in (("disk_mib", _MIB), ("shm_mib", _MIB), ("hosts", PORTS)):
        if not 0 <= getattr(job, name) <= most:
            return f"{name} must be from 0 (none) to {most}, not {getattr(job, name)}"
    return ""


def fault_mistake(fault: InjectedFault) -> str:
    """Return what is wrong with a requested fault; empty if nothing is."""
    if fault.kind not in KINDS:
        return f"there is no kind '{fault.kind}'; holdfast chaos list shows all"
    may = {*NEUTRAL, *KINDS[fault.kind].takes}
    if strange := [name for name in given_fields(fault) if name not in may]:
        takes = ", ".join(KINDS[fault.kind].takes) or "nothing of its own"
        return f"{fault.kind} does not take {', '.join(strange)}; it takes {takes}"
    if fault.when not in MOMENTS:
        return f"when must be one of {', '.join(MOMENTS[1:])}, not '{fault.when}'"
    if not 0 <= fault.share <= 1 or not 0 <= fault.chance <= 1:
        return "share and chance must be from 0 to 1"
    if not 0 <= fault.code <= 255:
        return "code must be from 0 to 255"
    for name in ("after_s", "for_s", "delay_s", "at_step", "count", "bytes_s", "rank"):
        if not 0 <= (getattr(fault, name) or 0) < math.inf:
            return f"{name} must be a number and not negative, not {getattr(fault, name)}"
    return ""


def draw_scenario(seed: int, minutes: float, kinds: dict[str, int] | None = None) -> Scenario:
    """Draw a scenario from a seed: the same seed gives the same faults. Targets are drawn later, as the job runs."""
    if not 0 < minutes <= WEEK:
        raise BadScenario(f"--minutes must be above 0 and at most {WEEK:g} (a week), not {minutes:g}")
    dice = random.Random(seed)
    weights = kinds or WALK
    faults: list[InjectedFault] = []
    at = 0.0
    while True:
        gap_s = min(dice.expovariate(1 / _GAP_S), 4 * _GAP_S)
        at += gap_s
        if at > 60 * minutes:
            break
        kind = dice.choices(list(weights), list(weights.values()))[0]
        faults.append(InjectedFault(kind=kind, after_s=round(gap_s, 1)))
    return Scenario(fault=tuple(faults), seed=seed)


def fault_lines(scenario: Scenario) -> list[str]:
    """Return one line for each fault, for the person who has to approve it."""
    lines = []
    for fault in scenario.fault:
        more: dict[str, Any] = {name: getattr(fault, name) for name in given_fields(fault) if name != "kind"}
        lines.append(" ".join([fault.kind, *(f"{name}={value}" for name, value in more.items())]))
    return lines
