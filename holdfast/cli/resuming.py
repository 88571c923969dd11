"""`holdfast run --resume`: goes on with a run whose front is gone."""

import contextlib
from pathlib import Path

import msgspec

from holdfast.cli import rundir
from holdfast.cli.console import console_of, say
from holdfast.cli.flags import RunArgs, UsageError
from holdfast.cli.front import Front, leave_terminal
from holdfast.cli.listening import listen
from holdfast.config import Settings
from holdfast.controller.replay import ReplayError, replay
from holdfast.core.decider import Decider
from holdfast.journal.sqlite import JournalDamagedError, JournalError, SqliteJournal
from holdfast.wire import spec


def resume(args: RunArgs, settings: Settings | None) -> int:
    """`settings`: what the person gave this time, if anything."""
    run_dir = rundir.find(args.resume)
    run = rundir.read_spec(run_dir)
    if alive := rundir.listening(run_dir):
        raise UsageError(f"this run has a controller already (pid {alive.pid}); look with holdfast status {run_dir}")
    if (run_dir / "exit.json").exists():
        raise UsageError(f"this run has ended; see holdfast report {run_dir}, or start a new one")
    _check_replay(run_dir)
    if settings is not None:
        run = msgspec.structs.replace(run, settings=settings)
    with listen(run.host, run.port, "this run's nodes look for it there, so that must be free") as listener:
        spec.write(run_dir / "run.json", run)
        console = console_of(args, run, run_dir)
        console.skip_to_end()
        say(f"resuming {run.job.run_id} in {run_dir}")
        if args.detach:
            leave_terminal(run_dir)
        return Front(run_dir, listener, console).run()


def _check_replay(run_dir: Path) -> None:
    """Before anything is touched: what runs is not to be ended because of a journal that we cannot go on with."""
    path = run_dir / "journal.db"
    if not path.exists():
        return
    try:
        # The controller goes on without what is damaged, and says so.
        with (
            contextlib.closing(SqliteJournal(path, read_only=True)) as journal,
            contextlib.suppress(JournalDamagedError),
        ):
            for _ in replay(journal, Decider()):
                pass
    except ReplayError as e:
        raise UsageError(f"{e}; resume with the version that wrote it") from None
    except JournalError as e:
        raise UsageError(str(e)) from None
