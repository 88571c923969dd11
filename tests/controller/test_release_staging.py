"""A release goes to one node first."""

import asyncio

import msgspec

from holdfast.controller.actions.release_staging import NO_ANSWER
from holdfast.model.action import Stage
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Outcome
from holdfast.model.node_errands import Done, StageHere
from tests.controller.test_action_executor import Bench, settle

RELEASE = Release(number=2, digest="d" * 64)
STAGE = Stage(id=9, release=RELEASE, nodes=("a", "b", "c"))


async def test_the_first_checks_and_then_all_get_it() -> None:
    bench = Bench("a", "b", "c")
    carried = asyncio.create_task(bench.carry_out(STAGE))
    await settle()
    assert bench.told == [("a", StageHere(id=9, release=RELEASE, check=True))]
    bench.done("a", 9)
    await settle()
    assert bench.told[1:] == [(node, StageHere(id=9, release=RELEASE)) for node in ("b", "c")]
    bench.done("b", 9)
    bench.done("c", 9, "the disk is full")
    await carried
    assert bench.outcomes == [Outcome(action=9, ok=False, failed={"c": "the disk is full"})]


async def test_one_that_is_refused_goes_to_nobody_else() -> None:
    bench = Bench("a", "b", "c")
    carried = asyncio.create_task(bench.carry_out(STAGE))
    await settle()
    bench.dispatch.on_done(Done(id=9, node="a", ok=False, detail="train.py, line 3: no", refused=True))
    await carried
    assert [node for node, _ in bench.told] == ["a"]
    assert bench.outcomes == [Outcome(action=9, ok=False, detail="train.py, line 3: no")]


async def test_where_the_first_cannot_the_next_one_checks() -> None:
    bench = Bench("a", "b", "c")
    carried = asyncio.create_task(bench.carry_out(STAGE))
    await settle()
    bench.dispatch.on_silent("a")
    await settle()
    assert bench.told[1] == ("b", StageHere(id=9, release=RELEASE, check=True))
    bench.done("b", 9)
    await settle()
    bench.done("c", 9)
    await carried
    assert bench.outcomes == [Outcome(action=9, ok=False, failed={"a": NO_ANSWER})]


async def test_nobody_can() -> None:
    bench = Bench("a", "b", "c")
    carried = asyncio.create_task(bench.carry_out(STAGE))
    for node in "abc":
        await settle()
        bench.done(node, 9, "no room")
    await carried
    assert bench.outcomes == [Outcome(action=9, ok=False, failed=dict.fromkeys("abc", "no room"))]
    await bench.carry_out(msgspec.structs.replace(STAGE, nodes=()))
    assert not bench.outcomes[-1].ok and not bench.outcomes[-1].failed and bench.outcomes[-1].detail
