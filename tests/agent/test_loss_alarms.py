"""What ranks tell of their steps: a spike is one alarm for the node, a rank's own one for the rank."""

import mmap

import msgspec

from holdfast.agent.rank.loss_alarms import LossAlarms
from holdfast.agent.rank.progress_slots import ProgressSlots
from holdfast.core.detect.loss_spikes import LossLimits, SpikeRule, policy_hindrance
from holdfast.core.detect.nonfinite_loss import alarm_of
from holdfast.core.incident.incident_text import describe_cause
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.job_and_seats import Seat
from holdfast.model.loss_response import Ease, LossPolicy
from holdfast.model.node_errands import LaunchHere
from holdfast.model.observation import Loss, StepValues
from holdfast.wire.rank_memory.slot_writer import SLOT_BYTES, SlotWriter

LIMITS = LossLimits(window=32)
NAN = float("nan")


def launch(generation: int = 1, eases: tuple[Ease, ...] = ()) -> LaunchHere:
    return LaunchHere(
        id=generation,
        generation=generation,
        seat=Seat(node="n0", first_rank=0, nproc=2, group_rank=0),
        world_size=2,
        group_world_size=1,
        store_host="",
        store_port=0,
        run_id="",
        max_restarts=0,
        eases=eases,
    )


class Node:
    """Two ranks and who looks at them."""

    def __init__(self, generation: int = 1, limits: LossLimits = LIMITS) -> None:
        self.arena = mmap.mmap(-1, 2 * SLOT_BYTES)
        self.slots = [SlotWriter(self.arena, index, generation=generation, rank=index) for index in range(2)]
        self.memory = ProgressSlots(2)
        self.memory.arena = self.arena
        self.losses = LossAlarms("n0", limits)

    def step(self, number: int, *losses: float, own: tuple[float | None, float | None] = (None, None)) -> list[object]:
        for slot, loss, norm in zip(self.slots, losses, own, strict=True):
            slot.write_values(number, loss, None, norm)
            slot.step(number)
        return list(self.losses.read_losses(self.memory, 1000.0))


def test_updates_that_a_scaler_skips_for_good_are_told_once() -> None:
    node = Node()
    assert node.step(20, 2.0, 2.0) == []
    for slot in node.slots:
        slot.note_skipped_updates(29)
    assert list(node.losses.read_losses(node.memory, 1000.0)) == [], "as at the start, where a scale is too large"
    for slot in node.slots:
        slot.note_skipped_updates(30)
    [alarm] = node.losses.read_losses(node.memory, 1000.0)
    assert isinstance(alarm, Alarm) and (alarm.stance, alarm.klass) == (Stance.NOTIFY, "nan_divergence")
    assert alarm.not_after is None, "the weights are what they were"
    assert describe_cause(alarm) == (
        "rank 0 on n0 has skipped 30 updates in a row after step 20: its GradScaler finds gradients that are not "
        "finite; nothing is done about it"
    )
    node.slots[0].note_skipped_updates(31)
    assert list(node.losses.read_losses(node.memory, 1000.0)) == []


def test_a_spike_that_ranks_share_is_one_alarm() -> None:
    node = Node()
    for number in range(40):
        assert node.step(number, 2.0 + number % 3 / 10, 2.1) == []
    [alarm] = node.step(40, 30.0, 31.0)
    assert isinstance(alarm, Alarm) and (alarm.kind, alarm.stance, alarm.ranks) == (Kind.LOSS, Stance.NOTIFY, (0,))
    assert alarm.not_after == 39 and alarm.at > 1000.0
    assert node.step(41, 30.0, 31.0) == []


def test_a_gradient_of_its_own_names_the_rank() -> None:
    node = Node()
    for number in range(40):
        node.step(number, 2.0, 2.0, own=(1.0 + number % 3 / 10, 1.0 + number % 5 / 10))
    [alarm] = node.step(40, 2.0, 2.0, own=(1.0, 1e6))
    assert isinstance(alarm, Alarm) and (alarm.ranks, alarm.evidence) == ((1,), (SpikeRule.OWN_TIMES,))


def test_two_losses_in_a_row_that_are_not_finite_are_told() -> None:
    node = Node()
    node.step(1, 2.0, 2.0)
    assert node.step(2, 2.0, NAN) == []
    assert [(one.rank, one.step) for one in node.step(3, 2.0, NAN) if isinstance(one, Loss)] == [(1, 2)]


def test_what_is_told_of_bad_losses_does_not_hang_on_when_they_are_read() -> None:
    """A single one is a notice, two in a row are trouble since the first of them, read at every step or at the end."""
    for often in (True, False):
        node = Node()
        told: list[object] = []
        for number in range(100):
            loss = NAN if number in (33, 90, 91) else 2.0
            for slot in node.slots[:1]:
                slot.write_values(number, loss, float("inf"))
                slot.step(number)
            if often or number == 80 or number == 99:
                told += node.losses.read_losses(node.memory, 1000.0)
        [notice] = [one for one in told if isinstance(one, Alarm)]
        assert (notice.stance, notice.not_after, notice.signature) == (Stance.NOTIFY, None, "single loss")
        assert " step 33 " in notice.reason
        assert {one.step for one in told if isinstance(one, Loss)} == {90}, often
        [last] = {alarm_of(one).reason for one in told if isinstance(one, Loss) and one.loss == 2.0}
        assert last == "had losses that were not finite since step 90"


def test_whose_loss_went_wrong_first_is_told_first() -> None:
    """Its gradients spoil the others' weights, so these have it one step later."""
    node = Node()
    node.step(1, 2.0, NAN)
    node.step(2, NAN, NAN)
    told = node.step(3, NAN, NAN)
    assert [(one.rank, one.step) for one in told if isinstance(one, Loss)] == [(1, 1), (0, 2)]


def test_marks_are_handed_on_once() -> None:
    node = Node()
    node.slots[1].write_hash(10, 99, 1, 2)
    node.slots[1].step(10)
    list(node.losses.read_losses(node.memory, 0.0))
    assert [(mark.rank, mark.step, mark.value) for mark in node.losses.take_marks()] == [(1, 10, 99)]
    assert node.losses.take_marks() == ()


def test_batches_are_left_out_where_the_script_asks_for_it() -> None:
    for asks, stance in ((False, Stance.NOTIFY), (True, Stance.ACT)):
        node = Node(limits=LossLimits(window=32, policy=LossPolicy.REWIND, skip_batches=2))
        for slot in node.slots:
            if asks:
                slot.mark_skippable()
        for number in range(40):
            node.step(number, 2.0 + number % 3 / 10, 2.1)
        [alarm] = node.step(40, 30.0, 31.0)
        assert isinstance(alarm, Alarm) and alarm.stance is stance
        assert alarm.policy == ("rewind-and-skip:2" if asks else "")


def test_a_step_that_is_eased_already_is_not_gone_back_for_again() -> None:
    for first, stance in ((40, Stance.NOTIFY), (41, Stance.ACT)):
        node = Node(limits=LossLimits(window=32, policy=LossPolicy.LOWER))
        node.losses.on_launch(launch(eases=(Ease(first=first, last=first + 9, factor=0.5),)))
        for number in range(40):
            node.step(number, 2.0 + number % 3 / 10, 2.1)
        [alarm] = node.step(40, 30.0, 31.0)
        assert isinstance(alarm, Alarm) and alarm.stance is stance


def test_counted_steps_get_the_number_that_the_script_gives_them() -> None:
    node = Node()
    for slot, origin in zip(node.slots, (100, 100), strict=True):
        slot.resume_from(origin)
        slot.write_values(3, NAN, None)
        slot.write_values(4, NAN, None)
        slot.step(4, counted=True)
    told = [one for one in node.losses.read_losses(node.memory, 0.0) if isinstance(one, Loss)]
    assert [(one.step, one.numbered) for one in told] == [(103, True)] * 2


def test_steps_without_a_known_number_put_no_state_in_doubt() -> None:
    node = Node(limits=LossLimits(window=32, policy=LossPolicy.LOWER))
    found: list[object] = []
    for number in range(1, 42):
        for slot in node.slots:
            slot.resume_from(-1)
            slot.write_values(number, 2.0 if number < 41 else 90.0, None)
            slot.step(number, counted=True)
        found += node.losses.read_losses(node.memory, 0.0)
    [alarm] = found
    assert isinstance(alarm, Alarm) and (alarm.not_after, alarm.stance) == (None, Stance.NOTIFY)
    unnumbered = msgspec.structs.replace(logged(41, 90.0), numbered=False)
    assert alarm.response is None and (hindrance := policy_hindrance(LossLimits(), unnumbered, False, ()))
    assert alarm.reason.endswith(hindrance), "the policy is to lower the learning rate"


def logged(step: int, loss: float) -> StepValues:
    return StepValues(generation=1, rank=0, step=step, at=5.0, loss=loss)


def test_a_line_tells_the_loss_of_a_rank_that_reports_none() -> None:
    node = Node()
    node.losses.on_logged(logged(7, 2.0), "a line")
    node.losses.on_logged(logged(8, NAN), "a line")
    assert list(node.losses.read_losses(node.memory, 1000.0)) == []
    node.losses.on_logged(logged(9, NAN), "a line")
    [told] = node.losses.read_losses(node.memory, 1000.0)
    assert isinstance(told, Loss) and (told.rank, told.step, told.at) == (0, 8, 5.0)
    assert node.losses.source == "a line"


def test_lines_that_tell_of_a_single_bad_loss_are_a_notice() -> None:
    node = Node()
    for number, loss in ((7, 2.0), (8, NAN), (9, 2.0), (10, NAN), (11, 2.0)):
        node.losses.on_logged(logged(number, loss), "a line")
    [told] = node.losses.read_losses(node.memory, 1000.0)
    assert isinstance(told, Alarm) and told.stance is Stance.NOTIFY and "at step 8 " in told.reason


def test_a_line_says_nothing_where_the_rank_reports_losses_itself() -> None:
    node = Node()
    node.step(1, 2.0, 2.0)
    node.losses.on_logged(logged(2, NAN), "a line")
    assert node.step(2, 2.0, 2.0) == [] and node.losses.source == ""


def test_a_redone_step_is_compared_with_the_one_before() -> None:
    node = Node(limits=LossLimits(exact=True))
    node.losses.on_launch(launch())
    for number in range(1, 6):
        node.step(number, 2.0 + number, 2.0 + number)
    for index in range(2):
        node.slots[index] = SlotWriter(node.arena, index, generation=2, rank=index)
    node.losses.on_launch(launch(generation=2))
    assert node.step(4, 6.0, 6.0) == []
    [alarm] = node.step(5, 7.0, 7.5)
    assert isinstance(alarm, Alarm) and (alarm.kind, alarm.stance, alarm.suspects) == (Kind.REDONE, Stance.ACT, ())
    assert alarm.reason.startswith("step 5 was made again with loss 7.5, was 7:") and alarm.not_after == 4
