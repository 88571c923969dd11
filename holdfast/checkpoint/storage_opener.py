"""Opens the storage for checkpoints: a local folder or any fsspec URL."""

from typing import TypeAlias

from holdfast.checkpoint.direct_io import InputFile
from holdfast.checkpoint.local_storage import LocalStorage
from holdfast.checkpoint.remote_storage import RemoteInput, RemoteStorage

Storage: TypeAlias = LocalStorage | RemoteStorage
File: TypeAlias = InputFile | RemoteInput


def open_storage(url: str) -> Storage:
    if "://" not in url:
        return LocalStorage(url)
    if url.startswith(("file://", "local://")):
        return LocalStorage(url.partition("://")[2])
    return RemoteStorage(url)


def is_remote(url: str) -> bool:
    """Return whether the storage is remote, not a folder in a file system of this host."""
    return isinstance(open_storage(url), RemoteStorage)
