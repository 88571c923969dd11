"""Keeps torch's folder for compiled code from other users of the host: its name in the temporary folder is known, torch
takes whatever is there, and ranks execute what they find in it."""

import logging
import os
import pwd
import re
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

_TEMPORARY = "TMPDIR"
_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")  # where Python looks for the user's name
_log = logging.getLogger("holdfast.agent")


def claim_compile_folder(env: MutableMapping[str, str]) -> None:
    """Make torch's usual folder ours before anybody else makes it. If somebody has, set TMPDIR in `env` to a folder of
    our own, so that ranks use one in there."""
    folder = _usual_folder(env)
    if why := _foreign_reason(folder):
        env[_TEMPORARY] = tempfile.mkdtemp(prefix="holdfast-", dir=folder.parent)
        _log.warning("%s, where torch keeps compiled code, %s; ranks have %s instead", folder, why, env[_TEMPORARY])


def _usual_folder(env: MutableMapping[str, str]) -> Path:
    """Return the folder that torch chooses in this environment without TORCHINDUCTOR_CACHE_DIR. It keeps headers there
    in any case."""
    wanted = (env.get(name, "") for name in (_TEMPORARY, "TEMP", "TMP"))
    parent = next((path for path in wanted if path and os.access(path, os.W_OK | os.X_OK)), "/tmp")
    user = next((name for name in map(env.get, _NAMES) if name), "") or _own_name()
    cleaned = re.sub(r'[\\/:*?"<>|]', "_", user)
    return Path(parent).absolute() / f"torchinductor_{cleaned}"


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid_{os.getuid()}"


def _foreign_reason(folder: Path) -> str:
    """Make the folder if it is missing. Return why others can write to it; "" if they cannot, or if it cannot be made:
    then torch cannot, either."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError:
        return ""
    try:
        link, seen = folder.lstat(), folder.stat()
    except OSError as e:
        return f"cannot be opened ({e.strerror})"
    if {link.st_uid, seen.st_uid} != {os.getuid()}:
        return "belongs to another user"
    if not stat.S_ISDIR(seen.st_mode):
        return "is no folder"
    others = 0o002 if seen.st_gid == seen.st_uid else 0o022
    return "can be written by others" if seen.st_mode & others else ""
