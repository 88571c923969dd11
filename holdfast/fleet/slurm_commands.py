"""Slurm's own commands, each run with a time limit. All of these block: call them in a thread."""

import getpass
import os
import pwd
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from holdfast.controller_interfaces import FleetRefusal
from holdfast.fleet import slurm_replies
from holdfast.fleet.slurm_replies import SlurmHost, SlurmJob, SlurmStep

_ANSWER_S = 60.0  # Slurm's own commands give up after about as long
_LOG_CHARS = 1 << 20  # of the output of a job that prints nothing itself
_FOR_SUBMISSION = ("SBATCH_", "SLURM_CONF")
_PLAIN = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ")


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """Slurm's answer about our jobs, their job steps and their hosts."""

    asked: frozenset[int]  # the jobs that Slurm was asked about; one that it does not know is long over
    jobs: dict[int, SlurmJob]
    steps: tuple[SlurmStep, ...]
    hosts: dict[str, SlurmHost]

    def find_step(self, job: int, name: str) -> SlurmStep | None:
        return next((step for step in self.steps if step.job == job and step.name == name), None)


def submission_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the few variables of `env` to run `sbatch` with, since Slurm stores sbatch's environment with the job."""
    return {key: value for key, value in env.items() if key in _PLAIN or key.startswith(_FOR_SUBMISSION)}


def step_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` for `srun` and the node that it starts, without the variables of an allocation we may be inside."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {key: value for key, value in env.items() if not key.startswith(("SLURM_", "SRUN_")) or key in kept}


def own_slurm_job(env: Mapping[str, str]) -> int:
    """Return the id of the Slurm job in whose allocation this process runs; 0 if it runs in none."""
    text = env.get("SLURM_JOB_ID", "")
    return int(text) if text.isdecimal() else 0


def split_exclusions(flags: tuple[str, ...]) -> tuple[list[str], set[str]]:
    """Split the user's own --exclude from other flags of `sbatch`, because a later --exclude would replace it."""
    kept: list[str] = []
    avoided: set[str] = set()
    words = iter(flags)
    for word in words:
        name, equals, value = word.partition("=")
        if name in ("--exclude", "-x"):
            avoided.add(value if equals else next(words, ""))
        elif word.startswith("-x") and not word.startswith("--"):
            avoided.add(word[2:])
        else:
            kept.append(word)
    return kept, avoided


class SlurmCommands:
    def __init__(self, env: Mapping[str, str], cwd: str, before_change: Callable[[], object]) -> None:
        """`before_change` is called before every command that changes jobs, steps or hosts. It raises if another
        controller acts by now."""
        self._before_change = before_change
        self._env = dict(env)
        self._cwd = cwd
        self._version: tuple[int, int] | None = None
        self._cancellers: dict[int, str] = {}  # of cancelled jobs, as far as the accounting knew

    def submit(self, words: Sequence[str], script: str) -> int:
        """Submit a script and return the id of its job. Raises FleetRefusal if Slurm rejects it for good, OSError if
        another try may succeed."""
        self._before_change()
        done = self._run(["sbatch", "--parsable", *words], script, submission_environment(self._env))
        if done.returncode == 0:
            id = done.stdout.strip().split("\n")[-1].split(";")[0]
            if id.isdecimal():
                return int(id)
            raise OSError(f"sbatch answered {done.stdout.strip()!r}, which names no job")
        passes = slurm_replies.may_pass(slurm_replies.failure_sentence(done.returncode, done.stderr))
        told = f"sbatch: {slurm_replies.refusal_sentence(done.returncode, done.stderr)}"
        raise OSError(told) if passes else FleetRefusal(told)

    def find_jobs(self) -> dict[int, str]:
        """Return the names of this run's live jobs, by their ids. Another run may have jobs of the same names, but it
        does not submit them from our folder."""
        told = self._ask(
            ["squeue", "--noheader", f"--user={getpass.getuser()}", f"--format={slurm_replies.PLACE_FORMAT}"]
        )
        own = os.path.realpath(self._cwd)
        found = slurm_replies.parse_places(told)
        return {id: name for id, (name, folder) in found.items() if os.path.realpath(folder) == own}

    def find_job(self, name: str) -> int:
        """Return the id of this run's newest live job of this name; 0 if there is none."""
        return max((id for id, found in self.find_jobs().items() if found == name), default=0)

    def look(self, jobs: Iterable[int], hosts: Iterable[str]) -> ClusterView:
        """Ask Slurm about these jobs and hosts. Raise OSError if Slurm does not answer."""
        asked = frozenset(jobs)
        if not asked:
            return ClusterView(asked=asked, jobs={}, steps=(), hosts={})
        ids = ",".join(map(str, sorted(asked)))
        steps = self._ask(["squeue", "--noheader", "--steps", f"--jobs={ids}", f"--format={slurm_replies.STEP_FORMAT}"])
        found = self._ask_jobs(ids)  # after the steps: one that has ended between is seen to run once more
        names = ",".join(sorted({*hosts, *(host for job in found.values() for host in job.hosts)}))
        told = ""
        if names:
            told = self._ask(
                ["sinfo", "--noheader", "--Node", f"--nodes={names}", f"--format={slurm_replies.HOST_FORMAT}"]
            )
        return ClusterView(
            asked=asked, jobs=found, steps=slurm_replies.parse_steps(steps), hosts=slurm_replies.parse_hosts(told)
        )

    def _ask_jobs(self, ids: str) -> dict[int, SlurmJob]:
        found = self._ask_states(ids)
        for id, job in found.items():
            if job.state == "CANCELLED":
                found[id] = msgspec.structs.replace(job, cancelled_by=self._find_canceller(id))
        if any(job.reservation and job.is_running for job in found.values()):
            told = self._ask(["scontrol", "--oneliner", "show", "reservation"])
            reservations = slurm_replies.parse_reservations(told)
            found = {id: slurm_replies.end_with_reservation(job, reservations) for id, job in found.items()}
        return found

    def _find_canceller(self, job: int) -> str:
        """Return the user who cancelled a job, according to `sacct`; "" if that is unknown."""
        if job not in self._cancellers:
            try:
                text = self._ask(["sacct", "--noheader", "--parsable2", "-X", "--format=State", f"--jobs={job}"])
                id = slurm_replies.parse_canceller(text)
                self._cancellers[job] = pwd.getpwuid(int(id)).pw_name if id.isdecimal() else id
            except (OSError, KeyError):
                self._cancellers[job] = ""
        return self._cancellers[job]

    def _ask_states(self, ids: str) -> dict[int, SlurmJob]:
        if self._version is None:
            self._version = slurm_replies.parse_version(self._ask(["sinfo", "--version"]))
        words = ["squeue", f"--jobs={ids}", "--states=all"]
        if self._version >= slurm_replies.JSON_FROM:
            try:
                return slurm_replies.parse_jobs_json(self._ask([*words, "--json"]).encode())
            except (OSError, msgspec.DecodeError):
                self._version = (0, 0)  # built without JSON, or in a form that we do not know
        fields = ",".join(f"{field}:|" for field in slurm_replies.JOB_FIELDS)
        found = slurm_replies.parse_jobs(self._ask([*words, "--noheader", f"--Format={fields}"]))
        return {id: self._name_end(job) for id, job in found.items()}

    def _name_end(self, job: SlurmJob) -> SlurmJob:
        """Return a COMPLETING job with the final state that the job's log names. Return any other job, or a job without
        such a log, unchanged. Older versions of Slurm report the final state late, but write it to the log. The log is
        in our folder unless the user redirects it."""
        if job.state != "COMPLETING":
            return job
        try:
            with open(f"{self._cwd}/job-{job.id}.log", encoding="utf-8", errors="replace") as log:
                end = slurm_replies.parse_end(log.read(_LOG_CHARS))
        except OSError:
            return job
        return msgspec.structs.replace(job, state=end) if end else job

    def cancel(self, what: str) -> None:
        """Cancel a job (12) or a job step (12.3). It is no error if the job or step is already over."""
        self._before_change()
        done = self._run(["scancel", what])  # with --quiet it fails without a word if the job is over
        sentence = slurm_replies.failure_sentence(done.returncode, done.stderr)
        if done.returncode and "invalid job" not in sentence.lower() and "already" not in sentence.lower():
            raise OSError(f"scancel {what}: {sentence}")

    def shrink_job(self, job: int, hosts: Sequence[str]) -> None:
        """Give up a Slurm job's hosts except these."""
        self._before_change()
        self._ask(["scontrol", "update", f"JobId={job}", f"NodeList={','.join(hosts)}"])

    def drain_host(self, host: str, reason: str) -> None:
        """Ask Slurm to give a host to no further job. Raise OSError if we lack the right to."""
        self._before_change()
        self._ask(["scontrol", "update", f"NodeName={host}", "State=DRAIN", f"Reason={reason}"])

    def start_step(self, words: Sequence[str], env: Mapping[str, str], log: str) -> int:
        """Start `srun`, which outlives this process; return its pid."""
        self._before_change()
        with open(log, "ab") as output:
            process = subprocess.Popen(
                ["srun", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=step_environment(env),
                cwd=self._cwd,
                start_new_session=True,
            )
        _children[process.pid] = process
        return process.pid

    def _ask(self, words: Sequence[str]) -> str:
        done = self._run(words)
        sentence = slurm_replies.failure_sentence(done.returncode, done.stderr)
        if done.returncode and "invalid job id" not in sentence.lower():  # as it says of jobs that ended long ago
            raise OSError(f"{words[0]}: {sentence}")
        return done.stdout

    def _run(
        self, words: Sequence[str], text: str = "", env: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        own = {**step_environment(self._env if env is None else env), "SLURM_TIME_FORMAT": "%s"}
        try:
            return subprocess.run(
                words,
                check=False,
                input=text,
                env=own,
                cwd=self._cwd,
                capture_output=True,
                text=True,
                timeout=_ANSWER_S,
            )
        except subprocess.TimeoutExpired:
            raise OSError(f"{words[0]} has not answered for {_ANSWER_S:g} s") from None
        except FileNotFoundError:
            raise FleetRefusal(f"there is no {words[0]} on this host") from None


_children: dict[int, "subprocess.Popen[bytes]"] = {}  # of ours: polled, so that none stays a zombie


def is_alive(pid: int, mark: str) -> bool:
    """Return whether a process still runs. A process that is not our child must have `mark` in its environment."""
    if (child := _children.get(pid)) is not None:
        if child.poll() is None:
            return True
        del _children[pid]
        return False
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return os.fsencode(mark) in file.read().split(b"\0")
    except OSError:
        return False
