"""`holdfast ckpt export`: writes what a checkpoint holds in a form that others, or other numbers of ranks, can load."""

import argparse
import sys

from holdfast.checkpoint.checkpoint_reader import verify_checkpoint
from holdfast.checkpoint.manifest import MANIFEST
from holdfast.checkpoint.storage_opener import open_storage
from holdfast.checkpoint.stored_checkpoints import find_checkpoints
from holdfast.checkpoint.trainer_checkpoints import (
    TrainerCheckpoint,
    find_trainer_checkpoints,
    verify_trainer_checkpoint,
)
from holdfast.cli.commands.ckpt_gather import find_states
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.quantity_text import counted_noun
from holdfast.core.terminal_sanitizer import plain_line

_MOST_RANKS = 1 << 20


def choose_urls(place: str, step: int | None, *, states: bool = False) -> list[str]:
    """Return the URLs of the chosen checkpoints, newest first, those in doubt last; UsageError if there are none."""
    if open_storage(place).read(MANIFEST) is not None:
        return [place]
    stored = find_checkpoints(place) or (find_states(place) if states else ())
    found = [one for one in stored if step in (None, one.step)]
    if not found:
        which = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise UsageError(f"there is no {which} in {place}")
    return [one.url for one in sorted(found, key=lambda one: one.doubted)]


def export_checkpoint(args: argparse.Namespace) -> int:
    """Write the newest sound checkpoint, of ours if there is one, to the folder `args.to`."""
    if args.file_gb < 0:
        raise UsageError("--file-gb must not be negative")
    if args.ranks is not None and not 0 < args.ranks <= _MOST_RANKS:
        raise UsageError(f"--ranks must be from 1 to {_MOST_RANKS:,}")
    others = [one for one in find_trainer_checkpoints(args.place) if args.step in (None, one.step)]
    try:
        urls = choose_urls(args.place, args.step)
    except UsageError:
        if not others:
            raise
        return _export_trainer(args, others)
    if args.dcp or args.ranks:
        raise UsageError("--dcp and --ranks are for checkpoints of trainers; ours can be loaded by any number of ranks")
    return _export_weights(args, urls)


def _export_weights(args: argparse.Namespace, urls: list[str]) -> int:
    _require_safetensors()
    from holdfast.checkpoint.dcp.safetensors_export import export_safetensors  # torch, which takes seconds

    url = next((url for url in urls if not verify_checkpoint(url)), None)
    if url is None:
        raise UsageError(f"no checkpoint in {args.place} is sound; holdfast ckpt verify says more")
    files = export_safetensors(url, args.to, prefix=args.prefix, most_bytes=_most_bytes(args))
    print(plain_line(f"{url} -> {', '.join(map(str, files))}"))
    return 0


def _export_trainer(args: argparse.Namespace, others: list[TrainerCheckpoint]) -> int:
    if not (args.dcp or args.ranks):
        _require_safetensors()
    from holdfast.checkpoint.trainer_checkpoint_export.trainer_checkpoint_converter import (  # torch
        ExportForm,
        export_trainer_checkpoint,
    )

    one = next((one for one in others if not verify_trainer_checkpoint(one.url).fault), None)
    if one is None:
        raise UsageError(f"no checkpoint in {args.place} is sound; holdfast ckpt verify says more")
    form = ExportForm(
        is_dcp=args.dcp,
        ranks=args.ranks or 0,
        step=one.step or 0,
        prefix=args.prefix,
        most_bytes=_most_bytes(args),
    )
    made = export_trainer_checkpoint(one.url, args.to, form)
    print(plain_line(f"{one.url} -> {', '.join(made.files)}"))
    if made.left_out:
        print(plain_line(f"left out: {counted_noun(len(made.left_out), 'object')}, such as {made.left_out[0]}"))
    if made.assumed:
        print(plain_line(made.assumed))
    return 0


def _require_safetensors() -> None:
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise UsageError("this needs safetensors: pip install safetensors") from None


def _most_bytes(args: argparse.Namespace) -> int:
    return int(args.file_gb * 1e9) if args.file_gb else sys.maxsize
