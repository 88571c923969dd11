"""Notes in a keeper's folder: the launch, requests and layouts, which the next agent of the node needs."""

from pathlib import Path

from holdfast.wire import run_and_node_specs


class KeeperNoteFolder:
    """Small files that are written whole or not at all. Ranks leave their layouts in the same folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read_note(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def write_note(self, name: str, content: bytes) -> None:
        run_and_node_specs.publish_file(self._folder / name, content)

    def list_notes(self, prefix: str) -> list[str]:
        return sorted(path.name for path in self._folder.glob(f"{prefix}*"))
