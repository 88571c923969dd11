"""Which folders are on file systems of several hosts, by tables of mounts as kernels write them."""

from pathlib import Path

import pytest

from holdfast.linux.network_file_systems import network_kind

MOUNTS = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
40 22 0:35 / /users rw,relatime shared:20 - nfs4 filer:/users rw,vers=4.2,addr=10.0.0.9
41 22 0:36 /sub /mnt/big\\040disk rw,relatime - lustre mgs@tcp:/big rw,flock
42 40 0:37 / /users/local rw - xfs /dev/nvme0n1 rw
43 22 0:38 / /data rw - nfs filer:/data rw
44 43 0:39 / /data rw - tmpfs tmpfs rw
45 22 0:40 / /ssh rw - fuse.sshfs me@host: rw
46 22 0:41 / /overlay rw - overlay overlay rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp/run", ""),
        ("/users", "nfs4"),
        ("/users/ann/.local/state/holdfast/runs/one", "nfs4"),
        ("/users/local/run", ""),
        ("/users2/ann", ""),
        ("/mnt/big disk/run", "lustre"),
        ("/data/run", ""),
        ("/ssh/run", "fuse.sshfs"),
        ("/overlay/run", ""),
    ],
)
def test_the_mount_that_holds_a_path(path: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert network_kind(Path(path), tmp_path / "mountinfo") == kind


def test_no_table(tmp_path: Path) -> None:
    assert network_kind(Path("/users"), tmp_path / "nothing") == ""
    assert network_kind(tmp_path) == "", "tests run on a local disk"
