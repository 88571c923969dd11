"""The agent's side of its protocol with the controller, as a pure machine: errands, posts, rank exits, a lost link."""

from collections import OrderedDict, deque

import msgspec

from holdfast.core.detect import crash, nonfinite_loss
from holdfast.model.decider_events import Ended
from holdfast.model.detector_alarm import Alarm, Stance
from holdfast.model.message_bounds import Number
from holdfast.model.node_errands import Done, Errand, LaunchHere, Leave, StopHere
from holdfast.model.observation import Exit, Loss
from holdfast.model.probe_findings import Finding
from holdfast.model.replay_task import ReplayResult
from holdfast.model.state_copy import Copy
from holdfast.model.stored_checkpoint_report import MissedCheckpoint

OWN = 0  # id of errands that no controller has sent
PING_S = 20.0  # each end of a link asks so often whether the other is there, and waits half as long for the answer
_NOTICE_S = 1.5 * PING_S
_GRACE_S = 2.0
_MARGIN_S = 10.0  # for the next agent if one dies, for the grace, for clocks


class NodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    lost_s: float = 60.0  # without a controller this long, the node stops its ranks and leaves


def fence_s(limits: NodeLimits) -> float:
    """Return for how many seconds ranks may still run on a node after the controller has given the node up.

    The link may be broken in one direction only. Then the node ends its ranks only after it notices the broken link.
    """
    return limits.lost_s + 2 * _NOTICE_S + _MARGIN_S


class Post(msgspec.Struct, frozen=True, kw_only=True, tag="post"):
    """A message that the agent sends again until the controller acknowledges it."""

    seq: Number
    body: Alarm | Ended | Done


# What the machine hears.
class LinkOpened(msgspec.Struct, frozen=True):
    epoch: int = 0  # of the controller; 0: it does not say


class LinkLost(msgspec.Struct, frozen=True): ...


class PostAcknowledged(msgspec.Struct, frozen=True):
    seq: int


class ErrandReceived(msgspec.Struct, frozen=True):
    errand: Errand
    epoch: int = 0  # of the controller that tells it; 0: somebody on this host does


class ErrandDone(msgspec.Struct, frozen=True):
    """The shell has carried out an errand, or has failed to."""

    errand: Errand
    ok: bool
    detail: str = ""
    copies: tuple[Copy, ...] = ()  # after a stop: the snapshots that the node holds; at the end: those on its disk
    findings: tuple[Finding, ...] = ()
    played: tuple[ReplayResult, ...] = ()
    refused: bool = False
    stored: int = -1  # the newest checkpoint that the node has published
    missed: MissedCheckpoint | None = None
    stored_at: float = 0.0  # when it did; 0: not known
    kept: int = 0  # after a launch: ranks that went on in their processes


class RankExited(msgspec.Struct, frozen=True):
    exit: Exit
    failed_at: float | None = None  # by the clock of `step`: when its process or its script failed; None: not known


class ExitJudged(msgspec.Struct, frozen=True):
    """An alarm has been made for a rank that ended badly, from the end of the rank's log if it was read in time."""

    exit: Exit
    alarm: Alarm


class BadLossSeen(msgspec.Struct, frozen=True):
    told: Loss


class AlarmNoticed(msgspec.Struct, frozen=True):
    """A detector on this machine has raised an alarm."""

    alarm: Alarm


class ClockTick(msgspec.Struct, frozen=True): ...


News = (
    LinkOpened
    | LinkLost
    | PostAcknowledged
    | ErrandReceived
    | ErrandDone
    | RankExited
    | ExitJudged
    | BadLossSeen
    | AlarmNoticed
    | ClockTick
)


# What the machine wants done, in this order.
class SendPost(msgspec.Struct, frozen=True):
    post: Post


class RememberDone(msgspec.Struct, frozen=True):
    """Write this result to disk before it is posted, so that the errand is never carried out again."""

    done: Done


class HeedEpoch(msgspec.Struct, frozen=True):
    """Write this epoch to disk; from now on the agent ignores controllers of older epochs."""

    epoch: int


class RememberLeaving(msgspec.Struct, frozen=True):
    """Write to disk that the node leaves, before any process is ended, so that a new agent can finish leaving."""

    errand: Leave


class CarryOut(msgspec.Struct, frozen=True):
    errand: Errand


class JudgeExit(msgspec.Struct, frozen=True):
    """Have another process judge the end of a rank's log, because judging it may take any length of time."""

    exit: Exit


Deed = SendPost | HeedEpoch | RememberDone | RememberLeaving | CarryOut | JudgeExit


class AgentProtocol:
    """The state of one node's agent: `step` takes `News` and returns the deeds that the shell must do."""

    def __init__(self, node: str, limits: NodeLimits, now: float) -> None:
        self.node = node
        self.limits = limits
        self.generation = 0  # newest that was launched here
        self.expected: set[int] = set()  # its ranks that have not ended
        self.stopped = 0  # generations up to this one were ended by us
        self._stop_heard_at = 0.0  # when we were told to, for the newest of them
        self.leaving = False
        self.epoch = 0  # newest controller that was heard
        self.on_bad_loss = Stance.ACT
        self._over: set[int] = set()  # ranks of it that have
        self._departed: set[int] = set()  # of these, who ended well
        self.returned: set[int] = set()  # whose scripts had come to their end before they were stopped
        self._begun = 0  # a generation that an earlier agent launched, perhaps not wholly
        self._spoiled: set[tuple[int, int]] = set()  # generation and rank, of those whose loss is not finite
        self._failed = 0  # the generation in which a rank of ours ended badly
        self._done: dict[int, Done] = {}
        self._doing: set[int] = set()
        self._due: deque[Exit | Alarm | Ended | Done] = deque()  # to be posted behind an end that is being judged
        self._outbox: OrderedDict[int, Post] = OrderedDict()
        self._seq = 0
        self._linked = False
        self._unlinked_at = now

    def restore_state(
        self,
        done: tuple[Done, ...],
        generation: int,
        ranks: tuple[int, ...],
        stopped: int,
        leave: Leave | None = None,
        *,
        epoch: int = 0,
    ) -> tuple[Deed, ...]:
        """Take over the state of this node's earlier agent. `leave` is its errand to leave the job, if it had one."""
        self._done = {d.id: d for d in done}
        self.generation, self.expected, self.stopped = generation, set(ranks), stopped
        self._begun = generation
        self.epoch = epoch
        return self._begin_leaving(leave) if leave else ()

    @property
    def is_alone(self) -> bool:
        """Whether this node has no controller."""
        return not self._linked

    def occupied_by(self, running: int) -> int:
        """Return the newest generation that may have ranks on this node; 0 if there is none. A generation that was
        launched here counts until this node is told to stop it. If no such generation is left, return `running`, the
        generation whose processes were seen here."""
        return self.generation if self.generation > self.stopped else running

    def step(self, now: float, news: News) -> tuple[Deed, ...]:
        match news:
            case LinkOpened(epoch) if epoch >= self.epoch:
                self._linked = True
                return (*self._heed_epoch(epoch), *(SendPost(post) for post in self._outbox.values()))
            case ErrandReceived(errand, epoch) if epoch == 0 or epoch >= self.epoch:
                return (*self._heed_epoch(epoch), *self._on_errand(now, errand))
            case LinkOpened() | ErrandReceived():
                return ()  # a controller that another has taken over from
            case LinkLost():
                if self._linked:
                    self._linked, self._unlinked_at = False, now
                return ()
            case PostAcknowledged(seq):
                self._outbox.pop(seq, None)
                return ()
            case ErrandDone():
                return self._on_finished(news)
            case RankExited():
                return self._on_exit(news)
            case ExitJudged(exit, alarm):
                self._due[self._due.index(exit)] = alarm
                return self._post_due()
            case BadLossSeen(told):
                return self._on_loss(told)
            case AlarmNoticed(alarm):
                return (
                    () if self.leaving else self._queue_post(msgspec.structs.replace(alarm, generation=self.generation))
                )
            case ClockTick():
                return self._on_clock(now)

    def _heed_epoch(self, epoch: int) -> tuple[Deed, ...]:
        if epoch <= self.epoch:
            return ()
        self.epoch = epoch
        return (HeedEpoch(epoch),)

    def _on_errand(self, now: float, errand: Errand) -> tuple[Deed, ...]:
        if errand.id in self._done:
            return self._queue_post(self._done[errand.id])
        if errand.id in self._doing or self.leaving:
            return ()
        if isinstance(errand, LaunchHere) and self._is_over(errand.generation):
            return self._on_finished(ErrandDone(errand, False, f"generation {errand.generation} is over here"))
        if isinstance(errand, Leave):
            return self._begin_leaving(errand)
        self._doing.add(errand.id)
        if isinstance(errand, LaunchHere):
            seat = errand.seat
            if errand.generation != self.generation:
                self.generation, self._over, self._departed = errand.generation, set(), set()
                self.returned = set()
            self._begun = 0
            self.expected = set(seat.ranks) - self._over
        elif isinstance(errand, StopHere) and errand.generation > self.stopped:
            self.stopped, self._stop_heard_at = errand.generation, now
        return (CarryOut(errand),)

    def _begin_leaving(self, errand: Leave) -> tuple[Deed, ...]:
        """Begin to leave the job. Record the order on disk first, so that a new agent knows that it must finish."""
        self.leaving, self.stopped = True, self.generation
        return (RememberLeaving(errand), CarryOut(errand))

    def _is_over(self, generation: int) -> bool:
        """Return whether to refuse a launch of this generation: this or a newer one was stopped or launched here. A
        launch that this node's earlier agent began is not refused, since it may be incomplete."""
        return generation <= self.stopped or (generation <= self.generation and generation != self._begun)

    def _on_finished(self, news: ErrandDone) -> tuple[Deed, ...]:
        id = news.errand.id
        if id == OWN:
            return ()  # nobody waits for an answer, and the next one of this id is another errand
        self._doing.discard(id)
        done = self._done[id] = Done(
            id=id,
            node=self.node,
            ok=news.ok,
            detail=news.detail,
            copies=news.copies,
            departed=tuple(sorted(self._departed | self.returned)) if isinstance(news.errand, StopHere) else (),
            findings=news.findings,
            played=news.played,
            refused=news.refused,
            stored=news.stored,
            missed=news.missed,
            stored_at=news.stored_at,
            kept=news.kept,
        )
        return (RememberDone(done), *self._queue_post(done))

    def _on_exit(self, news: RankExited) -> tuple[Deed, ...]:
        exit = news.exit
        if exit.generation != self.generation or exit.rank not in self.expected:
            return ()  # it was told before
        if exit.generation <= self.stopped and not self._failed_by_itself(news):
            return ()  # we ended it
        self.expected.discard(exit.rank)
        self._over.add(exit.rank)
        if exit.code != 0:
            self._failed = exit.generation
            self._due.append(exit)
            return (JudgeExit(exit),)
        self._departed.add(exit.rank)
        if self.expected or self._failed == exit.generation:
            return ()
        return self._queue_post(Ended(node=self.node, generation=exit.generation))

    def _failed_by_itself(self, news: RankExited) -> bool:
        """Return whether a rank of a stopped generation had failed before we heard of the stop, and not because of
        another rank. Its process may have taken longer to end than the first failure took to stop the job."""
        before = news.failed_at is not None and news.failed_at < self._stop_heard_at
        return before and not self.leaving and news.exit.code != 0 and not crash.tells_of_others(news.exit)

    def _on_loss(self, told: Loss) -> tuple[Deed, ...]:
        ranks = {(told.generation, rank) for rank in (told.rank, *told.also)}
        if told.generation <= self.stopped or told.generation != self.generation or ranks <= self._spoiled:
            return ()
        self._spoiled = {one for one in self._spoiled if one[0] == told.generation} | ranks
        return self._queue_post(msgspec.structs.replace(nonfinite_loss.alarm_of(told), stance=self.on_bad_loss))

    def _on_clock(self, now: float) -> tuple[Deed, ...]:
        if self._linked or self.leaving or now < self._unlinked_at + self.limits.lost_s:
            return ()
        reason = f"no controller for {self.limits.lost_s:g} s"
        return self._begin_leaving(Leave(id=OWN, code=1, grace_s=_GRACE_S, reason=reason))

    def _queue_post(self, body: Alarm | Ended | Done) -> tuple[Deed, ...]:
        self._due.append(body)
        return self._post_due()

    def _post_due(self) -> tuple[Deed, ...]:
        """Return the due messages to the controller, in the order of their events; none while there is no link. The
        exit of a rank that is still being judged holds up later messages."""
        posts = []
        while self._due and not isinstance(body := self._due[0], Exit):
            self._due.popleft()
            self._seq += 1
            post = self._outbox[self._seq] = Post(seq=self._seq, body=body)
            posts.append(SendPost(post))
        return tuple(posts) if self._linked else ()
