"""Sends the job's incidents, restarts and ETTR to nodes whose ranks log to W&B, MLflow or TensorBoard."""

from collections.abc import Callable

from holdfast.controller.node_links import NodeLinks
from holdfast.core.decide.job_view import JobView
from holdfast.core.incident.incident_text import incident_sentence
from holdfast.core.record.ledger import Ledger
from holdfast.model.observation import Beat
from holdfast.wire.agent_messages import IncidentNote, JobFigures

_EVERY_S = 60.0  # an ETTR changes slowly
_NOTES, _CHARS = 8, 1000
_SAID = 4  # sentences on who gets figures; a script uses one or two trackers


class TrackerFigures:
    def __init__(self, view: JobView, ledger: Ledger, links: NodeLinks, say: Callable[[str], None]) -> None:
        self._view, self._ledger, self._links, self._say = view, ledger, links, say
        self._sent: dict[str, tuple[float, int, int]] = {}  # by node: when, generation, incidents by then
        self._made: tuple[float, int, int] = (float("-inf"), 0, 0)  # as above, of the newest figures
        self._figures: JobFigures | None = None
        self._told: set[str] = set()

    def on_beat(self, now: float, beat: Beat) -> None:
        """Send the job's figures to a seated node that asks for them: after each incident, and also at intervals."""
        if not beat.trackers or beat.generation != self._view.generation:
            return
        if beat.trackers not in self._told and len(self._told) < _SAID:
            self._told.add(beat.trackers)
            self._say(f"incidents, restarts and ETTR are logged to {beat.trackers}, too")
        generation, incidents = self._view.generation, len(self._ledger.incidents)
        sent_at, *sent = self._sent.get(beat.node, (float("-inf"), 0, 0))
        if sent == [generation, incidents] and now < sent_at + _EVERY_S:
            return
        if self._links.send_message(beat.node, self._make_figures(now, generation, incidents)):
            self._sent[beat.node] = now, generation, incidents

    def _make_figures(self, now: float, generation: int, incidents: int) -> JobFigures:
        """Return the job's figures. They are computed at most once a second, because thousands of nodes ask in their
        beats."""
        made_at, *made = self._made
        if self._figures is not None and made == [generation, incidents] and now < made_at + 1.0:
            return self._figures
        account, progress = self._ledger.make_account(now), self._ledger.progress
        closed = [r for r in self._ledger.incidents[-_NOTES:] if progress and r.resumed_at >= progress.first_at]
        self._made, self._figures = (
            (now, generation, incidents),
            JobFigures(
                generation=generation,
                incidents=incidents,
                restarts=max(0, generation - 1),
                lost_s=round(sum(account.lost_s().values()), 3),
                ettr=account.ettr,
                open=self._view.open_incident > 0,
                notes=tuple(IncidentNote(number=r.number, text=incident_sentence(r)[:_CHARS]) for r in closed),
            ),
        )
        return self._figures
