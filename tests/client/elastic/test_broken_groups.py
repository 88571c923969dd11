"""Messages and votes that end without their content, as an abort leaves them over NCCL, are never taken for whole."""

from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.client.elastic.layer_state import HOST
from holdfast.client.elastic.packed_layer_transfer import receive_packed, send_packed, swap_packed
from holdfast.client.elastic.rank_traffic import GroupsBrokenError, Incoming, Outgoing, RankTraffic
from holdfast.client.elastic.step_totals import exchange_totals
from holdfast.client.snapshot.seal_fence import SealFence

Sent = list[torch.Tensor]


class Over:
    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class Wire:
    """Carries what is sent to whoever receives next; with `cut`, only so many bytes of each tensor's beginning. What
    does not come is left as it was: as memory is that something else had before."""

    def __init__(self, cut: int | None = None) -> None:
        self._cut, self._sent = cut, Sent()

    def post(self, sends: Sequence[Outgoing], receives: Sequence[Incoming]) -> list[Over]:
        self._sent += [tensor.clone() for tensor, _ in sends]
        for into, _ in receives:
            into.view(torch.uint8).fill_(7)
            if self._sent:
                sent = self._sent.pop(0).view(torch.uint8).flatten()
                into.view(torch.uint8).flatten()[: self._cut].copy_(sent[: self._cut])
        return [Over()]


@pytest.fixture
def worlds() -> Iterator[None]:
    yield
    dist.destroy_process_group()


def join(world: int) -> None:
    """Join a group whose collectives return at once, and sum nothing up, as those of an aborted group do."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def test_what_never_came_is_no_message() -> None:
    for receive in (
        lambda traffic: traffic.start_shaped(1),
        lambda traffic: receive_packed(1, traffic),
        lambda traffic: swap_packed([], 1, 1, 2, traffic),
    ):
        with pytest.raises(GroupsBrokenError):
            receive(RankTraffic(HOST, Wire(cut=0).post))


def test_a_layer_that_came_in_part_is_refused() -> None:
    packed = torch.arange(1, 4097, dtype=torch.int64).view(torch.uint8)
    whole = RankTraffic(HOST, Wire().post)
    send_packed(packed, 1, whole)
    assert torch.equal(receive_packed(1, whole), packed)
    torn = RankTraffic(HOST, Wire(cut=1024).post)
    send_packed(packed, 1, torn)
    with pytest.raises(GroupsBrokenError):
        receive_packed(1, torn)


@pytest.mark.usefixtures("worlds")
def test_a_vote_without_the_others_is_none() -> None:
    join(4)
    with pytest.raises(GroupsBrokenError):
        exchange_totals([1.0, torch.tensor(2.0)], HOST, SealFence().make_pass())


@pytest.mark.usefixtures("worlds")
def test_a_vote_that_ends_after_the_abort_has_begun_is_none() -> None:
    join(1)
    fence = SealFence()
    seal = fence.make_pass()
    assert exchange_totals([1.0, torch.tensor(2.0)], HOST, seal) == ((1.0, 2.0), False)
    fence.raise_fence()
    with pytest.raises(GroupsBrokenError):
        exchange_totals([1.0], HOST, seal)
    fence.lower()
    with pytest.raises(GroupsBrokenError):
        exchange_totals([1.0], HOST, seal)
    assert exchange_totals([1.0], HOST, fence.make_pass()) == ((1.0,), False)
