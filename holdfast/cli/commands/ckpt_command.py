"""`holdfast ckpt`: lists, verifies, exports, gathers and removes checkpoints."""

import argparse
import json
import sys
from pathlib import Path

import msgspec

from holdfast.checkpoint.checkpoint_reader import verify_checkpoint
from holdfast.checkpoint.retention import clean_unpublished
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.storage_opener import open_storage
from holdfast.checkpoint.stored_checkpoints import StoredCheckpoint, find_checkpoints
from holdfast.checkpoint.trainer_checkpoints import (
    TrainerCheckpoint,
    find_trainer_checkpoints,
    verify_trainer_checkpoint,
)
from holdfast.cli.commands.ckpt_export import choose_urls, export_checkpoint
from holdfast.cli.commands.ckpt_gather import find_states, gather_states
from holdfast.cli.commands.ckpt_ls_journal import local_time, read_table, stored_of
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.quantity_text import counted_noun
from holdfast.core.terminal_sanitizer import plain_line
from holdfast.journal.journal_errors import JournalError

BROKEN = 1
NONE = 1  # there is no checkpoint


def main(argv: list[str]) -> int:
    args = _make_parser().parse_args(argv)
    verbs = {
        "ls": _list_checkpoints,
        "verify": _verify_checkpoints,
        "export": export_checkpoint,
        "gather": gather_states,
        "rm": _remove_checkpoints,
    }
    try:
        return verbs[args.verb](args)
    except (UsageError, StorageError, JournalError) as e:
        print(f"holdfast ckpt {args.verb}: {plain_line(str(e))}", file=sys.stderr)
        return 2


def _make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="holdfast ckpt", description="Look after checkpoints on storage.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    what = "List checkpoints, newest first, also those of DeepSpeed, Megatron and TorchTitan; 1 if there is none."
    ls = verbs.add_parser("ls", help="list the checkpoints of a job", description=what)
    ls.add_argument("base", nargs="?", help="the folder or URL that checkpoints go to")
    ls.add_argument("--journal", metavar="URL", help="ask the database of journals instead: postgres://HOST/DATABASE")
    ls.add_argument("--run-id", metavar="ID", help="with --journal: only those of this run")
    ls.add_argument("--json", action="store_true", help="print them as JSON")
    what = "Read checkpoints and compare every byte that has a checksum; the exit code is 1 if one is broken."
    check = verbs.add_parser("verify", help="check every byte of checkpoints", description=what)
    check.add_argument("place", help="a checkpoint, or the folder or URL of several")
    check.add_argument("--step", type=int, help="only this one of several")
    what = (
        "Write the weights of a checkpoint as safetensors, checked as they are read. Of a checkpoint that DeepSpeed, "
        "Megatron or TorchTitan has written, --dcp and --ranks write the optimizer's state as well."
    )
    export = verbs.add_parser("export", help="write weights as safetensors, or for other ranks", description=what)
    export.add_argument("place", help="a checkpoint, or the folder or URL of several (the newest sound one)")
    export.add_argument("to", type=Path, help="folder for the files")
    export.add_argument("--step", type=int, help="this one of several")
    export.add_argument("--prefix", default="model.", help="of tensors to export; it is stripped (default model.)")
    export.add_argument("--file-gb", type=float, default=5.0, help="largest size of a file (default 5; 0: one file)")
    form = export.add_mutually_exclusive_group()
    form.add_argument("--dcp", action="store_true", help="for torch.distributed.checkpoint, with the optimizer's state")
    form.add_argument("--ranks", type=int, help="DeepSpeed's own, for so many data parallel ranks")
    what = "Make a checkpoint of the states that a run has left on the disks of its nodes (disk.path)."
    gather = verbs.add_parser("gather", help="make a checkpoint of states on disks", description=what)
    gather.add_argument("folders", nargs="+", metavar="folder", help="of the run on a disk, as the console named it")
    gather.add_argument("to", help="the folder or URL that the checkpoint goes to")
    gather.add_argument("--step", type=int, required=True, help="that lies there of every rank")
    what = "Remove checkpoints, or the remains of unfinished writes."
    rm = verbs.add_parser("rm", help="remove checkpoints", description=what)
    rm.add_argument("base", help="the folder or URL that checkpoints go to")
    rm.add_argument("steps", nargs="*", type=int, metavar="STEP")
    rm.add_argument("--partial", action="store_true", help="unfinished writes of processes that have ended")
    rm.add_argument("--force", action="store_true", help="even the last sound one, and writes that may still run")
    return parser


def _list_checkpoints(args: argparse.Namespace) -> int:
    if (args.base is None) == (args.journal is None) or (args.run_id and not args.journal):
        raise UsageError("name the folder or URL of checkpoints, or --journal and perhaps --run-id")
    return _list_table(args) if args.journal else _list_storage(args)


def _list_table(args: argparse.Namespace) -> int:
    """Print what a database says of the checkpoints of its runs; the storage is not asked."""
    found = read_table(args.journal, args.run_id)
    if args.json:
        print(json.dumps({"checkpoints": [msgspec.to_builtins(msgspec.structs.asdict(one)) for one in found]}))
        return 0 if found else NONE
    place = None
    for one in found:
        if (one.run_id, one.base) != place:
            place = (one.run_id, one.base)
            _print_line(f"run {one.run_id}, {one.base} as of {local_time(one.seen_at.timestamp())}:")
        _print_line(_checkpoint_line(stored_of(one)))
    if not found:
        which = f" of run {args.run_id}" if args.run_id else ""
        _print_line(f"there is no checkpoint{which} in the table of {args.journal}")
    return 0 if found else NONE


def _list_storage(args: argparse.Namespace) -> int:
    found = find_checkpoints(args.base)
    storage = open_storage(args.base)
    states = [] if found else find_states(args.base)
    unfinished = [storage.url(attempt.name) for attempt in storage.list_unpublished()]
    others = find_trainer_checkpoints(args.base)
    if args.json:
        told = {"checkpoints": found, "unfinished": unfinished, "states": states, "trainers": others}
        print(json.dumps(msgspec.to_builtins(told)))  # names of files may be no text
        return 0 if found or others else NONE
    for one in found:
        _print_line(_checkpoint_line(one))
    for other in others:
        _print_line(_trainer_line(other))
    if states:
        _print_line(
            f"{args.base} holds no checkpoint, but states that a run has left on this host's disk, rank by rank:"
        )
        for state in sorted(states, key=lambda one: one.step, reverse=True):
            _print_line(_state_line(state))
    elif not found and not others:
        _print_line(f"there is no checkpoint in {args.base}")
    for url in unfinished:
        _print_line(f"unfinished, or being written: {url}")
    return 0 if found or others else NONE


def _print_line(text: str) -> None:
    """Print one line without control characters: strangers who can write to the folder may have chosen names in it."""
    print(plain_line(text))


def _checkpoint_line(one: StoredCheckpoint) -> str:
    # Not a table: addresses are long, and one that is folded cannot be copied.
    if not one.ok:
        return f"{one.step:>10}  {one.url}  {'not used' if one.doubted else 'broken'}: {one.why}"
    when = local_time(one.at)
    run = f" of {one.author.run}" if one.author.run else ""
    ranks, author = counted_noun(one.world, "rank"), f"written by generation {one.author.generation}{run}"
    return f"{one.step:>10}  {one.url}  {when}, {_size_text(one.bytes)}, {ranks}, {author}"


def _trainer_line(one: TrainerCheckpoint) -> str:
    step = "?" if one.step is None else one.step
    if not one.ok:
        return f"{step:>10}  {one.url}  by {one.trainer or 'an unknown trainer'}, not whole: {one.why}"
    size = f"{_size_text(one.bytes)} in {counted_noun(one.files, 'file')}"
    return f"{step:>10}  {one.url}  by {one.trainer}, {size}, none missing or cut short"


def _state_line(one: StoredCheckpoint) -> str:
    return f"{one.step:>10}  {one.url}  {_size_text(one.bytes) if one.ok else f'broken: {one.why}'}"


def _size_text(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _verify_checkpoints(args: argparse.Namespace) -> int:
    broken = 0
    doubted = {one.url: one.why for one in find_checkpoints(args.place) if one.doubted}
    others = [one for one in find_trainer_checkpoints(args.place) if args.step in (None, one.step)]
    try:
        urls = choose_urls(args.place, args.step, states=True)
    except UsageError:
        if not others:
            raise
        urls = []
    for url in urls:
        faults = verify_checkpoint(url)
        broken += bool(faults)
        doubt = f", but not used: {doubted[url]}" if url in doubted else ""
        _print_line(f"{url}: {'broken' if faults else 'sound'}{doubt}")
        for fault in faults:
            _print_line(f"  {fault}")
    return BROKEN if broken + sum(not _verify_trainer(one) for one in others) else 0


def _verify_trainer(one: TrainerCheckpoint) -> bool:
    """Verify a trainer's checkpoint. Print its fault, or what was checked and what could not be. Return whether it is
    sound."""
    found = verify_trainer_checkpoint(one.url)
    _print_line(f"{one.url}: {'broken' if found.fault else 'sound'}, by {one.trainer or 'an unknown trainer'}")
    if found.fault:
        _print_line(f"  {found.fault}")
    else:
        _print_line(f"  checked: {found.checked}")
        _print_line(f"  its format does not tell: {found.unchecked}")
    return not found.fault


def _remove_checkpoints(args: argparse.Namespace) -> int:
    if not args.steps and not args.partial:
        raise UsageError("name the steps, or give --partial")
    found = find_checkpoints(args.base)
    if unknown := sorted(set(args.steps) - {one.step for one in found}):
        raise UsageError(f"there is no checkpoint of step {unknown[0]} in {args.base}")
    gone = [one for one in found if one.step in args.steps]
    sound = [one for one in found if one.ok]
    if gone and sound and not args.force and not [one for one in sound if one not in gone]:
        raise UsageError(f"step {sound[0].step} is the last sound checkpoint; --force removes it anyway")
    storage = open_storage(args.base)
    for one in gone:
        storage.remove_folder(one.url.rstrip("/").rpartition("/")[2])
    removed = [one.url for one in gone]
    if args.partial:
        removed += clean_unpublished(args.base, None, force=args.force)
    for line in [f"removed {url}" for url in removed] or ["there was nothing to remove"]:
        _print_line(line)
    if args.partial and (left := storage.list_unpublished()):
        print(f"{counted_noun(len(left), 'unfinished write')} may still be running; --force removes them anyway")
    return 0
