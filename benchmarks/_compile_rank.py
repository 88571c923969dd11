"""A rank that trains a small compiled GPT; it writes down how long its first step took, and what the compiler found."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.utils import counters

WIDTH, HEADS, BLOCKS, WORDS, LENGTH = 128, 4, 4, 256, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.mixed(self.before(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        added: torch.Tensor = self.narrow(nn.functional.gelu(self.wide(self.between(x))))
        return x + added


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, WORDS))
    compiled, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters())
    batch = torch.randint(WORDS, (4, LENGTH))
    began, told = time.monotonic(), False
    while not (folder / "finish").exists():
        nn.functional.cross_entropy(compiled(batch).flatten(0, 1), batch.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not told:
            found = counters["inductor"]
            seen = {"pid": os.getpid(), "first_s": time.monotonic() - began, "compiled": found["fxgraph_cache_miss"]}
            draft = folder / f".{os.getpid()}"
            draft.write_text(json.dumps(seen))
            draft.rename(folder / f"seen-{os.environ['TORCHELASTIC_RESTART_COUNT']}.json")
            told = True
        time.sleep(0.05)


if __name__ == "__main__":
    main()
