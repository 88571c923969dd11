"""Parses what Slurm's commands print into plain values; runs no command itself."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.core.incident.incident_text import describe_exit
from holdfast.decoding import from_json

# The fields of one job, in this order, as `squeue -O` prints them with SLURM_TIME_FORMAT=%s.
JOB_FIELDS = ("JobID", "State", "Reason", "EndTime", "PreemptTime", "NodeList", "Name", "Reservation")
STEP_FORMAT = "%i|%j|%N"  # of `squeue -s`
HOST_FORMAT = "%N|%T|%E"  # of `sinfo -N`
PLACE_FORMAT = "%A|%j|%Z"  # of `squeue`: where jobs were submitted from
JSON_FROM = (23, 11)  # in the JSON of older versions a job that is completing cannot be told from one that is over

_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_STARTING = frozenset({"CONFIGURING", "POWER_UP_NODE"})
_RUNNING = frozenset({"RUNNING", "RESIZING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "STOPPED"})
_FAILED = frozenset({"NODE_FAIL", "BOOT_FAIL"})  # of the machine, not of the job
_DUE_TO = {"": "CANCELLED", "TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED", "NODE FAILURE": "NODE_FAIL"}
_GRACE_S = 30.0  # taken for the grace of a preemption that is not known
_FLAGS = frozenset({"COMPLETING", "CONFIGURING", "POWER_UP_NODE", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"})
_ENDED = re.compile(r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+(?: DUE (?:TO|to) ([\w ]+?))? \*\*\*")
_SPEAKER = re.compile(r"^s[a-z]+: (?:error: |fatal: )?")
_ADVICE = 'Try "'  # ... --help" for more information
_REFUSED, _BEFORE = "Batch job submission failed", 3
_HOSTS = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_PAIR = re.compile(r"(?:^|\s)(\w+)=(\S*)")
_BRACKET = re.compile(r"\[([^\]]*)\]")
# Sentences of Slurm that another try may not hear again; whatever else it says of a request is a refusal.
_PASSING = re.compile(
    r"unable to contact|timed? ?out|temporarily|try again|connection (refused|reset)|unexpected message|zero bytes"
    r"|communication|job submit limit|pending job submission|not responding|protocol authentication|munge",
    re.IGNORECASE,
)


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    """One Slurm job as the queue shows it."""

    id: int
    state: str  # in Slurm's capitals
    completing: bool = False  # it is over, but processes of it may be there still
    reason: str = ""
    ends_at: float = 0.0  # 0: it has no end
    preempted: bool = False  # it was told to go
    hosts: tuple[str, ...] = ()
    name: str = ""
    cancelled_by: str = ""  # "": by nobody, or nobody knows
    reservation: str = ""  # or several, with commas: Slurm chose one of them
    ends_with: str = ""  # the reservation that ends before the job's time limit does

    @property
    def is_queued(self) -> bool:
        return self.state in _WAITING

    @property
    def is_starting(self) -> bool:
        return self.state in _STARTING

    @property
    def is_running(self) -> bool:
        return self.state in _RUNNING

    @property
    def is_over(self) -> bool:
        """Return whether nothing of the job runs any more on hosts that answer."""
        return not (self.completing or self.is_queued or self.is_starting or self.is_running)

    @property
    def ending(self) -> str:
        """Why the job ends before its time limit, such as "preempted"; "" if it does not."""
        if self.preempted or self.state == "PREEMPTED":
            return "preempted"
        if self.state == "CANCELLED":
            return f"job {self.id} was cancelled{f' by {self.cancelled_by}' if self.cancelled_by else ''}"
        if self.state == "COMPLETING":
            return f"Slurm ends job {self.id}, and has not said why"
        return f"reservation {self.ends_with} ends" if self.ends_with else ""

    @property
    def failed(self) -> bool:
        return self.state in _FAILED


class SlurmReservation(msgspec.Struct, frozen=True, kw_only=True):
    """A reservation that ends the jobs in it when it ends."""

    ends_at: float
    hosts: tuple[str, ...]


class SlurmStep(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # JOB.STEP
    job: int
    name: str


class SlurmHost(msgspec.Struct, frozen=True, kw_only=True):
    answers: bool
    state: str
    reason: str = ""


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts in a list such as "n[1-3,07],login", in Slurm's order."""
    if text in ("", "(null)", "None", "N/A", "None assigned"):
        return ()
    return tuple(host for part in _HOSTS.findall(text) for host in _expand_part(part))


def _expand_part(part: str) -> list[str]:
    found = _BRACKET.search(part)
    if found is None:
        return [part]
    before, after = part[: found.start()], _expand_part(part[found.end() :])
    numbers = [number for piece in found[1].split(",") for number in _expand_range(piece)]
    return [f"{before}{number}{rest}" for number in numbers for rest in after]


def _expand_range(piece: str) -> list[str]:
    first, dash, last = piece.partition("-")
    if not dash or not (first.isdecimal() and last.isdecimal()):
        return [piece]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def parse_jobs(text: str) -> dict[int, SlurmJob]:
    """Read lines of `squeue -O` with JOB_FIELDS; lines of another form are left out."""
    found = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) < len(JOB_FIELDS) or not fields[0].isdecimal():
            continue
        id, state, reason, ends, preempted, hosts, name, reservation = fields[: len(JOB_FIELDS)]
        found[int(id)] = SlurmJob(
            id=int(id),
            state=state,
            completing=state == "COMPLETING",
            reason=_meant(reason),
            ends_at=_find_end(_instant(ends), _instant(preempted)),
            preempted=_instant(preempted) > 0,
            hosts=expand_hosts(hosts),
            name=name,
            reservation=_meant(reservation),
        )
    return found


def parse_jobs_json(content: bytes) -> dict[int, SlurmJob]:
    """Read `squeue --json` of any version since JSON_FROM; raises msgspec.DecodeError."""
    jobs = from_json(content, dict[str, Any]).get("jobs")
    if not isinstance(jobs, list):
        raise msgspec.DecodeError("there is no list of jobs")
    return {job.id: job for entry in jobs if isinstance(entry, dict) and (job := _json_job(entry))}


def _json_job(entry: dict[str, Any]) -> SlurmJob | None:
    states = entry.get("job_state")
    states = [states] if isinstance(states, str) else states
    id = _number(entry.get("job_id"))
    if not id or not isinstance(states, list) or not states:
        return None
    shown = next((state for state in states if state in _STARTING), None)
    preempted_at = _number(entry.get("preempt_time"))
    proper = [state for state in states if state not in _FLAGS]
    return SlurmJob(
        id=int(id),
        state=str(shown or (proper or states)[0]),
        completing="COMPLETING" in states,
        reason=_meant(str(entry.get("state_reason") or "")),
        ends_at=_find_end(_number(entry.get("end_time")), preempted_at),
        preempted=preempted_at > 0,
        hosts=expand_hosts(str(entry.get("nodes") or "")),
        name=str(entry.get("name") or ""),
        reservation=str(entry.get("resv_name") or ""),
    )


def parse_reservations(text: str) -> dict[str, SlurmReservation]:
    """Read `scontrol --oneliner show reservation` with SLURM_TIME_FORMAT=%s. Leave out reservations that let their jobs
    go on after them."""
    rows = (dict(_PAIR.findall(line)) for line in text.splitlines())
    return {
        row["ReservationName"]: SlurmReservation(
            ends_at=_instant(row.get("EndTime", "")), hosts=expand_hosts(row.get("Nodes", ""))
        )
        for row in rows
        if "ReservationName" in row and "FLEX" not in row.get("Flags", "").split(",")
    }


def end_with_reservation(job: SlurmJob, reservations: Mapping[str, SlurmReservation]) -> SlurmJob:
    """Return the job with the end of its reservation, if that is before its own: Slurm then ends it."""
    found = [(name, reservations[name]) for name in job.reservation.split(",") if name in reservations]
    ends = {name: one.ends_at for name, one in found if {*job.hosts} <= {*one.hosts} and one.ends_at}
    if not ends or not job.hosts:
        return job
    name, ends_at = min(ends.items(), key=lambda end: end[1])
    if job.ends_at and job.ends_at <= ends_at:
        return job
    return msgspec.structs.replace(job, ends_at=ends_at, ends_with=name)


def parse_places(text: str) -> dict[int, tuple[str, str]]:
    """Read lines of `squeue` with PLACE_FORMAT; return the name and the folder of each job."""
    rows = (line.strip().split("|", 2) for line in text.splitlines())
    return {int(row[0]): (row[1], row[2]) for row in rows if len(row) == 3 and row[0].isdecimal()}


def parse_end(log: str) -> str:
    """Return a job's final state, read from Slurm's own line in the job's output; "" if there is no such line."""
    last = (_ENDED.findall(log) or ["no end"])[-1]
    return "CANCELLED" if last.startswith("SIGNAL ") else _DUE_TO.get(last, "")


def parse_canceller(text: str) -> str:
    """Return who cancelled a job, from `sacct -o State` ("CANCELLED by 1000"); "" if it does not say."""
    found = re.search(r"^CANCELLED by (\w+)", text, re.MULTILINE)
    return found[1] if found else ""


def parse_steps(text: str) -> tuple[SlurmStep, ...]:
    """Read lines of `squeue -s` with STEP_FORMAT."""
    rows = (line.strip().split("|") for line in text.splitlines())
    return tuple(
        SlurmStep(id=row[0], job=int(row[0].split(".")[0]), name=row[1])
        for row in rows
        if len(row) == 3 and row[0].split(".")[0].isdecimal()
    )


def parse_hosts(text: str) -> dict[str, SlurmHost]:
    """Read lines of `sinfo -N` with HOST_FORMAT. A star after the state means that the host does not answer Slurm."""
    rows = (line.strip().split("|", 2) for line in text.splitlines())
    return {
        row[0]: SlurmHost(
            answers=not row[1].endswith("*") and not row[1].startswith(("down", "unknown", "power")),
            state=row[1].rstrip("*"),
            reason="" if row[2] == "none" else row[2],
        )
        for row in rows
        if len(row) == 3
    }


def parse_version(text: str) -> tuple[int, int]:
    """Read `sinfo --version`; (0, 0) if the version cannot be recognized."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def failure_sentence(code: int, stderr: str) -> str:
    """Return why a command of Slurm failed, in its own last sentence; if it printed none, how it ended."""
    lines = _sentences(stderr)
    return lines[-1] if lines else f"it {describe_exit(code)} and said nothing"


def refusal_sentence(code: int, stderr: str) -> str:
    """Return why `sbatch` refused a job. What comes before its last sentence may name the cause: which partition it is,
    or what the site's own plugin asks for."""
    last, before = failure_sentence(code, stderr), _sentences(stderr)[:-1]
    return "; ".join([*before[-_BEFORE:], last]) if last.startswith(_REFUSED) else last


def _sentences(stderr: str) -> list[str]:
    """Return the lines that a command of Slurm printed, without its name and without the advice to ask for help."""
    lines = (_SPEAKER.sub("", line.strip()) for line in stderr.splitlines())
    return [line for line in lines if line and not line.startswith(_ADVICE)]


def may_pass(sentence: str) -> bool:
    """Return whether this error may be temporary, so that Slurm may answer otherwise next time."""
    return bool(_PASSING.search(sentence))


def _find_end(ends_at: float, preempted_at: float) -> float:
    """Return when a job ends; 0 if it has no end.
    Slurm does not say when a preempted job without a time limit ends, so a grace time is assumed."""
    return ends_at or (preempted_at + _GRACE_S if preempted_at else 0.0)


def _meant(word: str) -> str:
    return "" if word in ("None", "(null)", "N/A") else word


def _instant(text: str) -> float:
    return float(text) if text.isdecimal() else 0.0  # "N/A", "NONE", "Unknown": there is none


def _number(value: Any) -> float:
    """Return a number as any version of Slurm writes it: plain, or as {"set": true, "infinite": false, "number": 5}."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") and not value.get("infinite") else 0
    return float(value) if isinstance(value, int | float) else 0.0
