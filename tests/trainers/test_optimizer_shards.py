"""What an optimizer holds comes back bit for bit into a new one that has made no step yet."""

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.state_image import StateError
from holdfast.trainers.optimizer_shards import GroupValues, ModuleBuffers, PlainFields, ShardCheckpointer


class MasterWeights:
    """A model of 16 bits whose optimizer holds masters of 32, as trainers make it."""

    def __init__(self, path: Path) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).bfloat16()
        self.masters = [parameter.detach().float() for parameter in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scale = 1024.0
        extra = {"scale": PlainFields(self, ["scale"]), "schedule": self.schedule}
        self.held = ShardCheckpointer([self.optimizer], self.model, extra, path=path, every=1)

    def copy_masters(self) -> None:
        with torch.no_grad():
            for parameter, weights in zip(self.model.parameters(), self.masters, strict=True):
                parameter.copy_(weights)

    def make_step(self, step: int) -> None:
        self.model(torch.arange(8.0).reshape(2, 4).bfloat16() * step).square().sum().backward()
        for parameter, weights in zip(self.model.parameters(), self.masters, strict=True):
            assert parameter.grad is not None
            weights.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        self.schedule.step()
        self.copy_masters()
        self.scale /= 2

    def tell(self) -> list[bytes]:
        tensors = [*self.masters, *self.model.state_dict().values()]
        return [tensor.detach().view(torch.uint8).numpy().tobytes() for tensor in tensors if tensor.dim()]


def test_a_state_comes_back_into_an_optimizer_that_has_made_no_step(tmp_path: Path) -> None:
    calm = MasterWeights(tmp_path / "ckpt")
    assert calm.held.restore(calm.copy_masters) == 0
    for step in (1, 2, 3):
        calm.make_step(step)
        calm.held.save(step)
    calm.held.close()
    again = MasterWeights(tmp_path / "ckpt")
    assert again.tell() != calm.tell()
    assert again.held.restore(again.copy_masters) == 3
    assert again.tell() == calm.tell() and again.scale == calm.scale
    for one in (calm, again):
        one.make_step(4)
    assert again.tell() == calm.tell()
    assert again.optimizer.param_groups[0]["lr"] == calm.optimizer.param_groups[0]["lr"]


def test_an_optimizer_whose_state_cannot_be_foreseen_is_refused(tmp_path: Path) -> None:
    first = MasterWeights(tmp_path / "ckpt")
    first.make_step(1)
    first.held.save(1)
    first.held.close()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    held = ShardCheckpointer([optimizer], model, {}, path=tmp_path / "ckpt")
    with pytest.raises(StateError, match=r"\bLBFGS\b"):
        held.restore(lambda: None)


class Wrapper(torch.nn.Module):
    """Its state dict has the names of the inner module, as that of Megatron's DistributedDataParallel has."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.BatchNorm1d(4)
        self.module.register_buffer("scratch", torch.zeros(1), persistent=False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def forward(self, batch: torch.Tensor) -> Any:
        return self.module(batch)


def test_buffers_come_back_whatever_a_wrapper_calls_them(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.ModuleList, torch.optim.Optimizer, ShardCheckpointer]:
        models = torch.nn.ModuleList([Wrapper(), Wrapper()])
        optimizer = torch.optim.SGD(models.parameters(), lr=0.1, momentum=0.9)
        return models, optimizer, ShardCheckpointer([optimizer], models, {}, path=tmp_path / "ckpt", every=1)

    models, optimizer, held = make()
    for n, model in enumerate(models):
        model(torch.arange(8.0).reshape(2, 4) + n).sum().backward()
    optimizer.step()
    held.save(1)
    held.close()
    again, _, restoring = make()
    assert restoring.restore(lambda: None) == 1
    names = {f"{n}.module.{name}" for n in (0, 1) for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert ModuleBuffers(again).state_dict().keys() == names
    saved, restored = dict(models.named_buffers()), dict(again.named_buffers())
    assert all(saved[name].any() and saved[name].equal(restored[name]) for name in names)


def test_a_state_without_a_buffer_is_refused() -> None:
    buffers = ModuleBuffers(torch.nn.BatchNorm1d(4))
    saved = buffers.state_dict()
    del saved["running_var"]
    with pytest.raises(StateError, match=r"running_var"):
        buffers.load_state_dict(saved)


def make_frozen(path: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer, ShardCheckpointer]:
    """A model with a frozen weight, whose optimizer was given all parameters."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model.get_parameter("0.weight").requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, ShardCheckpointer([optimizer], model, {}, path=path, every=1)


def test_a_frozen_parameter_gets_no_state(tmp_path: Path) -> None:
    model, optimizer, held = make_frozen(tmp_path / "ckpt")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    held.save(1)
    held.close()
    again, new, restoring = make_frozen(tmp_path / "ckpt")
    assert restoring.restore(lambda: None) == 1
    trained, weight = model.get_parameter("1.weight"), again.get_parameter("1.weight")
    assert len(new.state) == 3 and weight.equal(trained)
    assert new.state[weight]["exp_avg"].equal(optimizer.state[trained]["exp_avg"])


def test_a_state_of_more_parameters_than_the_optimizer_will_hold_is_refused() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    values = GroupValues([optimizer])
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer.step()
    saved = values.state_dict()
    values.load_state_dict(saved)
    del optimizer.state[weights[0]]
    with pytest.raises(StateError) as refused:
        values.load_state_dict(saved)
    assert str(refused.value) == "the optimizers will hold [1] states of parameters, and [2] were saved"
