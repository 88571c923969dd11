"""The setup of one seed: the job, its limits, its machines, and the faults that may strike them."""

from random import Random

import msgspec

from holdfast.config import Settings
from holdfast.core.agent_state_machine import PING_S, NodeLimits
from holdfast.core.detect.hang import HangLimits
from holdfast.core.detect.job_progress import PaceLimits
from holdfast.core.snapshots.recovery_floor_coordination import BackupLimits
from holdfast.model.decider_limits import Limits
from holdfast.model.job_and_seats import Job

DIAL_S = 1.0  # agents dial at least this often
NOTICE_S = 1.5 * PING_S  # a link that died without a word is noticed by then


class SeedSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The setup of one seed; together with the code it determines every event."""

    seed: int
    job: Job
    settings: Settings
    nproc: int
    step_s: float
    save_steps: int  # between checkpoints on storage; 0: none are made
    last_step: int  # ranks end well after it; 0: never
    verified: bool  # snapshots found good are kept beside the others
    faults_s: float
    pause_s: float  # between faults, in the mean
    reports_mesh: bool = False  # the script reports its parallel groups
    forgets: bool = False  # the journal may have lost its end when a controller comes back
    loses_links: bool = False  # machines lose their links to one another, and nodes are drained meanwhile
    stalls_hellos: bool = False  # agents die before their hellos arrive, and these come after those of their successors
    surveys: bool = False  # the fleet has a queue, and tells of its nodes: who waits, who is gone, who will be taken
    survives: bool = False  # ranks can go on in their processes when another one fails
    stop_s: float  # somebody ends the job then, amid the faults; 0: nobody does

    @property
    def machines(self) -> int:
        """Return the number of machines of a job that cannot acquire nodes: all that it may use, and its standbys."""
        return self.job.max_nodes + self.job.standbys


def draw_setup(seed: int) -> SeedSetup:
    rng = Random(f"setup {seed}")
    nodes = rng.choice((1, 2, 2, 3, 3, 4))
    job = Job(
        run_id=f"dst-{seed}",
        min_nodes=rng.choice((nodes, nodes, max(1, nodes - 1))),
        max_nodes=nodes,
        standbys=rng.choice((0, 1, 1, 2)),
        can_acquire=rng.random() < 0.6,
        probes=rng.random() < 0.5,
        checks=rng.random() < 0.3,
    )
    limits = Limits(
        stop_grace_s=2.0,
        shutdown_grace_s=5.0,
        stop_s=20.0,
        launch_s=30.0,
        ready_s=40.0,
        wait_s=180.0,
        last_call_s=5.0,
        attempts=6,
    )
    settings = Settings(
        recovery=limits,
        pace=PaceLimits(progress_s=rng.choice((2.0, 10.0))),
        node=NodeLimits(lost_s=rng.choice((10.0, 20.0))),
        hang=HangLimits(start_s=60.0, act_s=10.0),
        backup=BackupLimits(enabled=rng.random() < 0.8, stuck_s=10.0, duty=0.5, verify_steps=4),
    )
    faults_s = rng.choice((40.0, 80.0, 120.0))
    return SeedSetup(
        seed=seed,
        job=job,
        settings=settings,
        nproc=rng.choice((1, 1, 2)),
        step_s=rng.choice((0.5, 1.0, 2.0)),
        save_steps=rng.choice((0, 5, 9)),
        last_step=rng.choice((0, 0, 0, rng.randrange(20, 90))),
        verified=rng.random() < 0.3,
        faults_s=faults_s,
        stop_s=0.9 * faults_s * (rng.random() < 0.15),
        pause_s=rng.choice((2.0, 4.0, 8.0, 15.0)),
    )
