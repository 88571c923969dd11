"""Scenarios as transcripts: what the decider hears, a line of dashes, and what it must answer.

    after started                  the events of another scenario first, unprinted
    at 12.5 alarm crash n1 rank 2 code -9 said TypeError: x
    ----
    stopping: incident 1: ...      phase and reason
    > Stop 5 ...                   each action
    wake 300                       when it wants to be woken, if it does

Several events may stand above one line of dashes. `PYTEST_HOLDFAST_REWRITE=1` writes the answers anew.
"""

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from holdfast.core.decide.decider import Decider
from holdfast.core.detect import nonfinite_loss, redone_losses
from holdfast.core.detect.crash import alarm_of
from holdfast.core.detect.silence import departure_alarm
from holdfast.logs import catalog_files
from holdfast.model.action import Acquire, Action, Block, Dismiss, Finish, Launch, Probe, Replay, Say, Stage, Stop
from holdfast.model.code_release import Release
from holdfast.model.decider_events import (
    Begin,
    Ended,
    Event,
    LinksDown,
    LinksUp,
    MeshReport,
    Order,
    OrderVerb,
    Outcome,
    Progress,
    Ready,
    SlowTime,
    Successor,
    Tick,
)
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import SWITCH, UNNAMED, Alarm, Kind, Stance
from holdfast.model.fleet_node_reports import FleetNode, FleetReport, FleetState
from holdfast.model.incident_record import Remedy
from holdfast.model.job_and_seats import HostIdentity, Job
from holdfast.model.journal_entry import Decision, Entry
from holdfast.model.observation import Departure, Exit, Loss

HERE = Path(__file__).parent / "scenarios"
CATALOG = catalog_files.load_failures()


class Words:
    """The words of one line, taken from the left; `NAME value` pairs may come in any order."""

    def __init__(self, line: str) -> None:
        self.left = shlex.split(line)

    def next(self) -> str:
        return self.left.pop(0)

    def after(self, name: str, default: str) -> str:
        if name not in self.left:
            return default
        at = self.left.index(name)
        _, value = self.left[at : at + 2]
        del self.left[at : at + 2]
        return value

    def has(self, name: str) -> bool:
        found = name in self.left
        self.left = [word for word in self.left if word != name]
        return found

    def after_all(self, name: str) -> list[str]:
        """Every word behind this one."""
        if name not in self.left:
            return []
        at = self.left.index(name)
        rest, self.left = self.left[at + 1 :], self.left[:at]
        return rest


def parse(line: str, now: float, generation: int) -> Event:
    words = Words(line)
    event = PARSERS[words.next()](words, now, generation)
    assert not words.left, f"{words.left} not understood in: {line}"
    return event


def _begin(words: Words, now: float, generation: int) -> Event:
    low, _, high = words.after("nnodes", "1").partition(":")
    restarts = words.after("max-restarts", "")
    job = Job(
        run_id="scenario",
        min_nodes=int(low),
        max_nodes=int(high or low),
        standbys=int(words.after("standbys", "0")),
        max_restarts=int(restarts) if restarts else None,
        can_acquire=not words.has("join"),
        probes=words.has("probes"),
        checks=words.has("checks"),
        replays=words.has("replays"),
        blocks=words.has("blocks"),
    )
    fence_s = float(words.after("fence", "0"))
    limits = dict(pair.split("=") for pair in words.after_all("limits"))
    return Begin(job=job, limits=msgspec.convert(limits, Limits, strict=False), fence_s=fence_s)


def _ready(words: Words, now: float, generation: int) -> Event:
    node = words.next()
    nproc, order = int(words.after("nproc", "2")), int(words.after("order", "0"))
    name, *gpus = words.after("host", "").split(",")  # its id is its name here
    blocked = " ".join(words.after_all("blocked"))
    identity = HostIdentity(id=name, gpus=tuple(gpus))
    return Ready(node=node, host=name or f"host-{node}", nproc=nproc, order=order, identity=identity, blocked=blocked)


def _mesh(words: Words, now: float, generation: int) -> Event:
    sizes = [word.split("=") for word in words.next().split(",")]
    return MeshReport(mesh=tuple((name, int(size)) for name, size in sizes))


def _alarm(words: Words, now: float, generation: int) -> Event:
    kind, node = words.next(), words.next()
    at = float(words.after("since", str(now)))
    if kind == "silence":
        reason = "has been silent for 3 s"
        return Alarm(kind=Kind.SILENCE, at=at, suspects=(node,), reason=reason, signature=f"silence {node}")
    if kind == "left":
        return departure_alarm(Departure(node=node, generation=generation, at=at, reason="why", ended=False))
    if kind == "loss":
        rank, step = int(words.after("rank", "0")), int(words.after("step", "0"))
        counted, nan = words.has("counted"), float("nan")
        told = Loss(node=node, generation=generation, rank=rank, step=step, loss=nan, at=at, numbered=not counted)
        return nonfinite_loss.alarm_of(told)
    if kind == "redone":
        return _redone_alarm(int(words.after("step", "0")), at, generation)
    if kind == "switch":
        return Alarm(
            kind=Kind.HEALTH,
            at=at,
            suspects=tuple(node.split(",")),
            reason=f"{len(node.split(','))} nodes lost their links within 1 s ({node}: a switch)",
            generation=generation,
            signature=SWITCH,
            hard=True,
        )
    if kind in ("health", "lines", "hang", "slow"):
        said = " ".join(words.after_all("said"))
        return Alarm(
            kind=Kind(kind),
            at=at,
            suspects=() if node == "nobody" else tuple(node.split(",")),
            ranks=tuple(int(rank) for rank in words.after("rank", "").split(",") if rank),
            generation=int(words.after("generation", str(generation))),
            reason=said,
            signature=UNNAMED if node == "nobody" else said,
            hard=words.has("hard"),
            stance=Stance(words.after("stance", "act")),
        )
    return _exit_alarm(words, node, at, generation)


def _exit_alarm(words: Words, node: str, at: float, generation: int) -> Alarm:
    said, raised = tuple(words.after_all("said")), " ".join(words.after_all("raised"))
    threw = " ".join(words.after_all("threw"))  # by a statement of the script's own
    rank = int(words.after("rank", "0"))
    code = f"raise {threw.partition(':')[0]}(words)" if threw else "go()"
    trace = (
        "Traceback (most recent call last):",
        f'  File "/job/train.py", line {rank + 1}, in <module>',
        f"    {code}",
    )
    raised = raised or threw
    exit = Exit(
        node=node,
        generation=int(words.after("generation", str(generation))),
        rank=rank,
        code=int(words.after("code", "1")),
        at=at,
        words=(*trace, raised) if raised else (" ".join(said),) if said else (),
    )
    return alarm_of(exit, CATALOG)


def _redone_alarm(step: int, at: float, generation: int) -> Alarm:
    reason = f"step {step} was made again with loss 2.31, was 2.29: the restored state, the code or a machine differs"
    return Alarm(
        kind=Kind.REDONE,
        at=at,
        suspects=(),
        generation=generation,
        reason=reason,
        signature=redone_losses.SIGNATURE,
        not_after=step - 1,
    )


def _progress(words: Words, now: float, generation: int) -> Event:
    step = int(words.next())
    at = float(words.after("at", str(now)))
    return Progress(
        generation=int(words.after("generation", str(generation))),
        step=step,
        at=at,
        first_step=int(words.after("from", str(step))),
        first_at=float(words.after("since", str(at))),
        counted=words.has("counted"),
        numbered=words.has("numbered"),
        skippable=words.has("skippable"),
        backed=words.has("backed"),
        parted=words.has("parted"),
        last_at=float(words.after("last", "0")),
        grouped_at=float(words.after("grouped", "0")),
    )


def _ended(words: Words, now: float, generation: int) -> Event:
    node, number = words.next(), int(words.after("generation", str(generation)))
    left = tuple(int(rank) for rank in words.after("left", "").split(",") if rank)
    departed, said = words.has("departed"), " ".join(words.after_all("said"))
    return Ended(node=node, generation=number, left=left, reason=said, departed=departed)


def _outcome(words: Words, now: float, generation: int) -> Event:
    action, ok = int(words.next()), words.next() == "ok"
    untested = words.has("untested")
    nodes, failed = tuple(words.after_all("nodes")), words.after_all("on")
    return Outcome(
        action=action,
        ok=ok,
        detail=words.after("because", ""),
        nodes=nodes,
        failed=dict(zip(failed[::2], failed[1::2], strict=True)),
        untested=tuple(failed[::2]) if untested else (),
        apart=words.after("apart", ""),
        departed=tuple(int(rank) for rank in words.after("departed", "").split(",") if rank),
    )


def _order(words: Words, now: float, generation: int) -> Event:
    verb: OrderVerb = msgspec.convert(words.next(), OrderVerb)
    who, code = words.after("by", "somebody"), int(words.after("code", "0"))
    digest = words.after("digest", "")
    return Order(
        verb=verb,
        who=who,
        code=code,
        now=words.has("now"),
        node=words.after("node", ""),
        release=Release(number=0, digest=digest) if digest else None,
        number=int(words.after("to", "0")),
        window_s=float(words.after("window", "86400")),
    )


PARSERS: dict[str, Callable[[Words, float, int], Event]] = {
    "begin": _begin,
    "ready": _ready,
    "alarm": _alarm,
    "progress": _progress,
    "ended": _ended,
    "outcome": _outcome,
    "order": _order,
    "successor": lambda words, now, generation: Successor(
        epoch=int(words.next()), alone_since=float(words.after("alone", "0"))
    ),
    "mesh": _mesh,
    "slowed": lambda words, now, generation: SlowTime(
        generation=generation,
        since=float(words.after("since", "0")),
        until=float(words.after("until", str(now))),
        cost_s=float(words.after("cost", "0")),
        node=words.after("for", ""),
    ),
    "cut": lambda words, now, generation: LinksDown(nodes=tuple(words.next().split(","))),
    "links": lambda words, now, generation: LinksUp(nodes=tuple(words.next().split(","))),
    "fleet": lambda words, now, generation: FleetReport(
        nodes={words.next(): FleetNode(state=FleetState(words.next()), reason=" ".join(words.after_all("said")))}
    ),
    "tick": lambda words, now, generation: Tick(),
}


def show(decision: Decision) -> Iterator[str]:
    yield f"{decision.phase}: {decision.reason}" if decision.reason else f"{decision.phase}"
    yield from (f"> {show_action(action)}" for action in decision.actions)
    if decision.closed:
        record = decision.closed
        gave_up = record.verdict.remedy is Remedy.GIVE_UP  # else its sentence is said
        said = record.sentence if gave_up else f"remedy {record.verdict.remedy}"
        yield f"closed {record.number}: failures {record.failures}, echoes {record.echoes}, {said}"
    if decision.changed:
        change = decision.changed
        yield f"changed: generation {change.generation}, release {change.release}, resumed from {change.resumed_from}"
    if decision.wake_at is not None:
        yield f"wake {decision.wake_at:g}"


def show_action(action: Action) -> str:
    match action:
        case Say(text=text):
            return f"Say {text}"
        case Acquire(id=id, count=count):
            return f"Acquire {id} count {count}"
        case Dismiss(id=id, node=node, reason=reason):
            return f"Dismiss {id} {node}{f' code {action.code}' if action.code != 1 else ''}: {reason}"
        case Block(id=id, host=host, identity=identity, reason=reason):
            what = " ".join(("id", identity.id or "none", *identity.gpus))
            return f"Block {id} {host} ({what}), incident {action.incident}: {reason}"
        case Launch(id=id, generation=generation, seats=seats):
            places = " ".join(f"{s.node}:{s.first_rank}-{s.first_rank + s.nproc - 1}" for s in seats)
            since = f" after doubts {action.doubts[-1].not_after}" if action.doubts else ""
            kind = " verified" if action.verified else ""
            until = f" from{kind} memory up to {action.not_after}" if action.not_after is not None else ""
            what = f" of release {action.release.number}" if action.release.number > 1 else ""
            held = f" without what {' '.join(action.astray)} holds" if action.astray else ""
            out = "".join(f" leaving out {s.first}-{s.last}" for s in action.skips)
            eased = "".join(f" easing {e.first}-{e.last} to {e.factor:g}" for e in action.eases)
            zero = " or from step 0" if action.from_zero else ""
            return f"Launch {id} generation {generation}{what} on {places}{until}{zero}{since}{held}{out}{eased}"
        case Stage(id=id, release=release, nodes=nodes):
            return f"Stage {id} release {release.number} ({release.digest}) on {' '.join(nodes)}"
        case Stop(id=id, generation=generation, nodes=nodes, grace_s=grace_s):
            return f"Stop {id} generation {generation} on {' '.join(nodes) or 'nobody'}, grace {grace_s:g}"
        case Probe(id=id, nodes=nodes, level=level):
            return f"Probe {id} level {level} of {' '.join(nodes)}"
        case Replay(id=id, seats=seats):
            return f"Replay {id} on {' '.join(seat.node for seat in seats)}"
        case Finish(id=id, code=code, grace_s=grace_s, reason=reason, last_s=last_s, not_after=not_after):
            lost = "" if last_s else ", nothing goes to storage"
            doubted = "" if not_after is None else f", states after {not_after} in doubt"
            return f"Finish {id} code {code}, grace {grace_s:g}{lost}{doubted}: {reason}"


class Scenario:
    """One file, played to a decider; `entries` is the journal that a controller would have written."""

    def __init__(self, name: str) -> None:
        self.path = HERE / f"{name}.txt"
        self.decider = Decider()
        self.entries: list[Entry] = []
        self.text = self.path.read_text(encoding="utf-8")

    def play(self) -> str:
        """The file as it would read with today's answers."""
        return "\n\n".join(self._block(block) for block in self.text.strip().split("\n\n")) + "\n"

    def _block(self, block: str) -> str:
        heard = block.split("\n----")[0].split("\n")
        answers = [answer for line in heard if line[:1] not in ("#", "") for answer in self._line(line)]
        return "\n".join([*heard, "----", *answers]) if answers else "\n".join(heard)

    def _line(self, line: str) -> list[str]:
        verb, rest = line.split(" ", 1)
        if verb == "after":
            before = Scenario(rest)
            before.play()
            self.decider, self.entries = before.decider, before.entries
            return []
        assert verb == "at", line
        at, event = rest.split(" ", 1)
        times = 1
        if event[0] == "x":  # the same event many times; only the last answer is shown
            many, event = event[1:].split(" ", 1)
            times = int(many)
        decision = Decision()
        for _ in range(times):
            decision = self._hear(float(at), event)
        return list(show(decision))

    def _hear(self, now: float, line: str) -> Decision:
        event = parse(line, now, self.decider.view.generation)
        decision = self.decider.step(now, event)
        self.entries.append(Entry(seq=len(self.entries) + 1, at=now, event=event, decision=decision))
        return decision


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.txt"))
