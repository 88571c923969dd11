"""From a fault to all ranks stepping again: holdfast beside torchrun, on the same script with four gloo ranks."""

import time
from collections.abc import Callable, Mapping

import msgspec
import psutil
from rich.table import Table

from benchmarks._harness import START_LIMIT_S, Fault, Job, executable, free_port, holdfast, is_listening
from benchmarks._report import FULL, Findings, brief, median, report

RANKS, VICTIM = 4, 2
RANK_WAIT_S, NODE_WAIT_S = 60.0, 120.0  # for recovery; after that it counts as none
SILENCE_S = 3.0  # holdfast's default: how long a node may say nothing
FAULTS = 3  # per job, as many as there are restarts
RANK_JOBS, EARLY_JOBS, NODE_JOBS, PLAIN_JOBS = (3, 3, 3, 3) if FULL else (1, 1, 2, 0)
WARM_STEPS, SETTLED_STEPS = 5, 8
MORE_STEPS = 5  # before each further fault: a fault that comes at the same step again is how a bug looks
WARM_S = 15.0  # of training before the first fault, but for the early one: the job is then as it is for all its life

# Without this, restarted ranks may read the keys of the ranks before them and never find each other.
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
STANDALONE = ["--standalone", f"--nproc-per-node={RANKS}", f"--max-restarts={FAULTS}"]

Times = list[float | None]


class Case(msgspec.Struct, frozen=True):
    """One fault under one launcher; `measure` runs one job and gives the seconds of each fault in it."""

    name: str
    done: str  # what the table says was done
    jobs: int
    measure: Callable[[], Times]


def lose_torchrun_ranks(env: Mapping[str, str]) -> Times:
    with Job(RANKS) as job:
        job.start([executable("torchrun"), *STANDALONE], env)
        return lose_ranks(job)


def lose_holdfast_ranks() -> Times:
    with Job(RANKS) as job:
        job.start(holdfast(job.folder / "run", *STANDALONE))
        return lose_ranks(job)


def lose_holdfast_rank_early() -> Times:
    """Kill a rank within the first second of training, while what the next ranks are forked from is being made."""
    with Job(RANKS) as job:
        job.start(holdfast(job.folder / "run", *STANDALONE))
        return lose_ranks(job, faults=1, warm_s=0.0)


def lose_ranks(job: Job, faults: int = FAULTS, warm_s: float = WARM_S) -> Times:
    """Kill the same rank, again and again, in one running job."""
    times: Times = []
    warm_up(job)
    time.sleep(warm_s)
    for number in range(faults):
        fault = job.fault()
        job.kill(job.pid_of(VICTIM))
        times.append(recovery(job, fault, RANK_WAIT_S))
        if times[-1] is None or job.wait_steps(SETTLED_STEPS + MORE_STEPS * (number + 1), fault) is None:
            break
    return times


def lose_torchrun_node() -> Times:
    """Kill one of four agents and its rank, and start another in its place, as somebody would have to do by hand."""
    port = free_port()
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id=bench{port}"]
    nodes = [f"--nnodes={RANKS - 1}:{RANKS}", "--nproc-per-node=1", f"--max-restarts={FAULTS}"]
    agent = [executable("torchrun"), *nodes, *rendezvous]
    with Job(RANKS) as job:
        job.start(agent, FRESH_STORE)
        # The first agent keeps the rendezvous: it must be the one that is not lost, or the job is.
        job.wait(lambda: is_listening(port) or None, START_LIMIT_S)
        victim = [job.start(agent, FRESH_STORE) for _ in range(RANKS - 1)][-1]
        warm_up(job)
        ranks = psutil.Process(victim.pid).children(recursive=True)
        fault = job.fault()
        job.kill(victim.pid, *(rank.pid for rank in ranks))
        job.start(agent, FRESH_STORE)
        return [recovery(job, fault, NODE_WAIT_S)]


def lose_holdfast_node() -> Times:
    """Kill the holder of the node that runs a certain rank; all below it goes with it, and a standby takes over."""
    nodes = [f"--nnodes={RANKS}", "--nproc-per-node=1", "--standbys=1", f"--max-restarts={FAULTS}"]
    with Job(RANKS) as job:
        run_dir = job.folder / "run"
        job.start(holdfast(run_dir, *nodes))
        warm_up(job)
        victim = job.pid_of(VICTIM)
        holders = {int(path.read_text()) for path in run_dir.glob("nodes/*/holder.pid")}
        holder = next(above.pid for above in psutil.Process(victim).parents() if above.pid in holders)
        fault = job.fault()
        job.kill(holder)
        took = recovery(job, fault, NODE_WAIT_S)
        if job.owns(victim):
            raise RuntimeError("the rank outlived its node, so no node was lost")
        return [took]


def warm_up(job: Job) -> None:
    if job.wait_steps(WARM_STEPS) is None:
        raise RuntimeError(f"the job never came to step {WARM_STEPS}:\n{job.last_words()}")


def recovery(job: Job, fault: Fault, limit_s: float) -> float | None:
    """Seconds from the fault until every rank has stepped again; None unless all of them then go on stepping."""
    stepping_at = job.wait_steps(1, fault, limit_s)
    if stepping_at is None or job.wait_steps(SETTLED_STEPS, fault) is None:
        print(f"no recovery, and none awaited after {limit_s:g} s; the launcher's last words:\n{job.last_words()}")
        return None
    return stepping_at - fault.at


def cases() -> list[Case]:
    """In the order they are run: each fault under torchrun and right after it under holdfast."""
    kill, by_hand = f"SIGKILL of rank {VICTIM}", "SIGKILL of an agent and its rank; a fresh agent by hand at once"
    standby = "SIGKILL of a holder and all below it; one standby"
    chosen = [
        Case("torchrun rank", kill, RANK_JOBS, lambda: lose_torchrun_ranks(FRESH_STORE)),
        Case("holdfast rank", kill, RANK_JOBS, lose_holdfast_ranks),
        Case("holdfast rank early", f"{kill} in the first second of training", EARLY_JOBS, lose_holdfast_rank_early),
        Case("torchrun node", by_hand, NODE_JOBS, lose_torchrun_node),
        Case("holdfast node", standby, NODE_JOBS, lose_holdfast_node),
        Case("plain torchrun rank", kill, PLAIN_JOBS, lambda: lose_torchrun_ranks({})[:1]),
    ]
    return [case for case in chosen if case.jobs and (executable("holdfast") or "holdfast" not in case.name)]


def judge(runs: Mapping[str, Times]) -> Findings:
    medians = {name: median(times) for name, times in runs.items()}
    findings = Findings(figures={f"{name.replace(' ', '_')}_s": found for name, found in medians.items()})
    if plain := runs.get("plain torchrun rank"):
        recovered = sum(time is not None for time in plain)
        findings.figures["plain_torchrun_recovered"] = f"{recovered} of {len(plain)}"
    if "holdfast rank" not in runs:
        findings.skipped["holdfast"] = "there is no holdfast beside this python"
        return findings
    theirs, rank, node = medians["torchrun rank"], medians["holdfast rank"], medians["holdfast node"]
    ratio = theirs / rank if theirs and rank else None
    limit_s = 1.3 * rank + SILENCE_S if rank else None
    findings.figures |= {"rank_ratio": ratio, "node_limit_s": limit_s}
    findings.goals = {
        "rank_15_times_faster": ratio is not None and ratio >= 15,
        "rank_under_1_s": rank is not None and rank < 1,
        "node_within_limit": node is not None and limit_s is not None and node <= limit_s,
    }
    return findings


def main() -> None:
    table = Table("case", "what was done", "faults", "recovered", "median s", "all, s", title=(__doc__ or "").strip())
    runs: dict[str, Times] = {}
    for case in cases():
        times = [time for _ in range(case.jobs) for time in case.measure()]
        runs[case.name] = times
        back = sum(time is not None for time in times)
        each = " ".join(brief(time) for time in times)
        table.add_row(case.name, case.done, str(len(times)), str(back), brief(median(times)), each)
    report("restart", table, judge(runs), runs)


if __name__ == "__main__":
    main()
