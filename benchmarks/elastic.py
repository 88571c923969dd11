"""From a killed rank to all four stepping again: survivors that go on in their processes, beside a restart of all."""

from pathlib import Path

from rich.table import Table

from benchmarks._harness import START_LIMIT_S, Job, holdfast
from benchmarks._report import FULL, Findings, brief, median, report

RANKS, VICTIMS = 4, (2, 1)  # each on a node of its own: a second failure there would cost the node its seat
NODES = ["--nnodes=2", "--nproc-per-node=2"]
WAYS = {"survivors go on": [], "all restart": ["--set=recovery.survive_s=0"]}
JOBS = 4 if FULL else 2
WARM_STEPS, WAIT_S = 60, 60.0  # steps before a fault: by then the zygotes know what the script imports
GOAL_S = 0.3
SCRIPT = Path(__file__).with_name("_elastic_rank.py")

Times = list[float | None]


def lose_ranks(flags: list[str]) -> tuple[Times, int]:
    """Kill one rank, then another; return the seconds of each fault, and how many processes went on."""
    times: Times = []
    kept = 0
    with Job(RANKS, SCRIPT) as job:
        job.start(holdfast(job.folder / "run", *NODES, *flags))
        for generation, victim in enumerate(VICTIMS, 1):
            before = job.wait(lambda g=generation: job.steps_in(g, WARM_STEPS), START_LIMIT_S)  # type: ignore[misc]
            if before is None:
                raise RuntimeError(f"the job never came to step {WARM_STEPS}:\n{job.last_words()}")
            killed_at = job.fault().at
            job.kill(next(event.pid for event in before if event.rank == victim))
            after = job.wait(lambda g=generation + 1: job.steps_in(g, 1), WAIT_S)  # type: ignore[misc]
            if after is None:
                print(f"no recovery after {WAIT_S:g} s; the launcher's last words:\n{job.last_words()}")
                return [*times, None], kept
            times.append(max(event.at for event in after) - killed_at)
            kept += len({event.pid for event in before} & {event.pid for event in after})
    return times, kept


def judge(runs: dict[str, Times], kept: dict[str, int]) -> Findings:
    survived, restarted = (median(runs[way]) for way in WAYS)
    figures = {"survivors_s": survived, "restart_s": restarted, "processes_kept": float(kept["survivors go on"])}
    goals = {
        f"under_{GOAL_S}_s": survived is not None and survived <= GOAL_S,
        "faster_than_a_restart": survived is not None and (restarted is None or survived < restarted),
        "processes_go_on": kept["survivors go on"] == (RANKS - 1) * len(runs["survivors go on"]),
        "a_restart_keeps_none": not kept["all restart"],
    }
    return Findings(figures={**figures}, goals=goals)


def main() -> None:
    table = Table("way", "faults", "recovered", "median s", "all, s", title=(__doc__ or "").strip())
    runs: dict[str, Times] = {way: [] for way in WAYS}
    kept = dict.fromkeys(WAYS, 0)
    for _ in range(JOBS):
        for way, flags in WAYS.items():
            times, processes = lose_ranks(flags)
            runs[way] += times
            kept[way] += processes
    for way, times in runs.items():
        back = sum(time is not None for time in times)
        table.add_row(way, str(len(times)), str(back), brief(median(times)), " ".join(map(brief, times)))
    report("elastic", table, judge(runs, kept), runs)


if __name__ == "__main__":
    main()
