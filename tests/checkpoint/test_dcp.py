"""What we write torch reads by itself, in any number of pieces; and what we read ourselves is checked first."""

import os
import pickle  # noqa: TID251 to forge metadata with
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from holdfast.checkpoint import checkpoint_publication, checkpoint_reader, dcp
from holdfast.checkpoint.image_layout import EXTRA, ImageLayout, arrange_image
from holdfast.checkpoint.image_record_locations import file_of, locate_pieces
from holdfast.checkpoint.manifest import Author
from holdfast.checkpoint.memory_copy import MemoryCopier
from holdfast.checkpoint.state_image import (
    StateError,
    StateImage,
    TensorHolders,
    extra_spec,
    flatten_state,
    item_slices,
    record_sizes,
)
from holdfast.checkpoint.storage_errors import CorruptError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
AUTHOR = Author(1, "run")

State = dict[str, Any]


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 50, bias=False))
    model.append(torch.nn.Linear(50, 50, bias=False))
    model[3].weight = model[2].weight  # tied
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (seed + 1))
    for _ in range(seed):
        model(torch.randn(4, 20)).sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(seed: int) -> State:
    model, optimizer = trained(seed)
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def images(state: State, world: int, holders: Callable[[int], TensorHolders]) -> list[StateImage]:
    """One image for each of some ranks that hold the same state."""
    made = []
    for rank in range(world):
        found = flatten_state(state, lambda _, rank=rank: holders(rank))  # type: ignore[misc]
        specs = [*found.specs, extra_spec(1 << 12, rank, world)]
        layout = arrange_image(specs, record_sizes, rank=rank, world=world)
        image = StateImage(layout, memoryview(bytearray(layout.image_bytes)))
        image.write_frames()
        moves = []
        row = torch.full((1, 1 << 12), rank, dtype=torch.uint8)
        for index, (item, part) in enumerate(zip(layout.items, item_slices(layout), strict=True)):
            thing = found.objects.get(item.spec.key, row)
            if isinstance(thing, torch.Tensor):
                moves.append(image.put_tensor(index, thing if part is None else thing[part]))
            else:
                image.put_value(index, thing)
        MemoryCopier(1).copy_moves(filter(None, moves))
        made.append(image)
    return made


def share(image: StateImage) -> list[memoryview]:
    return [image.memory[part.start : part.end] for part in image.layout.owned_ranges()]


def put(folder: Path, made: list[StateImage]) -> str:
    """As raw files, without any code of ours."""
    for image in made:
        (folder / file_of(image.layout.rank)).write_bytes(b"".join(share(image)))
    (folder / ".metadata").write_bytes(dcp.encode_metadata([image.layout for image in made]))
    return str(folder)


def published(folder: Path, made: list[StateImage]) -> str:
    staged = checkpoint_publication.staging_folder(str(folder), 7, AUTHOR)
    parts = [checkpoint_publication.write_part(staged, image.layout.rank, share(image)) for image in made]
    return checkpoint_publication.publish_checkpoint(
        str(folder), 7, parts, dcp.encode_metadata([image.layout for image in made]), author=AUTHOR
    )


def leaves(state: object, path: tuple[object, ...] = ()) -> dict[tuple[object, ...], object]:
    if isinstance(state, dict):
        return {k: v for name, inner in state.items() for k, v in leaves(inner, (*path, name)).items()}
    if isinstance(state, list) and state and isinstance(state[0], dict):
        return {k: v for number, inner in enumerate(state) for k, v in leaves(inner, (*path, number)).items()}
    return {path: state}


def assert_same(found: State, wanted: State) -> None:
    mine, theirs = leaves(found), leaves(wanted)
    assert mine.keys() == theirs.keys()
    for path, thing in mine.items():
        if isinstance(thing, torch.Tensor):
            assert torch.equal(thing, theirs[path]), path  # type: ignore[arg-type]
        else:
            assert thing == theirs[path], path


def replicated(world: int) -> Callable[[int], TensorHolders]:
    return lambda _: TensorHolders(tuple(range(world)), tuple(range(world)))


@pytest.mark.parametrize("world", [1, 2, 5])
def test_torch_reads_the_shares_of_replicas(tmp_path: Path, world: int) -> None:
    state = state_of(3)
    made = images(state, world, replicated(world))
    assert sum(len(part) for image in made for part in share(image)) < 1.2 * made[0].layout.image_bytes + 20_000 * world
    loaded = state_of(1)
    torch_dcp.load(loaded, checkpoint_id=put(tmp_path, made))
    assert_same(loaded, state)


def test_torch_reads_what_only_some_ranks_have(tmp_path: Path) -> None:
    """Stages of a pipeline: other keys on every rank, but for those of their optimizers."""
    state: State = {"model": {f"layer{n}": torch.randn(3, n + 1) for n in range(2)}, "optimizer": {"lr": 0.5}}
    stages = [
        images({"model": {f"layer{n}": state["model"][f"layer{n}"]}, "optimizer": {"lr": n + 0.5}}, 2, _own)[n]
        for n in range(2)
    ]
    url = put(tmp_path, stages)
    loaded: State = {
        "model": {name: torch.zeros_like(t) for name, t in state["model"].items()},
        "optimizer": {"lr": 0.0},
    }
    torch_dcp.load(loaded, checkpoint_id=url)
    assert_same(loaded, state)
    other = {"optimizer.lr@1": 0.0}
    torch_dcp.load(other, checkpoint_id=url)
    assert other == {"optimizer.lr@1": 1.5}


def _own(rank: int) -> TensorHolders:
    return TensorHolders((rank,), (rank,))


def test_extras_are_rows(tmp_path: Path) -> None:
    url = put(tmp_path, images({"x": torch.ones(1)}, 3, replicated(3)))
    loaded = {EXTRA: torch.zeros(3, 1 << 12, dtype=torch.uint8)}
    torch_dcp.load(loaded, checkpoint_id=url)
    assert loaded[EXTRA].float().mean(1).tolist() == [0, 1, 2]


def test_every_dtype(tmp_path: Path) -> None:
    dtypes = [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int8, torch.complex64, torch.float64]
    state = {str(dtype): torch.randint(0, 2, (6, 4), dtype=torch.uint8).to(dtype) for dtype in dtypes}
    state |= {"scalar": torch.tensor(3), "empty": torch.empty(0, 3)}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    torch_dcp.load(loaded, checkpoint_id=put(tmp_path, images(state, 2, replicated(2))))
    for name, tensor in state.items():
        assert torch.equal(loaded[name].to(torch.complex128), tensor.to(torch.complex128)), name


@pytest.mark.parametrize("world", [1, 3])
def test_an_image_is_filled_again_from_the_parts(tmp_path: Path, world: int) -> None:
    made = images(state_of(2), world, replicated(world))
    url = published(tmp_path, made)
    metadata = dcp.decode_metadata(checkpoint_reader.read_metadata(url))
    for image in made:
        pieces = locate_pieces(metadata, image.layout)
        assert pieces is not None and len(pieces) <= 2 * world
        again = bytearray(image.layout.image_bytes)
        checkpoint_reader.read_ranges(url, pieces, memoryview(again))
        assert bytes(again) == bytes(image.memory)


def test_another_cut_is_noticed(tmp_path: Path) -> None:
    state = state_of(2)
    metadata = dcp.decode_metadata(dcp.encode_metadata([image.layout for image in images(state, 3, replicated(3))]))
    assert locate_pieces(metadata, images(state, 2, replicated(2))[0].layout) is None
    other = {**state, "model": {**state["model"], "0.bias": torch.zeros(51)}}
    assert locate_pieces(metadata, images(other, 3, replicated(3))[0].layout) is None


def test_our_reader(tmp_path: Path) -> None:
    state = state_of(3)
    url = published(tmp_path, images(state, 3, replicated(3)))
    loaded = state_of(1)
    torch_dcp.load(loaded, storage_reader=dcp.Reader(url))
    assert_same(loaded, state)
    # The same by torch's own, and in smaller batches.
    again = state_of(1)
    torch_dcp.load(again, checkpoint_id=url)
    assert_same(again, state)


def test_our_reader_in_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp.reader, "_AT_ONCE_BYTES", 5000)
    state = state_of(3)
    url = published(tmp_path, images(state, 2, replicated(2)))
    loaded = state_of(1)
    torch_dcp.load(loaded, storage_reader=dcp.Reader(url))
    assert_same(loaded, state)


def test_our_reader_sees_a_flipped_byte(tmp_path: Path) -> None:
    made = images(state_of(3), 2, replicated(2))
    url = published(tmp_path, made)
    item = next(item for item, _ in made[1].layout.owned_items() if item.spec.bytes > 1000)
    at = next(at for other, at in made[1].layout.owned_items() if other is item) + item.length // 2
    path = Path(url) / file_of(1)
    with path.open("r+b") as file:
        content = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([content[0] ^ 1]), at)
    torch_dcp.load(state_of(1), checkpoint_id=url)  # torch does not notice
    with pytest.raises(CheckpointException, match=CorruptError.__name__):
        torch_dcp.load(state_of(1), storage_reader=dcp.Reader(url))


def test_metadata_is_not_trusted() -> None:
    with pytest.raises(Exception, match=r"os.system|posix.system|Unsupported"):
        dcp.decode_metadata(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(StateError, match=r"\bdict$"):
        dcp.decode_metadata(pickle.dumps({}, protocol=2))


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("false",)


def test_two_owners_are_refused() -> None:
    one: ImageLayout = images({"x": torch.ones(3)}, 1, replicated(1))[0].layout
    with pytest.raises(StateError, match=r"__0_0\.distcp .*__0_0\.distcp .*holdfast\.extra"):
        dcp.encode_metadata([one, one])
