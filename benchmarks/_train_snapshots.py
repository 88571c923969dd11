"""A job on one GPU that takes a snapshot at every step: what it restores from memory, and what becomes of its weights.

Events as in _train_ddp.py: start, imported, cuda_up, made (the model is on the GPU), rehearsed (a standing spare rank
has made a step), entered (the training function), laid (there is a Checkpointer), answered (the keeper told where the
state is), restored (step: from which), step. The last words are a checksum of all weights, in the file that --ckpt
names. With BENCH_SPARE=1 the function survives, so that with recovery.spares a spare rank stands by.
"""

import argparse
import json
import os
import time
from pathlib import Path

started_at = time.time()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # noqa: E402  the start counts from before the imports
import torch.distributed as dist  # noqa: E402
import xxhash  # noqa: E402
from torch import nn  # noqa: E402

import holdfast  # noqa: E402
from holdfast.checkpoint.keeper_client import KeeperClient  # noqa: E402
from holdfast.wire.rank_keeper_messages import StateGrant, StateRequest  # noqa: E402

imported_at = time.time()
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CPU_STEP_S = 0.1  # so that a job on a processor does not end before it is struck
SPARE = os.environ.get("BENCH_SPARE") == "1"
WIDTH, LAYERS, TOKENS = (4096, 40, 32768) if ON_GPU else (256, 4, 64)  # 671 million parameters


def network() -> nn.Module:
    with DEVICE:
        parts = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
        return nn.Sequential(*parts)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batch = torch.randn(TOKENS, WIDTH, device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def digest(model: nn.Module) -> str:
    found = xxhash.xxh3_64()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
    return found.hexdigest()


class Noter:
    """Writes this process's events."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def note(self, kind: str, at: float | None = None, step: int = 0) -> None:
        event = {"at": at or time.time(), "kind": kind, "pid": os.getpid(), "rank": 0, "world": 1, "step": step}
        self._file.write(json.dumps(event) + "\n")

    def note_answers(self) -> None:
        """From now on, note when the keeper has answered where the state is."""
        ask = KeeperClient.request_state

        def resume(link: KeeperClient, asked: StateRequest) -> StateGrant:
            answer = ask(link, asked)
            self.note("answered")
            return answer

        KeeperClient.request_state = resume  # type: ignore[method-assign, assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=Path, required=True, help="folder for the events")
    parser.add_argument("--ckpt", type=Path, required=True, help="where the checksum goes")
    parser.add_argument("--steps", type=int, default=int(os.environ.get("BENCH_STEPS", "30")))
    args = parser.parse_args()
    events = Noter(args.events)
    events.note("start", started_at)
    events.note("imported", imported_at)
    if SPARE:
        dist.init_process_group("nccl" if ON_GPU else "gloo")
    torch.manual_seed(0)
    torch.ones(8, device=DEVICE).sum().item()
    events.note("cuda_up")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if ON_GPU:
        torch.cuda.synchronize()
    events.note("made")
    events.note_answers()

    def rehearse() -> None:
        trained(model, optimizer)
        events.note("rehearsed")

    def train(here: holdfast.Here | None = None) -> None:
        events.note("entered")
        ckpt = holdfast.Checkpointer(model=model, optimizer=optimizer)
        events.note("laid")
        start = ckpt.restore()
        events.note("restored", step=start)
        for step in range(start + 1, args.steps + 1):
            trained(model, optimizer)
            if ON_GPU:
                torch.cuda.current_stream().synchronize()  # of the step alone: copies go on beside the next
            else:
                time.sleep(CPU_STEP_S)
            events.note("step", step=step)
            ckpt.save(step)

    if SPARE:
        holdfast.survive(model=model, optimizer=optimizer, rehearsal=rehearse)(train)()
    else:
        train()
    if ON_GPU:
        torch.cuda.synchronize()
    args.ckpt.write_text(digest(model))


if __name__ == "__main__":
    main()
