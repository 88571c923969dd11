"""Settings as one frozen tree: built from defaults, a TOML file and --set, and checked for consistency."""

import difflib
import tomllib
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from holdfast.core.agent_state_machine import NodeLimits
from holdfast.core.detect.hang import HangLimits
from holdfast.core.detect.health import HealthLimits
from holdfast.core.detect.job_progress import PaceLimits
from holdfast.core.detect.lines import LineLimits
from holdfast.core.detect.loss_spikes import LossLimits
from holdfast.core.detect.replica import ReplicaLimits
from holdfast.core.detect.silence import SilenceLimits
from holdfast.core.detect.slow import SlowLimits
from holdfast.core.detect.user_log_rules import RuleLimits
from holdfast.core.detect.user_log_rules import find_rule_fault as fault_of_rules
from holdfast.core.diagnose.probe_assessment import ProbeLimits
from holdfast.core.membership.host_blocking import BlockLimits
from holdfast.core.record.hook_notices import FORMATS, HookLimits
from holdfast.core.replay.regrouped_replay import ReplayLimits
from holdfast.core.snapshots.copy_keepers import MOST_COPIES
from holdfast.core.snapshots.disk_floor_coordination import DiskLimits
from holdfast.core.snapshots.memory_grant import SnapshotLimits, parse_cap
from holdfast.core.snapshots.recovery_floor_coordination import BackupLimits
from holdfast.decoding import from_toml
from holdfast.model.decider_limits import Limits


class LogLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on how much of the ranks' output is kept and shown."""

    file_bytes: int = 1 << 30  # a rank's log file is rotated beyond this; one older file is kept
    console_bytes_s: int = 1 << 20  # shown on the console per second; more is skipped and counted
    trackers: bool = True  # W&B, MLflow and TensorBoard of the script get the job's figures, and runs are resumed


class WordLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The path of the user's own catalog of patterns for last words."""

    catalog: str = ""  # the user's own rows; empty: words.toml in HOLDFAST_HOME, else in ~/.config/holdfast


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the language model that is asked about a failure when holdfast's own rules are not sure."""

    url: str = ""  # of an OpenAI-compatible endpoint; empty: nobody is asked
    name: str = ""
    key_env: str = ""  # the environment variable that holds the key
    timeout_s: float = 30.0
    below: float = 0.6  # it is asked when the rules are less sure than this
    chars: int = 24000  # of the log that it gets
    hide_hosts: bool = True  # addresses and names of hosts and users are masked, as secrets always are


class ReleaseLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Who may sign the releases that the job accepts, and how much compiled code standbys get."""

    signers: str = ""  # an OpenSSH file of allowed signers; empty: signatures are not asked for
    compiled_mb: int = 512  # MiB of compiled code that standbys on other hosts get; 0: none


class DoorLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The TLS files with which the hosts of a job prove who they are. Without them, the job makes its own authority."""

    authority: str = ""
    certificate: str = ""
    key: str = ""


class SlurmLimits(msgspec.Struct, frozen=True, kw_only=True):
    drain: bool = False  # whether hosts of evicted nodes are drained, which Slurm lets operators do


class FleetLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long machines that a cluster has given may wait for the rest of the job's machines."""

    gather_s: float = 600.0  # machines that wait for the rest of a job's are given back after so long; 0: never


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    recovery: Limits = Limits()
    silence: SilenceLimits = SilenceLimits()
    pace: PaceLimits = PaceLimits()
    node: NodeLimits = NodeLimits()
    logs: LogLimits = LogLimits()
    hang: HangLimits = HangLimits()
    slow: SlowLimits = SlowLimits()
    backup: BackupLimits = BackupLimits()
    disk: DiskLimits = DiskLimits()
    snapshot: SnapshotLimits = SnapshotLimits()
    health: HealthLimits = HealthLimits()
    lines: LineLimits = LineLimits()
    rules: RuleLimits = RuleLimits()
    loss: LossLimits = LossLimits()
    replica: ReplicaLimits = ReplicaLimits()
    probe: ProbeLimits = ProbeLimits()
    replay: ReplayLimits = ReplayLimits()
    words: WordLimits = WordLimits()
    model: ModelLimits = ModelLimits()
    hook: HookLimits = HookLimits()
    release: ReleaseLimits = ReleaseLimits()
    door: DoorLimits = DoorLimits()
    block: BlockLimits = BlockLimits()
    slurm: SlurmLimits = SlurmLimits()
    fleet: FleetLimits = FleetLimits()


ASK_S = 14400.0  # recovery.ask_s where a hook tells people, unless it is set


class ConfigError(Exception):
    """A bad setting; the message says in one sentence what is wrong and how to fix it."""


def load(path: str | None, overrides: Iterable[tuple[str, str]]) -> Settings:
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = from_toml(Path(path).read_text(encoding="utf-8"))
        except OSError as e:
            raise ConfigError(f"cannot read the config file {path}: {e.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
            raise ConfigError(f"the config file {path} is not valid TOML: {e}") from None
    for key, value in overrides:
        section, _, field = key.partition(".")
        if not field:
            raise ConfigError(f"--set {key}={value}: write it as SECTION.FIELD=VALUE, for example recovery.attempts=5")
        fields = tree.setdefault(section, {})
        if isinstance(fields, dict):  # else _check_known says so
            fields[field] = value
    for section, fields in tree.items():
        _check_known(section, fields)
    settings = msgspec.convert(tree, Settings, strict=False)
    _check_relations(settings)
    hooked = bool(settings.hook.command or settings.hook.url)
    if hooked and "ask_s" not in tree.get("recovery", {}):  # somebody can be reached
        recovery = msgspec.structs.replace(settings.recovery, ask_s=ASK_S)
        settings = msgspec.structs.replace(settings, recovery=recovery)
    return settings


def _check_known(section: str, fields: object) -> None:
    sections = {f.name: f.type for f in msgspec.structs.fields(Settings)}
    if section not in sections:
        near = _near_name(section, sections)
        hint = f"; did you mean {near}?" if near else f"; there are {', '.join(sections)}"
        raise ConfigError(f"there is no section '{section}' of settings{hint}")
    if not isinstance(fields, dict):
        raise ConfigError(f"'{section}' is a section of settings, not a value; write [{section}] and its fields below")
    types = {f.name: f.type for f in msgspec.structs.fields(sections[section])}
    for name, value in fields.items():
        if name not in types:
            near = _near_name(name, types)
            hint = f"; did you mean {section}.{near}?" if near else f"; {section} has {', '.join(types)}"
            raise ConfigError(f"there is no setting '{section}.{name}'{hint}")
        try:
            msgspec.convert(value, types[name], strict=False)
        except (msgspec.ValidationError, UnicodeError) as e:  # words of a shell may be any bytes
            kind = _describe_type(types[name])
            why = f"must be {kind}, not {value!r:.80}" if kind else f"cannot be read: {e}"
            raise ConfigError(f"{section}.{name} {why}") from None


def _near_name(name: str, names: Iterable[str]) -> str:
    """Return the name that was probably meant; "" if none is near."""
    return next(iter(difflib.get_close_matches(name, names, n=1)), "")


def _describe_type(kind: Any) -> str:
    """Return in words what values a setting takes; "" for a table, for which msgspec's own message is used."""
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return f"one of {', '.join(kind)}"
    words = {int: "a whole number", bool: "true or false", str: "a text"}
    return words.get(kind, "a number" if kind in (float, float | None) else "")


def _parse_url(url: str) -> SplitResult | None:
    """Return the parts of an HTTP(S) address; None if it is malformed or has no host or a bad port."""
    try:
        found = urlsplit(url)
        return found if found.scheme in ("http", "https") and found.hostname and found.port != 0 else None
    except ValueError:
        return None


def _model_rules(m: ModelLimits) -> tuple[tuple[bool, str], ...]:
    url = _parse_url(m.url)
    return (
        (not m.url or url is not None, "model.url must begin with http(s)://"),
        (
            url is None or "@" not in url.netloc,
            "model.url must not contain a password; name the environment variable that does in model.key_env",
        ),
        (not m.url or bool(m.name), "model.url needs model.name, the model to ask"),
        (m.timeout_s > 0, "model.timeout_s must be above 0"),
        (m.below <= 1, "model.below must be at most 1"),
        (m.chars >= 2000, "model.chars must be at least 2000"),
    )


def _hook_rules(h: HookLimits) -> tuple[tuple[bool, str], ...]:
    return (
        (not h.url or _parse_url(h.url) is not None, "hook.url must begin with http(s)://"),
        (h.format in FORMATS, f"hook.format must be one of {', '.join(FORMATS)}"),
        (h.timeout_s > 0, "hook.timeout_s must be above 0"),
        ("\0" not in h.command, "hook.command must not contain a NUL"),
    )


def _release_rules(r: ReleaseLimits) -> tuple[tuple[bool, str], ...]:
    absolute = Path(r.signers).is_absolute() and "\0" not in r.signers
    return (
        (not r.signers or absolute, "release.signers must be an absolute path"),
        (not absolute or Path(r.signers).is_file(), f"release.signers: there is no file {r.signers!r}"),
        (r.compiled_mb >= 0, "release.compiled_mb must be 0 or more"),
    )


def _door_rules(d: DoorLimits) -> tuple[tuple[bool, str], ...]:
    given = [bool(path) for path in (d.authority, d.certificate, d.key)]
    whole = all(given) or not any(given)
    return (
        (whole, "door.authority, door.certificate and door.key go together: set all three, or none"),
        ("\0" not in d.authority + d.certificate + d.key, "door.authority, certificate and key must not contain a NUL"),
    )


def _block_rules(b: BlockLimits) -> tuple[tuple[bool, str], ...]:
    absolute = Path(b.path).is_absolute() and "\0" not in b.path
    return ((not b.path or absolute, "block.path must be an absolute path"),)


def _check_relations(s: Settings) -> None:
    """Raise ConfigError if a setting is out of range or contradicts another one."""
    for section in msgspec.structs.fields(Settings):
        limits = getattr(s, section.name)
        for field in msgspec.structs.fields(type(limits)):
            value = getattr(limits, field.name)
            if isinstance(value, int | float) and not 0 <= value < float("inf"):
                raise ConfigError(f"{section.name}.{field.name} must not be negative, infinite or not a number")
    rules = (
        (0 < s.silence.beat_s, "silence.beat_s must be above 0"),
        (2 * s.silence.beat_s <= s.silence.silence_s, "silence.silence_s must be at least two beats (silence.beat_s)"),
        (s.silence.silence_s < s.node.lost_s, "node.lost_s must be above silence.silence_s"),
        (s.recovery.attempts >= 1, "recovery.attempts must be at least 1"),
        (0 < s.backup.duty <= 1, "backup.duty must be above 0 and at most 1"),
        (1 <= s.backup.copies <= MOST_COPIES, f"backup.copies must be 1 or {MOST_COPIES}"),
        (
            s.backup.copies == 1 or not s.backup.parity,
            "backup.parity and backup.copies=2 exclude each other: set one of them",
        ),
        (s.disk.path == "" or s.disk.path.startswith("/"), "disk.path must be a folder's whole path, from / on"),
        (s.disk.keep >= 1, "disk.keep must be at least 1"),
        (s.logs.file_bytes >= 1 << 16, "logs.file_bytes must be at least 65536"),
        (s.lines.bytes_s >= 1 << 12, "lines.bytes_s must be at least 4096"),
        (
            0 < min(s.health.kernel_s, s.health.gpu_s, s.health.host_s, s.health.network_s),
            "health.kernel_s, gpu_s, host_s and network_s must be above 0",
        ),
        (s.loss.skip_batches >= 1, "loss.skip_batches must be at least 1; loss.policy=ignore or alert skips nothing"),
        (s.loss.lower_to < 1, "loss.lower_to must be below 1"),
        (s.loss.lower_steps >= 1, "loss.lower_steps must be at least 1"),
        (s.health.deadline_s >= 1, "health.deadline_s must be at least 1"),
        (not (wrong := fault_of_rules(s.rules)), wrong),
        *_model_rules(s.model),
        *_hook_rules(s.hook),
        *_release_rules(s.release),
        *_door_rules(s.door),
        *_block_rules(s.block),
    )
    for holds, sentence in rules:
        if not holds:
            raise ConfigError(sentence)
    try:
        parse_cap(s.snapshot.memory)
    except ValueError as e:
        raise ConfigError(f"snapshot.memory: {e}") from None
