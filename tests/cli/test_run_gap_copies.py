"""Copies to peers go into the gaps between collectives of a real job, and stay new; the test times both itself."""

import json
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.cli.conftest import Start
from tests.cli.copy_proxy import CopyProxy
from tests.cli.driver import Job

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Each step begins with collectives, which are open for as long as the last of the ranks lets the others wait: each of
# them is the last one in one group. Then hosts are idle, as while their devices compute. A copy that is sent as soon as
# there is a snapshot meets the collectives of the next step.
TRAIN = """
import json, os, sys, time
import torch, torch.distributed as dist
import holdfast

folder, rank, world = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
groups = [dist.new_group(list(range(world))) for _ in range(world)]
net = torch.nn.Linear(300, 300)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
ckpt = holdfast.Checkpointer(model=net, optimizer=optimizer)
step, stop = ckpt.restore(), torch.zeros(1)
noted = open(f"{folder}/noted-{rank}", "w", buffering=1)
while not stop:
    step += 1
    began = time.monotonic()
    stop = torch.tensor(float(os.path.exists(f"{folder}/finish")))
    votes = [stop.clone() for _ in groups]
    others = [number for number in range(world) if number != rank]
    works = [dist.all_reduce(votes[number], group=groups[number], async_op=True) for number in others]
    time.sleep(max(0.0, began + 0.25 - time.monotonic()))
    works.append(dist.all_reduce(votes[rank], group=groups[rank], async_op=True))
    for work in works:
        work.wait()
    ended, stop = time.monotonic(), sum(votes)
    time.sleep(0.5)
    net(torch.randn(1, 300)).sum().backward()
    optimizer.step()
    ckpt.save(step)
    holdfast.step(step)
    noted.write(json.dumps([step, began, ended, time.monotonic()]) + "\\n")
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
"""
STATE_BYTES = 3 * 4 * 300 * 300
STEPS = 25  # that are looked at
MARGIN_S = 0.005  # between two processes' readings of when something was


@contextmanager
def proxied(job: Job, nodes: int) -> Iterator[list[CopyProxy]]:
    with ExitStack() as stack:
        proxies = []
        for number in range(nodes):
            folder = job.run_dir / "nodes" / f"n{number}"
            [path] = job.until(lambda folder=folder: list(folder.rglob("links-*.sock")), "a keeper's socket")  # type: ignore[misc]
            proxies.append(CopyProxy(path))
            stack.callback(proxies[-1].end)
        yield proxies


def noted(job: Job, rank: int) -> list[tuple[int, float, float, float]]:
    lines = (job.folder / f"noted-{rank}").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines]


def trained(job: Job, pacing: str, nodes: int) -> tuple[list[CopyProxy], int]:
    """Let the job train until copies are paced so, and then for some steps more; return what passed, and since when."""
    with proxied(job, nodes) as proxies:
        job.trains()
        job.until(lambda: job.status()["pacing"].startswith(pacing), f"copies paced by {pacing}", patience_s=120)
        first = job.status()["step"] + 3
        job.until(lambda: job.status()["step"] >= first + STEPS, "more steps", patience_s=120)
        assert job.status()["pacing"].startswith(pacing) or pacing == "gaps"
        job.finish()
        job.ends(0)
    return proxies, first


def share_in_collectives(job: Job, proxies: list[CopyProxy], first: int) -> float:
    """The part of all bytes that came while a collective of the sending rank was open."""
    inside = total = 0
    for copy in (copy for proxy in proxies for copy in proxy.copies if copy.ask.get("verb") == "push"):
        steps = [one for one in noted(job, copy.ask["rank"]) if one[0] >= first]
        for at, count in copy.pieces:
            if steps[0][1] <= at <= steps[-1][3]:
                total += count
                inside += count * any(began + MARGIN_S < at < ended - MARGIN_S for _, began, ended, _ in steps)
    assert total > STEPS / 4 * STATE_BYTES, "many copies were sent meanwhile"
    return inside / total


def ages(job: Job, proxies: list[CopyProxy], first: int, ranks: int, copies: int) -> list[int]:
    """How many steps old the newest step is that all peers have, at the end of each step."""
    came: dict[int, list[float]] = {}
    for copy in (copy for proxy in proxies for copy in proxy.copies if copy.ask.get("verb") == "push"):
        if sum(count for _, count in copy.pieces) >= STATE_BYTES:
            came.setdefault(copy.ask["step"], []).append(copy.replied_at)
    whole = sorted((max(times), step) for step, times in came.items() if len(times) == ranks * copies)
    ends = [(step, at) for step, _, _, at in noted(job, 0) if first <= step < first + STEPS]
    found = []
    for step, at in ends:
        there = bisect_right(whole, (at, 1 << 60))
        found.append(step - max((one for _, one in whole[:there]), default=-1))
    return found


def test_copies_are_sent_in_gaps_and_are_at_most_two_steps_old(start: Start) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "1", script=TRAIN)
    proxies, first = trained(job, "gaps", 2)
    share, found = share_in_collectives(job, proxies, first), ages(job, proxies, first, ranks=2, copies=1)
    print(f"in collectives: {share:.3f}; ages: {found}")
    assert share <= 0.05
    # Others may compute on this machine: a step of theirs that comes late makes copies late.
    assert sorted(found)[len(found) * 8 // 10] <= 2


def test_two_copies_are_sent_in_gaps(start: Start) -> None:
    job = start("--nnodes", "3", "--nproc-per-node", "1", "--set", "backup.copies=2", script=TRAIN)
    proxies, first = trained(job, "gaps", 3)
    share, found = share_in_collectives(job, proxies, first), ages(job, proxies, first, ranks=3, copies=2)
    print(f"in collectives: {share:.3f}; ages: {found}")
    assert share <= 0.05
    assert sorted(found)[len(found) * 8 // 10] <= 2


def test_by_duty_copies_meet_collectives(start: Start) -> None:
    """What the tests above find is not so by itself."""
    job = start("--nnodes", "2", "--nproc-per-node", "1", "--set", "backup.pacing=duty", script=TRAIN)
    proxies, first = trained(job, "duty: backup.pacing is duty", 2)
    assert share_in_collectives(job, proxies, first) > 0.3
