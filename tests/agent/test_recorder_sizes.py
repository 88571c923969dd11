"""How many entries torch's recorder gets: in a pipeline as many as the messages of a step need."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from holdfast.agent.rank.recorder_sizes import RecorderSizes
from holdfast.model.job_and_seats import Dims
from holdfast.wire.holder_messages import ExecRank, RankStarted
from holdfast.wire.rank_environment_defaults import make_rank_environment
from holdfast.wire.rank_memory.flight_log_writer import ChannelState, FlightLog, flight_log_offset
from holdfast.wire.rank_memory.slot_writer import SlotWriter, open_slot_memory
from tests.agent.test_rank_processes import Bench, close, launch_of

NAME = "TORCH_FR_BUFFER_SIZE"
PIPELINE: Dims = (("pp", 4), ("dp", 2))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    await close(made)


@pytest.mark.parametrize(
    ("mesh", "entries"),
    [
        ((), "64"),
        ((("dp", 8),), "64"),
        (PIPELINE, "1024"),
        ((("pipeline", 3),), "1024"),
        ((("pp", 1), ("tp", 8)), "64"),
    ],
)
def test_before_anything_is_known_a_pipeline_gets_the_most(mesh: Dims, entries: str) -> None:
    given = make_rank_environment({})
    assert (given | RecorderSizes().variables(0, given, mesh))[NAME] == entries


@pytest.mark.parametrize("name", [NAME, "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_the_users_size_stays(name: str) -> None:
    given = make_rank_environment({name: "100"})
    assert given | RecorderSizes().variables(0, given, PIPELINE) == given


def train(bench: Bench, local: int, posted: int, steps: int, *, gpu: str = "", begun: int | None = None) -> None:
    """What a rank of generation 1 leaves behind."""
    memory = open_slot_memory(str(bench.arena))
    slot = SlotWriter.open(str(bench.arena), local, generation=1, rank=4 + local)
    for step in range(7, 7 + steps):
        slot.step(step)
    log = FlightLog(memory, flight_log_offset(2, local), generation=1, rank=4 + local)
    log.gpu = gpu
    channels: list[ChannelState] = [
        ("0", 4 + local, 6, posted - posted // 4, begun, begun, 0, 64),
        ("0", 6, 4 + local, posted // 4, begun, begun, 0, 64),
    ]
    log.write_flight(1.0, [], [], channels)


async def launched_sizes(bench: Bench, mesh: Dims) -> dict[str, str]:
    errand = msgspec.structs.replace(launch_of(2), mesh=mesh)
    launching = asyncio.create_task(bench.ranks.launch_ranks(errand))
    found = {}
    for pid in (100, 101):
        asked = await bench.hear()
        assert isinstance(asked, ExecRank)
        found[asked.key] = asked.env[NAME]
        await bench.say(RankStarted(key=asked.key, pid=pid))
    assert await launching == ""
    return found


async def test_a_launch_gives_each_rank_room_for_messages_that_run_ahead(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 4 has posted 90 messages a step over NCCL, rank 5 six."""
    monkeypatch.delenv(NAME, raising=False)
    await bench.begin()
    train(bench, 0, 900, 10, gpu="0b6f")
    train(bench, 1, 60, 10, begun=58)
    assert await launched_sizes(bench, PIPELINE) == {"2:4": "1024", "2:5": "256"}


@pytest.mark.parametrize(
    "told",
    [
        pytest.param({"posted": 900, "steps": 10}, id="gloo has no entries for messages"),
        pytest.param({"posted": 900, "steps": 0, "gpu": "0b6f"}, id="no step"),
    ],
)
async def test_without_messages_over_nccl_nothing_is_learned(
    bench: Bench, told: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    await bench.begin()
    train(bench, 0, **told)  # type: ignore[arg-type]
    assert await launched_sizes(bench, PIPELINE) == {"2:4": "1024", "2:5": "1024"}


async def test_what_was_learned_outlives_a_launch_that_makes_no_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    await bench.begin()
    train(bench, 0, 900, 10, gpu="0b6f")
    sizes, slots = RecorderSizes(), bench.ranks.slots
    for _ in range(2):
        sizes.learn_and_clear(0, slots)
    assert slots.read_slots() == [] and slots.read_flight(0) is None
    given = make_rank_environment({})
    assert sizes.variables(0, given, ())[NAME] == "1024"
