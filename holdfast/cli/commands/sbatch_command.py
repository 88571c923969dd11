"""`holdfast sbatch`: writes a batch script for a run on Slurm, and submits it."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.cli.launch.cluster_launch import check_cluster_flags
from holdfast.cli.launch.job_request import load_settings
from holdfast.cli.run_dirs import batch_job_note, run_dir_creation, run_directory
from holdfast.cli.run_dirs.run_dir_trust import make_private_folder
from holdfast.cli.run_flags import run_arguments
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.run_flags.run_arguments import RunArgs
from holdfast.cli.terminal.output_file import make_private_file, replace_file
from holdfast.config import ConfigError
from holdfast.core.decide.fleet_news import OUT_OF_TIME
from holdfast.fleet import slurm_fleet, slurm_node_file, slurm_replies

_USAGE = """usage: holdfast sbatch [--dry-run] [flags of holdfast run] SCRIPT [arguments of the script]

Writes a batch script that runs `holdfast run --fleet slurm` on the first of --nnodes + --standbys nodes, and submits
it. After a time limit or a requeue the same script takes the run up where it was. --slurm gives flags of sbatch:

    holdfast sbatch --nnodes 8 --nproc-per-node 8 --standbys 1 --slurm 'partition=gpu gres=gpu:8 time=24:00:00' train.py

--dry-run shows the script and submits nothing. All other flags are those of holdfast run, see holdfast run --help."""

_AHEAD_S = 600  # before the time limit the next job is queued
_SUBMITTED = re.compile(r"^Submitted batch job (\d+)", re.MULTILINE)
_SCRIPT = """#!/bin/bash
{flags}

[ -L {output} ] || chmod go= {output} 2>/dev/null # it may show secrets
# Others learn which job has the run, or will have it. A link that another user may have put there is not followed.
note() {{ made=$(mktemp {note}.XXXXXX) && echo "${{next:-$SLURM_JOB_ID}}" >"$made" && mv -fT "$made" {note}; }}
forget() {{ [ -n "$next" ] || rm -f {note}; }}
# Slurm sends SIGUSR1 ahead of the time limit. The next job then waits for this one, and goes on with the run. It gets
# this very script, of which Slurm keeps a copy as long as the job lasts.
submit() {{ sbatch --parsable --dependency=singleton "$@" "$0"; }}
queue_next() {{
    [ -z "$next" ] || return
    evicted=$(cat {excluded} 2>/dev/null) # hosts; Slurm may not know them any more
    next=$([ -n "$evicted" ] && submit "--exclude=$evicted" "$@" || submit "$@")
    next=${{next%%;*}}
    note
}}
# A reservation that ends first ends this job. What is left of it is too short for the next one.
queue_after() {{
    if [ -n "$SLURM_JOB_RESERVATION" ]; then
        export SLURM_TIME_FORMAT=%s
        told_of=$(scontrol -o show reservation "$SLURM_JOB_RESERVATION" | grep -v FLEX)
        over=$(echo "$told_of" | grep -o ' EndTime=[0-9]*' | cut -d= -f2)
        limit=$(squeue -h -j "$SLURM_JOB_ID" -o %e)
        case "$limit" in '' | *[!0-9]*) limit=$over ;; esac
        left=$((${{over:-0}} - $(date +%s)))
        [ "$left" -le 0 ] || [ "$left" -gt {ahead} ] || [ "$over" -gt "$limit" ] || set -- "--begin=now+$left"
    fi
    queue_next "$@"
}}
is_preempted() {{ squeue -h -j "$SLURM_JOB_ID" -O PreemptTime:30 | grep -q '^[0-9]'; }}
find_next() {{
    noted=$(cat {note} 2>/dev/null)
    [ "${{noted:-$SLURM_JOB_ID}}" != "$SLURM_JOB_ID" ] || return
    squeue -h -t PD -n "$SLURM_JOB_NAME" -j "$noted" -o %A 2>/dev/null
}}
trap queue_next USR1
trap 'kill -TERM "${{run:-$!}}"; is_preempted || told=1' TERM # of a time limit, a preemption, or scancel
[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || next=$(find_next) # queued before Slurm started this job again
note
trap forget EXIT
cd {cwd} || exit 2
if [ -e {there} ]; then
    {resume} &
else
    {begin} &
fi
run=$!
while wait "$run"; code=$?; kill -0 "$run" 2>/dev/null; do :; done # a signal ends a wait early
if [ "$code" = {over} ]; then
    [ -n "$told" ] || queue_after
elif [ -n "$next" ]; then
    scancel "$next"
    next=
fi
exit "$code"
"""


def main(argv: list[str]) -> int:
    if argv[:1] in (["--help"], ["-h"]):
        print(_USAGE)
        return 0
    dry = argv[:1] == ["--dry-run"]
    words = argv[1:] if dry else argv
    try:
        args = run_arguments.parse_run_args(["--fleet", "slurm", *words], os.environ)
        if args.resume or args.detach or args.refill_h is not None:
            raise UsageError("--resume, --detach and --standbys auto do not go with sbatch; give holdfast run these")
        check_cluster_flags(args, load_settings(args))  # what the job would be refused is refused here
        args.ranks_per_node()
        run_dir, run_id = _choose_place(args)
        script = write_script(args, words, run_dir, run_id)
        _make_folder(run_dir.parent)  # Slurm opens the output there before the script begins
        if dry:
            print(script, end="")
            return 0
        return _submit(script, run_dir)
    except (UsageError, ConfigError) as e:
        print(f"holdfast sbatch: {e}", file=sys.stderr)
        return 2


def _choose_place(args: RunArgs) -> tuple[Path, str]:
    """Return the directory and the id of the run. They have one name, unless the user names either or both."""
    new_id = run_dir_creation.new_run_id()
    if args.run_dir:
        run_dir = Path(args.run_dir).absolute()
        if (run_dir / "exit.json").exists() and not run_directory.goes_on(run_dir):
            raise UsageError(f"{run_dir} holds a run that has ended; give another --run-dir")
        return run_dir, args.run_id or new_id
    run_dir = run_directory.holdfast_home() / "runs" / run_dir_creation.folder_name(args.run_id or new_id)
    if any(path.exists() for path in (run_dir, _script_path(run_dir), _output_path(run_dir))):
        run_dir = run_dir.with_name(f"{run_dir.name}-{new_id}")
    return run_dir, args.run_id or run_dir.name


def write_script(args: RunArgs, words: Sequence[str], run_dir: Path, run_id: str) -> str:
    """Return the batch script. If Slurm starts it again, after a time limit or a requeue, it resumes the same run."""
    flags = [
        f"--job-name=holdfast-{run_dir_creation.folder_name(run_id)}",
        f"--nodes={args.max_nodes + args.standbys}",
        "--ntasks-per-node=1",
    ]
    flags += ["--no-kill", "--requeue", f"--signal=B:USR1@{_AHEAD_S}"]
    flags += ["--open-mode=append", f"--output={_output_path(run_dir)}"]
    holdfast = [sys.executable, "-P", "-m", "holdfast", "run"]
    return _SCRIPT.format(
        flags="\n".join(f"#SBATCH {_quoted(flag)}" for flag in (*flags, *args.slurm)),
        output=shlex.quote(str(_output_path(run_dir))),
        note=shlex.quote(str(batch_job_note.note_path(run_dir))),
        excluded=shlex.quote(f"{run_dir}/{slurm_fleet.FOLDER}/{slurm_node_file.EXCLUDED}"),
        cwd=shlex.quote(os.getcwd()),
        there=shlex.quote(f"{run_dir}/run.json"),
        resume=shlex.join([*holdfast, "--resume", str(run_dir)]),
        begin=shlex.join([*holdfast, *_run_words(words, run_dir, run_id)]),
        over=OUT_OF_TIME,
        ahead=_AHEAD_S,
    )


def _script_path(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.sbatch")


def _output_path(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.out")


def _run_words(words: Sequence[str], run_dir: Path, run_id: str) -> list[str]:
    """Return the arguments of `holdfast run`: holdfast's own first, so that the user's flags override them."""
    return ["--fleet", "slurm", "--run-dir", str(run_dir), "--rdzv-id", run_id, *words]


def _quoted(flag: str) -> str:
    return flag if shlex.quote(flag) == flag else f'"{flag}"'  # sbatch knows double quotes, and no others inside


def _make_folder(folder: Path) -> None:
    try:
        make_private_folder(folder)
    except OSError as e:
        raise UsageError(f"cannot make {e.filename or folder}: {e.strerror}; give another --run-dir") from None


def _submit(script: str, run_dir: Path) -> int:
    path, note = _script_path(run_dir), batch_job_note.note_path(run_dir)
    try:
        replace_file(path, script, 0o600)  # its words may be secrets, as may be what ranks print
        make_private_file(_output_path(run_dir))  # Slurm would make it for everybody
        done = subprocess.run(["sbatch", str(path)], check=False, capture_output=True, text=True)
        if told := _SUBMITTED.search(done.stdout):
            replace_file(note, f"{told[1]}\n", 0o600)
    except FileNotFoundError:
        raise UsageError("there is no sbatch on this host") from None
    except OSError as e:
        raise UsageError(f"cannot write {e.filename or path}: {e.strerror}; give another --run-dir") from None
    if done.returncode:
        with contextlib.suppress(OSError):
            path.unlink()
            if not _output_path(run_dir).stat().st_size:
                _output_path(run_dir).unlink()
        raise UsageError(f"sbatch: {slurm_replies.refusal_sentence(done.returncode, done.stderr)}")
    print(done.stdout, end="")
    print(f"holdfast: {path} runs in {run_dir}; its output goes to {_output_path(run_dir)}")
    return 0
