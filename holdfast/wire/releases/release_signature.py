"""Signs releases with ssh keys, and checks their signatures against the signers that a job accepts."""

import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

import msgspec

from holdfast.model.code_release import Release

_SPACE = "holdfast-release"  # so that a signature for something else is none for this
_WAIT_S = 10.0


class SigningError(Exception):
    """Says in one sentence why a release could not be signed."""


def signed_message(release: Release) -> bytes:
    """Return the bytes that are signed: the tree's digest, its places, the command and the environment."""
    told = {
        "digest": release.digest,
        "root": release.root,
        "home": release.home,  # files that ranks make are brought there
        "script": release.script,
        "argv": list(release.argv),
        "env": release.env,
    }
    return msgspec.json.encode(told, order="deterministic")


def signed_digest(release: Release) -> str:
    return sha256(signed_message(release)).hexdigest()


def sign_release(release: Release, key: Path) -> Release:
    """Sign a release. `key` is a private key file, or a public key file whose private key is in ssh-agent."""
    try:
        done = _ssh_keygen("-Y", "sign", "-n", _SPACE, "-f", str(key), sent=signed_message(release))
    except (OSError, subprocess.TimeoutExpired) as e:
        raise SigningError(f"ssh-keygen cannot sign with {key}: {e}") from None
    if done.returncode:
        raise SigningError(f"ssh-keygen cannot sign with {key}: {_keygen_output(done)}")
    return msgspec.structs.replace(release, signature=done.stdout.decode("ascii", "replace"))


def signature_fault(release: Release, signers: str) -> str:
    """Return why a release is not signed by one of these signers; empty if it is."""
    if not release.signature:
        return "this job requires signed releases; sign it with holdfast update --sign KEY"
    with tempfile.TemporaryDirectory(prefix="holdfast-signature-") as folder:
        file = Path(folder) / "signature"
        file.write_text(release.signature)
        try:
            found = _ssh_keygen("-Y", "find-principals", "-s", str(file), "-f", signers)
            names = found.stdout.decode("utf-8", "replace").splitlines()
            if found.returncode or not names:
                return f"none of the signers in {signers} signed it"
            flags = ("-Y", "verify", "-f", signers, "-I", names[0], "-n", _SPACE, "-s", str(file))
            done = _ssh_keygen(*flags, sent=signed_message(release))
        except (OSError, subprocess.TimeoutExpired) as e:
            return f"its signature cannot be checked: {e}"
    return f"its signature is invalid: {_keygen_output(done)}" if done.returncode else ""


def _ssh_keygen(*flags: str, sent: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(["ssh-keygen", *flags], input=sent, capture_output=True, check=False, timeout=_WAIT_S)


def _keygen_output(done: "subprocess.CompletedProcess[bytes]") -> str:
    return " ".join((done.stderr + done.stdout).decode("utf-8", "replace").split())[:200]
