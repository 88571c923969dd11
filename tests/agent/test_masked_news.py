"""What an agent tells holds no secret, and nothing that a terminal obeys."""

from holdfast.agent.masked_news import mask_beat, mask_trace
from holdfast.logs.secret_masking import Masker
from holdfast.model.observation import Beat
from holdfast.model.rank_traces import Channel, Collective, Flight, Frame, Process, Thread, Trace

SECRET = "correct-horse-battery"
MASK = Masker(hosts=False, people=False, known=[SECRET])
FORGED = f"a\nholdfast: n0 evicted\x1b]0;PWN\x07 {SECRET}"
CLEAN = "a holdfast: n0 evicted <secret>"


def test_a_phase_is_cleaned_and_masked() -> None:
    phases = (FORGED, f"up {SECRET[:21]}", f"up {SECRET[:12]}", "eval", "")
    told = [mask_beat(MASK, Beat(node="n0", generation=1, step=1, at=0.0, phase=phase)).phase for phase in phases]
    assert told == [CLEAN, "up <secret>", "up <secret>", "eval", ""]


def test_names_in_stacks_and_collectives_are_cleaned_masked_and_then_cut() -> None:
    long = "f" * 190 + SECRET  # cut first, a part of it would be left
    frames = (Frame(FORGED, f"/x/{FORGED}/b.py", 3), Frame(long, f"/x/site-packages/{'d' * 180}/{SECRET}/b.py", 4))
    process = Process(node="n0", rank=0, pid=1, name=FORGED, threads=(Thread(name=FORGED, main=True, frames=frames),))
    one = Collective(group=FORGED, entered=1, completed=0, op=FORGED, ended_op=FORGED, started_op=FORGED, at=1.0)
    channel = Channel(group=FORGED, source=0, target=1, posted=1)
    flight = Flight(node="n0", rank=0, groups=(one,), channels=(channel,))
    told = mask_trace(MASK, Trace(node="n0", at=1.0, processes=(process,), flights=(flight, Flight(node="n0", rank=1))))
    [thread] = told.processes[0].threads
    assert (told.processes[0].name, thread.name) == (CLEAN, CLEAN)
    assert thread.frames[0] == Frame(CLEAN, f"{CLEAN}/b.py", 3)
    assert thread.frames[1].function == "f" * 190 + "<secret>" and thread.frames[1].file.endswith("/<secret>/b.py")
    [seen] = told.flights[0].groups
    assert {seen.group, seen.op, seen.ended_op, seen.started_op} == {CLEAN}
    assert told.flights[0].channels == (Channel(group=CLEAN, source=0, target=1, posted=1),)
    assert told.flights[1].channels is None
