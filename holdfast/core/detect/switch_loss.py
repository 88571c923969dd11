"""Switch detector: tells whether several machines lost their links together or one machine lost its own.

A link that stays down is proof against its machine, unless other machines lost links at about the same time. In this
case a switch that the machines share is down, and replacing the machines would cost more than waiting.

Each machine reads its links at its own times. So losses count as simultaneous if their first readings are little more
than one reading interval apart. One reading that shows a link down counts here, although an alarm takes two.
"""

from holdfast.model.detector_alarm import SWITCH, Alarm, Kind
from holdfast.model.observation import Beat, Strain, StrainKind

_APART = 1.5  # times the time between two readings
_LINKS = (StrainKind.CUT, StrainKind.FLAPPED)


class SwitchDetector:
    def __init__(self, network_s: float) -> None:
        self._apart_s = _APART * network_s
        self._strains: dict[str, tuple[Strain, ...]] = {}  # by who tells, of links alone
        self._told: set[str] = set()  # nodes whose links were told to be lost together, and have not been up since

    def on_launch(self) -> None:
        self._told = set()

    def on_beat(self, beat: Beat) -> None:
        if own := tuple(strain for strain in beat.strains if strain.kind in _LINKS):
            self._strains[beat.node] = own
        else:
            self._told.difference_update(self._nodes_told_by(beat.node))  # what they lose next is another outage
            self._strains.pop(beat.node, None)

    def _nodes_told_by(self, teller: str) -> set[str]:
        """Return the nodes whose links this node reports: all nodes of its machine."""
        return {node for strain in self._strains.get(teller, ()) for node in strain.nodes}

    def forget_node(self, node: str) -> None:
        self._strains.pop(node, None)

    def is_cut(self, node: str) -> bool:
        """Return whether a link of this node's machine is down now."""
        cut = (strain for own in self._strains.values() for strain in own if strain.kind is StrainKind.CUT)
        return any(node in strain.nodes for strain in cut)

    def judge_alarm(self, alarm: Alarm, generation: int) -> Alarm | None:
        """Return the alarm unchanged if only one machine lost its links. If several machines did, return one alarm
        about all of them, or None if an alarm about all of them was raised before."""
        own = self._find_strain(alarm)
        if own is None:
            return alarm
        together = {
            teller: near
            for teller, strains in self._strains.items()
            if (near := [strain for strain in strains if abs(strain.since - own.since) <= self._apart_s])
        }
        if len(together) < 2:
            return alarm
        nodes = {node for near in together.values() for strain in near for node in strain.nodes}
        if nodes <= self._told:
            return None
        self._told |= nodes
        since = [strain.since for near in together.values() for strain in near]
        spread_s = max(1.0, max(since) - min(since))
        lost = f"{len(nodes)} nodes lost their links within {spread_s:.0f} s"
        return Alarm(
            kind=Kind.HEALTH,
            at=min(since),
            suspects=tuple(sorted(nodes)),
            reason=f"{lost} ({', '.join(sorted(nodes))}: a switch)",
            generation=generation,
            klass=alarm.klass,
            group=alarm.group,
            signature=SWITCH,
            stance=alarm.stance,
            hard=True,
        )

    def _find_strain(self, alarm: Alarm) -> Strain | None:
        """Return the strain that an alarm about a link is made from; None for every other alarm."""
        if alarm.kind is not Kind.HEALTH or not alarm.hard:
            return None
        every = (strain for own in self._strains.values() for strain in own)
        return next((s for s in every if s.sign == alarm.signature and set(s.nodes) & set(alarm.suspects)), None)
