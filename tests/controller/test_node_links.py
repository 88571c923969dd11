"""Outboxes: a newer link counts, nobody waits for a slow node, and posts are acknowledged when they are on disk."""

from holdfast.controller.node_links import NodeLinks, Outbox
from holdfast.model.copy_aim import Aim
from holdfast.model.node_errands import StopHere
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import Ack, AimMessage, ControllerPacket, ErrandMessage, PeersMessage
from holdfast.wire.credentials.admitted_peers import AdmittedPeers

STOP = StopHere(id=1, generation=1, grace_s=0.0)


def sent(outbox: Outbox) -> list[object]:
    return [packet.message for packet in packets(outbox)]


def packets(outbox: Outbox) -> list[ControllerPacket]:
    return [agent_messages.decode_from_controller(outbox.get_nowait()) for _ in range(outbox.qsize())]


async def test_what_is_sent_goes_by_the_newest_link() -> None:
    links = NodeLinks(lambda: 7)
    older, newer = links.make_outbox(), links.make_outbox()
    assert not links.send_errand("a", STOP) and not links.is_linked("a")
    assert links.open_link("a", older) and not links.open_link("a", older)
    assert not links.has_newer_link("a", older) and not links.has_newer_link("a", newer)
    assert links.open_link("a", newer) and links.is_newest("a", newer)
    assert links.has_newer_link("a", older) and not links.has_newer_link("b", older)
    links.close_link("a", older)  # it ends late
    assert links.linked_nodes == ("a",) and links.send_errand("a", STOP)
    assert links.send_aim("a", Aim(generation=1))
    assert sent(older) == []
    assert packets(newer) == [
        ControllerPacket(7, ErrandMessage(errand=STOP)),
        ControllerPacket(7, AimMessage(aim=Aim(generation=1))),
    ]
    links.close_link("a", newer)
    assert not links.is_linked("a") and not links.send_errand("a", STOP)


async def test_a_link_stays_older_than_one_that_is_gone() -> None:
    """A hello of an agent that was killed comes after its successor was told to launch, and has lost its link."""
    links = NodeLinks(lambda: 7)
    older, newer = links.make_outbox(), links.make_outbox()
    links.open_link("a", newer)
    links.hang_up("a")
    links.close_link("a", newer)
    assert links.has_newer_link("a", older) and not links.has_newer_link("a", links.make_outbox())


async def test_the_epoch_is_the_newest_one() -> None:
    epochs = [1]
    links = NodeLinks(lambda: epochs[-1])
    outbox = links.make_outbox()
    links.open_link("a", outbox)
    epochs.append(5)
    links.send_errand("a", STOP)
    assert packets(outbox) == [ControllerPacket(5, ErrandMessage(errand=STOP))]


async def test_a_full_outbox_takes_no_more_and_can_still_be_hung_up() -> None:
    links = NodeLinks(lambda: 1)
    outbox = links.make_outbox()
    links.open_link("a", outbox)
    while links.send_errand("a", STOP):
        pass
    assert outbox.full() and links.is_linked("a")
    links.hang_up("a")
    assert not links.is_linked("a") and [outbox.get_nowait()] == [b""] and outbox.empty()
    links.hang_up("a")  # nobody is there


async def test_an_acknowledgement_goes_to_the_link_that_the_post_came_by() -> None:
    links = NodeLinks(lambda: 1)
    older, newer = links.make_outbox(), links.make_outbox()
    links.open_link("a", older)
    links.hold_ack(older, 3)
    links.open_link("a", newer)
    links.hold_ack(newer, 4)
    assert sent(older) == sent(newer) == []
    links.send_acks()
    links.send_acks()
    assert (sent(older), sent(newer)) == ([Ack(seq=3)], [Ack(seq=4)])


async def test_whose_certificates_count_is_told_once_on_each_link() -> None:
    links, peers = NodeLinks(lambda: 1), AdmittedPeers(members=b"a" * 12)
    outbox = links.make_outbox()
    links.open_link("a", outbox)
    for _ in range(2):
        links.send_peers(peers)
    assert sent(outbox) == [PeersMessage(peers=peers)]
    others = AdmittedPeers(members=b"b" * 12)
    while links.send_errand("a", STOP):
        pass
    links.send_peers(others)  # there is no room for it
    assert PeersMessage(peers=others) not in sent(outbox)
    links.send_peers(others)
    again = links.make_outbox()
    links.open_link("a", again)
    links.send_peers(others)
    assert sent(outbox) == sent(again) == [PeersMessage(peers=others)]
