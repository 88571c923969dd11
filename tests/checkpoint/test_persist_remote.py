"""The same promises on storage that fsspec reaches, where nothing can be renamed and the manifest alone publishes."""

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest

from holdfast.checkpoint.lane import Lane, Pulse
from holdfast.checkpoint.load import Piece, read_part, read_ranges, verify
from holdfast.checkpoint.manifest import BLOCK_BYTES, Author, StorageError
from holdfast.checkpoint.owner import take
from holdfast.checkpoint.persist import publish, staging, write_part
from holdfast.checkpoint.remote import Remote
from holdfast.checkpoint.retention import clean, find, retain
from holdfast.checkpoint.storage import at
from tests.checkpoint.making import METADATA, content, in_pages, save

SIZES = (BLOCK_BYTES + 77, 0, 5000)


@pytest.fixture
def memory() -> Iterator[str]:
    url = f"memory://{uuid.uuid4().hex}/runs/one"
    yield url
    fsspec.filesystem("memory").rm(url.split("/runs")[0], recursive=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 server on a free port."""
    pytest.importorskip("moto.server", reason="moto's S3 server is not installed (pip install 'moto[server]')")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    log = tmp_path_factory.mktemp("s3") / "log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        for _ in range(600):
            if found := re.search(r"http://127\\.0\\.0\\.1:\\d+", log.read_text()):
                break
            process.wait(0.1) if process.poll() is not None else __import__("time").sleep(0.1)
        else:
            pytest.fail(f"the S3 server did not start: {log.read_text()}")
        yield found[0]
    finally:
        process.terminate()
        process.wait(30)
