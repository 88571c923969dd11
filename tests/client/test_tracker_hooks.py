"""The functions of trackers that are hooked: the real packages have them, and a module that is known already is too."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.client.training.logged_losses import LoggedLosses
from holdfast.client.training.logger_hooks import LoggerFinder
from holdfast.client.training.tracker_hooks import TRACKER_CALLS, TrackerHooks, find_tracker_hooks
from tests.client.played_trackers import play_board, play_mlflow


def test_a_job_may_leave_trackers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_KEEPER", "/run/n0/keeper.sock")
    monkeypatch.delenv("HOLDFAST_TRACKED_RUN", raising=False)
    assert find_tracker_hooks() is None
    monkeypatch.setenv("HOLDFAST_TRACKED_RUN", "job.1")
    assert find_tracker_hooks() is not None
    monkeypatch.delenv("HOLDFAST_KEEPER")
    assert find_tracker_hooks() is None


def test_other_names_of_a_function_are_hooked_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A zygote may have imported the tracker before the rank was made."""
    fluent, outer = play_mlflow(monkeypatch, {}), ModuleType("mlflow")
    vars(outer)["start_run"], vars(outer)["log_metric"] = fluent.start_run, print
    monkeypatch.setitem(sys.modules, "mlflow", outer)
    TrackerHooks("j", str(tmp_path)).hook_module(fluent)
    assert outer.start_run is fluent.start_run and fluent.start_run.shows_holdfast
    assert outer.log_metric is print, "another function of that name"
    hooked = fluent.start_run
    TrackerHooks("j", str(tmp_path)).hook_module(fluent)
    assert fluent.start_run is hooked, "once"


def test_losses_are_read_beside_and_none_of_our_figures_is_one(tmp_path: Path) -> None:
    seen: list[str] = []
    losses = LoggedLosses(lambda step, loss, norm: None, seen.append)
    board = play_board()
    LoggerFinder(losses, TrackerHooks("j", str(tmp_path))).hook_module(board)
    writer = board.SummaryWriter()
    for tag in ("holdfast/lost_s", "holdfast/ettr", "loss", "loss"):
        writer.add_scalar(tag, 1.0, 1)
    assert seen == ["SummaryWriter.add_scalar('loss')"]
    assert (tmp_path / "trackers").read_text() == "TensorBoard"


@pytest.mark.parametrize("module", sorted({call.module for call in TRACKER_CALLS}))
@pytest.mark.filterwarnings("ignore")  # of others
def test_real_packages_have_what_is_hooked(module: str) -> None:
    """A release that has renamed something would be left alone in silence; here it is told."""
    pytest.importorskip(module.partition(".")[0])
    if module.startswith("torch."):
        pytest.importorskip("tensorboard")
    found = pytest.importorskip(module)
    for call in TRACKER_CALLS:
        if call.module == module:
            owner = getattr(found, call.owner) if call.owner else found
            assert callable(vars(owner)[call.function]), call
