"""The requests by which an agent has its holder start a rank: as a fork of the zygote, or as a new program."""

import sys
from pathlib import Path
from typing import NamedTuple

from holdfast.wire.holder_messages import ExecRank, RankKey
from holdfast.wire.holder_zygote_messages import ForkRank
from holdfast.wire.releases.staged_release import StagedRelease
from holdfast.wire.run_and_node_specs import EntryPoint

_EXECUTED = str(Path(__file__).parents[2] / "client" / "boot" / "executed_rank.py")


class RankStart(NamedTuple):
    """One rank to start: what it runs, under which key, and where its output goes."""

    key: RankKey
    local: int
    entry: EntryPoint
    staged: StagedRelease
    env: dict[str, str]
    where: Path  # its log folder
    stdin: str

    def fork(self) -> ForkRank:
        return ForkRank(
            key=str(self.key),
            argv=self._arguments(),
            module=self.entry.module,
            env=self.env,
            cwd=self.entry.cwd,
            stdout=str(self.where / "stdout.log"),
            stderr=str(self.where / "stderr.log"),
            stdin=self.stdin,
            path=self.staged.staged_path(self.entry.cwd) if self.entry.module else "",
            root=self.staged.root,
            staged=self.staged.at,
        )

    def execute(self) -> ExecRank:
        return ExecRank(
            key=str(self.key),
            argv=(*self._interpreter(), *self._arguments()),
            env=self.env,
            cwd=self.entry.cwd,
            stdin=self.stdin,
            stdout=str(self.where / "stdout.log"),
            stderr=str(self.where / "stderr.log"),
        )

    def _arguments(self) -> tuple[str, ...]:
        return tuple(argument.replace("${local_rank}", str(self.local)) for argument in self.entry.argv)

    def _interpreter(self) -> tuple[str, ...]:
        """Return the command line's interpreter and flags. Holdfast's own interpreter runs the script by way of
        `executed_rank.py`. Any other may not find holdfast's code, so it runs the script directly."""
        if self.entry.python != sys.executable:
            return self.entry.interpreter_argv()
        path = self.staged.staged_path(self.entry.cwd) if self.entry.module else "script"
        return (self.entry.python, "-u", _EXECUTED, path)
