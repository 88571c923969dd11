"""What is said of checkpoints that could not be written: seldom, and only what is so."""

from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.snapshots.checkpoint_writer import CheckpointWriter
from holdfast.checkpoint.manifest import Author
from holdfast.checkpoint.write_lane import WriteOutcome


def test_checkpoints_that_are_not_written_are_told_again_ever_less_often() -> None:
    said: list[str] = []
    writer = CheckpointWriter(said.append, SystemClock(), lambda listing: None)
    for step in range(1, 10):
        for rank in (0, 1):
            writer._report_outcome(rank, "/s", WriteOutcome(step=step, ok=False, detail=f"step {step} failed"))
    assert [line.partition(";")[0] for line in said] == [f"rank 0: step {step} failed" for step in (1, 2, 4, 8)]
    assert said[-1].endswith("; 8 checkpoints were not written since that began")
    writer.begin_generation(Author(2, "r."))
    for step in range(4, 11):  # from an older step: the 10th to the 16th that are not written
        writer._report_outcome(0, "/s", WriteOutcome(step=step, ok=False, detail=f"step {step} failed"))
    assert [line.partition(";")[0] for line in said[4:]] == ["rank 0: step 10 failed"]


def test_when_ranks_are_being_ended_nobody_is_told_that_training_goes_on() -> None:
    said: list[str] = []
    writer = CheckpointWriter(said.append, SystemClock(), lambda listing: None)
    outcome = WriteOutcome(step=60, ok=False, detail="step 60 was not written: the write was given up")
    writer.end_training()
    writer._report_outcome(0, "/s", outcome)
    writer.begin_generation(Author(2, "r."))
    writer._report_outcome(0, "/other", outcome)
    assert said == [
        f"rank 0: {outcome.detail}",
        f"rank 0: {outcome.detail}; training goes on, snapshots stay in memory",
    ]


def test_storage_that_is_slow_on_and_off_is_said_to_be_slow_once() -> None:
    said: list[str] = []
    writer = CheckpointWriter(said.append, SystemClock(), lambda listing: None)

    def tell(step: int, *, ok: bool, behind: bool = False) -> None:
        url = f"/s/{step}" if ok else ""
        outcome = WriteOutcome(step=step, ok=ok, detail=f"step {step}", url=url, behind=behind)
        writer._report_outcome(0, "/s", outcome)

    for step in (2, 6, 10):
        tell(step + 2, ok=False, behind=True)
        tell(step, ok=True)  # late
    tell(14, ok=True)
    tell(18, ok=False, behind=True)
    for step in (20, 22):
        tell(step, ok=True)
    assert len(said) == 1 and said[0].startswith("rank 0: step 4; training goes on")
    tell(24, ok=True)
    assert said[1:] == ["checkpoints are written again: step 24"]
    tell(26, ok=False)  # it is away
    tell(28, ok=True)
    assert said[2:] == [
        "rank 0: step 26; training goes on, snapshots stay in memory",
        "checkpoints are written again: step 28",
    ]
