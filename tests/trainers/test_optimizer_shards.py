"""What an optimizer holds comes back bit for bit into a new one that has made no step yet."""

from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.state_image import StateError
from holdfast.trainers.optimizer_shards import PlainFields, ShardCheckpointer


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
