"""`holdfast ckpt gather`: makes a checkpoint from the states that a run left on the local disks of its nodes."""

import argparse
import re

import msgspec

from holdfast.checkpoint import checkpoint_publication, checkpoint_reader, storage_owner
from holdfast.checkpoint.disk_state_record import DiskNote
from holdfast.checkpoint.image_layout import ImageLayout
from holdfast.checkpoint.manifest import CheckpointPart
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.storage_opener import open_storage
from holdfast.checkpoint.stored_checkpoints import StoredCheckpoint, find_checkpoints
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.quantity_text import counted_noun
from holdfast.decoding import from_msgpack

_RANK_FOLDER = re.compile(r"rank-(\d+)")


def find_states(folder: str) -> list[StoredCheckpoint]:
    """Return the states that ranks left in `folder`, which is the run's folder below `disk.path`, rank by rank."""
    storage = open_storage(folder)
    ranks = [name for name in storage.list_names() if _RANK_FOLDER.fullmatch(name)]
    return [one for name in ranks for one in find_checkpoints(storage.url(name))]


def gather_states(args: argparse.Namespace) -> int:
    """Write every rank's share of step `args.step` to the storage `args.to` and publish it all as one checkpoint."""
    from holdfast.checkpoint.dcp import encode_metadata  # torch, which takes seconds

    found = [one for folder in args.folders for one in find_states(folder) if one.step == args.step and one.ok]
    if not found:
        raise UsageError(f"there is no state of step {args.step} in {', '.join(args.folders)}")
    newest = max(found, key=lambda one: (one.author.generation, one.at)).author
    states = {(layout := _read_layout(one)).rank: (layout, one) for one in found if one.author == newest}
    world = next(iter(states.values()))[0].world
    count = world - sum(0 <= rank < world for rank in states)  # in a folder of strangers any number
    if count > 0:
        missing = next(rank for rank in range(world) if rank not in states)
        lacking = f"rank {missing} of {world} lacks" if count == 1 else f"{count} of {world} ranks lack"
        raise UsageError(f"{lacking} step {args.step}: give the folders of all nodes' disks")
    layouts = [states[rank][0] for rank in range(world)]
    storage_owner.take_ownership(args.to, newest)
    folder = checkpoint_publication.staging_folder(args.to, args.step, newest)
    parts = [_write_share(folder, *states[rank]) for rank in range(world)]
    url = checkpoint_publication.publish_checkpoint(
        args.to, args.step, parts, encode_metadata(layouts), author=newest, layout=layouts[0].digest.hex()
    )
    storage_owner.release_ownership(args.to, newest)
    print(f"step {args.step} of {counted_noun(world, 'rank')} -> {url}")
    return 0


def _read_layout(state: StoredCheckpoint) -> ImageLayout:
    try:
        return from_msgpack(checkpoint_reader.read_metadata(state.url), DiskNote).layout
    except msgspec.DecodeError as e:
        raise StorageError(f"{state.url} is no state of a run: {e}") from None


def _write_share(folder: str, layout: ImageLayout, state: StoredCheckpoint) -> CheckpointPart:
    """Read a rank's image, check every block against its checksum, and write the ranges that the rank owns."""
    image = memoryview(bytearray(layout.image_bytes))
    checkpoint_reader.read_part(state.url, 0, image)
    return checkpoint_publication.write_part(
        folder, layout.rank, [image[one.start : one.end] for one in layout.owned_ranges()]
    )
