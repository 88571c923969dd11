"""Traces made by hand: ranks at places, and what their flight recorders say."""

from holdfast.model.rank_traces import Collective, Flight, Frame, Process, Thread, Trace

SCRIPT = (("<module>", "/opt/run/train.py", 9), ("train", "/opt/run/train.py", 7))
WRAP = ("_exception_logger.<locals>.wrapper", "torch/distributed/c10d_logger.py", 83)
REDUCE = (*SCRIPT, WRAP, ("all_reduce", "torch/distributed/distributed_c10d.py", 3252))
RECEIVE = (*SCRIPT, WRAP, ("recv", "torch/distributed/distributed_c10d.py", 2900))
SEND = (*SCRIPT, WRAP, ("isend", "torch/distributed/distributed_c10d.py", 2760))
GATHER = (*SCRIPT, WRAP, ("all_gather_into_tensor", "torch/distributed/distributed_c10d.py", 4100))
SLEEP = (*SCRIPT, ("load", "/opt/run/train.py", 3))
Places = tuple[tuple[str, str, int], ...]


def process(rank: int, at: Places = REDUCE, *, node: str = "", state: str = "S", child: bool = False) -> Process:
    thread = Thread(name="MainThread", main=True, frames=tuple(Frame(*frame) for frame in at))
    pid = 1000 + rank + 500 * child
    threads = (thread,) if at else ()
    return Process(node=node or f"n{rank // 2}", rank=rank, pid=pid, child=child, state=state, threads=threads)


def flight(rank: int, *groups: tuple[str, int, int], op: str = "all_reduce") -> Flight:
    """Groups as (name, entered, completed)."""
    told = tuple(Collective(group=g, entered=e, completed=c, op=op, at=1.0) for g, e, c in groups)
    return Flight(node=f"n{rank // 2}", rank=rank, groups=told)


def trace(*processes: Process, flights: tuple[Flight, ...] = ()) -> list[Trace]:
    """One trace for each node that has a process here."""
    nodes = dict.fromkeys(p.node for p in processes)
    return [
        Trace(
            node=node,
            at=1.0,
            processes=tuple(p for p in processes if p.node == node),
            flights=tuple(f for f in flights if f.node == node),
        )
        for node in nodes
    ]
