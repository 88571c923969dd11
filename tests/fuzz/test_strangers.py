"""What strangers may have written or sent: trainers' checkpoints, the word of NCCL's RAS, messages of survivors."""

import io
import json
import pickle  # noqa: TID251  # of this test's own making
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.checkpoint import trainer_checkpoints
from holdfast.checkpoint.foreign_file_faults import end_fault, first_fault
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.trainer_checkpoint_export.trainer_checkpoint_converter import (
    ExportForm,
    export_trainer_checkpoint,
)
from holdfast.checkpoint.trainer_checkpoints import find_trainer_checkpoints, verify_trainer_checkpoint
from holdfast.core.diagnose.ras_status import TOLD_CHARS, describe_ras, parse_ras, telling_lines
from holdfast.model.rank_traces import Process
from holdfast.wire import survivor_messages
from holdfast.wire.survivor_messages import PartOrder, RejoinOrder, SurvivorState
from tests.checkpoint.trainer_checkpoint_export.zero_making import Zero, pickle_of, put_pickle, write_zero
from tests.core.diagnose.test_ras_status import BEHIND, SILENT
from tests.fuzz.making import JSON, hostile, mutated, narrow, values

_TREES = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
_NAMED = st.dictionaries(st.sampled_from(("global_steps", "dp_world_size", "mp_world_size", "storage_data")), _TREES)
_PICKLES = st.tuples(_TREES | _NAMED, st.integers(0, 5)).map(lambda one: pickle.dumps(one[0], one[1]))
_SMALL = 256 << 20  # bytes that a child may take


def _archive(content: bytes) -> bytes:
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("archive/data.pkl", content)
    return file.getvalue()


def _tensors(header: dict[str, object]) -> bytes:
    told = json.dumps(header).encode()
    return len(told).to_bytes(8, "little") + told


_HEADERS = st.dictionaries(st.text(max_size=3), st.fixed_dictionaries({"data_offsets": _TREES}) | _TREES, max_size=3)
_FILES = {
    "mp_rank_00_model_states.pt": mutated(_PICKLES).map(_archive) | mutated(_PICKLES.map(_archive)),
    ".metadata": mutated(_PICKLES),
    "metadata.json": mutated(_NAMED.map(lambda told: json.dumps(told, default=str).encode())),
    "x.safetensors": mutated(_HEADERS.map(lambda told: _tensors(json.loads(json.dumps(told, default=str))))),
}


@given(st.sampled_from(sorted(_FILES)).flatmap(lambda name: st.tuples(st.just(name), _FILES[name])))
@example((".metadata", b"\x80\x02]q\x00h\x05."))
@example((".metadata", b"\x8e\xff\xff\xff\xff\xff\xff\xff\xff."))
@example(("mp_rank_00_model_states.pt", _archive(b"\x80\x02}X\x0c\x00\x00\x00global_stepsI-1\ns.")))
@example(("metadata.json", b"[" * 200_000))
def test_checkpoints_of_trainers(file: tuple[str, bytes]) -> None:
    name, content = file
    before, trainer_checkpoints._MOST_MEMORY_BYTES = trainer_checkpoints._MOST_MEMORY_BYTES, _SMALL
    try:
        with TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(content)
            told = [first_fault([path]), end_fault(path), verify_trainer_checkpoint(folder).fault]
            told += [one.why for one in find_trainer_checkpoints(folder)]
    finally:
        trainer_checkpoints._MOST_MEMORY_BYTES = before
    assert {f"{begin}whoever read it ended with code 1" for begin in ("", "it cannot be read: ")}.isdisjoint(told)


@pytest.mark.slow  # it makes a folder of two ranks for each example, and may take minutes
@given(st.data(), st.sampled_from((1, 3)), st.booleans())
def test_checkpoints_of_trainers_that_are_exported(data: st.DataObject, stage: int, is_dcp: bool) -> None:
    """Each is exported, or refused in a sentence, without a word from torch."""
    with TemporaryDirectory() as folder:
        source = write_zero(Path(folder) / "from", 2, Zero(stage=stage))
        path = data.draw(st.sampled_from(sorted(source.glob("*.pt"))))
        put_pickle(path, data.draw(mutated(st.just(pickle_of(path)))))
        form = ExportForm(is_dcp=True) if is_dcp else ExportForm(ranks=3)
        fault = ""
        try:
            export_trainer_checkpoint(str(source), Path(folder) / "to", form)
        except StorageError as e:
            fault = str(e)
        assert not fault.endswith("ended with code 1"), fault


@given(hostile(st.sampled_from((BEHIND, SILENT)).map(str.encode)))
@example(b"  Rank " + b"9" * 5000 + b" -- GPU 0 managed by process 1 on node x")
def test_the_word_of_ras(content: bytes) -> None:
    lines = telling_lines(content.decode(errors="replace"))
    assert len(lines) <= TOLD_CHARS
    mains = {word.rank: Process(node="n", rank=word.rank, pid=word.pid) for word in parse_ras(lines)}
    assert describe_ras(lines, mains).isprintable()


_SURVIVOR = st.one_of(*(values(kind, JSON) for kind in (SurvivorState, PartOrder, RejoinOrder)))


@given(hostile(_SURVIVOR.map(survivor_messages.encode)))
@example(b'{"type":"survivor","rank":1e999,"generation":0,"parked":true}')
@example(b'{"type":"survivor","rank":' + b"[" * 9_000)
def test_messages_of_survivors(content: bytes) -> None:
    for decode in (survivor_messages.to_agent, survivor_messages.to_rank):
        narrow(lambda decode=decode: decode(content), msgspec.DecodeError)  # type: ignore[misc]
