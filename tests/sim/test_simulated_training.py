"""Steps advance with the clock, stop where they are broken off, and begin again at what was saved."""

from holdfast.sim.simulated_training import SimTraining


def started(save_steps: int = 10) -> SimTraining:
    training = SimTraining(step_s=2.0, save_steps=save_steps)
    training.on_launch(1)
    training.first_step(100.0)
    return training


def step(training: SimTraining, now: float) -> int | None:
    beat = training.newest_beat(now)
    return beat.step if beat else None


def test_no_step_before_the_first() -> None:
    training = SimTraining(step_s=2.0, save_steps=10)
    assert training.newest_beat(500.0) is None
    training.on_launch(1)
    assert training.newest_beat(500.0) is None


def test_steps_advance_with_the_clock() -> None:
    training = started()
    assert [step(training, at) for at in (100.0, 101.9, 102.0, 120.0)] == [1, 1, 2, 11]
    beat = training.newest_beat(121.5)
    assert beat is not None
    assert (beat.at, beat.first_step, beat.first_at, beat.generation) == (120.0, 1, 100.0, 1)
    assert training.left_s(121.5, 12) == 0.5


def test_what_is_broken_off_stays_where_it_was() -> None:
    training = started()
    training.stall_steps(150.0)
    training.stall_steps(170.0)
    assert (step(training, 999.0), training.stalled) == (26, True)


def test_a_restart_begins_at_what_was_saved() -> None:
    training = started()
    training.stall_steps(150.0)
    assert training.saved == 20
    training.on_launch(2)
    training.first_step(200.0)
    assert step(training, 200.0) == 21
    training.stall_steps(201.0)
    assert training.saved == 20


def test_a_launch_that_makes_no_step_saves_nothing() -> None:
    training = started()
    training.stall_steps(150.0)
    training.on_launch(2)
    training.stall_steps(160.0)
    assert (training.saved, step(training, 161.0)) == (20, None)
