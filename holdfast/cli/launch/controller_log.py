"""RUN_DIR/controller.log: what the controller logs and what its process prints, in two files of bounded size."""

import asyncio
import os
from logging.handlers import RotatingFileHandler
from pathlib import Path

from holdfast.controller.access.log_flood_filter import ServerLogFilter
from holdfast.logs.secret_masking import Masker, keep_masked_log, make_secret_masker

LOG_BYTES = 32 << 20
_LOOK_S = 10.0


class ControllerLog(RotatingFileHandler):
    """The log's handler. Where standard output and error go to the same file, they go on to the next one, too."""

    def __init__(self, run_dir: Path, most_bytes: int = LOG_BYTES) -> None:
        super().__init__(run_dir / "controller.log", maxBytes=most_bytes, backupCount=1)

    def doRollover(self) -> None:
        own = [fd for fd in (1, 2) if self._writes_here(fd)]
        super().doRollover()
        for fd in own:
            os.dup2(self._fileno(), fd)

    def _fileno(self) -> int:
        assert self.stream is not None  # it is opened at once
        return self.stream.fileno()

    def _writes_here(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.fstat(self._fileno()))
        except OSError:
            return False

    def bound_size(self) -> None:
        """Begin a new file if this one has become too large by what was printed there."""
        self.acquire()
        try:
            if os.fstat(self._fileno()).st_size > self.maxBytes:
                self.doRollover()
        finally:
            self.release()

    async def watch_size(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.bound_size()


def open_log(run_dir: Path) -> tuple[ControllerLog, Masker]:
    """Open the log of this process, the controller; return it and what masks its secrets. Its size is bounded, and few
    complaints about bad requests are written."""
    log, mask = ControllerLog(run_dir), make_secret_masker()
    log.addFilter(ServerLogFilter())
    keep_masked_log(log, mask)
    return log, mask
