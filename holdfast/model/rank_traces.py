"""Stacks: where the processes of a job are in their code at one instant."""

import msgspec

from holdfast.model.message_bounds import Duration, Instant, Name, Number


class Frame(msgspec.Struct, frozen=True, array_like=True):
    function: str
    file: str
    line: Number = 0


class Thread(msgspec.Struct, frozen=True, kw_only=True):
    """A thread and its frames, the outermost first."""

    name: str = ""
    tid: Number = 0
    main: bool = False
    sleeps_in: str = ""  # function of the kernel in which it sleeps; "": it runs, or nobody may know
    frames: tuple[Frame, ...] = ()


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A rank, or a process that a rank has started, such as a data loader or a checkpoint writer."""

    node: str
    rank: Number  # its own, or that of the rank it belongs to
    pid: Number
    child: bool = False
    name: str = ""
    state: str = ""  # as the kernel tells it: R running, S asleep, D in the kernel, T stopped, Z ended
    cpu_s: Duration = 0.0  # used so far, all threads
    io_bytes: Number = 0  # read and written so far
    threads: tuple[Thread, ...] = ()
    error: str = ""  # why there are no frames
    steps: bool = False  # a child that makes the steps of its rank
    ending: str = ""  # of a rank's script: "returned", "parting" (it destroys its process groups), "parted" (none left)


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """The newest collective that a rank entered in one process group, from the flight recorder."""

    group: str  # name of the process group
    entered: Number  # sequence number
    completed: Number
    op: str = ""
    ended_op: str = ""  # the operation of the newest completed; "": not known
    at: Instant = 0.0  # when it was entered, on the controller's clock
    expires_at: Instant = 0.0  # when the oldest that has not completed times out; 0: there is none, or nobody told
    started: Number | None = None  # newest that has begun on the GPU; None: nobody tells, as with gloo
    started_op: str = ""  # "": not known
    unbegun_since: Instant = 0.0  # since when the GPU could begin the next one; 0: the rank has entered none
    unbegun_s: Duration = 0.0  # the longest that one has waited so before it began


class Channel(msgspec.Struct, frozen=True, kw_only=True):
    """The messages from one rank to another in a process group, as one of the two ranks counts them."""

    group: str
    source: Number
    target: Number
    posted: Number  # so many has this rank begun to send or to receive, or queued
    begun: Number | None = None  # the newest that has begun on its GPU; None: nobody tells, as with gloo
    ended: Number | None = None  # on its GPU
    tag: Number = 0  # of the newest
    size_bytes: Number = 0


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """The time at which a rank reached one collective. All ranks give a collective the same `group` and `seq`."""

    group: str
    seq: Number
    at: Instant  # on the controller's clock
    # For how long its GPU was in it: it waited for the last one, and then moved bytes. 0: an operation in which not all
    # wait for all. None: not known, and processes are compared.
    held_s: Duration | None = None


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of one rank's flight recorder."""

    node: str
    rank: Number
    at: Instant = 0.0  # when the rank wrote it, on the controller's clock
    groups: tuple[Collective, ...] = ()
    channels: tuple[Channel, ...] | None = None  # None: nobody counts messages, or there are too many channels
    waits: bool = False  # its main thread waits for a collective or a message
    unbegun_since: Instant = 0.0  # since when the GPU could begin the next message; 0: none is queued
    unbegun_s: Duration = 0.0  # the longest that a message has waited so before it began


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks that one node took of all its processes at one instant."""

    node: str
    at: Instant  # on the controller's clock
    processes: tuple[Process, ...] = ()
    flights: tuple[Flight, ...] = ()
    ras: Name = ""  # lines in which NCCL's RAS tells of single ranks of the job; one node asks for them
    took_s: Duration = 0.0
    error: str = ""  # why the node found nothing, as when it did not answer


class StackRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One frame of the merged stacks of many ranks. Rows stand in the order of a tree: a row is called from the nearest
    row before it that is less deep."""

    depth: Number  # 0: outermost
    frame: str
    ranks: str = ""  # that are in it or in frames that it calls, in words; "": only counted
    count: Number = 0  # of these
    named: bool = False  # all of them are ranks that an alarm names
    here: str = ""  # those of them whose innermost frame it is, where others go on; "": all stop here, or nobody does
