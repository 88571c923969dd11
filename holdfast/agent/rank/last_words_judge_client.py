"""The agent's side of the judge: asks why a rank failed, and waits a bounded time without blocking the loop."""

import asyncio
import logging
import socket
from pathlib import Path

from holdfast.agent.rank import last_words_judge
from holdfast.agent.rank.last_words_judge import JudgeAborted, JudgeAlarm, JudgeRequest
from holdfast.agent.system import child_process
from holdfast.core.detect.crash import alarm_without_words
from holdfast.core.log_analysis.failure_catalog import FailureCatalog
from holdfast.logs.secret_masking import Masker
from holdfast.model.detector_alarm import Alarm
from holdfast.model.observation import Exit
from holdfast.wire import holder_messages

_WAIT_S = 5.0  # for a judge that has still to read its catalog, or that is stopped or stuck itself
_NOTHING = FailureCatalog(())
_log = logging.getLogger("holdfast.agent")


class JudgeClient:
    def __init__(self, sock: socket.socket, mask: Masker) -> None:
        """`mask` is for alarms that the judge has not made."""
        sock.setblocking(False)
        self._sock, self._mask = sock, mask
        self._id = 0
        self._open: dict[int, asyncio.Future[bool]] = {}  # whether all was told
        self._told: dict[int, Alarm] = {}
        self._listening = False
        self._gone = False  # the judge has ended

    async def judge_exit(self, exit: Exit, where: Path) -> Alarm:
        """Return the alarm for an exit: from the rank's last words if these are judged in time, else without them."""
        loop = asyncio.get_running_loop()
        if not self._listening:
            self._listening = True
            loop.add_reader(self._sock, self._on_packet)
        self._id += 1
        id, answer = self._id, loop.create_future()
        self._open[id] = answer
        if self._gone or not child_process.send_packet(
            self._sock, last_words_judge.encode(self._make_request(id, exit, where))
        ):
            answer.set_result(False)
        try:
            async with asyncio.timeout(_WAIT_S):
                whole = await answer
        except TimeoutError:
            _log.warning("the judge did not answer within %g s", _WAIT_S)
            whole = False
        finally:
            del self._open[id]
        if not whole:
            _log.warning("the last words of rank %d could not be judged; its alarm goes out without them", exit.rank)
        return self._told.pop(id, None) or self._mask.mask_alarm(alarm_without_words(exit, _NOTHING))

    def _make_request(self, id: int, exit: Exit, where: Path) -> JudgeRequest:
        return JudgeRequest(id=id, exit=exit, where=str(where), secrets=tuple(sorted(self._mask.learned)))

    def _on_packet(self) -> None:
        packet = child_process.receive_packet(self._sock, holder_messages.PACKET_BYTES)
        if not packet:
            self._on_judge_gone()
            return
        match last_words_judge.to_agent(packet):
            case JudgeAlarm(id=id, alarm=alarm, last=last) if id in self._open:
                self._told[id] = alarm
                if last:
                    self._resolve_answer(id, whole=True)
            case JudgeAborted(id=id, late=late) if id in self._open:
                if late:
                    _log.warning(
                        "the judge gave up last words that take more than %g s of processor time",
                        last_words_judge.DEADLINE_S,
                    )
                self._resolve_answer(id, whole=False)

    def _resolve_answer(self, id: int, *, whole: bool) -> None:
        if not self._open[id].done():
            self._open[id].set_result(whole)

    def _on_judge_gone(self) -> None:
        _log.warning("the judge has ended; until the agent restarts, alarms go out without last words")
        self._gone = True
        asyncio.get_running_loop().remove_reader(self._sock)
        for id in self._open:
            self._resolve_answer(id, whole=False)
