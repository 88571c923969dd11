"""Hooks in a rank that carry out chaos's orders: in the optimizer's step, in a forward pass or before a reduction."""

import builtins
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from holdfast.chaos.inrank.bit_flips import can_flip, flip_bits
from holdfast.chaos.rank_orders import FOLDER, RankDone, RankOrder, done_path, order_path, read_orders, write_json
from holdfast.wire.progress_environment import KEEPER, SLOT
from holdfast.wire.rank_memory import slot_reader

# Newer versions of FSDP2 call the last one, older ones the second.
_NAMES = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter", "reduce_scatter_single")
_REDUCTIONS = tuple(name for name in _NAMES if hasattr(dist, name))
_SLEEP_S = 0.1


class OrderHooks:
    """Looks for orders at every step of the rank's first optimizer, and carries them out. A zygote has no steps."""

    def __init__(self) -> None:
        self._optimizer: int | None = None
        self._seen_ns = 0
        self._orders: list[RankOrder] = []
        self._obeyed: set[int] = set()
        self._steps = 0
        self._slot: tuple[Any, int] | None = None
        self._armed: list[Callable[[], None]] = []  # takes back what waits in forward passes and reductions
        self._reduced = False

    # --- around the optimizer's step ---------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._is_first(optimizer):
            return
        self._remove_hooks()
        step = self._current_step()
        for order in self._due_orders(step):
            match order.deed:
                case "raise":
                    self._report_done(order, step, f"raises {order.error}")
                    raise _parse_exception(order.error)
                case "exit":
                    self._report_done(order, step, f"exits with code {order.code}")
                    os._exit(order.code)
                case "hang":
                    self._report_done(order, step, "sleeps")
                    _sleep_until_undone(order)
                case "bits" if order.place == "gradients":
                    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                    self._flip_tensors(order, step, grads)

    def after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._is_first(optimizer):
            return
        step = self._current_step()
        for order in self._due_orders(step):
            if order.deed == "bits" and order.place == "weights":
                self._flip_tensors(order, step, [p for group in optimizer.param_groups for p in group["params"]])
            elif order.deed == "bits" and order.place == "optimizer":
                kept = [value for state in optimizer.state.values() for value in state.values()]
                self._flip_tensors(
                    order, step, [value for value in kept if isinstance(value, torch.Tensor) and value.dim()]
                )
        self._steps += 1
        for order in self._due_orders(step + 1):
            if order.deed == "bits" and order.place == "activations":
                self._arm_activations(order, step + 1)
            elif order.deed == "bits" and order.place == "all_reduce":
                self._arm_reductions(order, step + 1)

    def _is_first(self, optimizer: Optimizer) -> bool:
        if self._optimizer is None:
            self._optimizer = id(optimizer)
        return self._optimizer == id(optimizer)

    # --- in a forward pass, on the way to a reduction ----------------------------------------------------------

    def _arm_activations(self, order: RankOrder, step: int) -> None:
        dice = self._order_dice(order, step)
        skips = dice.randrange(3)  # outputs that pass unharmed, so that it is not always the first layer's
        left = [skips]

        def hook(module: torch.nn.Module, _args: Any, output: Any) -> None:
            if order.id not in self._obeyed and can_flip(output):
                left[0] -= 1
                if left[0] < 0:
                    with torch.no_grad():
                        self._flip_tensors(order, step, [output])

        self._keep_hook(register_module_forward_hook(hook))

    def _arm_reductions(self, order: RankOrder, step: int) -> None:
        """Flip bits in the next reduction: by a comm hook in DDP, which reduces in C++, else by wrapped functions."""

        def find(module: torch.nn.Module, _args: Any) -> None:
            if isinstance(module, torch.nn.parallel.DistributedDataParallel) and not self._reduced:
                self._reduced = True
                module.register_comm_hook(None, self._reduce_bucket)

        self._keep_hook(register_module_forward_pre_hook(find))
        self._reducing = (order, step)
        for name in _REDUCTIONS:
            self._wrap_collective(name, order, step)

    def _wrap_collective(self, name: str, order: RankOrder, step: int) -> None:
        plain = getattr(dist, name)

        def struck(*args: Any, **kwargs: Any) -> Any:
            given = [a for a in (*args, *kwargs.values()) if can_flip(a)]
            if given and order.id not in self._obeyed and given[-1].numel() > 1:
                self._flip_tensors(order, step, [given[-1]])
            return plain(*args, **kwargs)

        setattr(dist, name, struck)
        self._armed.append(lambda: setattr(dist, name, plain))

    def _reduce_bucket(self, _state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        order, step = self._reducing
        if self._armed and order.id not in self._obeyed:
            self._flip_tensors(order, step, [bucket.buffer()])
        assert dist.group.WORLD is not None
        return allreduce_hook(dist.group.WORLD, bucket)

    def _keep_hook(self, handle: RemovableHandle) -> None:
        self._armed.append(handle.remove)

    def _remove_hooks(self) -> None:
        for take_back in self._armed:
            take_back()
        self._armed.clear()

    # --- orders ------------------------------------------------------------------------------------------------

    def _due_orders(self, step: int) -> list[RankOrder]:
        folder = _orders_folder()
        if folder is None:
            return []
        rank = int(os.environ.get("RANK", "0"))
        try:
            changed = os.stat(folder).st_mtime_ns
        except OSError:
            return []
        if changed != self._seen_ns:
            self._seen_ns, self._orders = changed, read_orders(folder)
            # By a rank of an earlier generation: once is once.
            self._obeyed |= {one.id for one in self._orders if done_path(folder.parent, one.id, rank).exists()}
        mine = [one for one in self._orders if rank in one.ranks and step >= one.step]
        return [one for one in mine if (one.id not in self._obeyed or one.chance) and self._is_drawn(one, step)]

    def _is_drawn(self, order: RankOrder, step: int) -> bool:
        return not order.chance or random.Random(f"{order.seed} {step}").random() < order.chance

    def _order_dice(self, order: RankOrder, step: int) -> random.Random:
        return random.Random(f"{order.seed} {order.id} {step}")

    def _flip_tensors(self, order: RankOrder, step: int, tensors: list[Any]) -> None:
        with torch.no_grad():
            what = flip_bits(tensors, order.bits, order.count, self._order_dice(order, step))
        self._report_done(
            order, step, f"{order.place}: {what}" if what else "", "" if what else f"no {order.place} to strike"
        )

    def _report_done(self, order: RankOrder, step: int, what: str, trouble: str = "") -> None:
        folder = _orders_folder()
        self._obeyed.add(order.id)
        if folder is not None:
            rank = int(os.environ.get("RANK", "0"))
            pid = os.getpid()
            done = RankDone(id=order.id, rank=rank, pid=pid, step=step, at=time.time(), what=what, trouble=trouble)
            write_json(done_path(folder.parent, order.id, rank), done)
            self._seen_ns = 0  # our own note has changed the folder, and may have hidden another order

    def _current_step(self) -> int:
        """Return the number of the current step: the script's own if it reports steps, otherwise our count."""
        if self._slot is None:
            path, _, index = os.environ.get(SLOT, "").rpartition(":")
            if not path:
                return self._steps + 1
            self._slot = (slot_reader.open_slot_memory(path), int(index))
        reading = slot_reader.read_slot(*self._slot)
        return reading.step + 1 if reading and reading.step >= 0 else self._steps + 1


def _orders_folder() -> Path | None:
    keeper = os.environ.get(KEEPER, "")
    return Path(keeper).parent / FOLDER if keeper else None


def _sleep_until_undone(order: RankOrder) -> None:
    """Sleep until the order is removed."""
    folder = _orders_folder()
    while folder is not None and order_path(folder.parent, order).exists():
        time.sleep(_SLEEP_S)


def _parse_exception(text: str) -> BaseException:
    """Build an exception from "TypeError: message"; an unknown name gives a RuntimeError with the whole text."""
    name, _, message = text.partition(": ")
    kind = getattr(builtins, name, None) or getattr(torch, name.removeprefix("torch."), None)
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return kind(message)
    return RuntimeError(text)


def install_hooks() -> None:
    obeying = OrderHooks()
    register_optimizer_step_pre_hook(torch.compiler.disable(obeying.before_step))
    register_optimizer_step_post_hook(torch.compiler.disable(obeying.after_step))
