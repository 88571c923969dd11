"""A small GPT for the reference probe: its weights, its batch and its training step are the same everywhere.

Weights come from a hash of their positions: the numbers of a random generator change with versions and devices.
"""

import torch
from torch import nn
from torch.nn import functional

from holdfast.agent.probes.probe_tools import float_tensor, integer_tensor

_LEARNS = 1e-2
_VOCABULARY = 256


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, device: torch.device, seed: int) -> None:
        super().__init__()
        scale = width**-0.5
        shapes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        made = [nn.Parameter(scale * float_tensor(shape, device, seed + number)) for number, shape in enumerate(shapes)]
        self.qkv, self.out, self.up, self.down = made
        self.first = nn.LayerNorm(width, device=device)
        self.second = nn.LayerNorm(width, device=device)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = torch.matmul(self.first(x), self.qkv).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        # Written out: which kernel a library takes for attention is a matter of its version, and probed by itself.
        scores = torch.matmul(q, k.transpose(-1, -2)) * (width // self.heads) ** -0.5
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = torch.matmul(torch.softmax(scores.masked_fill(hidden, float("-inf")), -1), v)
        x = x + torch.matmul(mixed.transpose(1, 2).reshape(batch, length, width), self.out)
        return x + torch.matmul(functional.gelu(torch.matmul(self.second(x), self.up)), self.down)


class MiniGpt(nn.Module):
    def __init__(self, width: int, layers: int, length: int, device: torch.device) -> None:
        super().__init__()
        self.token = nn.Parameter(width**-0.5 * float_tensor((_VOCABULARY, width), device, 100))
        self.position = nn.Parameter(width**-0.5 * float_tensor((length, width), device, 101))
        self.blocks = nn.ModuleList(GptBlock(width, width // 32, device, 200 + 10 * n) for n in range(layers))
        self.norm = nn.LayerNorm(width, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # A product with ones and zeros: the backward of a table look-up adds in no fixed order on GPUs.
        x = torch.matmul(_one_hot(tokens), self.token) + self.position
        for block in self.blocks:
            x = block(x)
        return torch.matmul(self.norm(x), self.token.transpose(0, 1))


def _one_hot(tokens: torch.Tensor) -> torch.Tensor:
    """Return the one-hot encoding of the tokens."""
    return (tokens.unsqueeze(-1) == torch.arange(_VOCABULARY, device=tokens.device)).float()


def train_step(width: int, layers: int, length: int, device: torch.device) -> list[torch.Tensor]:
    """Make one training step; return the loss, then all gradients, then all parameters."""
    model = MiniGpt(width, layers, length, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNS, foreach=False, fused=False)
    tokens = integer_tensor((4, length + 1), device, 300) % _VOCABULARY
    given = tokens[:, :-1]
    loss = -(functional.log_softmax(model(given), -1) * _one_hot(tokens[:, 1:])).sum() / given.numel()
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    return [loss.detach(), *grads, *(p.detach() for p in model.parameters())]
