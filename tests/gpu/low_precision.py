"""Checks of states in 8 and 16 bits on a GPU, with the scales that belong to them; `checkpoint_cuda.py` runs them."""

import os
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from holdfast.checkpoint.dcp import Reader, Writer
from holdfast.client.checkpointing.checkpointer import Checkpointer
from holdfast.wire.progress_environment import KEEPER
from tests.client.fake_keeper import FakeKeeper
from tests.gpu.counted_state import Found, snapshots_of

EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = torch.float8_e8m0fnu  # of blocks, as MX formats have them
LARGE, SMALL = 1536, 24  # of matrices: those that are copied by themselves, and those that are packed


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8).cpu()


def all_bits(dtype: torch.dtype, size: int) -> torch.Tensor:
    """Every pattern of bits, NaN among them."""
    raw = torch.randint(0, 256, (size, size * dtype.itemsize), dtype=torch.uint8, device="cuda")
    return raw.view(dtype)


def make_state() -> dict[str, torch.Tensor]:
    """Weights in few bits, some of them the other way round in memory, as matrix products want them; their scales."""
    state: dict[str, torch.Tensor] = {}
    for dtype in (*EIGHT, SCALES, torch.bfloat16):
        for size in (LARGE, SMALL):
            name = f"{str(dtype).removeprefix('torch.')}_{size}"
            state[name] = all_bits(dtype, size)
            state[f"{name}_turned"] = all_bits(dtype, size).t()
    state["amax_history"] = torch.rand(16, 24, device="cuda")
    state["scale"] = torch.rand((), device="cuda")
    return state


def change(state: dict[str, torch.Tensor]) -> None:
    """As a step does: other bits everywhere, and the history rolls on."""
    for name, tensor in state.items():
        if name == "amax_history":
            tensor.copy_(torch.roll(tensor, 1, 0).mul_(1.01))
        elif name == "scale":
            tensor.mul_(1.1)
        else:
            turned = name.endswith("turned")
            (tensor.t() if turned else tensor).view(torch.uint8).random_(0, 256)


def state_of_few_bits(keeper: FakeKeeper) -> Found:
    """Snapshots beside a state that changes at once, and a restore into another state: the same bits."""
    state = make_state()
    ckpt = Checkpointer(state_dict=state)
    wanted: dict[int, dict[str, torch.Tensor]] = {}
    looked = 0
    for step in range(1, 31):
        if step % 5 == 0:
            torch.cuda._sleep(20_000_000)
        ckpt.before_step()
        change(state)
        wanted[step] = {name: tensor.clone() for name, tensor in state.items()}
        assert ckpt.save(step)
        looked += look(ckpt, keeper, wanted) if step % 10 == 0 else 0
    ckpt.close()
    looked += look(ckpt, keeper, wanted)
    other = make_state()
    assert Checkpointer(state_dict=other).restore() == 30
    for name, tensor in other.items():
        assert torch.equal(bits(tensor), bits(wanted[30][name])), f"{name} was restored with other bits"
    return {"tensors looked at": looked, "restored": len(other)}


def look(ckpt: Checkpointer, keeper: FakeKeeper, wanted: dict[int, dict[str, torch.Tensor]]) -> int:
    ckpt.wait()
    looked = 0
    for sealed in keeper.arena().list_sealed():
        image = snapshots_of(ckpt).images[sealed.slot]
        for index, item in enumerate(image.layout.items):
            if item.spec.key in wanted[sealed.step]:
                same = torch.equal(bits(image.payloads[index]), bits(wanted[sealed.step][item.spec.key]))
                assert same, f"step {sealed.step}: {item.spec.key} has other bits"
                looked += 1
    return looked


class Scaled(nn.Module):
    """Weights in bfloat16 that are cast to 8 bits by a scale that follows from the last maxima."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.bfloat16) / width**0.5)
        self.register_buffer("cast", torch.zeros(width, width, dtype=torch.float8_e4m3fn))
        self.register_buffer("amax_history", torch.ones(8))
        self.register_buffer("scale", torch.ones(()))
        self.cast: torch.Tensor
        self.amax_history: torch.Tensor
        self.scale: torch.Tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.amax_history.copy_(torch.roll(self.amax_history, 1))
            self.amax_history[0] = self.weight.abs().amax().float()
            self.scale.copy_(448.0 / self.amax_history.amax())
            self.cast.copy_((self.weight.float() * self.scale).to(torch.float8_e4m3fn))
        casted = self.cast.to(torch.bfloat16) / self.scale.to(torch.bfloat16)
        weight = self.weight + (casted - self.weight).detach()
        return inputs @ weight


def model_of_few_bits(keeper: FakeKeeper) -> Found:
    """A model in bfloat16 with casts in 8 bits, and AdamW whose moments are in bfloat16: resumed, it ends the same."""

    def run(seed: int, resume: bool) -> list[torch.Tensor]:
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(seed)
        model = nn.Sequential(Scaled(1024), nn.GELU(), Scaled(1024)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        ckpt = Checkpointer(model=model, optimizer=optimizer)
        start = ckpt.restore()
        assert start == (6 if resume else 0)
        for step in range(start + 1, 13):
            made = torch.Generator("cuda").manual_seed(step)
            inputs = torch.randn(64, 1024, device="cuda", generator=made).bfloat16()
            (model(inputs) - inputs).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step <= 6:
                ckpt.save(step)
        ckpt.close()
        kept = [tensor for own in optimizer.state.values() for tensor in own.values()]
        return [bits(tensor.reshape(-1)) for tensor in (*model.state_dict().values(), *kept)]

    wanted, again = run(0, False), run(1, True)
    same = [torch.equal(one, other) for one, other in zip(wanted, again, strict=True)]
    assert all(same), f"{same.count(False)} of {len(same)} tensors differ"
    return {"tensors compared": len(same)}


def checkpoints_of_few_bits(keeper: FakeKeeper) -> Found:
    """`dcp.save` and `dcp.load` by holdfast's Writer and Reader, and by the Reader of what torch has written."""
    os.environ.pop(KEEPER)  # they are written by this process
    state = make_state()
    wanted = {name: bits(tensor) for name, tensor in state.items()}
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(state, checkpoint_id="step-1", storage_writer=Writer(f"{folder}/ours"), no_dist=True)
        dcp.save(state, checkpoint_id=f"{folder}/torch", no_dist=True)
        for name, reader in {"ours": Reader(f"{folder}/ours"), "torch's": Reader(f"{folder}/torch")}.items():
            change(state)
            dcp.load(state, storage_reader=reader, no_dist=True)
            for key, tensor in state.items():
                assert torch.equal(bits(tensor), wanted[key]), f"{name}: {key} has other bits"
            found[name] = len(state)
    return found


CHECKS = {
    "a state in 8 bits": state_of_few_bits,
    "a model in 8 and 16 bits": model_of_few_bits,
    "checkpoints in 8 bits": checkpoints_of_few_bits,
}
