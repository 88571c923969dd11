"""The secrets of a run: keys and secret of its controller's port, its token, and what an ended run has to forget."""

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.run_dirs.local_run_list import holdfast_home
from holdfast.cli.run_dirs.run_dir_removal import remove_below
from holdfast.cli.run_dirs.run_directory import COMPILED_CODE
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.releases import secret_file_search
from holdfast.wire.run_and_node_specs import COMPILED_ARCHIVES

if TYPE_CHECKING:
    from holdfast.config import Settings
    from holdfast.wire.credentials.certificate_authority import CertificateAuthority

JOURNAL_KEY = "journal.key"  # for the values of `update --env` in journal.db
# These and the folders below are needed to resume, and by nobody afterwards.
SECRET_FILES = ("token", "env.json", JOURNAL_KEY)
_RESUME_FOLDERS = ("door", "keys", "slurm/*/keys", f"{COMPILED_CODE}*", f"releases/{COMPILED_ARCHIVES}")


def open_authority(run_dir: Path) -> "CertificateAuthority":
    """Return the certificate authority that decides which hosts belong to this run; the first call creates it."""
    from holdfast.wire.credentials.certificate_authority import CertificateAuthority

    return CertificateAuthority(door_keys_folder(run_dir))


def door_keys_folder(run_dir: Path) -> Path:
    """Return the folder of the keys with which the controller proves its identity and checks hosts."""
    return run_dir / "door"


def is_certified(run_dir: Path) -> bool:
    """Return whether nodes prove who they are with certificates of the user's own authority, not with a secret."""
    return not (door_keys_folder(run_dir) / mutual_tls.SIGNING).exists()


def read_door_secret(run_dir: Path) -> str:
    """Return the secret that joining hosts must know."""
    return (door_keys_folder(run_dir) / "secret").read_text(encoding="utf-8").strip()


def write_door_secret(run_dir: Path, told: str) -> None:
    door_keys_folder(run_dir).mkdir(mode=0o700, exist_ok=True)
    mutual_tls.write_secret(door_keys_folder(run_dir) / "secret", told.encode())


def list_secrets(run_dir: Path, settings: "Settings") -> list[str]:
    """Return the secrets of a run itself: of its port, of hosts that join, and the address of its hook."""
    read_token(run_dir)  # which makes it if it is not there
    words = secret_file_search.read_secrets(run_dir, settings, None, os.environ)
    return [word.decode("utf-8", "replace") for word in words]


def forget_secrets(run_dir: Path) -> None:
    """Remove the secrets and the compiled code of an ended run, which only a resume would need."""
    for name in SECRET_FILES:
        (run_dir / name).unlink(missing_ok=True)
    for path in find_resume_folders(run_dir):
        with contextlib.suppress(OSError):
            remove_below(run_dir, path)


def find_resume_folders(run_dir: Path) -> list[Path]:
    """Return the folders that hold a run's secrets and compiled code, including half-copied ones."""
    return [path for pattern in _RESUME_FOLDERS for path in sorted(run_dir.glob(pattern))]


def people_path() -> Path:
    """Return the file of user tokens; they are valid for the ports of all runs of this user."""
    return holdfast_home() / "people.json"


def read_token(run_dir: Path) -> str:
    """Return the run's own token for its port; makes a new one if it is missing or damaged."""
    with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
        return (run_dir / "token").read_text(encoding="ascii").strip()
    made = os.urandom(16).hex()
    mutual_tls.write_secret(run_dir / "token", made.encode())
    return made
