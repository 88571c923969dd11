"""Where checkpoints lie: a folder, or any fsspec URL."""

from typing import TypeAlias

from holdfast.checkpoint.direct import Input
from holdfast.checkpoint.disk import Disk
from holdfast.checkpoint.remote import Remote, RemoteInput

Storage: TypeAlias = Disk | Remote
File: TypeAlias = Input | RemoteInput


def at(url: str) -> Storage:
    if "://" not in url:
        return Disk(url)
    if url.startswith(("file://", "local://")):
        return Disk(url.partition("://")[2])
    return Remote(url)
