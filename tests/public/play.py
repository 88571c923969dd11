"""One job of a public script, who watches it, and what it would have done if it had been left alone."""

import fcntl
import time
from pathlib import Path

import msgspec

from tests.public import truth
from tests.public.conftest import LaunchPublic
from tests.public.sentences import Known, check_sentences
from tests.public.table import STRUCK, Script
from tests.public.witness import Witness


class Play:
    def __init__(self, script: Script, launch: LaunchPublic, name: str = "job", place: str = "work") -> None:
        self.script, self.job = script, launch(script, name, place)
        self.seen = Witness(self.job.run_dir, script)
        self.job.patience_s = 90.0  # imports of a large package, beside other tests
        self.busy = self.job.folder / "busy"
        self.edited = False

    def go_on(self) -> "Play":
        """Wait until it is worth striking; its storage is slow from then on, so that it does not end meanwhile."""
        worth = STRUCK - self.script.grain + 1
        self.job.until(lambda: self.seen.reached(1) >= worth or self._is_over(), "some steps")
        self.busy.touch()
        assert not self._is_over(), self.job.story()
        self._ask_step()
        return self

    def _ask_step(self) -> None:
        """Status tells the newest step, no older one and none that is still to come."""
        least = self.seen.reached(1) - 1
        told = self.job.until(lambda: max(0, int(self.job.status().get("step", -1)) - least), "the newest step") + least
        assert told <= self.seen.reached(1) + self.script.grain

    def _is_over(self) -> bool:
        return self.job.process.poll() is not None

    def victim(self) -> int:
        if self.script.spawns:
            return self.job.children(self.job.rank(0))[1]
        return self.job.rank(1)

    def edit_comment(self) -> None:
        path = self.job.folder / self.script.path
        path.write_text(path.read_text() + "\n# An afterthought.\n")
        self.edited = True

    def check_sentences(self, ended_at: float, struck: str = "") -> None:
        known = Known(
            job=self.job, seen=self.seen, script=self.script, ended_at=ended_at, struck=struck, edited=self.edited
        )
        check_sentences(known)

    def end(self, code: int = 0) -> float:
        """When it was over."""
        self.job.ends(code, 120.0)
        ended_at = time.time()
        self.seen.close()
        return ended_at


class Calm(msgspec.Struct, frozen=True, kw_only=True):
    """A run that nothing happened to."""

    losses: dict[int, str]
    files: set[str]


def run_calm(script: Script, launch: LaunchPublic, shared: Path) -> Calm:
    """The script is left alone once for all tests of it, whichever comes first."""
    kept = shared / f"calm-{script.name}.json"
    with (shared / f"calm-{script.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            play = Play(script, launch, place="calm")
            ended_at = play.end()
            truth.check_calm(play.job, play.seen, script, ended_at)
            calm = Calm(losses=play.seen.losses(1), files=truth.find_files(play.job.folder))
            kept.write_bytes(msgspec.json.encode(calm))
    return msgspec.json.decode(kept.read_bytes(), type=Calm)
