"""Who waits for whom in messages between two ranks."""

import msgspec

from holdfast.core.diagnose.blocking_ranks import BlockingRanks, find_blocking
from holdfast.core.diagnose.rank_motion import find_motion
from holdfast.core.diagnose.suspectless_hang_timeout import do_most_wait
from holdfast.core.diagnose.wait_graph import build_wait_graph
from holdfast.model.rank_traces import Channel, Flight
from tests.core.diagnose.places import RECEIVE, SCRIPT, SEND, SLEEP, Places, flight, process, trace
from tests.core.diagnose.test_gpu_hang import gpu_flight

WAIT = (*SCRIPT, ("wait_for_stage", "/opt/run/train.py", 21))  # in the script's own code, in the wait of a message
Counts = tuple[int, int, int]  # source, target, posted


def posting(rank: int, *channels: Counts, waits: bool = True) -> Flight:
    told = tuple(Channel(group="0", source=s, target=t, posted=n) for s, t, n in channels)
    return Flight(node=f"n{rank // 2}", rank=rank, channels=told, waits=waits)


def on_gpu(rank: int, *channels: tuple[int, int, int, int, int], size_bytes: int = 64) -> Flight:
    told = tuple(
        Channel(group="0", source=s, target=t, posted=n, begun=b, ended=e, size_bytes=size_bytes)
        for s, t, n, b, e in channels
    )
    return Flight(node=f"n{rank // 2}", rank=rank, channels=told)


def name_blocking(*flights: Flight, at: dict[int, Places] | None = None) -> BlockingRanks:
    places = [process(f.rank, (at or {}).get(f.rank, WAIT)) for f in flights]
    return find_blocking(trace(*places, flights=flights))


# A pipeline of four stages amid a step: activations go up, gradients come down. Stage 2 has stopped.
PIPELINE = (
    posting(0, (0, 1, 4), (1, 0, 1)),
    posting(1, (0, 1, 3), (1, 0, 0), (1, 2, 3), (2, 1, 1)),
    posting(2, (1, 2, 2), (2, 1, 0), (2, 3, 1), (3, 2, 0), waits=False),
    posting(3, (2, 3, 2), (3, 2, 1)),
)


def test_the_stage_that_stands_is_named_and_not_its_neighbours() -> None:
    found = name_blocking(*PIPELINE, at={2: SLEEP})
    assert (found.ranks, found.how, found.hard) == ((2,), "missing", True)
    assert found.reason == "rank 2 has not come to send 1 of group 0 (2 -> 1); 3 wait; it is in load (run/train.py)"


def test_a_stage_that_has_posted_a_receive_and_then_stands_does_not_wait_for_it() -> None:
    early = posting(2, (1, 2, 9), (2, 1, 0), (2, 3, 1), (3, 2, 5), waits=False)
    found = name_blocking(*PIPELINE[:2], early, PIPELINE[3], at={2: SLEEP})
    assert found.ranks == (2,)


def test_who_waits_by_its_stack_waits() -> None:
    flights = [posting(0, (0, 1, 5), waits=False), posting(1, (0, 1, 6), waits=False)]
    assert build_wait_graph(flights).outside == ()
    assert build_wait_graph(flights, {1}).outside == (0,)
    assert name_blocking(*flights, at={0: SLEEP, 1: RECEIVE}).ranks == (0,)


def test_who_counts_no_messages_is_not_said_to_have_sent_none() -> None:
    silent = Flight(node="n0", rank=0)
    assert build_wait_graph([silent, posting(1, (0, 1, 6))], {1}).missing == ()
    assert build_wait_graph([posting(0), posting(1, (0, 1, 6))], {1}).outside == (0,)


def test_a_message_leads_on_from_a_collective() -> None:
    """Ranks 0 and 1 wait for 2 in a collective, and 2 waits for a message of 3."""
    inside = [flight(rank, ("0", 6, 5)) for rank in (0, 1)]
    late = [flight(rank, ("0", 5, 5)) for rank in (2, 3)]
    receives = msgspec.structs.replace(
        late[0], channels=(Channel(group="0", source=3, target=2, posted=7),), waits=True
    )
    sends = msgspec.structs.replace(late[1], channels=(Channel(group="0", source=3, target=2, posted=6),))
    assert name_blocking(*inside, receives, sends, at={3: SLEEP}).ranks == (3,)


def test_on_gpus_only_what_has_begun_waits() -> None:
    both = [on_gpu(0, (0, 1, 9, 4, 4), (1, 0, 9, 5, 4)), on_gpu(1, (0, 1, 9, 4, 4), (1, 0, 9, 4, 4))]
    (missing,) = build_wait_graph(both).missing
    assert (missing.inside, missing.ranks, missing.queued, missing.seq, missing.op) == ((0,), (1,), (1,), 5, "send")
    late = [both[0], on_gpu(1, (1, 0, 4, 4, 4))]
    assert build_wait_graph(late).missing[0].queued == (), "its process has not posted it"
    unknown = build_wait_graph([both[0], posting(1, (1, 0, 9))])
    assert [m.ranks for m in unknown.missing] == [(1,)] and unknown.doubted == (1,)
    assert unknown.outside == (), "it may have begun, or wait itself"
    ahead = [both[0], on_gpu(1, (0, 1, 9, 4, 4), (1, 0, 9, 5, 5))]
    assert build_wait_graph(ahead).missing == (), "it has sent it"


def test_who_may_wait_for_someone_is_not_named() -> None:
    """Of an interleaved pipeline over NCCL, whose rank 0 slept: the process of rank 3 had queued more messages than the
    recorder holds, so nothing was known of the one that its GPU was in."""
    late, waits, next = on_gpu(0, (0, 1, 562, 562, 562)), on_gpu(1, (0, 1, 570, 563, 562), (1, 2, 570, 562, 562)), 291
    last = on_gpu(2, (1, 2, 570, 563, 562), (3, 2, 300, next, next - 1))
    ahead = on_gpu(3, (3, 2, 300, next - 1, next - 1))
    lost = Channel(group="0", source=2, target=3, posted=570)
    flights = (late, waits, last, msgspec.structs.replace(ahead, channels=(*(ahead.channels or ()), lost)))
    assert name_blocking(*flights, at={0: SLEEP}).ranks == (0,)
    assert name_blocking(*flights[2:]).ranks == (), "even if nobody else is in question"
    assert set(name_blocking(*flights[:3], ahead, at={0: SLEEP}).ranks) == {0, 3}, "it is known to wait for nobody"


def ahead_of_gpu(rank: int, *channels: Counts) -> Flight:
    """What a rank tells whose process has queued more messages than the recorder holds."""
    return posting(rank, *channels, waits=False)


LOSS = (*SCRIPT, ("train", "/opt/run/train.py", 40))  # waits for its GPU


def test_processes_that_ran_ahead_of_their_gpus() -> None:
    """Of an interleaved pipeline on an H200, as four ranks told it. Rank 0 slept; ranks 1 and 2 had run five steps
    ahead and could queue no more; the process of rank 3, which reads the loss, waited for its GPU."""
    asleep = on_gpu(0, (0, 1, 363, 363, 363), (1, 0, 354, 354, 354), (3, 0, 183, 183, 183), (0, 3, 177, 177, 177))
    second = ahead_of_gpu(1, (0, 1, 451), (1, 2, 450), (1, 0, 437), (2, 1, 438))
    third = ahead_of_gpu(2, (1, 2, 450), (2, 3, 449), (2, 1, 438), (3, 2, 439))
    last = on_gpu(3, (2, 3, 374, 364, 363), (3, 0, 187, 183, 183), (3, 2, 370, 354, 354), (0, 3, 185, 177, 177))
    at = {0: SLEEP, 1: SEND, 2: SEND, 3: LOSS}
    found = name_blocking(asleep, second, third, last, at=at)
    assert (found.ranks, found.how) == ((0,), "missing")
    graph = build_wait_graph([asleep, second, third, last], {1, 2})
    assert graph.missing[0].ranks == (0,) and graph.missing[0].seq == 451 and graph.doubted == (1, 2)


def test_a_gpu_that_stands_behind_a_process_that_ran_ahead_is_not_known() -> None:
    """The GPU of rank 2 stands. Rank 3 waits for it in a message, and so do the processes of all others: for rank 3,
    whose process cannot run ahead. Neither rank 3 nor a circle of 2 and 3 is the cause."""
    first = ahead_of_gpu(0, (0, 1, 451), (1, 0, 440), (3, 0, 225), (0, 3, 220))
    second = ahead_of_gpu(1, (0, 1, 451), (1, 2, 450), (1, 0, 440), (2, 1, 438))
    struck = ahead_of_gpu(2, (1, 2, 450), (2, 3, 449), (2, 1, 438), (3, 2, 439))
    last = on_gpu(3, (2, 3, 374, 364, 363), (3, 0, 187, 183, 183), (3, 2, 370, 354, 354), (0, 3, 185, 177, 177))
    found = name_blocking(first, second, struck, last, at={0: SEND, 1: SEND, 2: SEND, 3: LOSS})
    assert found.ranks == ()
    assert found.reason == (
        "ranks 0-2 queued more messages than torch's recorder holds, so nobody knows in which of them their GPUs are"
    )


def test_a_wrong_tag_is_named() -> None:
    sent, awaited = posting(0, (0, 1, 5)), posting(1, (0, 1, 5))
    assert name_blocking(sent, awaited, posting(2, waits=False), posting(3, waits=False)).ranks == ()
    wrong = msgspec.structs.replace(awaited.channels[0], tag=7)  # type: ignore[index]
    odd = msgspec.structs.replace(awaited, channels=(wrong,))
    found = name_blocking(sent, odd, posting(2, waits=False), posting(3, waits=False))
    assert (found.ranks, found.how, found.hard) == ((0, 1), "crossed", False)
    assert found.reason == (
        "message 5 of group 0: rank 0 sends 0 bytes with tag 0, and rank 1 awaits 0 bytes with tag 7"
    )
    free = msgspec.structs.replace(odd, waits=False)
    assert build_wait_graph([sent, free]).unlike == ()


def test_a_wrong_size_is_named_where_gpus_wait_for_it() -> None:
    sent, awaited = on_gpu(0, (0, 1, 5, 5, 4)), on_gpu(1, (0, 1, 5, 5, 4), size_bytes=128)
    (unlike,) = build_wait_graph([sent, awaited]).unlike
    assert (unlike.number, unlike.sent.size_bytes, unlike.awaited.size_bytes) == (5, 64, 128)
    assert build_wait_graph([sent, on_gpu(1, (0, 1, 5, 5, 4))]).unlike == (), "the network, then"
    assert build_wait_graph([sent, on_gpu(1, (0, 1, 5, 4, 4), size_bytes=128)]).unlike == (), "not yet in it"


def test_a_gpu_that_is_in_a_message_is_not_certain_to_stand() -> None:
    """Both ends of the message are in it: the network between them may be the reason."""
    begun, queued = ("0", 41, 41, 40), ("0", 41, 40, 40)
    inside = [gpu_flight(rank, begun) for rank in (0, 1, 3)]
    struck = gpu_flight(2, queued)
    assert name_blocking(*inside, struck).hard
    message = on_gpu(2, (3, 2, 7, 7, 6)).channels
    found = name_blocking(
        *inside[:2],
        msgspec.structs.replace(struck, channels=message),
        msgspec.structs.replace(inside[2], channels=message),
    )
    assert (found.ranks, found.how, found.hard) == ((2,), "gpu", False)


def test_messages_are_motion_and_waiting() -> None:
    before, after = (trace(process(0, WAIT), flights=(posting(0, (0, 1, count)),)) for count in (5, 8))
    assert find_motion(before, after)[0].collectives == 3
    assert do_most_wait(after) and not do_most_wait(trace(process(0, WAIT), flights=(posting(0, waits=False),)))
