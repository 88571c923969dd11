"""Refuses run directories that other users own or can write, and makes folders for this user alone. Imports nothing
slow."""

import errno
import os
import pwd
import stat
from pathlib import Path

_MOST_LINKS = 40  # as the kernel


def foreign_reason(run_dir: Path) -> str:
    """Return why others than this user may have written to this folder; "" if nobody else can. Ask this before you read
    anything in a run directory: its files decide which code the user's next command executes and what it removes."""
    try:
        if link := find_foreign_link(run_dir):
            return link
        seen = run_dir.stat()  # every link on the way is ours or root's
    except OSError as e:
        return f"{run_dir} cannot be opened: {e.strerror}"
    if not stat.S_ISDIR(seen.st_mode):
        return f"{run_dir} is a file"
    if seen.st_uid != os.getuid():
        return f"{run_dir} is another user's: only commands of {_user_name(seen.st_uid)} open it"
    # A group of the same number has one member, and in a pod the kubelet opens volumes to such a one (fsGroup).
    others = 0o002 if seen.st_gid == seen.st_uid else 0o022
    if not seen.st_mode & others:
        return ""
    mend = f"if you know that it is not: chmod go-w {run_dir}"
    return f"other users may write to {run_dir}, so what is in it may be theirs; {mend}"


def find_foreign_link(path: Path) -> str:
    """Say which symbolic link on a path belongs to neither this user nor root; "" if none does.
    The check ends where the path does not exist. Raises OSError."""
    at, ahead, followed = Path("/"), list(reversed(path.absolute().parts[1:])), 0
    while ahead:
        part = ahead.pop()
        here = at.parent if part == ".." else at / part
        try:
            seen = here.lstat()
        except FileNotFoundError:
            return ""
        if not stat.S_ISLNK(seen.st_mode):
            at = here
            continue
        if seen.st_uid not in (os.getuid(), 0):
            return f"{here} is a symbolic link of {_user_name(seen.st_uid)}"
        followed += 1
        if followed > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = Path(os.readlink(here))
        at = Path("/") if target.is_absolute() else at
        ahead += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return ""


def find_foreign_owner(path: Path) -> str:
    """Return the name of the user to whom a file belongs; "" if it is this user. Raises OSError."""
    owner = path.stat().st_uid
    return "" if owner == os.getuid() else _user_name(owner)


def make_private_folder(folder: Path) -> None:
    """Make a folder and its missing parents, all for this user alone; a folder that exists keeps its mode."""
    for path in reversed([folder, *folder.parents]):
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)


def _user_name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
