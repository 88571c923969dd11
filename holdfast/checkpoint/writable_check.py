"""Checks before training starts whether checkpoints can be written to a storage."""

import errno
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress

from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.storage_opener import open_storage

# These stay as they are, however long one waits; a disk that is full or a network that is down does not.
_FOR_GOOD = {errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL}
_REFUSED = (PermissionError, NotADirectoryError, FileExistsError, FileNotFoundError)
WAIT_S = 10.0
_TRIED_BYTES = 4096  # a full disk still takes an empty file


def write_refusal(url: str, wait_s: float = WAIT_S) -> str:
    """Return why this storage can never be written to; "" if it can, or if the failure may pass."""
    return look_in_time(lambda: _explain_refusal(url), wait_s)


def look_in_time(look: Callable[[], str], wait_s: float) -> str:
    """Call `look`, which examines a storage, and return its result; "" if it takes longer than `wait_s`."""
    found: list[str] = []
    # Of its own, and left behind if storage hangs: that is told when a checkpoint is due, and stops nobody.
    thread = threading.Thread(target=lambda: found.append(look()), name="holdfast-try", daemon=True)
    thread.start()
    thread.join(wait_s)
    return found[0] if found else ""


def try_write(url: str) -> None:
    """Write a small file to this storage and remove it. Raises StorageError if that fails."""
    storage, name = open_storage(url), f".holdfast-{secrets.token_hex(4)}"
    storage.make_folder()
    try:
        storage.put_file(name, bytes(_TRIED_BYTES))
    finally:
        with suppress(StorageError):  # why it cannot be written says more
            storage.remove_file(name)


def _explain_refusal(url: str) -> str:
    try:
        try_write(url)
    except StorageError as e:
        cause = e.__cause__
        lasting = isinstance(cause, _REFUSED) or (isinstance(cause, OSError) and cause.errno in _FOR_GOOD)
        return f"{url} cannot be written: {getattr(cause, 'strerror', None) or e}" if lasting else ""
    return ""
