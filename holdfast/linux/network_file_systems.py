"""Tells whether a folder is on a file system that several hosts share: locks and shared memory fail there."""

import os
import re
from pathlib import Path

_KINDS = frozenset("nfs nfs4 cifs smb3 smbfs ncpfs afs lustre gpfs beegfs ceph panfs wekafs pvfs2 gfs2 ocfs2".split())
_FUSE = frozenset(f"fuse.{name}" for name in "sshfs glusterfs ceph-fuse ceph s3fs gcsfuse juicefs beegfs".split())
_ESCAPED = re.compile(r"\\([0-7]{3})")


def network_kind(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the kind of network file system that holds this path, such as nfs4; empty if it is local or unknown."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    where, found = Path(os.path.realpath(path)), ("", "")
    for line in lines:
        before, _, after = line.partition(" - ")
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), before.split()[4])
        if where.is_relative_to(point) and len(point) >= len(found[0]):  # of two at one point, the later one counts
            found = (point, after.split()[0])
    return found[1] if found[1] in _KINDS | _FUSE else ""
