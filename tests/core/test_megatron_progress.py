"""The progress lines of Megatron: what they say of a step, and what a loss that is missing means."""

from math import isnan

from holdfast.core.log_analysis.megatron_progress import MegatronProgress
from holdfast.model.observation import Line

HEAD = " [2026-01-19 10:49:15.123456] iteration {:8d}/    5000 | consumed samples:  128 | elapsed time (ms): 289.1 |"
TAIL = " loss scale: 1.0 | grad norm: {} | number of skipped iterations: {:3d} | number of nan iterations:   0 |"


def line(step: int, loss: str = " lm loss: 1.258695E+01 |", norm: str = "10.275", skipped: int = 0) -> Line:
    text = HEAD.format(step) + " learning rate: 3.0E-05 |" + loss + TAIL.format(norm, skipped)
    return Line(text=text, at=5.0, rank=3, generation=2)


def test_a_line_is_read() -> None:
    progress = MegatronProgress()
    told = progress.on_line(line(7))
    assert told and (told.generation, told.rank, told.step, told.at) == (2, 3, 7, 5.0)
    assert (told.loss, told.grad_norm) == (12.58695, 10.275)
    assert progress.source == "Megatron's lines ('lm loss')"


def test_other_lines_are_not() -> None:
    progress = MegatronProgress()
    for text in (
        "iteration 7 done, loss: 3.0",
        " validation loss at iteration 10 | lm loss value: 1.2E+01 | lm loss PPL: 2.9E+05 | ",
        "Traceback (most recent call last):",
    ):
        assert progress.on_line(Line(text=text, at=1.0, rank=0)) is None
    assert progress.source == ""


def test_a_loss_that_is_left_out_is_not_a_number() -> None:
    """Megatron prints what is above 0, and NaN is not."""
    progress = MegatronProgress()
    progress.on_line(line(7))
    told = progress.on_line(line(8, loss="", norm="nan"))
    assert told and told.loss is not None and isnan(told.loss) and told.step == 8


def test_iterations_that_loss_scaling_skipped_say_nothing() -> None:
    progress = MegatronProgress()
    progress.on_line(line(7))
    assert progress.on_line(line(8, loss="", norm="inf", skipped=1)) is None


def test_a_rank_that_never_printed_a_loss_is_not_judged() -> None:
    assert MegatronProgress().on_line(line(8, loss="")) is None
