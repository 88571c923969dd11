"""How the executor ends a job: what is written last, what is told of it, and what haste leaves out."""

import asyncio
import re

import msgspec

from holdfast.cli.terminal.quantity_text import storage_said
from holdfast.controller.actions.action_executor import WITHOUT_GRACE
from holdfast.controller.actions.launch_plan import LaunchPlan
from holdfast.model.action import Finish
from holdfast.model.decider_events import Outcome
from holdfast.model.decider_limits import Limits
from holdfast.model.node_errands import Done, FinalState, Leave, StopHere
from holdfast.model.restore_sources import Restore
from holdfast.model.state_copy import Copy
from holdfast.model.state_doubt import Doubt
from holdfast.model.stored_checkpoint_report import StorageReport
from tests.controller.test_action_executor import Bench, settle

FINISH = Finish(id=9, code=3, grace_s=0.0, reason="enough")


async def test_finish() -> None:
    bench = Bench("a", "b")
    carried = asyncio.create_task(bench.carry_out(FINISH))
    await settle()
    leave = Leave(id=9, code=3, grace_s=0.0, reason="enough", ended=True)
    assert bench.told == [(node, leave) for node in ("a", "b")]
    assert not bench.store.over
    bench.done("a", 9)
    bench.done("b", 9)
    await carried
    assert bench.outcomes == [Outcome(action=9, ok=True)]
    assert bench.fleet.here == [] and bench.store.over


async def test_the_end_tells_which_step_only_disks_have() -> None:
    bench = Bench("a", "b")
    bench.registry.storage.on_told(1.0, 1, 30, None)
    carried = asyncio.create_task(bench.carry_out(FINISH))
    await settle()
    for rank, (node, steps) in enumerate((("a", (50, 40)), ("b", (40, 20)))):
        held = tuple(Copy(rank=rank, step=s, node=node, layout="l", world=2, whole=True, disk=True) for s in steps)
        bench.dispatch.on_done(Done(id=9, node=node, ok=True, copies=held))
    await carried
    [outcome] = bench.outcomes
    assert outcome.storage == StorageReport(step=30, at=1.0, disk=40)
    assert storage_said(outcome.storage).endswith("; step 40 lies on the disks of the nodes, in disk.path")
    bench.registry.storage.on_told(2.0, 1, 40, None)
    assert bench.registry.storage.close(-1, 40) == StorageReport(step=40, at=2.0), "storage has it"


async def test_the_end_tells_whether_the_newest_checkpoint_is_in_doubt() -> None:
    for not_after, doubted in ((None, False), (30, False), (29, True)):
        bench = Bench("a")
        bench.registry.storage.on_told(1.0, 1, 30, None)
        carried = asyncio.create_task(bench.carry_out(msgspec.structs.replace(FINISH, not_after=not_after)))
        await settle()
        bench.done("a", 9)
        await carried
        assert bench.outcomes[-1].storage == StorageReport(step=30, at=1.0, doubted=doubted)


async def test_the_end_puts_the_newest_common_step_on_storage() -> None:
    """Ranks are ended first, as only then all nodes hold what they hold for good; who has no ranks is not asked."""
    bench = Bench("a", "b", "standby", limits=Limits())
    planned = LaunchPlan(id=7, restore=Restore(), generation=3, nodes=("a", "b"))
    bench.notes.put_note("plan.json", msgspec.json.encode(planned))
    carried = asyncio.create_task(bench.carry_out(msgspec.structs.replace(FINISH, last_s=30.0, not_after=5)))
    await settle()
    assert [(node, type(errand)) for node, errand in bench.told] == [("a", StopHere), ("b", StopHere)]
    id = bench.told[0][1].id
    for rank, (node, steps) in enumerate((("a", (6, 5)), ("b", (5, 4)))):
        held = tuple(Copy(rank=rank, step=step, node=node, layout="l", world=2, whole=True) for step in steps)
        bench.dispatch.on_done(Done(id=id, node=node, ok=True, copies=held, stored=4))
    await settle()
    leaves = {node: errand for node, errand in bench.told[2:] if isinstance(errand, Leave)}
    wanted = {"a": (FinalState(step=5, ranks=(0,)),), "b": (FinalState(step=5, ranks=(1,)),), "standby": ()}
    assert {node: leave.last for node, leave in leaves.items()} == wanted
    assert 29 < leaves["a"].last_s <= 30
    assert leaves["a"].doubts == (Doubt(generation=bench.decider.view.generation, not_after=5),)
    bench.registry.storage.on_told(1.0, 3, 4, None)
    for node in leaves:
        bench.done(node, 9)
    await carried
    [outcome] = bench.outcomes
    assert outcome.ok and outcome.storage and outcome.storage.step == 4
    assert outcome.storage.missed and outcome.storage.missed.step == 5, "nobody said that it is there"


async def test_a_node_that_cannot_be_ended_does_not_keep_the_others() -> None:
    bench = Bench("a", "b")
    bench.fleet.error = OSError("pid 5 does not die")
    await bench.carry_out(FINISH)  # and nobody answers
    [outcome] = bench.outcomes
    assert not outcome.ok and set(outcome.failed) == {"a", "b"}
    assert bench.said == [f"cannot end {node}: pid 5 does not die" for node in ("a", "b")]
    assert bench.store.over


async def test_hurry() -> None:
    bench = Bench("a", "b", limits=Limits())
    carried = asyncio.create_task(bench.carry_out(FINISH))
    await settle()
    await bench.executor.end_at_once()
    await carried
    assert {reason for _, reason in bench.fleet.released} == {WITHOUT_GRACE}
    assert bench.outcomes == [Outcome(action=9, ok=True)]
    await bench.executor.end_at_once()
    assert bench.said == ["ending at once, without grace and without a last checkpoint"], "once"


async def test_hurry_tells_what_is_on_storage() -> None:
    bench = Bench("a", "b", limits=Limits())
    bench.registry.storage.on_told(1.0, 3, 4, None)
    carried = asyncio.create_task(bench.carry_out(FINISH))
    await settle()
    await bench.executor.end_at_once(6)
    await carried
    [said] = bench.said
    assert re.findall(r" step (\d+)", said) == ["6", "4"], "of the job, and on storage"
    [outcome] = bench.outcomes
    assert outcome.storage and outcome.storage.missed and outcome.storage.missed.step == 6


async def test_hurry_amid_the_stop_that_an_end_begins_with() -> None:
    bench = Bench("a", "b", limits=Limits())
    planned = LaunchPlan(id=7, restore=Restore(), generation=3, nodes=("a", "b"))
    bench.notes.put_note("plan.json", msgspec.json.encode(planned))
    carried = asyncio.create_task(bench.carry_out(msgspec.structs.replace(FINISH, grace_s=30.0, last_s=30.0)))
    await settle()
    await bench.executor.end_at_once()
    async with asyncio.timeout(5):
        await carried
    assert bench.outcomes == [Outcome(action=9, ok=True)]
