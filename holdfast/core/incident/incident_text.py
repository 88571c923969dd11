"""Sentences about incidents: which rank failed on which node and why, the step resumed from, and the cost."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from holdfast.core.incident.first_cause import ECHOES, is_switch_loss
from holdfast.core.incident.node_swap_text import describe_doubts, describe_evicted, staying_nodes
from holdfast.core.incident.plural_reasons import plural_reason
from holdfast.core.rank_ranges import format_ranks
from holdfast.core.sum_preserving_rounding import share_tenths
from holdfast.model.action import Action, Stop
from holdfast.model.detector_alarm import AGENT_LOST, Alarm, Kind
from holdfast.model.incident_record import Change, Record, Remedy
from holdfast.model.loss_response import Skip

_SIGNALS = {1: "SIGHUP", 2: "SIGINT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL"}
_SIGNALS |= {11: "SIGSEGV", 13: "SIGPIPE", 15: "SIGTERM"}
ADVICE = (
    "the script has started from step 0 twice: have it save checkpoints and load the newest one when it starts, "
    "or let holdfast do both (holdfast.Checkpointer)"
)
WENT_ON = "while the others went on"  # of a rank that left, and whose cause names the step
ASKS = "waiting for holdfast approve: "  # how the reason begins of a decision to ask a person
FAILED_START = "ended by an incident before its first step"  # of a planned restart
_BEFORE_START_UP = ("detect", "pause", "silence", "last step", "stop", "probe", "ask", "hold", "wait", "launch")
FAILED, BROKEN_OFF = "failed start", "start broken off"  # phases of launches that led to no step
LAST_STEP, FIRST_STEP = "last step", "first step"
_SET_UP_AGAIN = "set-up after the restore"  # booked as set-up
_OPTIONAL = ("silence", "probe", "ask", "hold", "wait", "last step", _SET_UP_AGAIN)  # told of only if they took time
_BRIEF = ("silence", "probe", "ask", "wait", _SET_UP_AGAIN)  # worth a word only above SHOWN_S
UNORDERED = "which first is not known"  # of ranks that were killed
_NOTICED_S = 0.1  # exits of one host that were noticed within this may have been in another order
SHOWN_S = 0.05  # which is more than nothing in tenths
_NAMED = 4  # of nodes that share a cause
_HEARD_OF = (("has a loss of ", "tells of a loss of "), ("had losses that", "tells of losses that"))


def describe_exit(code: int) -> str:
    if code < 0:
        return f"was killed by {_SIGNALS.get(-code, f'signal {-code}')}"
    return f"exited with code {code}"


def describe_cause(alarm: Alarm) -> str:
    """Return in words which rank or node failed, and how."""
    where = ", ".join(alarm.suspects)
    if not where or is_switch_loss(alarm):  # whose reason names all of them
        return alarm.reason
    if alarm.signature == AGENT_LOST:
        return f"the agent of {where} {alarm.reason}"
    if alarm.kind in (Kind.HEALTH, Kind.LINES) and len(alarm.suspects) > 1:
        where = f"the host of {where}"
    if alarm.kind is Kind.SILENCE and len(alarm.suspects) > 1:
        return f"{list_some(alarm.suspects)} {plural_reason(alarm.reason)}"
    if alarm.kind is Kind.SILENCE or not alarm.ranks:
        return f"{where} {alarm.reason}"
    if (alarm.kind is Kind.LOSS or alarm.code is not None) and len(alarm.ranks) > 1:
        return f"{format_ranks(alarm.ranks)} on {list_some(alarm.suspects)} {plural_reason(alarm.reason)}"
    if alarm.kind is Kind.HANG and len(alarm.ranks) > 1:
        stand = alarm.reason.replace("has stood", "have stood", 1).replace("keeps ", "keep ", 1)
        return f"{format_ranks(alarm.ranks)} on {where} {stand}"
    reason = alarm.reason
    for own, told in _HEARD_OF:  # whoever tells of a bad loss may have it from the others
        reason = f"{told}{reason.removeprefix(own)}" if reason.startswith(own) else reason
    return f"{format_ranks(alarm.ranks)} on {where} {reason}"


def describe_order(alarms: Sequence[Alarm], hosts: Mapping[str, str]) -> str:
    """Return a remark on which rank failed first, or that the order is unknown; "" unless several ranks crashed.

    A busy host notices an exit late, so the order of exits that are close together is unknown. So is the order of exits
    on different hosts, because clocks of hosts are not compared.
    """
    if len(alarms) < 2 or any(alarm.kind is not Kind.CRASH for alarm in alarms):
        return ""
    first, second = sorted(alarms, key=lambda a: a.at)[:2]
    comparable = len({hosts.get(node, node) for alarm in alarms for node in alarm.suspects}) == 1
    is_known = comparable and second.at - first.at > _NOTICED_S
    return f" ({format_ranks(first.ranks)} first)" if is_known else f" ({UNORDERED})"


def describe_causes(alarms: Sequence[Alarm], hosts: Mapping[str, str]) -> str:
    """Return in words which ranks or nodes failed and how; ranks that failed for the same reason share a clause."""
    told: dict[str, list[Alarm]] = {}
    for alarm in alarms:
        told.setdefault(alarm.reason, []).append(alarm)
    order = describe_order(alarms, hosts)
    together = [join_alarms(alike) for alike in told.values()]
    if order and len(together) == 1:
        last = together[0]
        return f"{format_ranks(last.ranks)} on {list_some(last.suspects)}{order} {plural_reason(last.reason)}"
    return ", and ".join(describe_cause(alarm) for alarm in together) + order


def join_alarms(alarms: Sequence[Alarm]) -> Alarm:
    """Return the first alarm, extended by the ranks and suspects of all other alarms."""
    if len(alarms) == 1:
        return alarms[0]
    ranks = sorted({rank for alarm in alarms for rank in alarm.ranks})
    nodes = sorted({node for alarm in alarms for node in alarm.suspects})
    return msgspec.structs.replace(alarms[0], ranks=tuple(ranks), suspects=tuple(nodes))


def describe_echo(alarm: Alarm) -> str:
    """Describe an alarm that only shows that another rank has failed, or that somebody stops the job."""
    who = msgspec.structs.replace(alarm, reason=ECHOES[alarm.klass])
    return f"{describe_cause(who)}: looking for the first cause"


def describe_round(first: Alarm) -> str:
    """Return in words what the first alarm of a round that is not judged yet says."""
    return describe_echo(first) if first.klass in ECHOES else describe_cause(first)


def list_some(names: Sequence[str]) -> str:
    """Return names as a phrase. Of many names, list the first few and say how many more there are."""
    shown = [*names[:_NAMED], f"{len(names) - _NAMED} more"] if len(names) > _NAMED + 1 else list(names)
    return " and ".join((", ".join(shown[:-1]), shown[-1])) if len(shown) > 1 else shown[0]


def incident_sentence(record: Record) -> str:
    """Return the sentence that sums up a closed incident."""
    return f"{_describe_recovery(record)}{describe_new_release(record)}{describe_doubts(record)}"


def describe_new_release(record: Record | Change) -> str:
    """Return a clause about a release that had waited and came in with this restart; "" if there is none."""
    if not record.brought_in:
        return ""
    stays = isinstance(record, Change) or (not record.rolled_back and record.verdict.remedy is not Remedy.GIVE_UP)
    came = "came in with this restart" if stays else "had come in with a restart of this incident"
    return f"; release {record.brought_in} {came}"


def _describe_recovery(record: Record) -> str:
    text = f"{record.cause}{describe_step(record)}{describe_again(record)}; {_describe_remedy(record)}"
    if record.verdict.remedy is Remedy.GIVE_UP:
        return text
    lost_s = recovery_s(record)
    held = f", held for {held_s:.1f} s" if (held_s := sum_held_s(record)) >= SHOWN_S else ""
    if is_fresh_start(record):
        text = f"{text.rstrip(',')}{held}, {describe_fresh_start(record)} and {lost_s:.1f} s"
    elif record.resumed_from is None:
        text += f"{describe_unknown_resume(record)}{held}, lost {lost_s:.1f} s"
    else:
        made = lost_steps(record)
        lost = f"{count_steps(made)} and " if made is not None else ""
        where = f"{describe_disks(record.disks)}{_describe_apart(record)}{_describe_bad_start(record)}"
        text += f" from step {record.resumed_from}{where}{held}, lost {lost}{lost_s:.1f} s"
    stood_s = record.good_at - record.stepped_at if record.stepped_at else 0.0
    return f"{text} ({describe_phases(record)}){describe_stood(stood_s)}"


def _describe_bad_start(record: Record) -> str:
    """Return a clause that the script went on from a state that it had saved when its loss was bad already."""
    if record.kind != Kind.LOSS or record.counted or not 0 <= record.good_step < (record.resumed_from or 0):
        return ""
    return ", a state that the script saved after its last good step (remove that checkpoint, or it fails again)"


def describe_stood(seconds: float) -> str:
    """Return a clause on the time without a step before a fault; "" if there was none. It follows the time since."""
    return f", after {seconds:.1f} s without a step" if seconds >= SHOWN_S else ""


def sum_held_s(record: Record | Change) -> float:
    """Return how long a person held the job."""
    return record.held_s + record.earlier_s.get("hold", 0.0)


def recovery_s(record: Record | Change) -> float:
    """Return the seconds from the last good step, or from a fault long after it, to the next step, without a person's
    hold."""
    return record.resumed_at - record.good_at - sum_held_s(record)


def describe_again(record: Record) -> str:
    return describe_failures(record.failures, record.last_cause)


def describe_failures(count: int, last_cause: str) -> str:
    """Return a clause on failures after the first one, and why the last one happened if for another reason."""
    last = f", the last time because {last_cause}" if last_cause else ""
    return f", then failed {_count_times(count - 1)} more before the next step{last}" if count > 1 else ""


def describe_disks(count: int) -> str:
    """Return words such as " from the disks of 2 nodes", to follow a step; "" if the state came from no disk."""
    return f" from the disk{'s' if count > 1 else ''} of {count} node{'s' if count > 1 else ''}" if count else ""


def is_fresh_start(record: Record | Change) -> bool:
    """Return whether the script started again from step 0 although steps had been made."""
    return record.resumed_from is not None and record.resumed_from <= 0 and record.resumed_from < record.good_step


def describe_fresh_start(record: Record | Change) -> str:
    made = lost_steps(record)
    return f"{why_from_zero(record)}: lost {count_steps(made) if made is not None else 'all steps'}"


def why_from_zero(record: Record | Change) -> str:
    """Return why a job began at step 0 again; the script is blamed only if holdfast did not restore its state."""
    doubted = isinstance(record, Record) and record.made_step >= 0 and record.restored_at > 0
    if record.apart and not doubted:
        return f"from step 0{_describe_apart(record)}"
    return "from step 0, as later states are in doubt" if doubted else "but the script started from step 0"


def _describe_apart(record: Record | Change) -> str:
    """Return a clause that the ranks' snapshots have no step in common; "" if they have one."""
    return f", as no step was held for every rank ({record.apart})" if record.apart else ""


def describe_unknown_resume(record: Record | Change) -> str:
    """Return a remark that the resumed step is unknown; "" if it is known or no step was made."""
    if record.resumed_from is not None or record.good_step <= 0 or is_failed_start(record):
        return ""
    most = "" if record.counted else f": at most {count_steps(record.good_step)} redone"
    return f" (whether the script resumed is not known{most})"


def lost_steps(record: Record | Change) -> int | None:
    """Return how many steps were lost and must be made again; None if this is unknown. If the job ends early, it makes
    only some of these steps again."""
    if record.resumed_from is None or record.counted or is_untold(record):
        return None
    made_step = record.made_step if isinstance(record, Record) else -1
    return max(0, max(record.good_step, made_step) - record.resumed_from)


def is_failed_start(record: Record | Change) -> bool:
    """Return whether this is a planned restart that an incident ended before its first step."""
    return isinstance(record, Change) and record.failed


def is_untold(record: Record | Change) -> bool:
    """Return whether ranks ran without a controller and their last steps were never reported."""
    return isinstance(record, Record) and record.untold


def describe_step(record: Record) -> str:
    """Return the step at which the failure happened, as a phrase that follows the cause."""
    if record.kind in (Kind.LOSS, Kind.REDONE):  # whose cause names the step itself
        none = record.good_step < (1 if record.counted else 0)  # counts begin at 1
        return " (no step was good)" if none else f" (last good step: {record.good_step})"
    if record.untold:
        seen = f"the last step seen is {record.good_step}" if record.good_step >= 0 else "no step was seen"
        return f" ({seen}; ranks may have made more without a controller)"
    at = f" {describe_place(record.good_step, counted=record.counted)}"
    is_named = WENT_ON in record.cause or f"{at} " in f"{record.cause} "  # a hang says where it stood
    return "" if is_named else at if record.good_step >= 0 else " before any step was seen"


def advice_clause(hint: str) -> str:
    """Return advice as the end of a sentence: "; " and the hint, with a small first letter and no full stop. Return ""
    if there is no hint."""
    return f"; {hint[0].lower() if hint[1:2].islower() else hint[0]}{hint[1:].removesuffix('.')}" if hint else ""


def describe_place(step: int, *, counted: bool, relation: str = "at") -> str:
    """Return where a job is: at or after a step, or if steps have no numbers, how many steps after its launch."""
    return f"{count_steps(step)} after its launch" if counted else f"{relation} step {step}"


def count_failures(records: Iterable[Record]) -> int:
    """Return the number of failures in these incidents; an incident may have several."""
    return sum(max(1, record.failures) for record in records)


def describe_phases(record: Record | Change) -> str:
    """Return the phases of a recovery with their seconds, in tenths that add up to the total. The sums for stop and
    start-up are rounded first and their phases after that, so that the sums agree with the report."""
    aside = "hold" if isinstance(record, Record) else ""  # told apart, as no part of what was lost
    spent = {name: seconds for name, seconds in phases_s(record).items() if name != aside}
    wholes: dict[str, dict[str, float]] = {}
    for name, seconds in spent.items():
        whole = "stop" if name in ("silence", "stop") else name if name in _BEFORE_START_UP else "start-up"
        wholes.setdefault(whole, {})[name] = seconds
    rounded = share_tenths({whole: sum(parts.values()) for whole, parts in wholes.items()})
    shown = {n: s for whole, parts in wholes.items() for n, s in share_tenths(parts, rounded[whole]).items()}
    return ", ".join(f"{name} {shown[name]:.1f}" for name in spent)


def start_up_s(record: Record | Change) -> dict[str, float]:
    """Return the seconds of the phases from the launch to the first step."""
    return {name: seconds for name, seconds in phases_s(record).items() if name not in _BEFORE_START_UP}


def stop_phases_s(record: Record | Change) -> dict[str, float]:
    """Return how long a lost node took to count as silent, and how long it took after that to stop all ranks."""
    return {name: seconds for name, seconds in phases_s(record).items() if name in ("silence", "stop")}


def phases_s(record: Record | Change) -> dict[str, float]:
    """Return the seconds of each phase from the last good step to the next one. Unreported phases are left out."""
    begins = LAST_STEP
    if isinstance(record, Record):
        begins = "pause" if record.paused else "detect"
        ends = {begins: record.alarm_at, "silence": record.silent_at, "stop": record.stopped_at}
        ends["probe"] = record.stopped_at + record.probed_s
        ends["ask"] = ends["probe"] + record.asked_s
        ends["hold"] = ends["ask"] + record.held_s
    else:
        ends = {begins: record.first_asked_at or record.asked_at, "stop": record.stopped_at}
        ends["hold"] = record.stopped_at + record.held_s
    set_up = "set-up" if record.grouped_at else "imports and set-up"
    restored = "restore" if record.grouped_at or record.restoring_at else "imports and restore"
    ends |= {"wait": record.ordered_at, "launch": record.launched_at}
    ends |= {"imports and groups": record.grouped_at, set_up: record.restoring_at, restored: record.restored_at}
    ends[_SET_UP_AGAIN] = record.set_up_at  # what comes after the restore, or without one
    if record.resumed_from is not None or record.resumed_at > record.launched_at:  # else its ranks make no steps
        ends[FIRST_STEP] = record.resumed_at
    found: dict[str, float] = {}
    at = record.good_at
    for name, end_at in ends.items():
        untold = name in ("imports and groups", set_up, restored, _SET_UP_AGAIN) and not end_at
        end_at = min(max(end_at, at), record.resumed_at)  # ranks may be further than the news of their launch
        brief = name in (*_BRIEF, *(["hold"] if isinstance(record, Record) else []))
        least_s = SHOWN_S if brief else 0.0  # such as a replay that is refused
        if not untold and (end_at > at + least_s or name not in _OPTIONAL):
            booked = set_up if name == _SET_UP_AGAIN else name
            found[booked] = found.get(booked, 0.0) + end_at - at
            at = end_at
        again_at = record.again_at if isinstance(record, Record) else record.asked_at
        if name == begins and record.earlier_s and again_at > at:
            found |= {phase: found.get(phase, 0.0) + seconds for phase, seconds in record.earlier_s.items()}
            at = again_at
    order = [name for end in ends for name in ((end, FAILED, BROKEN_OFF) if end == "launch" else (end,))]
    order.insert(1, "pause")
    return {name: found[name] for name in order if name in found}


def _describe_remedy(record: Record) -> str:
    if record.verdict.remedy is Remedy.GIVE_UP:
        return f"gave up: {record.verdict.reason}"
    if record.rolled_back:
        back = f"release {record.rolled_back} was rolled back to release {record.verdict.to or 'before it'}"
        return ", ".join((back, *describe_evicted(record)))
    if record.skipped:
        left_out = ", ".join(_step_range(skip) for skip in record.skipped)
        return f"restarted in place, the batches of {left_out} left out,"
    kept = f"{clause}," if (clause := describe_kept(record)) else ""
    if not record.evicted:
        return "restarted in place" + (f" with {', '.join(record.admitted)} admitted" if record.admitted else "") + kept
    went_on = "restarted" if is_fresh_start(record) or record.resumed_from is None else "resumed"
    evicted = ", ".join(describe_evicted(record, first="evicted "))
    if stayed := staying_nodes(record):
        return f"{evicted}, admitted {', '.join(stayed)} and {went_on}{kept}"
    fewer = f"{record.short}{kept}" if record.short else "fewer nodes"
    return f"{evicted} and {went_on} on {fewer}"


def _step_range(skip: Skip) -> str:
    return f"step {skip.first}" if skip.first == skip.last else f"steps {skip.first} to {skip.last}"


def count_steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def count_ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def describe_kept(record: Record | Change) -> str:
    """Return a clause about the ranks that went on in their processes; "" if none did."""
    if not record.kept:
        return ""
    new = f" and {record.renewed} new" if record.renewed else ""
    return f", {count_ranks(record.kept)} in the {'process it' if record.kept == 1 else 'processes they'} had{new}"


def describe_stop(actions: Iterable[Action]) -> str:
    """Return what these actions do to the ranks of a failed generation: some stay, or all are stopped."""
    parking = sum(action.parking for action in actions if isinstance(action, Stop))
    return f"telling {count_ranks(parking)} to leave the step and stay" if parking else "stopping all ranks"


def _count_times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def describe_wait(seconds: float) -> str:
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"
