"""Layer units: what is packed comes out the same, and what does not fit is refused in one sentence."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from holdfast.client.elastic.layer_state import LayerUnit, UnitError, digest_packed, find_shared

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
    "amsgrad": functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "momentum": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-2),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
}


class Layer(nn.Module):
    """Parameters of two kinds, one that is frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.small = nn.Parameter(torch.randn(3).bfloat16())
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("scale", torch.tensor(2.0))


def make(optimizer: str = "adamw", number: int = 1, seed: int = 0) -> LayerUnit:
    return LayerUnit(number, Layer, OPTIMIZERS[optimizer], seed)


def train(unit: LayerUnit, first: int, last: int) -> LayerUnit:
    for step in range(first, last + 1):
        count = sum(parameter.numel() for parameter in unit.parameters)
        unit.gradient = torch.randn(count, generator=torch.Generator().manual_seed(step))
        unit.apply(step, None, None)
    return unit


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_unit_goes_on_elsewhere_as_where_it_was(optimizer: str) -> None:
    here = train(make(optimizer), 1, 3)
    there = make(optimizer, seed=7)
    there.unpack(here.pack())
    assert there.step == 3 and digest_packed(there.pack()) == digest_packed(here.pack())
    assert digest_packed(train(there, 4, 5).pack()) == digest_packed(train(here, 4, 5).pack())


def test_what_a_layer_draws_follows_from_the_seed_and_its_number() -> None:
    torch.manual_seed(3)
    one = make().pack()
    state = torch.get_rng_state()
    assert torch.equal(make().pack(), one)
    assert torch.equal(torch.get_rng_state(), state), "the script's own random numbers are left alone"
    assert not torch.equal(make(seed=1).pack()[-64:], one[-64:])


def test_a_step_is_made_once() -> None:
    unit = train(make(), 1, 2)
    before = digest_packed(unit.pack())
    unit.gradient = torch.ones(sum(parameter.numel() for parameter in unit.parameters))
    unit.apply(2, None, None)
    assert digest_packed(unit.pack()) == before


def test_a_step_that_is_interrupted_leaves_no_whole_unit() -> None:
    unit = train(make(), 1, 1)
    assert unit.optimizer is not None

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    unit.optimizer.register_step_post_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(unit, 2, 2)
    assert (unit.step, unit.whole) == (1, False)


def refuse(unit: LayerUnit, packed: torch.Tensor) -> str:
    with pytest.raises(UnitError) as caught:
        unit.unpack(packed)
    return str(caught.value)


def test_what_does_not_fit_is_refused() -> None:
    packed = make().pack()
    assert refuse(make(number=2), packed) == "layer 1 came where layer 2 was wanted"
    assert refuse(make(), packed[:-16]) == "a packed layer ends too soon"
    assert refuse(make(), packed[:100]) == "a packed layer ends too soon"
    other = LayerUnit(1, functools.partial(nn.Linear, 2, 2), OPTIMIZERS["adamw"], 0)
    assert refuse(other, packed) == "layer 1 has another weight than the one that came"
    assert not other.whole


def test_damaged_bytes_are_refused_or_read() -> None:
    packed = make().pack()
    chance = torch.Generator().manual_seed(0)
    for _ in range(300):
        damaged = packed.clone()
        at = int(torch.randint(0, packed.numel(), (1,), generator=chance))
        damaged[at] = int(torch.randint(0, 256, (1,), generator=chance))
        try:
            make().unpack(damaged)
        except UnitError:
            continue


def test_layers_that_share_a_parameter_are_named() -> None:
    one = nn.Linear(2, 2)
    units = [LayerUnit(number, lambda: one, OPTIMIZERS["sgd"], 0) for number in (3, 4)]
    assert find_shared(units) == "layers 3 and 4 share a parameter; make them one layer"
    assert not find_shared([make(number=0), make(number=1)])
