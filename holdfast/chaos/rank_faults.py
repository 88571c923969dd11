"""Faults that a rank inflicts on itself when ordered to: exceptions, exits, hangs, flipped bits."""

import contextlib
import time

import msgspec

from holdfast.chaos import rank_orders
from holdfast.chaos.injection_records import CannotInject, InjectedFault, RemoveFile
from holdfast.chaos.injection_scene import InjectionReport, InjectionScene
from holdfast.chaos.rank_orders import RankDone, RankOrder
from holdfast.checkpoint.image_layout import ImageItem, ImageLayout
from holdfast.decoding import from_msgpack
from holdfast.wire.rank_keeper_messages import layout_file_name

_OBEY_S = 60.0
_ERROR = "RuntimeError: chaos: an exception in the training script"
_REPLICATED = ("weights", "optimizer", "gradients")  # of these one replica alone is spoilt
_SHARED = (
    "the wrong number goes into a sum that all replicas share, so they stay alike; only a loss far off would show it"
)


def order_rank(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    """Leave an order for a rank. Wait until the rank obeys, unless chance decides in which step it does."""
    status = scene.read_status()
    rank = scene.choose_rank(fault, status)
    node = status.node_of(rank)
    _check_order(scene, fault, node)
    written = _make_order(scene, fault, rank)
    folder = scene.sight.node_folder(node)
    path = rank_orders.order_path(folder, written)
    scene.keep_undo(RemoveFile(str(path)), RemoveFile(str(rank_orders.done_path(folder, written.id, rank))))
    asked_at = time.time()
    rank_orders.write_json(path, written)
    done = _await_done(scene, written, node, rank) if not fault.chance else None
    if done and done.trouble:
        raise CannotInject(f"rank {rank}: {done.trouble}")
    filled = msgspec.structs.replace(fault, rank=rank, node=node, **_filled_fields(fault, written))
    what = f"rank {rank} on {node} {done.what}" if done else f"rank {rank} on {node}: {_order_text(written)}"
    alarms, blind = _expected_alarms(scene, node, rank, written)
    return InjectionReport(
        what=what,
        fault=filled,
        ranks=(rank,),
        nodes=(node,),
        pids=(done.pid,) if done else (),
        at=done.at if done else asked_at,
        alarms=alarms,
        blind=blind,
    )


def _check_order(scene: InjectionScene, fault: InjectedFault, node: str) -> None:
    entry = scene.sight.node_spec(node).entry
    if rank_orders.PRELOAD not in entry.preload or not entry.zygote:
        raise CannotInject(
            f"ranks of this job accept no faults; start it with --preload {rank_orders.PRELOAD}, and with its zygote"
        )
    if fault.place and fault.place not in rank_orders.PLACES:
        raise CannotInject(f"there is no place '{fault.place}'; there are {', '.join(rank_orders.PLACES)}")
    if fault.bits and fault.bits not in rank_orders.BITS:
        raise CannotInject(f"there are no bits '{fault.bits}'; there are {', '.join(rank_orders.BITS)}")


def _make_order(scene: InjectionScene, fault: InjectedFault, rank: int) -> RankOrder:
    id = time.time_ns() % 10**12  # other injectors may have left orders here
    plain = RankOrder(id=id, ranks=(rank,), deed="bits", step=fault.at_step, seed=scene.dice.randrange(1 << 31))
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


def _await_done(scene: InjectionScene, order: RankOrder, node: str, rank: int) -> RankDone:
    folder, until = scene.sight.node_folder(node), time.monotonic() + _OBEY_S
    while (done := rank_orders.read_done(folder, order.id, rank)) is None:
        if time.monotonic() > until:
            raise CannotInject(
                f"rank {rank} did not inject the fault within {_OBEY_S:g} s: does its script use an optimizer?"
            )
        time.sleep(0.005)
    return done


def _filled_fields(fault: InjectedFault, order: RankOrder) -> dict[str, object]:
    match fault.kind:
        case "rank.raise":
            return {"error": order.error}
        case "rank.exit":
            return {"code": order.code}
        case "bits":
            return {"place": order.place, "bits": order.bits, "count": order.count}
    return {}


def _expected_alarms(
    scene: InjectionScene, node: str, rank: int, order: RankOrder
) -> tuple[tuple[str, ...] | None, str]:
    """Return the alarms that the order's flipped bits should raise; None stands for those that the fault's kind usually
    raises. Also return why no alarm should follow, or "" if one should."""
    if order.deed != "bits" or order.bits == "nan":
        return None, ""
    if order.place not in _REPLICATED:
        return (), _SHARED
    if not any(
        _is_struck(item, order.place) and len(item.spec.replicas) > 1 for item in _snapshot_items(scene, node, rank)
    ):
        return (), "no other rank has the same state, so there is nothing to compare it with"
    return ("replica", "loss"), ""


def _snapshot_items(scene: InjectionScene, node: str, rank: int) -> tuple[ImageItem, ...]:
    """Return the items of a rank's snapshots; empty if the rank takes none."""
    for want in scene.sight.arena_requests(node):
        if want.rank == rank:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                plan = scene.sight.node_folder(node) / layout_file_name(rank, want.layout)
                return from_msgpack(plan.read_bytes(), ImageLayout).items
    return ()


def _is_struck(item: ImageItem, place: str) -> bool:
    """Return whether a fault at this place can flip bits of the item. Scalars, such as a step count, are excluded."""
    spec = item.spec
    return bool(spec.dtype and spec.shape and spec.alike) and (spec.path[0] == "optimizer") == (place == "optimizer")


def _order_text(order: RankOrder) -> str:
    return f"{order.count} bits of {order.place} are flipped with a chance of {order.chance:g} in every step"
