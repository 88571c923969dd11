"""`holdfast update`: brings newer code to a running job."""

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from holdfast.cli.commands import releases_command
from holdfast.cli.commands.order_commands import STEPLESS_S, ask_patiently, exit_code_of, give_order
from holdfast.cli.launch import release_packing
from holdfast.cli.launch.release_packing import PackedUpdate
from holdfast.cli.run_dirs import run_directory, run_selection
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.quantity_text import duration_text
from holdfast.cli.terminal.rank_console import find_console_files
from holdfast.core.record.release_history import ReleaseChapter
from holdfast.model.code_release import Fate, Release
from holdfast.wire.releases import release_signature, tree_archive
from holdfast.wire.releases.release_signature import SigningError
from holdfast.wire.releases.staged_release import is_within
from holdfast.wire.run_and_node_specs import EntryPoint

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_WINDOW = "24h"
_LOOK_S = 0.1
_OPEN = (Fate.STAGING, Fate.WAITING)


def main(argv: list[str]) -> int:
    split = argv.index("--") if "--" in argv else len(argv)
    args = _make_parser().parse_args(argv[:split])
    return exit_code_of("update", lambda: _update_job(args, tuple(argv[split + 1 :])))


def _make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="holdfast update",
        usage="holdfast update [flags] [PATH|GIT_REF] [RUN] [-- SCRIPT [arguments of the script]]",
        description="Bring newer code to a running job: checked on one node, staged on all, then launched.",
    )
    parser.add_argument("what", nargs="?", metavar="PATH|GIT_REF", help="default: the job's own folder as it is now")
    run_selection.add_run_argument(parser, order=True)
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--now", action="store_true", help="restart the job for it, in place, as soon as it is staged")
    when.add_argument("--lazy", action="store_true", help="bring it in with the next restart (the default)")
    parser.add_argument("--window", metavar="TIME", default=_WINDOW, help="longest wait for a restart (default 24h)")
    parser.add_argument("--message", metavar="TEXT", default="", help="note for the history: what is new")
    parser.add_argument("--env", metavar="NAME=VALUE", action="append", default=[], help="for ranks; repeatable")
    parser.add_argument("--sign", metavar="KEY", help="sign it with this ssh key, for jobs that require signatures")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is staged")
    return parser


def _update_job(args: argparse.Namespace, words: tuple[str, ...]) -> int:
    if args.what and not args.run and run_directory.holds_run(Path(args.what)):
        args.run, args.what = args.what, None
    run_dir = run_selection.run_to_change(args)
    window_s, env = _parse_seconds(args.window), _parse_environment(args.env)
    run = run_directory.read_spec(run_dir)
    entry = run.entry
    if not entry.python:
        raise UsageError(f"this job runs {entry.argv[0]}, and only Python code has releases")
    chapters = releases_command.ask_releases(run_dir).releases
    base = next((c for c in reversed(chapters) if c.fate in _OPEN), _running_chapter(chapters))
    files = (run.log_dir, *run.console_files, *find_console_files())
    apart = release_packing.keep_out(run_dir, run.settings, None, files)
    brought = release_packing.pack_update(args.what, base.release, run_dir, apart)
    release = _make_release(base.release, brought, entry, words, env)
    release = msgspec.structs.replace(release, message=args.message, signature="")
    if args.sign:
        release = _sign_release(release, Path(args.sign))
    if _is_same_code(release, base.release) and not (args.now and base.fate in _OPEN):
        print(f"nothing has changed since release {base.release.number}, which is {base.fate}")
        return 0
    print(f"holdfast update: {_describe_changes(run_dir, base.release, release, brought)}", flush=True)
    body = {"verb": "update", "now": args.now, "window_s": 0.0 if args.now else window_s}
    give_order(run_dir, body | {"release": json.loads(msgspec.json.encode(release))})
    if args.no_wait:
        print("holdfast update: the release is being checked and staged; holdfast releases shows its state")
        return 0
    return _watch_release(run_dir, release, chapters, args.now, window_s)


def _sign_release(release: Release, key: Path) -> Release:
    try:
        return release_signature.sign_release(release, key)
    except SigningError as e:
        raise UsageError(str(e)) from None


def _running_chapter(chapters: tuple[ReleaseChapter, ...]) -> ReleaseChapter:
    return next(chapter for chapter in reversed(chapters) if chapter.fate is Fate.RUNNING)


def _parse_seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", text)
    if not found or found[2] not in _UNITS:
        raise UsageError(f"--window {text}: write a time such as 90s, 30m, 24h or 2d")
    return float(found[1]) * _UNITS[found[2]]


def _parse_environment(given: list[str]) -> dict[str, str]:
    for word in given:
        if not re.match(r"[A-Za-z_][A-Za-z0-9_]*=", word):
            raise UsageError(f"--env {word}: write it as NAME=VALUE")
    return dict(word.split("=", 1) for word in given)


def _make_release(
    base: Release, brought: PackedUpdate, entry: EntryPoint, words: tuple[str, ...], env: dict[str, str]
) -> Release:
    """Return the base release with another tree and, if given, another command line and environment."""
    script, argv = base.script, base.argv
    if words:
        script, argv = "" if entry.module else _script_path(words[0], brought.root), words
    release = msgspec.structs.replace(base, number=0, digest=brought.digest, root=brought.root, source=brought.source)
    release = msgspec.structs.replace(release, home=base.home or base.root)
    return msgspec.structs.replace(release, script=script, argv=argv, env=base.env | env)


def _script_path(word: str, root: str) -> str:
    """Return a script's path relative to the tree; `word` may be relative to the tree or to the current folder."""
    whole = os.path.realpath(word)
    return os.path.relpath(whole, root) if is_within(whole, root) else os.path.normpath(word)


def _is_same_code(release: Release, base: Release) -> bool:
    return (release.digest, release.script, release.argv, release.env) == (
        base.digest,
        base.script,
        base.argv,
        base.env,
    )


def _describe_changes(run_dir: Path, base: Release, release: Release, brought: PackedUpdate) -> str:
    """Say what an update changes. Raise UsageError if the tree lacks the script."""
    there = tree_archive.archive_contents(run_dir / "releases" / f"{release.digest}.tar")
    if release.script and release.script not in there and f"{release.script}/__main__.py" not in there:
        raise UsageError(f"{brought.source} has no {release.script}, which the job runs; name another after --")
    changed = (
        f"{brought.files} files"
        if not base.digest
        else release_packing.describe_difference(run_dir, base.digest, release)
    )
    own = [what for what, one, other in _changed_words(base, release) if one != other]
    what = ", ".join([*([changed] if changed else []), *own]) or "no file that ranks see has changed"
    return f"{what} since release {base.number}, from {brought.source}{_left_out_text(brought)}"


def _left_out_text(brought: PackedUpdate) -> str:
    written = release_packing.name_some(brought.left_out)
    said = f"; left out, because the job may have written it: {written}" if written else ""
    return said + release_packing.secrets_text(brought.secret)


def _changed_words(base: Release, release: Release) -> tuple[tuple[str, Any, Any], ...]:
    command = ((base.script, base.argv), (release.script, release.argv))
    return (("new command line", *command), ("new environment", base.env, release.env))


# --- what becomes of it ----------------------------------------------------------------------------------------


def _watch_release(
    run_dir: Path, release: Release, before: tuple[ReleaseChapter, ...], now: bool, window_s: float
) -> int:
    """Wait until the release is staged or, with `now`, has made a step; return the exit code. If the job has never
    reported a step, it is enough that the release has run for STEPLESS_S seconds."""
    began, said = time.monotonic(), ""
    stepless = not any(chapter.steps + chapter.redone for chapter in before)
    while True:
        chapter = _find_chapter(run_dir, release, len(before))
        if chapter is not None:
            for_s = time.time() - chapter.launched_at if chapter.launched_at else 0.0
            ran = chapter.steps + chapter.redone > 0 or (stepless and for_s >= STEPLESS_S)
            awaited = ""
            if chapter.fate is Fate.WAITING:
                status = ask_patiently(run_dir, lambda: ask_controller(run_dir, "/api/v1/status"))
                awaited = _awaited_text(status, now, window_s)
            line, code = _progress_line(chapter, now, ran, awaited, time.monotonic() - began)
            if line != said:
                print(f"holdfast update: {line}", file=sys.stderr if code else sys.stdout, flush=True)
            if code is not None:
                return code
            said = line
        time.sleep(_LOOK_S)


def _awaited_text(status: dict[str, Any], now: bool, window_s: float) -> str:
    """Say with what a staged release comes in. While the job waits for a person, its window does not end."""
    if status["held"] and status["phase"] == "held":
        return "it comes in with the next restart: the job is held, and holdfast resume restarts it now"
    if status["asking"]:
        return "it comes in with the next restart: the job asks a person, and holdfast approve restarts it now"
    if now:
        return "the job restarts with it"
    return f"it comes in with the next restart, at the latest in {duration_text(window_s)}"


def _find_chapter(run_dir: Path, release: Release, before: int) -> ReleaseChapter | None:
    """Return the newest history entry of this release after the first `before` entries; None if there is none."""
    came = releases_command.ask_releases(run_dir, waits=True).releases[before:]
    mine = [c for c in came if _is_same_code(c.release, release) and c.release.message == release.message]
    return mine[-1] if mine else None


def _progress_line(
    chapter: ReleaseChapter, now: bool, ran: bool, awaited: str, took_s: float
) -> tuple[str, int | None]:
    """Return the state of the release in words, and the exit code if this state is final."""
    name = f"release {chapter.release.number}"
    match chapter.fate:
        case Fate.STAGING:
            return f"{name} is being checked on one node and staged on all", None
        case Fate.WAITING:
            return f"{name} is staged; {awaited}", None if now else 0
        case Fate.RUNNING if ran or not now:
            return f"{name} runs; it took {took_s:.1f} s", 0
        case Fate.RUNNING:
            return f"{name} is launched", None
        case Fate.REFUSED:
            return f"{name} was refused, and no rank was stopped: {chapter.why}", 1
        case Fate.ROLLED_BACK:
            return f"{name} was rolled back: {chapter.why}", 1
        case Fate.MERGED | Fate.REPLACED:
            return f"{name} is {chapter.fate}: {chapter.why}", 0
        case Fate.ENDED | Fate.LEFT:
            raise AssertionError("a controller has told the fate of a run without one")
