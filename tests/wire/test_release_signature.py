"""A release is taken if one of the signers has signed exactly what will run."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.model.code_release import Release
from holdfast.wire.releases import release_signature
from holdfast.wire.releases.release_signature import SigningError

pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="there is no ssh-keygen here")
RELEASE = Release(number=2, digest="ab" * 32, script="train.py", argv=("train.py", "--lr", "1"), env={"A": "1"})


CHANGES: tuple[dict[str, Any], ...] = (
    {"digest": "cd" * 32},
    {"env": {"LD_PRELOAD": "x"}},
    {"argv": ("train.py",)},
    {"script": "evil.py"},
    {"root": "/tmp/evil"},
    {"home": "/srv/.ssh"},
)


def key(folder: Path, name: str) -> Path:
    made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name), "-C", name]
    subprocess.run(made, check=True, timeout=60)
    return folder / name


@pytest.fixture
def signers(tmp_path: Path) -> str:
    public = key(tmp_path, "ann").with_suffix(".pub").read_text()
    (tmp_path / "signers").write_text(f"ann@example.org {public}")
    return str(tmp_path / "signers")


def test_a_signed_release(signers: str, tmp_path: Path) -> None:
    release = release_signature.sign_release(RELEASE, tmp_path / "ann")
    assert release_signature.signature_fault(release, signers) == ""
    told = msgspec.structs.replace(release, number=7, message="faster", who="bob", source="~/x")
    assert release_signature.signature_fault(told, signers) == "", "what only is said about it is not signed"
    for change in CHANGES:
        changed = msgspec.structs.replace(release, **change)
        assert release_signature.signature_fault(changed, signers), change


def test_others(signers: str, tmp_path: Path) -> None:
    assert "holdfast update --sign" in release_signature.signature_fault(RELEASE, signers)
    stranger = release_signature.sign_release(RELEASE, key(tmp_path, "eve"))
    assert signers in release_signature.signature_fault(stranger, signers)
    for odd in ("no signature", "\0", stranger.signature[:100]):
        assert release_signature.signature_fault(msgspec.structs.replace(RELEASE, signature=odd), signers)
    with pytest.raises(SigningError, match="nowhere"):
        release_signature.sign_release(RELEASE, tmp_path / "nowhere")
