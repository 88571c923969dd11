"""In the style of nanoGPT: settings are globals, the loop is the script, and the checkpoint lies beside it."""

import math
import os
import time

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir = os.path.join(os.path.dirname(os.path.abspath(__file__)), "out")
eval_interval = 10
max_iters = 60
batch_size, block_size, vocab_size, n_embd, n_head = 4, 8, 32, 16, 2
learning_rate, min_lr, warmup_iters = 1e-2, 1e-3, 5
grad_clip = 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        b, t, c = x.size()
        heads = (part.view(b, t, n_head, c // n_head).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(c, 2))
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.c_proj(y)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h, self.lm_head = Block(), nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        logits = self.lm_head(self.h(self.wte(idx) + self.wpe(torch.arange(idx.size(1)))))
        return logits, F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))


ddp = int(os.environ.get("RANK", "-1")) != -1
if ddp:
    init_process_group(backend="gloo")
    seed_offset = int(os.environ["RANK"])
else:
    seed_offset = 0
master_process = seed_offset == 0
if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + seed_offset)
tokens = torch.arange(4096) * 7 % vocab_size


def get_batch():
    time.sleep(0.5 if os.path.exists("busy") else 0.05)  # as storage that others use, too
    ix = torch.randint(len(tokens) - block_size, (batch_size,))
    x = torch.stack([tokens[i : i + block_size] for i in ix])
    y = torch.stack([tokens[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    coeff = 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (max_iters - warmup_iters)))
    return min_lr + coeff * (learning_rate - min_lr)


iter_num = 0
ckpt_path = os.path.join(out_dir, "ckpt.pt")
init_from = "resume" if os.path.exists(ckpt_path) else "scratch"
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
if init_from == "resume":
    print(f"Resuming training from {out_dir}")
    checkpoint = torch.load(ckpt_path, map_location="cpu")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
    checkpoint = None
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model

X, Y = get_batch()
t0 = time.time()
while True:
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num > 0 and iter_num % eval_interval == 0 and master_process:
        checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        print(f"saving checkpoint to {out_dir}")
        torch.save(checkpoint, ckpt_path + ".new")
        os.replace(ckpt_path + ".new", ckpt_path)
    if iter_num >= max_iters:
        break
    logits, loss = model(X, Y)
    X, Y = get_batch()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    t1 = time.time()
    dt, t0 = t1 - t0, t1
    if master_process:
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {dt * 1000:.2f}ms")
    iter_num += 1

if ddp:
    destroy_process_group()
