"""Results of probes on a node, alone and together with others."""

import msgspec

from holdfast.model.message_bounds import Duration, Number, Real


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One result of one probe. If this machine cannot judge the result, `ok` is None and `detail` says why.

    Digests and values are comparable only between findings with the same probe, device, torch and form.
    """

    probe: str
    level: Number
    ok: bool | None
    detail: str = ""
    place: str = ""  # the device within the node: "cpu", "cuda:3"
    device: str = ""  # its model
    torch: str = ""  # the version, where it has a say in the result
    form: str = ""  # data type and sizes
    value: Real | None = None
    unit: str = ""
    lower: bool = False  # the lower the better, as for times
    samples: tuple[Real, ...] = ()  # the measurements behind the value
    rough: bool = False  # measured in a hurry on a shared machine: told, but not to be judged
    digest: str = ""  # of all bits of the result
    starved: bool = False  # not judged, because the probe waited for a processor for most of its time
    names: tuple[str, ...] = ()  # of what was found, such as rails
    took_s: Duration = 0.0


class PairMeeting(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part in one world of a pair test; the members meet through a store."""

    rank: int  # of this node's process in the world
    world: int  # two, or three
    host: str  # of the store
    port: int
    name: str  # of this world, no two the same in one store
    serve: bool = False  # rank 0 is the store itself; else it is the job's own
    backend: str = "gloo"
    rail: str = ""  # of this node, by the name of its interface or its address; empty: as the backend chooses
    seconds: float = 2.0  # what bandwidth may take to be measured
    deadline_s: float = 30.0  # for all of it; who has not come by then has failed
