"""Published mixes of failures, loaded from TOML: what fails, how often, and from which causes."""

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec

Shows = Literal["crash", "oom", "silence", "health", "hang", "slow", "loss"]
Why = Literal["machine", "passing", "release", "outside"]
_MOST = 1_000_000_000_000  # of weights
KNOWN = ("byterobust", "llama3", "rsc1", "stepfun")


def _check_limits(what: str, told: msgspec.Struct, limits: Mapping[str, tuple[int, int]]) -> None:
    """Raise ValueError for a number that is NaN or outside its limits; by default a number may not be negative."""
    for name, value in msgspec.structs.asdict(told).items():
        least, most = limits.get(name, (0, _MOST))
        if isinstance(value, int | float) and not least <= value <= most:
            raise ValueError(f"{name} of {what} is from {least:,} to {most:,}, not {value}")


class FailureMode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One symptom, and the weights of its possible causes."""

    name: str
    weight: float
    shows: Shows
    source: str
    said: str = ""  # last words of the rank that crashes
    klass: str = ""  # of the taxonomy, where a reading tells it
    read_s: float = 0.0  # how often that is read
    reads: int = 1  # how many readings it takes to act on it
    host: bool = False  # slow: the host is, so its ranks come late to collectives; a slow GPU's host runs ahead of it
    machine: float = 0.0  # the node is bad, and stays so
    code: float = 0.0  # parted into what passes and what a release brought
    passing: float = 0.0  # gone with the next restart
    outside: float = 0.0  # a service is away for a while

    def __post_init__(self) -> None:
        _check_limits(f"fault '{self.name}'", self, {"read_s": (0, 86400), "reads": (1, 1000)})
        if self.machine + self.code + self.passing + self.outside <= 0:
            raise ValueError(f"fault '{self.name}' needs a cause above 0: machine, code, passing or outside")


class CodeFailures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many failures of the user's code disappear after a restart, and how many need a rollback."""

    passing: float
    release: float
    source: str

    def __post_init__(self) -> None:
        _check_limits("code", self, {})


class BlastFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A failure that takes down several neighbouring nodes at once, such as a switch or a rack's power supply."""

    name: str
    nodes: int
    share: float  # of incidents
    source: str

    def __post_init__(self) -> None:
        _check_limits(f"blast '{self.name}'", self, {"nodes": (1, 1_000_000), "share": (0, 1)})


class FailureMix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    rate: float  # unplanned incidents per node and day
    rate_source: str
    fault: tuple[FailureMode, ...]
    updates_per_day: float = 0.0
    updates_source: str = ""
    blast: tuple[BlastFailure, ...] = ()
    lemons: float = 0.0  # share of nodes that fail more often
    lemon_times: float = 1.0
    lemon_source: str = ""
    code: CodeFailures = CodeFailures(passing=1.0, release=0.0, source="")

    def __post_init__(self) -> None:
        limits = {"rate": (0, 1), "updates_per_day": (0, 1000), "lemons": (0, 1), "lemon_times": (1, 1_000_000)}
        _check_limits("a mix", self, limits)
        if not self.fault or sum(fault.weight for fault in self.fault) <= 0:
            raise ValueError("a mix needs faults, and one of them a weight above 0")
        if sum(blast.share for blast in self.blast) > 1:
            raise ValueError("the shares of all kinds of blast must not be more than 1 together")

    @property
    def machine_share(self) -> float:
        """Return the share of incidents that a bad machine causes."""
        parts = [(fault.weight, self.cause_weights(fault)) for fault in self.fault]
        bad = sum(weight * causes["machine"] / sum(causes.values()) for weight, causes in parts)
        return bad / sum(weight for weight, _ in parts)

    def cause_weights(self, fault: FailureMode) -> dict[Why, float]:
        """Return the weights of a symptom's possible causes."""
        parts = self.code.passing + self.code.release
        passing, release = (self.code.passing / parts, self.code.release / parts) if parts else (1.0, 0.0)
        return {
            "machine": fault.machine,
            "passing": fault.passing + fault.code * passing,
            "release": fault.code * release,
            "outside": fault.outside,
        }


class MixError(Exception):
    """A file of failures is invalid; the message is one sentence that says what is wrong."""


def load_mix(name: str) -> FailureMix:
    """Load a mix by its name, or from the user's TOML file of the same form. Raise MixError if it is invalid."""
    if name in KNOWN:
        text = resources.files("holdfast.sim.scale").joinpath("mixes", f"{name}.toml").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            known = ", ".join(KNOWN)
            raise MixError(f"--failures {name}: neither one of {known} nor a file that can be read ({e})") from None
    try:
        return msgspec.convert(tomllib.loads(text), FailureMix)
    except (ValueError, msgspec.ValidationError) as e:  # also of numbers with thousands of digits
        raise MixError(f"--failures {name}: {e}; holdfast/sim/scale/mixes/ has examples") from None
