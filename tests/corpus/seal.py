"""Seals half of a folder of labelled logs: `python -m tests.corpus.seal FOLDER`, before anybody diagnoses one of them.

The half is drawn by the hash of each log's name, so nobody chooses it. It goes into an archive, where no editor and no
search shows it by chance; its hashes go into a list. The other half goes to `outside`, where everybody may read it.
It was done once, to the 191 logs of the first four batches. Later batches are in `outside` as a whole.
"""

import hashlib
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
OPEN, ARCHIVE, HASHES = HERE / "outside", HERE / "sealed.zip", HERE / "sealed.txt"
BATCHES = ("a", "b", "c", "d")  # from which the half was drawn: the name of a log begins with its batch
_NEVER = (1980, 1, 1, 0, 0, 0)  # an archive of the same logs has the same bytes


def draw_half(names: list[str]) -> list[str]:
    """Return half of the names, chosen by their hashes."""
    return sorted(names, key=lambda name: hashlib.sha256(f"seal {name}".encode()).hexdigest())[: len(names) // 2]


def seal_folder(folder: Path) -> None:
    names = sorted(path.parent.name for path in folder.glob("*/label.toml"))
    sealed = set(draw_half(names))
    with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for name in sealed for path in (folder / name).iterdir()):
            entry = zipfile.ZipInfo(f"{path.parent.name}/{path.name}", _NEVER)
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    HASHES.write_text("".join(f"{digest}  {name}\n" for name, digest in archive_hashes(ARCHIVE)))
    for name in names:
        if name not in sealed:
            shutil.copytree(folder / name, OPEN / name)


def archive_hashes(archive: Path) -> Iterator[tuple[str, str]]:
    with zipfile.ZipFile(archive) as files:
        for name in sorted(files.namelist()):
            yield name, hashlib.sha256(files.read(name)).hexdigest()


if __name__ == "__main__":
    seal_folder(Path(sys.argv[1]))
