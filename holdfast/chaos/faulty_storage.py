"""Storage that fails on demand: an fsspec file system, `faulty:///folder`, over a folder of this machine.

Every call reads from a control file how to behave: `ok`, `slow`, `hang` (until the file says otherwise), `eio` or
`enospc`. The environment variable FAULTY names the control file. Beside this file, a file `writing-N` exists while rank
N writes a part, and a file `publishing` while a manifest is being published. `register_in` makes the file system known
to every Python that has the folder on its path.
"""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

CONTROL = "FAULTY"
SLOW_S = 0.03  # for each piece of a write
_PIECES = 4
_ERRORS = {"eio": errno.EIO, "enospc": errno.ENOSPC}


def register_in(folder: Path) -> None:
    """Write the package metadata by which fsspec finds this file system."""
    about = folder / "faulty-0.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 0.0\n")
    (about / "entry_points.txt").write_text("[fsspec.specs]\nfaulty = holdfast.chaos.faulty_storage:FaultyFileSystem\n")


def suffer_fault(slow_s: float = 0.0) -> None:
    """Do what the control file says: return, wait, or raise OSError."""
    control = Path(os.environ[CONTROL])
    while (told := control.read_text().strip()) == "hang":
        time.sleep(0.05)
    if told == "slow":
        time.sleep(slow_s)
    if code := _ERRORS.get(told):
        raise OSError(code, os.strerror(code))


@contextmanager
def mark_write(name: str) -> Iterator[None]:
    mark = Path(os.environ[CONTROL]).with_name(name)
    mark.touch()
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


class FaultyFileSystem(LocalFileSystem):  # type: ignore[misc]
    protocol = "faulty"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        path = os.fspath(path)
        return str(super()._strip_protocol(path.removeprefix("faulty://")))

    def unstrip_protocol(self, name: str) -> str:
        return f"faulty://{self._strip_protocol(name)}"

    def _looked(self, path: Any, **kwargs: Any) -> Any:
        suffer_fault()
        return super().info(path, **kwargs)

    info = _looked  # fsspec's name for it

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        suffer_fault()
        super().makedirs(path, exist_ok=exist_ok)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        suffer_fault()
        return super().cat_file(path, start=start, end=end, **kwargs)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write a file as object stores do: it appears as a whole or not at all."""
        at = self._strip_protocol(path)
        with mark_write("publishing" if at.endswith("/holdfast.json") else "putting"):
            suffer_fault(SLOW_S)
            beside = f"{at}.{os.getpid()}.new"
            Path(beside).write_bytes(value)
            suffer_fault(SLOW_S)
            os.replace(beside, at)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        suffer_fault()
        name, file = os.path.basename(path), open(self._strip_protocol(path), mode)  # noqa: SIM115
        return PiecewiseFile(file, f"writing-{name.split('_')[2]}") if "w" in mode and name.startswith("__") else file


class PiecewiseFile:
    """A file that is written block by block, with a fault possible at each block."""

    def __init__(self, file: Any, mark: str) -> None:
        self._file = file
        self._mark = mark_write(mark)

    def __enter__(self) -> "PiecewiseFile":
        self._mark.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mark.__exit__(*error)
        self._file.close()

    def write(self, block: memoryview) -> None:
        size = len(block) // _PIECES + 1
        for start in range(0, len(block), size):
            suffer_fault(SLOW_S)
            self._file.write(block[start : start + size])
