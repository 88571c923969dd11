"""A script with DDP and a Checkpointer, replayed by groups of real ranks: all alike, but for the one on a bad node."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from holdfast.core.replay.majority import GroupResult, ReplayMajority
from holdfast.core.replay.regrouped_replay import ReplayGroup, ReplayWave
from holdfast.core.replay.regrouped_session import GroupLaunch, wave_launches
from holdfast.model.job_and_seats import Seat
from holdfast.wire.rank_memory.slot_writer import SLOT_BYTES
from holdfast.wire.replay_environment import decode_signatures, replay_variables, signature_path
from tests.client.conftest import Zygote

SCRIPT = """
import os, sys, torch, torch.distributed as dist, holdfast
torch.set_num_threads(1)
replay = holdfast.replayable(seed=3)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ddp = holdfast.attach(torch.nn.parallel.DistributedDataParallel(model))
ckpt = holdfast.Checkpointer(model=ddp, optimizer=optimizer, path=sys.argv[1], every=2)
step = ckpt.restore()
last = step + (replay.steps if replay else 4)
while step < last:
    step += 1
    x = torch.randn(4, 8)
    loss = ddp(x).square().mean()
    loss.backward()
    if os.environ.get("HOLDFAST_NODE") == "n4" and step == last - 1:
        model.weight.grad.view(torch.int32)[0, 0] ^= 1 << 20
    optimizer.step()
    optimizer.zero_grad()
    holdfast.step(step, loss=loss.item())
    ckpt.save(step)
    ckpt.wait()  # or the next might come while this one is still being written
dist.barrier()
with open(replay.path(sys.argv[2]), "a") as file:
    print(step, file=file)
os._exit(0)
"""


@pytest.fixture
def stores() -> Iterator[list[TCPStore]]:
    kept: list[TCPStore] = []
    yield kept
    kept.clear()


def envs_of(launch: GroupLaunch, port: int, folder: Path) -> list[dict[str, str]]:
    """What an agent gives to the ranks of a group."""
    shared = {"WORLD_SIZE": str(launch.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "HOLDFAST_GENERATION": "9"}
    shared |= replay_variables(launch.replay, str(folder / launch.replay.name))
    return [shared | {"RANK": str(seat.first_rank), "HOLDFAST_NODE": seat.node} for seat in launch.seats]


def signed(folder: Path, rank: int) -> list[tuple[int, int, int | None]]:
    return list(decode_signatures(Path(signature_path(str(folder), rank)).read_bytes()))


def test_the_group_with_the_bad_node_differs(warm: Zygote, tmp_path: Path, stores: list[TCPStore], arena: Any) -> None:
    script, ckpt, out = tmp_path / "train.py", tmp_path / "ckpt", tmp_path / "out"
    script.write_text(SCRIPT)
    path, memory = arena
    memory.resize(6 * SLOT_BYTES)

    def run(envs: list[dict[str, str]]) -> None:
        ranks = warm.forks(envs, str(script), str(ckpt), str(out))
        ended = [warm.wait(rank) for rank in ranks]
        assert [one.code for one in ended] == [0] * len(envs), [one.err for one in ended]

    def new_port() -> int:
        stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        return int(stores[-1].port)

    training = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(new_port())}
    training["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    run([training | {"RANK": str(rank)} for rank in range(3)])
    trained = sorted(str(path) for path in ckpt.rglob("*"))
    assert len(list(ckpt.glob("step-*"))) == 2

    seats = tuple(Seat(node=f"n{x}", group_rank=x, first_rank=x, nproc=1) for x in range(6))
    cut = [("h0", ("n0", "n1")), ("h1", ("n2", "n3")), ("h2", ("n4", "n5"))]
    wave = ReplayWave(groups=tuple(ReplayGroup(name=name, phase=1, repeat=1, nodes=nodes) for name, nodes in cut))
    launched = wave_launches(wave, seats, (), steps=3, not_after=4)
    envs = [env for launch in launched for env in envs_of(launch, new_port(), tmp_path / "replays")]
    for index, env in enumerate(envs):
        env["HOLDFAST_SLOT"] = f"{path}:{index}"
    run(envs)

    found = {}
    for launch in launched:
        heard = {rank: signed(tmp_path / "replays" / launch.replay.name, rank) for rank in range(2)}
        marks = {(step, rank): state for rank, lines in heard.items() for step, state, _ in lines}
        found[launch.group.name] = GroupResult(marks=marks)
        assert {step for step, _ in marks} == {5, 6, 7}, "from the checkpoint of step 4, three steps on"
        assert all(sent for lines in heard.values() for _, _, sent in lines), "gradients are signed before their sum"
    assert ReplayMajority().judge_wave(found) == {"h0": False, "h1": False, "h2": True}
    assert sorted(str(path) for path in ckpt.rglob("*")) == trained, "nothing was published"
    assert out.read_text().split() == ["4"] * 3
    assert (tmp_path / "replays" / "1-1-h2" / "out").read_text().split() == ["7", "7"]
