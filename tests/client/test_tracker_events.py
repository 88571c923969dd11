"""The job's figures reach the script's trackers; and whatever happens there, the script's own calls are made."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.client.training import tracker_events
from holdfast.client.training.tracker_events import TrackerEvents, add_to_board, attempt
from tests.cli.driver import until
from tests.client.played_trackers import METRICS, SENTENCE, Played, play_board, play_mlflow, play_wandb, write_figures

NOTES = [{"number": 1, "text": SENTENCE}]


@pytest.fixture(autouse=True)
def generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_GENERATION", "2")


def test_wandb_gets_them_in_a_row_of_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_module, init_module = play_wandb(monkeypatch)
    played = Played(tmp_path, run_module, init_module)
    run, row = run_module.Run(), {"loss": 2.0}
    run.log(row, step=3)
    assert (tmp_path / "trackers").read_text() == "W&B"
    write_figures(tmp_path, 1, generation=2, notes=NOTES)
    run.log(row, step=4)  # it was looked for less than a second ago
    played.now = 1.0
    run.log(row, 5, commit=True)
    played.wait_for_delivery()
    played.now = 2.0
    run.log(data=row)
    text = f"incident 1: {SENTENCE}"
    assert run.rows == [
        ({"loss": 2.0}, 3, None),
        ({"loss": 2.0}, 4, None),
        ({"loss": 2.0} | METRICS | {"holdfast/incident": text}, 5, True),
        ({"loss": 2.0}, None, None),
    ]
    assert run.alerts == [("holdfast: incident 1", SENTENCE, "WARN")]
    assert row == {"loss": 2.0}
    write_figures(tmp_path, 2, generation=2, notes=NOTES, ettr=None)
    played.now = 3.0
    run.log(data=row)
    assert run.rows[-1][0] == {"loss": 2.0} | {name: METRICS[name] for name in METRICS if name != "holdfast/ettr"}


def test_a_row_that_wandb_leaves_out_carries_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A resumed run knows steps that are made again, and takes no second row of them."""
    run_module, _ = play_wandb(monkeypatch)
    Played(tmp_path, run_module)
    write_figures(tmp_path, 1, generation=2)
    run = run_module.Run()
    run.step = 31
    run.log({"loss": 2.0}, step=30)
    run.log({"loss": 1.9}, step=31)
    assert [set(row) - {"loss"} for row, *_ in run.rows] == [set(), set(METRICS)]


def test_figures_of_an_earlier_generation_are_not_delivered(tmp_path: Path) -> None:
    """The node's file is that of the ranks before until the controller has sent figures of this generation."""
    board = play_board()
    played = Played(tmp_path, board)
    write_figures(tmp_path, 1, generation=1, notes=NOTES)
    writer = board.SummaryWriter()
    writer.add_scalar("loss", 2.0, 7)
    assert (writer.scalars, writer.texts) == ([("loss", 2.0, 7)], [])
    write_figures(tmp_path, 2, generation=2)
    played.now = 1.0
    writer.add_scalar("loss", 1.9, 8)
    assert writer.scalars[1:] == [("loss", 1.9, 8), *((name, value, 8) for name, value in METRICS.items())]
    assert writer.texts == []
    write_figures(tmp_path, 3, generation=3, notes=NOTES)  # this process has survived a failure
    played.now = 2.0
    writer.add_scalar("loss", 1.8, 9)
    assert [step for *_, step in writer.texts] == [9]


@pytest.mark.parametrize("module", ["tensorboardX", "torch.utils.tensorboard"])
@pytest.mark.filterwarnings("ignore")  # of others
def test_what_a_real_writer_queues_is_on_disk_soon_after(module: str, tmp_path: Path) -> None:
    pytest.importorskip(module.partition(".")[0])
    pytest.importorskip("tensorboard")
    writer = pytest.importorskip(module).SummaryWriter(str(tmp_path / "board"))
    [file] = (tmp_path / "board").iterdir()
    write_figures(tmp_path, 1, generation=2, notes=NOTES)
    events = TrackerEvents(str(tmp_path))
    writer.add_scalar("loss", 2.0, 7)
    add_to_board(events, type(writer).add_scalar, writer, 7)
    expected = (b"loss", b"holdfast/ettr", SENTENCE.encode())
    until(lambda: all(part in file.read_bytes() for part in expected), "all of it in the file")
    writer.close()


TEXT = f"incident 1: {SENTENCE}"


def come_later(folder: Path, delay_s: float, **values: object) -> threading.Thread:
    """Figures that come while the script ends: the node has them a moment after the first step."""
    thread = threading.Timer(delay_s, write_figures, (folder, 9, 2), {"notes": NOTES} | values)
    thread.start()
    return thread


@pytest.mark.parametrize("before", [{"generation": 1}, {"generation": 2, "open": True}])
def test_a_run_that_ends_at_once_after_a_restart_gets_the_incident(
    before: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the node's file holds by then is of the ranks before, or does not have the incident yet."""
    board, store = play_board(), dict[str, Any]()
    run_module, _ = play_wandb(monkeypatch)
    fluent = play_mlflow(monkeypatch, store)
    write_figures(tmp_path, 1, **before)
    played = Played(tmp_path, run_module, board, fluent)
    run, writer = run_module.Run(), board.SummaryWriter()
    run.log({"loss": 2.0})
    writer.add_scalar("loss", 2.0, 7)
    fluent.log_metric("loss", 2.0, step=7)
    coming = come_later(tmp_path, 0.3)
    run.finish()
    writer.close()
    fluent.end_run()
    coming.join()
    assert run.summary == METRICS | {"holdfast/incident": TEXT} and run.is_over
    assert run.alerts == [("holdfast: incident 1", SENTENCE, "WARN")]
    assert writer.texts == [("holdfast/incident", TEXT, 7)] and writer.closed_with == 1
    assert [row for row in writer.scalars if row[0] != "loss"][-len(METRICS) :] == [
        (*one, 7) for one in METRICS.items()
    ]
    [told] = store.values()
    assert told.status == "FINISHED" and told.batches[-1][1] == {"holdfast.incident.1": SENTENCE}
    assert played.hooks.events._thread is not None and not played.hooks.events._thread.is_alive()


def test_the_end_of_a_run_waits_for_nobody_for_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tracker_events, "_LAST_S", 0.3)
    run_module, _ = play_wandb(monkeypatch)
    Played(tmp_path, run_module)
    run, silent = run_module.Run(), run_module.Run()
    run.log({"loss": 2.0})
    for one in (run, silent):  # the second has logged nothing, and is not the first
        began_at = time.monotonic()
        one.finish()
        assert one.is_over and one.summary == {}
        assert 0.3 <= time.monotonic() - began_at < 5 if one is run else time.monotonic() - began_at < 0.3
    monkeypatch.setenv("HOLDFAST_GENERATION", "1")
    began_at = time.monotonic()
    run.finish()
    assert time.monotonic() - began_at < 0.3, "nothing has happened before a first launch"


def test_what_was_told_is_not_told_again_at_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_module, _ = play_wandb(monkeypatch)
    played = Played(tmp_path, run_module)
    run = run_module.Run()
    write_figures(tmp_path, 1, generation=2, notes=NOTES)
    run.log({"loss": 2.0})
    played.wait_for_delivery()
    run.finish()
    assert run.summary == {} and len(run.alerts) == 1


def test_tensorboard_gets_scalars_and_text_in_the_first_writer(tmp_path: Path) -> None:
    board = play_board()
    played = Played(tmp_path, board)
    first, second = board.SummaryWriter(), board.SummaryWriter()
    first.add_scalar("loss", 2.0, 1)
    write_figures(tmp_path, 1, generation=2, notes=NOTES)
    played.now = 1.0
    second.add_scalar("val", 2.0, 1)
    first.add_scalar("loss", 1.9, global_step=2)
    assert [tag for tag, *_ in second.scalars] == ["val"] and second.texts == []
    assert first.texts == [("holdfast/incident", f"incident 1: {SENTENCE}", 2)]
    assert ("holdfast/ettr", 0.9, 2) in first.scalars
    del first
    write_figures(tmp_path, 2, generation=2, notes=NOTES)
    played.now = 2.0
    second.add_scalar("val", 2.0, 3)
    assert ("holdfast/ettr", 0.9, 3) in second.scalars and second.texts == []


def test_mlflow_gets_metrics_and_tags_beside_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store: dict[str, object] = {}
    fluent = play_mlflow(monkeypatch, store)  # type: ignore[arg-type]
    played = Played(tmp_path, fluent)
    write_figures(tmp_path, 1, generation=2, notes=NOTES)
    fluent.log_metric("loss", 2.0, step=5)  # starts a run
    played.wait_for_delivery()
    [run] = store.values()
    [(metrics, tags)] = run.batches  # type: ignore[attr-defined]
    assert sorted(metrics) == sorted((name, value, 5) for name, value in METRICS.items())
    assert tags == {"holdfast.incident.1": SENTENCE}


def test_a_tracker_that_cannot_be_reached_is_tried_again_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store: dict[str, object] = {}
    fluent = play_mlflow(monkeypatch, store)  # type: ignore[arg-type]
    played = Played(tmp_path, fluent)
    plain = fluent.MlflowClient.log_batch

    def fail(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr(fluent.MlflowClient, "log_batch", fail)
    write_figures(tmp_path, 1, generation=2, notes=NOTES)
    fluent.log_metric("loss", 2.0, 1)
    played.wait_for_delivery()
    first = played.hooks.events._thread
    played.now = 59.0
    fluent.log_metric("loss", 2.0, 2)
    assert played.hooks.events._thread is first
    monkeypatch.setattr(fluent.MlflowClient, "log_batch", plain)
    played.now = 61.0
    fluent.log_metric("loss", 2.0, 3)
    played.wait_for_delivery()
    [run] = store.values()
    assert [tags for _, tags in run.batches] == [{"holdfast.incident.1": SENTENCE}]  # type: ignore[attr-defined]


def test_nothing_is_raised_into_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_module, _ = play_wandb(monkeypatch)
    board = play_board()
    Played(tmp_path / "nowhere", run_module, board)
    run = run_module.Run()
    run.log({"loss": 2.0})
    with pytest.raises(TypeError, match="data"):
        run.log()
    Played(tmp_path, board := play_board())
    (tmp_path / "job-figures.json").write_text("{")
    writer = board.SummaryWriter()
    writer.add_scalar("loss", 1.0)
    write_figures(tmp_path, 5, incidents="many")
    writer.add_scalar("loss", 1.0)
    assert writer.scalars == [("loss", 1.0, None)] * 2 and len(run.rows) == 1
    assert attempt(lambda: 1 // 0, 7) == 7


def test_children_of_the_rank_log_no_figures(tmp_path: Path) -> None:
    events, writer = TrackerEvents(str(tmp_path)), play_board().SummaryWriter()
    write_figures(tmp_path, 1, generation=2)
    child = os.fork()
    if child == 0:
        os._exit(0 if events.find_due("TensorBoard", writer) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert events.find_due("TensorBoard", writer) is not None
