"""A read-only view of a job's state, for everybody outside of core/decide.

It is a window and not a copy: it always shows the present state, and reading it costs nothing. That matters because
controllers read it at every beat, and long simulations at every event. All values that it returns are read-only.
"""

from collections.abc import Mapping, Set
from types import MappingProxyType

from holdfast.core.decide.job_state import JobState
from holdfast.core.decide.node_roles import NodeRole, assign_roles
from holdfast.core.decide.node_wait_text import NodeWait, find_node_wait
from holdfast.core.decide.status_text import tell_present
from holdfast.model.code_release import Fate, Release
from holdfast.model.decider_events import Progress, Ready
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.fleet_node_reports import FleetNode
from holdfast.model.incident_record import Verdict
from holdfast.model.job_and_seats import Dims, Job, Seat
from holdfast.model.job_phase import Phase


class JobView:
    __slots__ = ("_state",)

    def __init__(self, state: JobState) -> None:
        self._state = state

    # --- the job -------------------------------------------------------------------------------------------------

    @property
    def job(self) -> Job:
        return self._state.job

    @property
    def limits(self) -> Limits:
        return self._state.limits

    @property
    def phase(self) -> Phase:
        return self._state.phase

    @property
    def generation(self) -> int:
        return self._state.generation

    @property
    def progress(self) -> Progress | None:
        """The newest step of this generation; None before its first."""
        return self._state.progress

    @property
    def awaited(self) -> int:
        """The id of the action whose outcome ends this phase. A phase that waits for no action keeps an older id."""
        return self._state.awaited

    @property
    def summary(self) -> str:
        """What the job does now, in the words of the newest decision that gave a reason."""
        return self._state.summary

    def describe_present(self, now: float, step: int, ending: str, mute: tuple[int, ...] = ()) -> str:
        """Return one line on what the job is doing now; `mute` are the ranks that report no steps."""
        return tell_present(self._state, now, step, ending, mute)

    def node_wait(self, now: float) -> NodeWait | None:
        """What a job that lacks nodes waits for; None if it has enough."""
        return find_node_wait(self._state, now)

    # --- incidents -----------------------------------------------------------------------------------------------

    @property
    def incidents(self) -> int:
        """The number of incidents so far, including an open one."""
        return self._state.incidents

    @property
    def open_incident(self) -> int:
        """The number of the open incident; 0 if none is open."""
        incident = self._state.incident
        return incident.number if incident else 0

    @property
    def open_cause(self) -> str:
        """What has happened in the open incident so far, in words; "" if none is open."""
        incident = self._state.incident
        return incident.describe_so_far() if incident else ""

    @property
    def open_failures(self) -> int:
        """How many failures the open incident has; 0 if none is open."""
        incident = self._state.incident
        return incident.failures if incident else 0

    @property
    def silent_nodes(self) -> tuple[str, ...]:
        """The nodes that have fallen silent in the open incident."""
        incident = self._state.incident
        return incident.silent if incident else ()

    @property
    def cause(self) -> Alarm | None:
        """The open incident's first alarm or, once it is judged, its first cause; None without an incident."""
        incident = self._state.incident
        return incident.alarms[0] if incident else None

    @property
    def verdict(self) -> Verdict | None:
        """The newest verdict on the open incident."""
        return self._state.verdict

    # --- nodes ---------------------------------------------------------------------------------------------------

    @property
    def seats(self) -> tuple[Seat, ...]:
        return self._state.nodes.seats

    @property
    def mesh(self) -> Dims:
        """The parallel groups: those that the user gave or, if there are none, those that the script has reported."""
        return self._state.nodes.mesh

    @property
    def fewest_nodes(self) -> int:
        """On how few nodes the job can go on, as whole replicas of the model if its parallel groups are known."""
        return self._state.nodes.fewest_nodes

    @property
    def active(self) -> frozenset[str]:
        """The seated nodes that have not been evicted."""
        return frozenset(self._state.nodes.active)

    @property
    def out(self) -> frozenset[str]:
        """The seated nodes that have been evicted."""
        return frozenset(self._state.nodes.out)

    def has_ended(self, node: str) -> bool:
        """Return whether all ranks of this node have ended well."""
        return node in self._state.nodes.ended

    @property
    def some_ended(self) -> bool:
        """Whether there is a node whose ranks have all ended well."""
        return bool(self._state.nodes.ended)

    @property
    def pool(self) -> Mapping[str, Ready]:
        """The standbys."""
        return MappingProxyType(self._state.nodes.pool)

    @property
    def usable_pool(self) -> Mapping[str, Ready]:
        """The standbys that can get ranks: all but those whose links are down."""
        return MappingProxyType(dict(self._state.nodes.usable_pool))

    @property
    def coming(self) -> Mapping[str, float]:
        """The nodes that the fleet has promised, and since when."""
        return MappingProxyType(self._state.nodes.standbys.coming)

    @property
    def queued(self) -> Mapping[str, str]:
        """The nodes that wait in the fleet's queue, each with the cluster's reason."""
        return MappingProxyType(self._state.nodes.standbys.queued)

    @property
    def exit_code(self) -> int | None:
        return self._state.exit_code

    @property
    def fleet(self) -> Mapping[str, FleetNode]:
        """The fleet's latest report on each node that it has reported."""
        return MappingProxyType(self._state.nodes.standbys.fleet.nodes)

    @property
    def gone(self) -> Mapping[str, Kind | None]:
        """The nodes that have left, each with the kind of alarm that removed it; None if there was none."""
        return MappingProxyType(self._state.nodes.standbys.gone)

    @property
    def departures(self) -> Mapping[str, str]:
        """Why each of the nodes that have left did so."""
        return MappingProxyType(self._state.nodes.standbys.departures)

    @property
    def under_check(self) -> frozenset[str]:
        """The new nodes and the standbys that are being checked now."""
        return frozenset(self._state.nodes.standbys.checking.values())

    @property
    def under_probe(self) -> frozenset[str]:
        """The nodes under check, and the evicted nodes that are being examined or will be."""
        return frozenset(self._state.nodes.standbys.under_probe)

    @property
    def fenced(self) -> frozenset[str]:
        """The nodes that may still run ranks of an old generation."""
        return frozenset(self._state.fence.nodes)

    @property
    def without_links(self) -> frozenset[str]:
        """The nodes whose links are down, as far as the decider was told."""
        return frozenset(self._state.nodes.links.nodes)

    def may_return(self, node: str) -> bool:
        """Return whether this node may join the job, or join it again."""
        return self._state.nodes.standbys.may_return(node)

    def assign_roles(self, admitting: Set[str]) -> dict[str, NodeRole]:
        """Return the role of each node. `admitting` names the admitted nodes that have made no step yet."""
        return assign_roles(self._state, admitting)

    # --- people --------------------------------------------------------------------------------------------------

    @property
    def held_by(self) -> str:
        """Who holds the job, so that no rank runs; "" if nobody does."""
        return self._state.requests.held

    @property
    def question(self) -> str:
        """What a person has to decide; "" if nothing."""
        return self._state.requests.asking

    @property
    def asks_until(self) -> float | None:
        """When the job stops waiting for an answer to its question; None if it asks nothing."""
        return self._state.requests.asks_until if self.question else None

    @property
    def evicting(self) -> Mapping[str, str]:
        """The nodes that must leave at once, each with who wants that: a person or the fleet."""
        return MappingProxyType(self._state.requests.evicting)

    @property
    def draining(self) -> Mapping[str, str]:
        """The nodes that must leave once a standby can replace them, each with who wants it: a person or the fleet."""
        return MappingProxyType(self._state.requests.draining)

    # --- releases ------------------------------------------------------------------------------------------------

    @property
    def running_release(self) -> Release:
        return self._state.releases.running

    @property
    def waiting_release(self) -> Release | None:
        """The staged release that waits for the next launch; None if the running release stays."""
        return self._state.releases.waiting

    @property
    def waits_until(self) -> float | None:
        """The time at which the waiting release gets a restart of its own; None if no release waits."""
        return self._state.releases.wake_at()

    @property
    def releases(self) -> Mapping[int, Release]:
        return MappingProxyType(self._state.releases.known)

    @property
    def fates(self) -> Mapping[int, Fate]:
        return MappingProxyType(self._state.releases.fates)

    @property
    def fate_reasons(self) -> Mapping[int, str]:
        return MappingProxyType(self._state.releases.told)

    def rolled_back_as(self, release: Release) -> int:
        """Return the number under which a release with the same code was rolled back; 0 if there is none."""
        return self._state.releases.rolled_back_as(release)

    def rollback_refusal(self, number: int) -> str:
        """Return why the job cannot go back to this release (0: the one before); "" if it can."""
        return self._state.releases.rollback_refusal(number)
