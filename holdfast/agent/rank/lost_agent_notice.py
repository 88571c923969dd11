"""Tells the controller how the agent before this one ended."""

import asyncio
from collections.abc import Callable

from holdfast.agent.agent_clock import AgentClock
from holdfast.agent.connection.controller_clock import ControllerClock
from holdfast.agent.rank.rank_processes import RankProcesses
from holdfast.core.detect.silence import lost_agent_alarm
from holdfast.model.detector_alarm import Alarm

_LOOK_S = 0.1


async def tell_lost_agent(
    ranks: RankProcesses, clock: AgentClock, time: ControllerClock, on_alarm: Callable[[Alarm], None]
) -> None:
    """Raise an alarm if there was an agent before this one, once the controller's time is known."""
    while ranks.lost_agent:
        if time.known:
            at, runs = clock.monotonic() + time.offset_s, any(held.code is None for held in ranks.held.values())
            return on_alarm(lost_agent_alarm(at, ranks.spec.node, ranks.lost_agent, has_ranks=runs))
        await asyncio.sleep(_LOOK_S)
    return None
