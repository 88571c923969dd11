"""A job that snapshots every step, seen and struck from outside, and held step by step against an undisturbed one."""

import os
import time
from pathlib import Path

from benchmarks._torture_scene import KEEP_NODES, SCRIPT, Came, Scene, differing
from holdfast.chaos import faulty_storage
from tests.cli.conftest import Start
from tests.cli.driver import ROOT, Job


class Tortured:
    """Ranks of `benchmarks/_ckpt_torture.py`, nproc on each node, started by a real `holdfast run`."""

    def __init__(self, start: Start, tmp_path: Path, shape: tuple[int, int], *words: str, **env: str) -> None:
        self._start = start
        self._folder = tmp_path
        self._flags = ("--nnodes", str(shape[0]), "--nproc-per-node", str(shape[1]), *KEEP_NODES)
        self._same = [word for word in words if word.startswith(("--how", "--width"))]
        self.job = self._started("job", words, env)
        self.scene = Scene(tmp_path, tmp_path / "run", shape[0] * shape[1], lambda: self.job.process.poll() is None)

    def _started(self, name: str, words: tuple[str, ...], env: dict[str, str]) -> Job:
        text = SCRIPT.read_text()
        return self._start(*self._flags, script=text, name=name, HOLDFAST_TORTURE=" ".join(words), **env)

    def strike(self, *ranks: int) -> Came:
        """Kill ranks wherever they are; whatever all ranks had sealed by then must be there again, from memory."""
        since = time.monotonic()
        struck = self.scene.strike(*ranks)
        came = self.scene.came(struck, since)
        assert came.sources == ("memory",) and came.step >= struck.sealed, (struck, came, self.job.story())
        assert struck.reached - came.step <= 1, (struck, came)
        return came

    def ends_exact(self) -> None:
        """End it: after every step, of whatever generation, every rank had the state of an undisturbed run."""
        self.job.finish()
        self.job.ends(0)
        found = {rank: list(self.scene.lines(rank)) for rank in self.scene.ranks}
        last = max(int(str(line["step"])) for lines in found.values() for line in lines if "step" in line)
        for rank in self.scene.ranks:
            self._folder.joinpath(f"trace-{rank}.jsonl").unlink()
        self._folder.joinpath("finish").unlink()
        self._folder.joinpath("run").rename(self._folder / "run-tortured")
        self._started("calm", (*self._same, f"--steps={last}"), {}).ends(0, patience_s=90)
        calm = Scene(self._folder, self._folder / "run", len(self.scene.ranks))
        assert {rank: differing(found[rank], calm.lines(rank)) for rank in found} == {rank: [] for rank in found}


class Storage:
    """A folder that is storage of a kind that can be told to fail."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "store"
        self.url = f"faulty://{self.folder}"
        self._control = tmp_path / "control"
        self.be("ok")
        faulty_storage.register_in(tmp_path / "site")
        path = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
        self.env = {faulty_storage.CONTROL: str(self._control), "PYTHONPATH": path}

    def be(self, what: str) -> None:
        self._control.write_text(what)

    def published(self) -> list[int]:
        """Steps that are there as checkpoints."""
        return published(self.folder)


def published(folder: Path) -> list[int]:
    return sorted(int(path.parent.name.split("-")[1].split(".")[0]) for path in folder.glob("step-*/holdfast.json"))
