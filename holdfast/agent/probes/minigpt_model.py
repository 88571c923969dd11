"""A small GPT for the reference probes: its weights, its batch and its training step are the same everywhere. Weights
are a hash of their positions, because a random generator's numbers differ between versions and devices. The same code
makes the step on one device or, with the model split, on several."""

import msgspec
import torch
from torch import nn
from torch.nn import functional

from holdfast.agent.probes.minigpt_collectives import ALONE, RankExchange
from holdfast.agent.probes.probe_tools import float_tensor, integer_tensor

_LEARNS = 1e-2
_VOCABULARY = 256
_BATCH = 4
_HEAD_WIDTH = 32


class MiniGptForm(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and dtype of the model; `experts` is the number of experts in each layer, 0 for a dense model."""

    width: int
    layers: int
    length: int
    dtype: torch.dtype = torch.float32
    experts: int = 0

    def __str__(self) -> str:
        kind = "" if self.dtype is torch.float32 else f"{str(self.dtype).removeprefix('torch.')} "
        experts = f" {self.experts} experts" if self.experts else ""
        return f"{kind}{self.width}x{self.layers}x{self.length}{experts}"


class GptBlock(nn.Module):
    def __init__(self, form: MiniGptForm, device: torch.device, seed: int, exchange: RankExchange) -> None:
        super().__init__()
        width, inner = form.width, exchange.inner
        cuts = 1 if form.experts else inner.size  # experts are shared out whole, and attention is on every rank then
        scale, wide = width**-0.5, width // cuts
        mine = slice(inner.index * wide, inner.index * wide + wide) if cuts > 1 else slice(None)
        wider = slice(4 * wide * inner.index, 4 * wide * (inner.index + 1)) if cuts > 1 else slice(None)

        def weights(number: int, *shape: int) -> torch.Tensor:
            return float_tensor(shape, device, seed + number).mul(scale).to(form.dtype)

        self.qkv = nn.Parameter(weights(0, width, 3, width)[:, :, mine].reshape(width, 3 * wide))
        self.out = nn.Parameter(weights(1, width, width)[mine].clone())
        if form.experts:
            own = form.experts // inner.size
            held = slice(inner.index * own, inner.index * own + own)
            self.up = nn.Parameter(weights(2, form.experts, width, 4 * width)[held].clone())
            self.down = nn.Parameter(weights(3, form.experts, 4 * width, width)[held].clone())
            self.router = nn.Parameter(weights(4, width, form.experts))
        else:
            self.up = nn.Parameter(weights(2, width, 4 * width)[:, wider].clone())
            self.down = nn.Parameter(weights(3, 4 * width, width)[wider].clone())
        self.first = nn.LayerNorm(width, device=device, dtype=form.dtype)
        self.second = nn.LayerNorm(width, device=device, dtype=form.dtype)
        self.heads = wide // _HEAD_WIDTH
        self.form, self.exchange, self.name = form, exchange, f"layer {(seed - 200) // 10 + 1}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attend(self.first(x))
        return x + (self._ask_experts(self.second(x)) if self.form.experts else self._ask_mlp(self.second(x)))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        split = not self.form.experts
        x = self.exchange.enter_pieces(x, f"{self.name} attention") if split else x
        qkv = torch.matmul(x, self.qkv).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        # Written out: which kernel a library takes for attention is a matter of its version, and probed by itself.
        scores = torch.matmul(q, k.transpose(-1, -2)) * _HEAD_WIDTH**-0.5
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = torch.matmul(torch.softmax(scores.masked_fill(hidden, float("-inf")), -1), v)
        out = torch.matmul(mixed.transpose(1, 2).reshape(batch, length, -1), self.out)
        return self.exchange.add_pieces(out, f"{self.name} attention") if split else out

    def _ask_mlp(self, x: torch.Tensor) -> torch.Tensor:
        x = self.exchange.enter_pieces(x, f"{self.name} mlp")
        out = torch.matmul(functional.gelu(torch.matmul(x, self.up)), self.down)
        return self.exchange.add_pieces(out, f"{self.name} mlp")

    def _ask_experts(self, x: torch.Tensor) -> torch.Tensor:
        """Send every token to its best expert and back. Every expert has room for all tokens, so no token is dropped.
        Matrix products move the tokens, because they always add in the same order."""
        tokens = x.reshape(-1, x.shape[-1])
        count, experts, ranks = len(tokens), self.form.experts, self.exchange.inner.size
        odds = torch.softmax(torch.matmul(tokens.float(), self.router.float()), -1)
        chosen = (odds.argmax(-1, keepdim=True) == torch.arange(experts, device=x.device)).float()
        order = torch.matmul(torch.ones(count, count, device=x.device).tril(), chosen) - 1  # whole numbers: exact
        seats = (chosen.unsqueeze(-1) * (order.unsqueeze(-1) == torch.arange(count, device=x.device))).to(x.dtype)
        seats = seats.view(count, experts * count)
        sent = torch.matmul(seats.transpose(0, 1), tokens).view(experts, count, -1)
        got = self.exchange.swap_tokens(sent, f"{self.name} experts")
        asked = got.view(ranks, experts // ranks, count, -1).transpose(0, 1).reshape(experts // ranks, -1, x.shape[-1])
        said = torch.matmul(functional.gelu(torch.matmul(asked, self.up)), self.down)
        said = said.view(experts // ranks, ranks, count, -1).transpose(0, 1).reshape(experts, count, -1)
        back = self.exchange.swap_tokens(said, f"{self.name} answers")
        weight = (odds * chosen).sum(-1, keepdim=True).to(x.dtype)
        return (torch.matmul(seats, back.view(experts * count, -1)) * weight).view_as(x)


class MiniGpt(nn.Module):
    """One pipeline stage. The first stage and the last have the token table too, and the first has the positions."""

    def __init__(self, form: MiniGptForm, device: torch.device, exchange: RankExchange) -> None:
        super().__init__()
        scale, stage = form.width**-0.5, exchange.stage
        if stage.is_first or stage.is_last:
            table = scale * float_tensor((_VOCABULARY, form.width), device, 100)
            self.token = nn.Parameter(table.to(form.dtype))
        if stage.is_first:
            self.position = nn.Parameter((scale * float_tensor((form.length, form.width), device, 101)).to(form.dtype))
        own = form.layers // stage.size
        numbers = range(stage.index * own, stage.index * own + own)
        self.blocks = nn.ModuleList(GptBlock(form, device, 200 + 10 * n, exchange) for n in numbers)
        if stage.is_last:
            self.norm = nn.LayerNorm(form.width, device=device, dtype=form.dtype)

    def embed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        # A product with ones and zeros: the backward of a table look-up adds in no fixed order on GPUs.
        return torch.matmul(_one_hot(tokens).to(self.token.dtype), self.token) + self.position

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def score_tokens(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the loss: the sum over its tokens, divided by the whole batch's token count."""
        scores = torch.matmul(self.norm(x), self.token.transpose(0, 1)).float()
        return -(functional.log_softmax(scores, -1) * _one_hot(wanted)).sum() / (_BATCH * wanted.shape[1])


def _one_hot(tokens: torch.Tensor) -> torch.Tensor:
    """Return the one-hot encoding of the tokens."""
    return (tokens.unsqueeze(-1) == torch.arange(_VOCABULARY, device=tokens.device)).float()


def train_step(form: MiniGptForm, device: torch.device, exchange: RankExchange = ALONE) -> list[torch.Tensor]:
    """Make one training step; return the loss, then this rank's gradients, then its parameters. A rank without the last
    stage does not know the loss and returns 0 for it."""
    model = MiniGpt(form, device, exchange)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNS, foreach=False, fused=False)
    tokens = integer_tensor((_BATCH, form.length + 1), device, 300) % _VOCABULARY
    if form.experts:  # who has experts has a part of the batch
        part = _BATCH // exchange.inner.size
        tokens = tokens[exchange.inner.index * part :][:part]
    stage, given, wanted = exchange.stage, tokens[:, :-1], tokens[:, 1:]
    loss = torch.zeros((), device=device)
    shape = (*given.shape, form.width)
    if stage.is_first:
        x = model.embed_tokens(given)
    else:
        x = exchange.hand_on(torch.empty(shape, dtype=form.dtype, device=device), 0, "activations").requires_grad_()
    out = model(x)
    if stage.is_last:
        loss = model.score_tokens(out, wanted)
        loss.backward()
    else:
        exchange.hand_on(out.detach(), 0, "activations")
        out.backward(exchange.hand_on(torch.empty_like(out), 1, "gradients"))
    if not stage.is_first:
        assert x.grad is not None
        exchange.hand_on(x.grad, 1, "gradients")
    exchange.reduce_gradients(dict(model.named_parameters()), experts=bool(form.experts))
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    return [loss.detach(), *grads, *(p.detach() for p in model.parameters())]
