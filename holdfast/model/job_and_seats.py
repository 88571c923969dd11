"""The job as the user asked for it, and the seats that assign ranks to nodes."""

from typing import Annotated

import msgspec

from holdfast.model.message_bounds import Name, Number

Dims = tuple[tuple[Name, Number], ...]  # names and sizes, as a DeviceMesh has them: over ranks the last varies fastest


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The user's request; it never changes during the job."""

    run_id: str
    min_nodes: int
    max_nodes: int
    standbys: int = 0
    max_restarts: int | None = None  # caps restarts without eviction; None: the ledger's bounds hold
    can_acquire: bool = True  # whether the fleet can bring nodes by itself
    mark: str = ""  # tells the run from another of the same name
    probes: bool = False  # whether nodes may be tried while the job stands
    checks: bool = False  # and whether a standby has to pass probes before it is one
    replays: bool = False  # and whether its own work may be done again by groups of them, where the script allows it
    mesh: Dims = ()  # the parallel groups, where the user told
    parity: bool = False  # copies are laid over one another, so that more depends on each node
    copies: int = 1  # of each node's states on other nodes
    blocks: bool = False  # whether a host whose machine is at fault is blocked, for this job and for others

    @property
    def marked_id(self) -> str:
        """The run's unique name, which checkpoints and images on disk carry."""
        return marked_run_id(self.run_id, self.mark)


def marked_run_id(run_id: str, mark: str) -> str:
    return f"{run_id}.{mark}"


_Name = Annotated[str, msgspec.Meta(max_length=100)]


class HostIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A host's own report of its id and GPUs, by which it is recognized under any node name."""

    # Of the machine or, if it has none, its host name; "": not told, as on a local fleet.
    id: _Name = ""
    # UUIDs of the GPUs that the job sees there.
    gpus: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=64)] = ()
    # What alarms call each of these: its number ("GPU 3") and its place on the bus; (): not told.
    gpu_names: Annotated[tuple[tuple[_Name, _Name], ...], msgspec.Meta(max_length=64)] = ()


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A node's place in one generation: its ranks are first_rank .. first_rank + nproc - 1."""

    node: str
    group_rank: int
    first_rank: int
    nproc: int
    near: tuple[str, ...] = ()  # where its machine is, from wide to narrow, as the fleet says; (): not known

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.nproc)

    def has_rank(self, rank: int) -> bool:
        return rank in self.ranks


def world_size(seats: tuple[Seat, ...]) -> int:
    return sum(seat.nproc for seat in seats)
