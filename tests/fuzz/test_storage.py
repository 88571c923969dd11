"""Checkpoints on storage, whatever their files hold: refused in one sentence, or loaded as they were written."""

import contextlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.checkpoint import checkpoint_reader, storage_owner
from holdfast.checkpoint.doubt_notes import DoubtedRun, UnknownDoubtsError, read_doubts
from holdfast.checkpoint.image_layout import ImageLayout
from holdfast.checkpoint.manifest import (
    Author,
    CheckpointPart,
    Manifest,
    decode_manifest,
    decode_part,
    encode_manifest,
    encode_part,
    staged_of,
    step_of,
    tagged_of,
)
from holdfast.checkpoint.storage_errors import CorruptError, StorageError
from tests.checkpoint.making import save
from tests.fuzz.making import JSON, PLAIN, hostile, mutated, narrow, values

_MANIFESTS = values(Manifest, JSON)
_PARTS = values(CheckpointPart, JSON)


@given(hostile(st.one_of(_MANIFESTS.map(encode_manifest), _PARTS.map(encode_part))))
@example(b'{"format":1,"step":' + b"9" * 5000 + b"}")
@example(b'{"format":1e999}')
@example(b'{"format":1,"x":' + b"[" * 9_000)
def test_manifests_and_parts(content: bytes) -> None:
    for decode in (decode_manifest, decode_part):
        narrow(lambda decode=decode: decode(content), CorruptError)  # type: ignore[misc]


@given(_PARTS)
def test_a_part_comes_back(part: CheckpointPart) -> None:
    content = encode_part(part)
    found = narrow(lambda: decode_part(content), CorruptError)
    assert found in (part, None)


@given(
    st.one_of(st.text(max_size=30), mutated(st.just(b".step-00000007.tmp-run-3")).map(lambda b: b.decode("latin-1")))
)
@example("step-" + "9" * 5000)
@example(".step-" + "9" * 5000 + ".tmp-a")
@example("step-" + "٣" * 8)
def test_names_of_folders(name: str) -> None:
    for read in (step_of, staged_of, tagged_of):
        read(name)


@pytest.mark.parametrize("file", ["holdfast.json", "__0_0.json", "__0_0.distcp", ".metadata"])
@given(data=st.data())
def test_a_checkpoint_with_a_damaged_file(file: str, data: st.DataObject, tmp_path: Path) -> None:
    base = tmp_path / "ckpt"
    folder = Path(save(base, 1)) if not (base / "step-00000001").exists() else base / "step-00000001"
    whole = (tmp_path / "kept").read_bytes() if (tmp_path / "kept").exists() else (folder / file).read_bytes()
    (tmp_path / "kept").write_bytes(whole)
    damaged = data.draw(hostile(st.just(whole)))
    (folder / file).write_bytes(damaged)
    try:
        found = narrow(lambda: checkpoint_reader.verify_checkpoint(str(folder)), StorageError)
        assert found is None or (found == ()) == (damaged == whole)
    finally:
        (folder / file).write_bytes(whole)


@given(hostile(values(Author, JSON).map(lambda author: b'{"generation":1,"run":"a"}')))
def test_who_owns_a_folder(content: bytes) -> None:
    class One:
        def read(self, name: str) -> bytes:
            return content

    storage_owner.read_owner(One())  # type: ignore[arg-type]


@given(hostile(values(DoubtedRun, JSON).map(lambda one: msgspec.json.encode([one]))))
def test_what_is_in_doubt(content: bytes) -> None:
    class One:
        def read(self, name: str) -> bytes:
            return content

        def url(self, name: str) -> str:
            return name

    with contextlib.suppress(UnknownDoubtsError):
        assert isinstance(read_doubts(One()), tuple)  # type: ignore[arg-type]


@given(values(ImageLayout, PLAIN))
def test_a_layout_that_nobody_made(layout: ImageLayout) -> None:
    """Layouts come from peers; whoever asks one what it owns gets an answer."""
    assert len(layout.digest) == 32
    list(layout.owned_items())
    layout.owned_ranges(0)
