"""Faults that a rank does to itself, by order: exceptions, exits, hangs, flipped bits."""

import contextlib
import time

import msgspec

from holdfast.chaos import orders
from holdfast.chaos.fault import Cannot, Fault, Remove
from holdfast.chaos.orders import Done, Order
from holdfast.chaos.scene import Scene, Struck
from holdfast.checkpoint.layout import Item, Layout
from holdfast.core.decoding import from_msgpack
from holdfast.wire.keeping import plan_name

_OBEY_S = 60.0
_ERROR = "RuntimeError: chaos: an exception in the training script"
_REPLICATED = ("weights", "optimizer", "gradients")  # of these one replica alone is spoilt
_SHARED = (
    "the wrong number goes into a sum that all replicas share, so they stay alike; only a loss far off would show it"
)


def order(scene: Scene, fault: Fault) -> Struck:
    """Leave the order, and wait until it was carried out."""
    status = scene.status()
    rank = scene.rank(fault, status)
    node = status.node_of(rank)
    _check(scene, fault, node)
    written = _order(scene, fault, rank)
    folder = scene.sight.folder(node)
    path = orders.order_path(folder, written)
    scene.keep(Remove(str(path)), Remove(str(orders.done_path(folder, written.id, rank))))
    asked_at = time.time()
    orders.put(path, written)
    done = _obeyed(scene, written, node, rank) if not fault.chance else None
    if done and done.trouble:
        raise Cannot(f"rank {rank}: {done.trouble}")
    filled = msgspec.structs.replace(fault, rank=rank, node=node, **_filled(fault, written))
    what = f"rank {rank} on {node} {done.what}" if done else f"rank {rank} on {node}: {_words(written)}"
    alarms, blind = _follows(scene, node, rank, written)
    return Struck(
        what=what,
        fault=filled,
        ranks=(rank,),
        nodes=(node,),
        pids=(done.pid,) if done else (),
        at=done.at if done else asked_at,
        alarms=alarms,
        blind=blind,
    )


def _check(scene: Scene, fault: Fault, node: str) -> None:
    entry = scene.sight.node_spec(node).entry
    if orders.PRELOAD not in entry.preload or not entry.zygote:
        raise Cannot(f"ranks of this job take no orders: start it with --preload {orders.PRELOAD}, and with its zygote")
    if fault.place and fault.place not in orders.PLACES:
        raise Cannot(f"there is no place '{fault.place}'; there are {', '.join(orders.PLACES)}")
    if fault.bits and fault.bits not in orders.BITS:
        raise Cannot(f"there are no bits '{fault.bits}'; there are {', '.join(orders.BITS)}")


def _order(scene: Scene, fault: Fault, rank: int) -> Order:
    id = time.time_ns() % 10**12  # other injectors may have left orders here
    plain = Order(id=id, ranks=(rank,), deed="bits", step=fault.at_step, seed=scene.dice.randrange(1 << 31))
    match fault.kind:
        case "rank.raise":
            return msgspec.structs.replace(plain, deed="raise", error=fault.error or _ERROR)
        case "rank.exit":
            return msgspec.structs.replace(plain, deed="exit", code=fault.code or 1)
        case "rank.hang":
            return msgspec.structs.replace(plain, deed="hang")
        case "loss.nan":
            return msgspec.structs.replace(plain, place="activations", bits="nan")
    return msgspec.structs.replace(
        plain, place=fault.place or "weights", bits=fault.bits or "any", count=fault.count or 1, chance=fault.chance
    )


def _obeyed(scene: Scene, order: Order, node: str, rank: int) -> Done:
    folder, until = scene.sight.folder(node), time.monotonic() + _OBEY_S
    while (done := orders.read_done(folder, order.id, rank)) is None:
        if time.monotonic() > until:
            raise Cannot(
                f"rank {rank} did not carry out the order within {_OBEY_S:g} s: does its script use an optimizer?"
            )
        time.sleep(0.005)
    return done


def _filled(fault: Fault, order: Order) -> dict[str, object]:
    match fault.kind:
        case "rank.raise":
            return {"error": order.error}
        case "rank.exit":
            return {"code": order.code}
        case "bits":
            return {"place": order.place, "bits": order.bits, "count": order.count}
    return {}


def _follows(scene: Scene, node: str, rank: int, order: Order) -> tuple[tuple[str, ...] | None, str]:
    """Which alarm bits lead to depends on whether anybody else has the same state."""
    if order.deed != "bits" or order.bits == "nan":
        return None, ""
    if order.place not in _REPLICATED:
        return (), _SHARED
    if not any(_is_struck(item, order.place) and len(item.spec.replicas) > 1 for item in _items(scene, node, rank)):
        return (), "no other rank has the same state, so there is nothing to compare it with"
    return ("replica", "loss"), ""


def _items(scene: Scene, node: str, rank: int) -> tuple[Item, ...]:
    """What a rank's snapshots hold; nothing if it takes none."""
    for want in scene.sight.wants(node):
        if want.rank == rank:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                plan = scene.sight.folder(node) / plan_name(rank, want.layout)
                return from_msgpack(plan.read_bytes(), Layout).items
    return ()


def _is_struck(item: Item, place: str) -> bool:
    """Whether bits of it may be flipped there; numbers of its own, such as a count of steps, are not struck."""
    spec = item.spec
    return bool(spec.dtype and spec.shape and spec.alike) and (spec.path[0] == "optimizer") == (place == "optimizer")


def _words(order: Order) -> str:
    return f"{order.count} bits of {order.place} are flipped with a chance of {order.chance:g} in every step"
