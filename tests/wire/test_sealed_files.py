"""Files that only who knows the job's secret can read or change."""

import pytest

from holdfast.wire.credentials.sealed_files import SealError, seal_files, unseal_files

SECRET = "0b1c8e93d7a24f56b8e1902c7d3f4a65"
FILES = {"authority.key": b"-----BEGIN PRIVATE KEY-----", "nodes.json": b""}


def test_who_knows_the_secret_gets_them_back() -> None:
    sealed = seal_files(FILES, SECRET, "run")
    assert unseal_files(sealed, SECRET, "run") == FILES
    assert b"PRIVATE" not in sealed and sealed != seal_files(FILES, SECRET, "run")


def test_nobody_else_does() -> None:
    sealed = seal_files(FILES, SECRET, "run")
    for bad, secret, run in (
        (sealed, SECRET[::-1], "run"),
        (sealed, SECRET, "another run"),
        (sealed[:-1], SECRET, "run"),
        (sealed[:-1] + bytes([sealed[-1] ^ 1]), SECRET, "run"),
        (b"short", SECRET, "run"),
        (b"", SECRET, "run"),
    ):
        with pytest.raises(SealError):
            unseal_files(bad, secret, run)
