"""Names the device that computed wrongly in a step that several devices made together.

After one wrong number, all later results are wrong. So each device reports a digest of its input to each collective and
of the output it receives. The same part of the work is done several times, by different devices. The first difference
between digests shows the fault. If a device received the right data and sent a wrong result, it computed wrongly. If it
received wrong data although all devices had sent the right data, the transfer was at fault.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec


class TracePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of what one rank sent into a collective and got out of it; "" if it sent or got nothing."""

    name: str
    sent: str = ""
    got: str = ""


class PlayedPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one device reported in one play (one run of the step); all devices with the same `part` do the same work."""

    play: int
    part: int
    device: str
    points: tuple[TracePoint, ...]


_Truth = dict[tuple[int, str], str]  # what is sent, by part and point


class TraceAssessment(msgspec.Struct, frozen=True, kw_only=True):
    bad: tuple[str, ...] = ()  # devices
    suspects: tuple[str, ...] = ()  # at least one of them is bad, and nobody knows which
    reason: str = ""


class _Parting(msgspec.Struct, frozen=True, kw_only=True):
    """The first point of the work at which devices that do the same part report different digests. `most` are the
    devices of the majority, and `odd` are the other devices. Without a majority, `most` is empty."""

    point: str
    sent: bool
    odd: tuple[PlayedPart, ...]
    most: tuple[PlayedPart, ...] = ()


def assess_traces(played: Sequence[PlayedPart]) -> TraceAssessment:
    """Return the devices that computed something wrong or, if there are none, the devices that got wrong data."""
    truth: _Truth = {}
    partings = [one for part in sorted({p.part for p in played}) for one in _part_ways(played, part, truth)]
    wrong = [one for one in partings if one.sent]
    if named := [one for one in wrong if one.most]:
        return TraceAssessment(bad=_odd_devices(named), reason=_tell_wrong(named[0]))
    if wrong:
        return TraceAssessment(suspects=_odd_devices(wrong), reason=_tell_tie(wrong[0], "computed"))
    arrived = [(one, p) for one in partings if one.most for p in one.odd if not _is_echo(p, one.point, played, truth)]
    if arrived:
        bad = tuple(sorted({p.device for _, p in arrived}))
        said = f"what arrived at {', '.join(bad)} in '{arrived[0][0].point}' is not what was sent"
        return TraceAssessment(bad=bad, reason=said)
    if partings:
        return TraceAssessment(suspects=_odd_devices(partings), reason=_tell_tie(partings[0], "got"))
    return TraceAssessment()


def _is_echo(one: PlayedPart, point: str, played: Sequence[PlayedPart], truth: _Truth) -> bool:
    """Return whether another device had sent the wrong data that this device received from the collective."""
    others = [other for other in played if other.play == one.play and other is not one]
    return any(at.name == point and at.sent != truth.get((p.part, point), at.sent) for p in others for at in p.points)


def _part_ways(played: Sequence[PlayedPart], part: int, truth: _Truth) -> Iterator[_Parting]:
    """Yield the first point at which each device's digest differs from the majority's. Later differences only follow
    from it, so they are left out. Record in `truth` what the majority sent at each point."""
    alike = [one for one in played if one.part == part]
    for number in range(max(len(one.points) for one in alike)):
        for sent in (True, False):
            values = [_digest_at(one, number, sent) for one in alike]
            most, count = Counter(values).most_common(1)[0]
            point = next((one.points[number].name for one in alike if number < len(one.points)), "the end")
            if sent and 2 * count > len(alike):
                truth[part, point] = most
            if count == len(alike):
                continue
            if 2 * count <= len(alike):
                yield _Parting(point=point, sent=sent, odd=tuple(alike))
                return
            odd = tuple(one for one, value in zip(alike, values, strict=True) if value != most)
            alike = [one for one, value in zip(alike, values, strict=True) if value == most]
            yield _Parting(point=point, sent=sent, odd=odd, most=tuple(alike))


def _digest_at(one: PlayedPart, number: int, sent: bool) -> str:
    if number >= len(one.points):
        return ""
    return one.points[number].sent if sent else one.points[number].got


def _odd_devices(partings: Sequence[_Parting]) -> tuple[str, ...]:
    return tuple(sorted({p.device for one in partings for p in one.odd}))


def _tell_wrong(one: _Parting) -> str:
    odd = _odd_devices([one])
    others = {p.device for p in one.most} - set(odd)
    than = f"{len(others)} other{'s' * (len(others) > 1)}" if others else "it did at other times"
    return f"{', '.join(odd)} computed other bits than {than} before '{one.point}'"


def _tell_tie(one: _Parting, did: str) -> str:
    return f"{' and '.join(_odd_devices([one]))} {did} different bits at '{one.point}', and no majority tells which"
