"""An update in place beside stopping the job and starting it anew; a standby beside a node that has yet to start."""

import os
from functools import partial

import msgspec
from rich.table import Table

from benchmarks._exact_scene import RANKS, Failed, Scene
from benchmarks._harness import Fault, Job
from benchmarks._kept import Kept
from benchmarks._report import FULL, Findings, brief, median, report

ROUNDS = 10 if FULL else 3
WARM_STEPS, SETTLED_STEPS = 20, 15
UPDATE_GOAL, STANDBY_GOAL = 10.0, 5.0

Times = list[float | None]


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """How long no step was made."""

    seconds: float
    known_s: float = 0.0  # of a lost node: since it was known to be lost
    load: float = 0.0


class Pauses(msgspec.Struct, frozen=True):
    first: list[Pause]
    second: list[Pause]


def updates() -> Pauses:
    """The same change of code, by turns in place and by hand, in one series of jobs over the same checkpoints."""
    in_place, anew = [], []
    with Job(RANKS) as job:
        scene = Scene(job)
        scene.start([])
        scene.await_steps(WARM_STEPS)
        for release in range(2, 2 * ROUNDS + 2, 2):
            fault = job.fault()
            scene.command("update", str(scene.tree(release)), "--now", "--no-wait", "--run", str(scene.run_dir))
            in_place.append(pause(scene, fault, release))
            fault = job.fault()
            scene.command("stop", str(scene.run_dir))
            scene.start([], release=release + 1)
            anew.append(pause(scene, fault, release + 1))
            print(f"  in place {in_place[-1].seconds:.2f} s, anew {anew[-1].seconds:.2f} s", flush=True)
    return Pauses(in_place, anew)


def pause(scene: Scene, fault: Fault, release: int) -> Pause:
    """From the last step of the ranks there were to the first one of all that came after, which run this release."""
    load, stepping_at = os.getloadavg()[0], scene.job.wait_steps(1, fault)
    if stepping_at is None or scene.job.wait_steps(SETTLED_STEPS, fault) is None:
        raise Failed(f"release {release} does not step:\n{scene.job.last_words(30)}")
    steps = [event for event in scene.job.events() if event.kind == "step"]
    if strangers := {e.world for e in steps if e.pid not in fault.before} - {release}:
        raise Failed(f"release {release} was asked for, and ranks run {strangers}")
    last_at = max(event.at for event in steps if event.pid in fault.before)
    return Pause(seconds=round(stepping_at - last_at, 3), load=load)


def losses(standbys: int) -> list[Pause]:
    """Nodes are lost one after the other, each time the same seats."""
    found = []
    with Job(RANKS) as job:
        scene = Scene(job)
        scene.start([f"--standbys={standbys}"])
        scene.await_steps(WARM_STEPS)
        for _ in range(ROUNDS):
            scene.await_standbys(standbys)
            fault = job.fault()
            scene.lose_node(RANKS - 1)
            load, stepping_at = os.getloadavg()[0], job.wait_steps(1, fault)
            if stepping_at is None or job.wait_steps(SETTLED_STEPS, fault) is None:
                raise Failed(f"the job does not step after the loss of a node:\n{job.last_words(30)}")
            known_at = job.wait(partial(scene.lost_at, fault.at), 60.0)
            if known_at is None:
                raise Failed("the journal knows of no lost node")
            seconds = round(stepping_at - fault.at, 3)
            found.append(Pause(seconds=seconds, known_s=round(stepping_at - known_at, 3), load=load))
            print(f"  {standbys} standbys: {seconds:.2f} s, since known {found[-1].known_s:.2f} s", flush=True)
    return found


def judge(updated: Pauses, replaced: Pauses) -> tuple[Findings, dict[str, Times]]:
    runs: dict[str, Times] = {
        "update in place": [one.seconds for one in updated.first],
        "stopped and started anew": [one.seconds for one in updated.second],
        "node lost, standby": [one.known_s for one in replaced.first],
        "node lost, cold node": [one.known_s for one in replaced.second],
        "node lost, standby, since the loss": [one.seconds for one in replaced.first],
        "node lost, cold node, since the loss": [one.seconds for one in replaced.second],
    }
    in_place, anew, standby, cold = (median(times) or 0.0 for times in list(runs.values())[:4])
    update_ratio, standby_ratio = anew / in_place, cold / standby
    figures = {f"{name.replace(', ', '_').replace(' ', '_')}_s": median(times) for name, times in runs.items()}
    return Findings(
        figures={**figures, "update_ratio": round(update_ratio, 2), "standby_ratio": round(standby_ratio, 2)},
        goals={
            "update_10_times_faster": update_ratio >= UPDATE_GOAL,
            "standby_5_times_faster": standby_ratio >= STANDBY_GOAL,
        },
    ), runs


def main() -> None:
    kept = Kept("update")
    replaced = kept.part("losses", Pauses, lambda: Pauses(losses(1), losses(0)))
    updated = kept.part("updates", Pauses, updates)
    findings, runs = judge(updated, replaced)
    table = Table("what", "median s", "all, s", title=(__doc__ or "").strip())
    for name, times in runs.items():
        table.add_row(name, brief(median(times)), " ".join(map(brief, times)))
    report("update", table, findings, runs)
    kept.forget()


if __name__ == "__main__":
    main()
