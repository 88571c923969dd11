"""The agent's side of the judge: asks what a bad end was, waits for so long and no longer, and never in its loop."""

import asyncio
import logging
import socket
from pathlib import Path

from holdfast.agent import judge, process
from holdfast.agent.judge import Asked, Gone, Told
from holdfast.core.detect.crash import Catalog, unjudged
from holdfast.model.alarm import Alarm
from holdfast.model.signal import Exit
from holdfast.wire import holding

_WAIT_S = 5.0  # for a judge that has still to read its catalog, or that is stopped or stuck itself
_NOTHING = Catalog(())
_log = logging.getLogger("holdfast.agent")


class Asking:
    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._id = 0
        self._open: dict[int, asyncio.Future[bool]] = {}  # whether all was told
        self._told: dict[int, Alarm] = {}
        self._listening = False
        self._gone = False  # the judge has ended

    async def alarm(self, exit: Exit, where: Path) -> Alarm:
        """What this end is taken for: by its last words or, where these take too long, without them."""
        loop = asyncio.get_running_loop()
        if not self._listening:
            self._listening = True
            loop.add_reader(self._sock, self._heard)
        self._id += 1
        id, answer = self._id, loop.create_future()
        self._open[id] = answer
        if self._gone or not process.send(self._sock, judge.encode(Asked(id=id, exit=exit, where=str(where)))):
            answer.set_result(False)
        try:
            async with asyncio.timeout(_WAIT_S):
                whole = await answer
        except TimeoutError:
            _log.warning("the judge has not answered for %g s", _WAIT_S)
            whole = False
        finally:
            del self._open[id]
        if not whole:
            _log.warning("the last words of rank %d could not be judged; its end is told without", exit.rank)
        return self._told.pop(id, None) or unjudged(exit, _NOTHING)

    def _heard(self) -> None:
        packet = process.receive(self._sock, holding.PACKET_BYTES)
        if not packet:
            self._lost()
            return
        match judge.to_agent(packet):
            case Told(id=id, alarm=alarm, last=last) if id in self._open:
                self._told[id] = alarm
                if last:
                    self._answer(id, whole=True)
            case Gone(id=id, late=late) if id in self._open:
                if late:
                    _log.warning(
                        "last words took too long to be judged (more than %g s of a processor)", judge.DEADLINE_S
                    )
                self._answer(id, whole=False)

    def _answer(self, id: int, *, whole: bool) -> None:
        if not self._open[id].done():
            self._open[id].set_result(whole)

    def _lost(self) -> None:
        _log.warning("the judge has ended; until there is another agent, ends are told without last words")
        self._gone = True
        asyncio.get_running_loop().remove_reader(self._sock)
        for id in self._open:
            self._answer(id, whole=False)
