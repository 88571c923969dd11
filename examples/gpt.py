"""A small GPT, trained with DDP on text it writes itself, that resumes bit for bit from its last checkpoint.

    python examples/gpt.py --steps 50
    torchrun --standalone --nproc-per-node=4 examples/gpt.py --steps 50 --ckpt DIR
    holdfast run --standalone --nproc-per-node=4 examples/gpt.py --steps 50 --ckpt DIR
    holdfast run --standalone --nproc-per-node=8 examples/gpt.py --device cuda --size large --steps 500

Three things make a resumed run equal to an undisturbed one. Every random number of a step (its batch, its dropout)
follows from (seed, step, rank), so no sampler or generator state needs saving. Kernels are deterministic and run in one
thread. And DDP keeps one layout of its gradient buckets, so that the sums are taken in the same order after a restart.
"""

import argparse
import ctypes
import hashlib
import os
import random
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import holdfast

DROPOUT = 0.1


class Size(NamedTuple):
    width: int
    layers: int
    heads: int
    span: int  # characters that the model looks back
    batch: int  # of one rank


SIZES = {
    "small": Size(width=64, layers=4, heads=4, span=64, batch=16),
    "large": Size(width=2048, layers=12, heads=16, span=1024, batch=8),  # 604 million parameters
}


def make_text(sentences: int = 2000) -> str:
    pick = random.Random(1).choice
    things = "harbour lantern rope anchor gull keel ferry island chart bell mast tide".split()
    kinds = "quiet old bright heavy northern patient broken little steady grey".split()
    deeds = "holds follows finds leaves guards answers carries forgets".split()
    return "".join(
        f"the {pick(kinds)} {pick(things)} {pick(deeds)} the {pick(kinds)} {pick(things)}.\n" for _ in range(sentences)
    )


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        rows, span, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, span, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).reshape(x.shape)))
        return x + cast(Tensor, self.drop(self.mlp(self.norm2(x))))


class GPT(nn.Module):
    """Characters in, the mean loss of predicting each next one out."""

    def __init__(self, letters: int, size: Size) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, size.width), nn.Embedding(size.span, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, letters)

    def forward(self, window: Tensor) -> Tensor:
        seen, wanted = window[:, :-1], window[:, 1:]
        x = self.letter(seen) + self.place(torch.arange(seen.shape[1], device=seen.device))
        guess = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(guess.flatten(0, 1), wanted.flatten())


class Checkpoint:
    """The newest state of the job in one file; a kill at any instant leaves the old one or the new one, never half."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.path, self.model, self.optimizer = folder / "checkpoint.pt", model, optimizer

    def save(self, step: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        state = {"step": step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        beside = self.path.with_suffix(".tmp")
        with beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)

    def restore(self) -> int:
        """Load what was saved last, and return its step; 0 when there is nothing yet."""
        if not self.path.exists():
            return 0
        state = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])


def join_group(backend: str) -> int:
    """Join the other ranks as the launcher says; started without one, be the only rank."""
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank()


def draw_window(text: Tensor, size: Size, key: tuple[int, int, int]) -> Tensor:
    """Seed this step's random numbers from (seed, step, rank), and draw its batch with the first of them."""
    seed, step, rank = key
    torch.manual_seed((seed * 1_000_003 + step) * 100_003 + rank)
    starts = torch.randint(len(text) - size.span, (size.batch, 1))
    return text[starts + torch.arange(size.span + 1)]


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, values in model.named_parameters():
        found.update(name.encode())
        bits = values.detach().cpu().contiguous()
        found.update(ctypes.string_at(bits.data_ptr(), bits.nbytes))
    return found.hexdigest()


def train(args: argparse.Namespace, rank: int) -> None:
    words, size = make_text(), SIZES[args.size]
    letters = sorted(set(words))
    text = torch.tensor([letters.index(letter) for letter in words])
    torch.manual_seed(args.seed)
    model = GPT(len(letters), size).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 * 64 / size.width)
    replay = holdfast.replayable(seed=args.seed)
    checkpoint = Checkpoint(args.ckpt, model, optimizer) if args.ckpt else None
    done = checkpoint.restore() if checkpoint else 0
    if rank == 0 and done:
        print(f"resumed from step {done}", flush=True)
    # By default DDP rebuilds its buckets after the first backward of each launch, and then sums in another order.
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    for step in range(done + 1, args.steps + 1):
        if holdfast.skip(step):  # its batch was found to be a bad one
            continue
        loss = ddp(draw_window(text, size, (args.seed, step, rank)).to(args.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        holdfast.step(step, loss=loss.item(), tokens=size.batch * size.span * dist.get_world_size())
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
            if checkpoint and not replay and step % args.ckpt_every == 0:
                checkpoint.save(step)
        if replay.done(step, model.parameters()):
            break
    if rank == 0:
        if args.out:
            torch.save(model.state_dict(), replay.path(args.out))
        print(f"weights sha256: {digest(model)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ckpt", type=Path, metavar="DIR", help="keep a checkpoint here, and resume from it")
    parser.add_argument("--ckpt-every", type=int, default=10, metavar="N", help="steps between checkpoints")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the final weights here")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU for each rank")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model and its batches")
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    rank = join_group("nccl" if args.device == "cuda" else "gloo")
    train(args, rank)
    # After `train`, which has let go of DDP by then: a DDP that outlives its group can deadlock when it is freed.
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may add in any order
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    main()
