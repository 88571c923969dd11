"""Records what a real Slurm prints of jobs and hosts in many states, for tests/fleet/test_slurm_versions.py. Jobs are
named after what they have come to, and of JSON the fields are kept that we read: python -m tests.slurm.record_output .
"""

import json
import sys
from pathlib import Path
from typing import Any

from holdfast.fleet.slurm_replies import HOST_FORMAT, JOB_FIELDS, STEP_FORMAT
from tests.cli.driver import until
from tests.slurm.lab import SlurmLab, lacking, run_lab

_KEPT = ("job_id", "job_state", "state_reason", "end_time", "preempt_time", "nodes", "name", "resv_name")
_STUBBORN = "trap '' TERM; while :; do sleep 1; done"
_REFUSED = {
    "partition": ("--partition=nowhere",),
    "constraint": ("--constraint=moon",),
    "reservation": ("--reservation=none",),
    "gres": ("--gres=gpu:8",),
}


class Recording:
    def __init__(self, lab: SlurmLab) -> None:
        self.lab = lab

    def submit(self, name: str, *flags: str, script: str = "sleep 900") -> str:
        words = [
            "--parsable",
            f"--job-name={name}",
            "--no-requeue",
            "--exclusive",
            f"--output={self.lab.dir}/{name}.log",
        ]
        return self.lab.call("sbatch", *words, *flags, "--wrap", script).strip()

    def wait(self, job: str, state: str) -> None:
        look = ("squeue", "-h", "--states=all", "-j", job, "-o", "%T")
        until(lambda: self.lab.call(*look).strip() == state, f"{job} to be {state}", 150)

    def bring_about(self) -> None:
        """All states at once: what has ended stays in the queue for MinJobAge."""
        node, call = self.lab.nodes, self.lab.call
        script = "srun --overlap --job-name=holdfast-n0 --nodes=1 sleep 900"
        self._reserve("held", "StartTime=now", "Duration=30")
        running = self.submit("running", "-w", node[0], "--time=60", "--reservation=held", script=script)
        unlimited = self.submit("unlimited", "-w", node[1])
        leaving = self.submit("told-to-go", "-w", node[2], "--time=60")
        stubborn = self.submit("completing", "-w", node[3], "--time=60", script=_STUBBORN)
        lost = self.submit("node-fail", "-w", node[4], "--time=60")
        endless = self.submit("told-to-go-unlimited", "-w", node[6])
        for job in (running, unlimited, leaving, stubborn, lost, endless):
            self.wait(job, "RUNNING")
        self.lab.power_off(node[4])
        for name, script, end in (("completed", "true", "COMPLETED"), ("failed", "exit 3", "FAILED")):
            self.wait(self.submit(name, "-w", node[5], script=script), end)
        cancelled = self.submit("cancelled", "-w", node[5])
        self.wait(cancelled, "RUNNING")
        call("scancel", cancelled)
        self.wait(cancelled, "CANCELLED")
        self._preempt(node[5])
        timed = self.submit("timeout", "-w", node[5], "--time=1")
        self.wait(timed, "TIMEOUT")
        self.wait(lost, "NODE_FAIL")
        self._queue()
        call("scontrol", "update", f"NodeName={node[5]}", "State=DRAIN", "Reason=a fan | is broken")
        call("scontrol", "update", "PartitionName=main", "GraceTime=180")
        self.submit("queued-urgent", "-p", "urgent", "-w", f"{node[2]},{node[6]}", "--nodes=2", "--time=5")
        for job in (leaving, endless):
            until(lambda job=job: "PreemptTime=20" in call("scontrol", "show", "job", job), "a preemption", 60)  # type: ignore[misc]
        call("scancel", stubborn)
        self.wait(stubborn, "COMPLETING")

    def _preempt(self, node: str) -> None:
        self.lab.call("scontrol", "update", "PartitionName=main", "GraceTime=0")
        preempted = self.submit("preempted", "-w", node, "--time=60")
        self.wait(preempted, "RUNNING")
        urgent = self.submit("urgent", "-p", "urgent", "-w", node, "--time=5")
        self.wait(preempted, "PREEMPTED")
        self.wait(urgent, "RUNNING")
        self.lab.call("scancel", urgent)
        self.wait(urgent, "CANCELLED")

    def _reserve(self, name: str, *words: str) -> None:
        words = (f"ReservationName={name}", *words, "Users=root", f"Nodes={self.lab.nodes[0]}")
        self.lab.call("scontrol", "create", "reservation", *words)

    def _queue(self) -> None:
        self.submit("queued-resources", "--nodes=7", "--time=5")
        self.submit("queued-begin", "--begin=now+1hour")
        self._reserve("later", "StartTime=now+2hours", "Duration=60")
        self._reserve("loose", "StartTime=now+4hours", "Duration=60", "Flags=FLEX")
        self.submit("queued-reservation", "--reservation=later", "--time=5")
        self.lab.call("scontrol", "create", "PartitionName=shut", "Nodes=ALL", "State=DOWN", "MaxTime=INFINITE")
        self.submit("queued-partition", "-p", "shut", "--time=5")

    def read(self) -> dict[str, Any]:
        call = self.lab.call
        fields = ",".join(f"{field}:|" for field in JOB_FIELDS)
        nodes = ",".join(self.lab.nodes)
        found: dict[str, Any] = {
            "version": call("sinfo", "--version"),
            "jobs": call("squeue", "--states=all", "--noheader", f"--Format={fields}", SLURM_TIME_FORMAT="%s"),
            "steps": call("squeue", "--noheader", "--steps", f"--format={STEP_FORMAT}"),
            "hosts": call("sinfo", "--noheader", "--Node", f"--nodes={nodes}", f"--format={HOST_FORMAT}"),
            "reservations": call("scontrol", "--oneliner", "show", "reservation", SLURM_TIME_FORMAT="%s"),
            "json": {parser: self._read_json(parser) for parser in self._parsers()},
            "logs": {path.stem: path.read_text() for path in sorted(self.lab.dir.glob("*.log"))},
            "refused": {name: self._refused(flags) for name, flags in _REFUSED.items()},
        }
        shown = json.dumps(found)
        return dict(json.loads(shown.replace(self.lab.name, "lab").replace(str(self.lab.dir), "/lab")))

    def _parsers(self) -> list[str]:
        """The forms of JSON that this version prints: its own and, from 23.11 on, those of versions before it."""
        if "22.05" in self.lab.call("sinfo", "--version"):
            return [""]
        found = self.lab.call("squeue", "--json=list", check=False)
        return sorted(word.rpartition("/")[2] for word in found.split() if "v0.0." in word)

    def _read_json(self, parser: str) -> dict[str, Any]:
        whole = json.loads(self.lab.call("squeue", "--states=all", f"--json={parser}" if parser else "--json"))
        return {"jobs": [{key: job[key] for key in _KEPT if key in job} for job in whole["jobs"]]}

    def _refused(self, flags: tuple[str, ...]) -> str:
        words = ["--parsable", "--output=/dev/null", *flags, "--wrap", "true"]
        return self.lab.call("sh", "-c", 'sbatch "$@" 2>&1; exit 0', "sh", *words)


def main() -> int:
    if why := lacking():
        sys.exit(f"no Slurm can run here: {why}")
    with run_lab(7, {"KillWait": "60"}) as lab:
        recording = Recording(lab)
        recording.bring_about()
        found = recording.read()
        number = found["version"].split()[-1]
        path = Path(sys.argv[1]) / f"slurm-{number}.json"
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        print(path)
        lab.call("scancel", "-u", "root", "-f", check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
