"""How an agent ended is told by the one that comes after it."""

import asyncio
from types import SimpleNamespace
from typing import Any

from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.connection.controller_clock import ControllerClock
from holdfast.agent.rank.lost_agent_notice import tell_lost_agent
from holdfast.core.incident.incident_text import describe_cause
from holdfast.model.detector_alarm import Alarm, Stance
from holdfast.wire.holder_messages import HolderRank, RankKey


def ranks_after(lost: str, *held: HolderRank) -> Any:
    ranks = {RankKey.parse_text(one.key): one for one in held}
    return SimpleNamespace(lost_agent=lost, held=ranks, spec=SimpleNamespace(node="n1"))


async def test_it_is_told_once_the_controllers_time_is_known() -> None:
    clock, told = SystemClock(), list[Alarm]()
    time, ranks = ControllerClock(clock), ranks_after("was killed by SIGKILL", HolderRank(key="2:0", pid=1))
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(tell_lost_agent(ranks, clock, time, told.append))
        await asyncio.sleep(0.3)
        assert told == []
        time.on_welcome(500.0)
    [alarm] = told
    assert alarm.stance is Stance.NOTIFY and abs(alarm.at - 500.0) < 20
    said = "the agent of n1 was killed by SIGKILL; another one has its place"
    assert describe_cause(alarm) == f"{said}, and the ranks went on"
    await tell_lost_agent(ranks_after("was killed by SIGKILL"), clock, time, told.append)
    assert describe_cause(told[1]) == said, "a standby"
    await tell_lost_agent(ranks_after("", HolderRank(key="2:0", pid=1)), clock, time, told.append)
    assert len(told) == 2, "it is the first agent"
