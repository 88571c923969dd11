"""The file of the nodes on Slurm. All hosts see it, so whoever writes it compares epochs first."""

import socket
from collections.abc import Iterable
from pathlib import Path

import msgspec

from holdfast.decoding import from_json
from holdfast.fleet.slurm_node_presence import NodeRecord
from holdfast.journal.journal_errors import LeaseLostError
from holdfast.wire.run_and_node_specs import publish_file

_NAME = "nodes.json"
EXCLUDED = "excluded"  # beside it: the hosts that later jobs of the run avoid, as a value of --exclude


class SlurmRecords(msgspec.Struct, frozen=True, kw_only=True):
    """A run's nodes on Slurm, and which controller wrote them down."""

    epoch: int = 0  # of that controller; 0: a version of holdfast that noted none
    host: str = ""  # it was on
    nodes: dict[str, NodeRecord] = {}

    @property
    def is_ours(self) -> bool:
        """Whether a controller on this host wrote them, as far as anybody noted that."""
        return self.host in ("", socket.gethostname())


def read_records(folder: Path) -> SlurmRecords:
    """Return the records, or none if there is no file yet. Raise OSError if the file is damaged."""
    try:
        content = (folder / _NAME).read_bytes()
        return from_json(content, SlurmRecords) if b'"epoch"' in content[:40] else _read_older(content)
    except FileNotFoundError:
        return SlurmRecords()
    except msgspec.DecodeError as e:
        raise OSError(f"{folder}/{_NAME} cannot be read: {e}") from None


def _read_older(content: bytes) -> SlurmRecords:
    """Read the records of an older version, which wrote down the nodes alone."""
    return SlurmRecords(nodes=from_json(content, dict[str, NodeRecord]))


def check_newest(folder: Path, epoch: int) -> None:
    """Raise LeaseLostError if a later controller than this one has written records."""
    found = read_records(folder)
    if found.epoch > epoch:
        raise LeaseLostError(
            f"controller {found.epoch} of this run, on {found.host}, has the nodes on Slurm; this one, {epoch}, ends"
        )


def write_records(folder: Path, epoch: int, nodes: dict[str, NodeRecord]) -> None:
    """Replace the records. Raise LeaseLostError if a later controller has written some."""
    check_newest(folder, epoch)
    records = SlurmRecords(epoch=epoch, host=socket.gethostname(), nodes=nodes)
    publish_file(folder / _NAME, msgspec.json.encode(records))


def note_excluded(folder: Path, hosts: Iterable[str]) -> None:
    """Note the hosts that the successor of a batch job avoids, the user's own among them: its script's --exclude does
    not count beside another."""
    publish_file(folder / EXCLUDED, ",".join(sorted(hosts)).encode())
