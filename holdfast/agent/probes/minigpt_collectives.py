"""Collectives of one rank in the parallel reference step; each records a digest of what the rank sends and receives.
Every group has two ranks, because a sum of two numbers has the same bits in whichever order a library adds them."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from holdfast.agent.probes.probe_tools import tensor_digest
from holdfast.core.diagnose.sdc_localization import TracePoint

_EXPERT = (".up", ".down")  # parameters that ranks with experts do not share


class RankAxis(msgspec.Struct, frozen=True):
    """A rank's place along one axis of the layout, and the process group of that axis. Size 1 needs no group."""

    index: int = 0
    size: int = 1
    group: Any = None
    ranks: tuple[int, ...] = ()  # the members' numbers in the world

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1


_NO_AXIS = RankAxis()


class RankExchange:
    """The collectives of one rank; along an axis of size 1 they do nothing and record nothing."""

    def __init__(self, inner: RankAxis = _NO_AXIS, stage: RankAxis = _NO_AXIS, replica: RankAxis = _NO_AXIS) -> None:
        """The axes divide matrices or experts (`inner`) and layers (`stage`), and repeat the model (`replica`)."""
        self.inner, self.stage, self.replica = inner, stage, replica
        self.points: list[TracePoint] = []

    def enter_pieces(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return x unchanged. In the backward pass, sum the gradient of x over the ranks of the inner axis."""
        return _through(x, _clone, lambda grad: self._add(self.inner, grad, f"{name} backward"))

    def add_pieces(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return the sum of x over the ranks of the inner axis. The backward pass hands the gradient on unchanged."""
        return _through(x, lambda one: self._add(self.inner, one, f"{name} forward"), _clone)

    def swap_tokens(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Send every rank its part of x, cut along the first dimension; return the parts sent to this rank."""
        return _through(
            x, lambda one: self._swap(one, f"{name} forward"), lambda grad: self._swap(grad, f"{name} backward")
        )

    def hand_on(self, x: torch.Tensor, sender: int, name: str) -> torch.Tensor:
        """Broadcast x from stage `sender` to the other stage and return it. The other stage's own x is overwritten."""
        sends, x = self.stage.index == sender, x.contiguous()
        held = x.clone() if sends else None
        dist.broadcast(x, src=self.stage.ranks[sender], group=self.stage.group)
        self._note(f"{name} of stage {sender + 1}", held, None if sends else x)
        return x

    def reduce_gradients(self, parameters: Mapping[str, nn.Parameter], *, experts: bool) -> None:
        """Sum the token table's gradients over stages. With `experts`, sum the gradients of all weights but the
        experts' over the inner axis. Then average all gradients over replicas."""
        if self.stage.size > 1:
            self._reduce(self.stage, [p for name, p in parameters.items() if name == "token"], "table of tokens")
        if experts:
            shared = [p for name, p in parameters.items() if not name.endswith(_EXPERT)]
            self._reduce(self.inner, shared, "gradients of all experts' ranks")
        self._reduce(self.replica, list(parameters.values()), "gradients of replicas", share=1 / self.replica.size)

    def _reduce(self, axis: RankAxis, parameters: list[nn.Parameter], name: str, share: float = 1.0) -> None:
        grads = [p.grad for p in parameters if p.grad is not None]
        if axis.size == 1 or not grads:
            return
        total = self._add(axis, torch.cat([grad.flatten() for grad in grads]), name) * share
        for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    def _add(self, axis: RankAxis, x: torch.Tensor, name: str) -> torch.Tensor:
        if axis.size == 1:
            return x
        total = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=axis.group)
        self._note(name, x, total)
        return total

    def _swap(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if self.inner.size == 1:
            return x
        sent = x.detach().contiguous()
        # A group counts its ranks by their numbers in the world, whoever has which place on the axis.
        turn = [0] if self.inner.ranks[0] > self.inner.ranks[1] else []
        got = torch.empty_like(sent).view(2, -1)
        dist.all_to_all_single(got, sent.view(2, -1).flip(turn).contiguous(), group=self.inner.group)
        got = got.flip(turn).view_as(sent)
        self._note(name, sent, got)
        return got

    def _note(self, name: str, sent: torch.Tensor | None, got: torch.Tensor | None) -> None:
        digests = ["" if one is None else tensor_digest(one) for one in (sent, got)]
        self.points.append(TracePoint(name=name, sent=digests[0], got=digests[1]))


def _clone(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Callable[..., Any], back: Callable[..., Any]) -> Any:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.back(grads[0]), None, None


def _through(x: torch.Tensor, there: Callable[..., Any], back: Callable[..., Any]) -> torch.Tensor:
    found: torch.Tensor = _Through.apply(x, there, back)  # type: ignore[no-untyped-call]
    return found


ALONE = RankExchange()
