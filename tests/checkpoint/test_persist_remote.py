"""The same promises on storage that fsspec reaches, where nothing can be renamed and the manifest alone publishes."""

import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import fsspec.implementations.memory  # type: ignore[import-untyped]
import pytest

from holdfast.checkpoint.checkpoint_publication import publish_checkpoint, staging_folder, write_part
from holdfast.checkpoint.checkpoint_reader import read_part, read_ranges, verify_checkpoint
from holdfast.checkpoint.manifest import BLOCK_BYTES, Author
from holdfast.checkpoint.remote_storage import RemoteStorage
from holdfast.checkpoint.retention import clean_unpublished, retain_checkpoints
from holdfast.checkpoint.storage_errors import StorageError, TakenOverError
from holdfast.checkpoint.storage_opener import open_storage
from holdfast.checkpoint.storage_owner import take_ownership
from holdfast.checkpoint.stored_checkpoints import find_checkpoints
from holdfast.checkpoint.verified_block_reads import PartPiece
from holdfast.checkpoint.write_lane import WriteLane, WritePulse
from tests.checkpoint.making import METADATA, content, in_pages, save

SIZES = (BLOCK_BYTES + 77, 0, 5000)


class Server:
    """A real S3 server, in a process of its own, on a free port."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("wb") as out:
            command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def address(self) -> str:
        until = time.monotonic() + 60
        while time.monotonic() < until and self._process.poll() is None:
            if found := re.search(r"http://127\.0\.0\.1:\d+", self._log.read_text()):
                return found[0]
            time.sleep(0.1)
        raise AssertionError(f"the S3 server did not start: {self._log.read_text()}")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("moto.server", reason="the S3 server of moto is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = Server(tmp_path_factory.mktemp("s3") / "log")
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        try:
            for name, value in (keys | {"AWS_ENDPOINT_URL": server.address()}).items():
                patch.setenv(name, value)
            fsspec.filesystem("s3").mkdir("holdfast")
            yield "s3://holdfast"
        finally:
            server.stop()
            fsspec.filesystem("s3").clear_instance_cache()


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.slow)])
def base(request: pytest.FixtureRequest) -> str:
    """An empty place on remote storage."""
    bucket = "memory://holdfast" if request.param == "memory" else request.getfixturevalue("bucket")
    return f"{bucket}/{uuid.uuid4().hex}/run"


def objects(base: str) -> list[str]:
    fs, path = fsspec.core.url_to_fs(base)
    fs.invalidate_cache()
    return sorted(name.removeprefix(path).removeprefix("/") for name in fs.find(path))


def test_a_checkpoint_is_written_and_read(base: str) -> None:
    url = save(base, 12, SIZES)
    assert url.endswith("/step-00000012.1")
    assert verify_checkpoint(url) == ()
    for rank, size in enumerate(SIZES):
        memory = in_pages(bytes(size))
        assert read_part(url, rank, memory) == size
        assert bytes(memory) == content(size, 12000 + rank)
    memory = in_pages(bytes(300))
    read_ranges(url, [PartPiece(rank=0, start=BLOCK_BYTES - 100, bytes=150, to=100)], memory)
    assert bytes(memory[100:250]) == content(SIZES[0], 12000)[BLOCK_BYTES - 100 :][:150]
    [found] = find_checkpoints(base)
    assert (found.step, found.url, found.ok, found.bytes) == (12, url, True, sum(SIZES))


def test_the_manifest_publishes_and_unpublishes(base: str) -> None:
    parts = [write_part(staging_folder(base, 1, Author(1)), 0, [memoryview(b"some")])]
    assert find_checkpoints(base) == ()
    url = publish_checkpoint(base, 1, parts, METADATA, author=Author(1))
    assert [one.url for one in find_checkpoints(base)] == [url]
    fsspec.core.url_to_fs(url)[0].rm_file(f"{url}/holdfast.json")
    assert find_checkpoints(base) == ()


def test_the_same_step_again_does_not_touch_the_first(base: str) -> None:
    first, second = save(base, 5), save(base, 5, author=Author(2))
    assert [one.url for one in find_checkpoints(base)] == [second, first]
    assert verify_checkpoint(first) == verify_checkpoint(second) == ()
    assert retain_checkpoints(base, keep=1) == (first,)
    assert [name.split("/")[0] for name in objects(base)] == ["step-00000005.2"] * 4


def test_retention_and_cleaning(base: str) -> None:
    me = Author(3)
    take_ownership(base, me)
    for step in range(1, 6):
        save(base, step, author=me)
    write_part(staging_folder(base, 4, Author(2)), 0, [memoryview(b"dead")])
    write_part(staging_folder(base, 9, Author(1, "other")), 0, [memoryview(b"alive: this test wrote it")])
    retain_checkpoints(base, keep=2, every=4, newest=5)
    assert [one.step for one in find_checkpoints(base)] == [5, 4]
    assert [url.rpartition("/")[2] for url in clean_unpublished(base, me)] == ["step-00000004.2"]
    left = {name.split("/")[0] for name in objects(base)} - {".holdfast-author.json"}
    assert left == {"step-00000004.3", "step-00000005.3", "step-00000009.other-1"}


def test_a_removal_that_is_cut_short_leaves_no_checkpoint(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(base, 1)
    save(base, 2)
    cut = [name for name in objects(base) if "step-00000001" in name and not name.endswith("holdfast.json")]

    def broken(*_: object, **__: object) -> None:
        raise ConnectionResetError("severed")

    with monkeypatch.context() as patch:
        patch.setattr(fsspec.core.url_to_fs(base)[0], "rm", broken)  # one for all, by fsspec
        with pytest.raises(StorageError, match=r"step-00000001\.1 .*: severed"):
            retain_checkpoints(base, keep=1)
    assert [one.step for one in find_checkpoints(base)] == [2]
    assert [name for name in objects(base) if "step-00000001" in name] == cut
    clean_unpublished(base, Author(2))
    assert [name for name in objects(base) if "step-00000001" in name] == []


def test_every_corruption_is_named(base: str) -> None:
    url = save(base, 3, SIZES)
    fs, path = fsspec.core.url_to_fs(url)
    for name in objects(url):
        was = fs.cat_file(f"{path}/{name}")
        changes = [was[:-1], was[:-1] + bytes([was[-1] ^ 1])] if was else [b"more"]
        for changed in changes:
            fs.pipe_file(f"{path}/{name}", changed)
            assert name in " ".join(verify_checkpoint(url)), (name, len(changed))
        fs.rm_file(f"{path}/{name}")
        assert name in " ".join(verify_checkpoint(url))
        fs.pipe_file(f"{path}/{name}", was)
    assert verify_checkpoint(url) == ()


def test_an_upload_is_taken_up_where_a_file_ended(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = staging_folder(base, 1, Author(1))
    first = write_part(folder, 0, [memoryview(b"whole")])
    real = RemoteStorage.write
    written: list[str] = []

    def counted(self: RemoteStorage, name: str, *rest: Any) -> str:
        written.append(name)
        return real(self, name, *rest)

    monkeypatch.setattr(RemoteStorage, "write", counted)
    assert write_part(folder, 0, [memoryview(b"whole")]) == first
    parts = [first, write_part(folder, 1, [memoryview(b"other")])]
    assert written == ["__1_0.distcp"]
    assert verify_checkpoint(publish_checkpoint(base, 1, parts, METADATA, author=Author(1))) == ()


def test_an_upload_that_breaks_off_is_an_outcome(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(pulse: WritePulse) -> str:
        real, calls = pulse.add_bytes, []

        def broken(count: int = 0) -> None:
            calls.append(count)
            if len(calls) == 2:
                raise ConnectionResetError("the link broke")
            real(count)

        monkeypatch.setattr(pulse, "add_bytes", broken)
        write_part(staging_folder(base, 1, Author(1)), 0, [in_pages(content(2 * BLOCK_BYTES, 1))], pulse=pulse)
        return ""

    outcome = WriteLane(base, print).run(1, write)
    assert "__0_0.distcp " in outcome.detail and outcome.detail.endswith(": the link broke")
    assert objects(base) == ["step-00000001.1/__0_0.json"]  # nothing of it is left but the reason


def test_an_older_generation_cannot_publish(base: str) -> None:
    part = write_part(staging_folder(base, 1, Author(1)), 0, [memoryview(b"late")])
    take_ownership(base, Author(2))
    with pytest.raises(TakenOverError):
        publish_checkpoint(base, 1, [part], METADATA, author=Author(1))
    assert find_checkpoints(base) == ()


def test_storage_that_cannot_be_reached_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"nosuch://bucket/run .*: Protocol not known: nosuch"):
        open_storage("nosuch://bucket/run")

    def unreachable(*_: object, **__: object) -> None:
        raise ArithmeticError("a library beneath fsspec raises what it likes")

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "ls", unreachable)
    with pytest.raises(StorageError, match=r"memory:///nowhere .*: a library beneath"):
        find_checkpoints("memory://nowhere")


@pytest.mark.slow
def test_a_server_that_is_gone_is_a_sentence(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("s3").clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens there
    try:
        outcome = WriteLane(bucket, print).run(1, lambda pulse: save(f"{bucket}/gone", 1))
    finally:
        fsspec.filesystem("s3").clear_instance_cache()
    assert not outcome.ok
    assert "http://127.0.0.1:9/" in outcome.detail


def test_file_urls_are_folders(tmp_path: Path) -> None:
    url = save(f"file://{tmp_path}", 1)
    assert url == str(tmp_path / "step-00000001")
    assert [one.url for one in find_checkpoints(f"file://{tmp_path}")] == [url]
