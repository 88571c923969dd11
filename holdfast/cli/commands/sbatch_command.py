"""`holdfast sbatch`: writes a batch script for a run on Slurm, and submits it."""

import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.cli.run_dirs import run_dir_creation, run_directory
from holdfast.cli.run_dirs.run_dir_trust import make_private_folder
from holdfast.cli.run_flags import run_arguments
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.run_flags.run_arguments import RunArgs
from holdfast.cli.terminal.output_file import make_private_file, replace_file
from holdfast.core.decide.fleet_news import OUT_OF_TIME
from holdfast.fleet import slurm_replies

_USAGE = """usage: holdfast sbatch [--dry-run] [flags of holdfast run] SCRIPT [arguments of the script]

Writes a batch script that runs `holdfast run --fleet slurm` on the first of --nnodes + --standbys nodes, and submits
it. After a time limit or a requeue the same script takes the run up where it was. --slurm gives flags of sbatch:

    holdfast sbatch --nnodes 8 --nproc-per-node 8 --standbys 1 --slurm 'partition=gpu gres=gpu:8 time=24:00:00' train.py

--dry-run shows the script and submits nothing. All other flags are those of holdfast run, see holdfast run --help."""

_AHEAD_S = 600  # before the time limit the next job is queued
_SCRIPT = """#!/bin/bash
{flags}

# Slurm sends SIGUSR1 ahead of the time limit. The next job then waits for this one, and goes on with the run.
queue_next() {{ [ -n "$next" ] || next=$(sbatch --parsable --dependency=singleton "$@" {path}); }}
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
find_next() {{ squeue -h -t PD -n "$SLURM_JOB_NAME" -u "$(id -un)" -o %A | grep -vx "$SLURM_JOB_ID" | head -n 1; }}
trap queue_next USR1
trap 'kill -TERM "$run"; is_preempted || told=1' TERM # of a time limit, a preemption, or scancel
[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || next=$(find_next) # queued before Slurm started this job again
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
        run_dir = _choose_run_dir(args)
        script = write_script(args, words, run_dir)
        if dry:
            print(script, end="")
            return 0
        return _submit(script, run_dir)
    except UsageError as e:
        print(f"holdfast sbatch: {e}", file=sys.stderr)
        return 2


def _choose_run_dir(args: RunArgs) -> Path:
    run_id = args.run_id or f"{run_dir_creation.new_run_id()}-{secrets.token_hex(2)}"
    return Path(args.run_dir).absolute() if args.run_dir else run_directory.holdfast_home() / "runs" / run_id


def write_script(args: RunArgs, words: Sequence[str], run_dir: Path) -> str:
    """Return the batch script. If Slurm starts it again, after a time limit or a requeue, it resumes the same run."""
    flags = [f"--job-name=holdfast-{run_dir.name}", f"--nodes={args.max_nodes + args.standbys}", "--ntasks-per-node=1"]
    flags += ["--no-kill", "--requeue", f"--signal=B:USR1@{_AHEAD_S}"]
    flags += ["--open-mode=append", f"--output={_output_path(run_dir)}"]
    holdfast = [sys.executable, "-P", "-m", "holdfast", "run"]
    return _SCRIPT.format(
        flags="\n".join(f"#SBATCH {_quoted(flag)}" for flag in (*flags, *args.slurm)),
        path=shlex.quote(str(_script_path(run_dir))),
        cwd=shlex.quote(os.getcwd()),
        there=shlex.quote(f"{run_dir}/run.json"),
        resume=shlex.join([*holdfast, "--resume", str(run_dir)]),
        begin=shlex.join([*holdfast, *_run_words(words, run_dir)]),
        over=OUT_OF_TIME,
        ahead=_AHEAD_S,
    )


def _script_path(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.sbatch")


def _output_path(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.out")


def _run_words(words: Sequence[str], run_dir: Path) -> list[str]:
    """Return the arguments of `holdfast run`: holdfast's own first, so that the user's flags override them."""
    return ["--fleet", "slurm", "--run-dir", str(run_dir), *words]


def _quoted(flag: str) -> str:
    return flag if shlex.quote(flag) == flag else f'"{flag}"'  # sbatch knows double quotes, and no others inside


def _submit(script: str, run_dir: Path) -> int:
    path = _script_path(run_dir)
    try:
        make_private_folder(path.parent)
        replace_file(path, script, 0o600)  # its words may be secrets, as may be what ranks print
        make_private_file(_output_path(run_dir))  # Slurm would make it for everybody
        done = subprocess.run(["sbatch", str(path)], check=False, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise UsageError("there is no sbatch on this host") from None
    except OSError as e:
        raise UsageError(f"cannot write {e.filename or path}: {e.strerror}; give another --run-dir") from None
    if done.returncode:
        raise UsageError(f"sbatch: {slurm_replies.last_sentence(done.stderr)}")
    print(f"holdfast: {path} runs in {run_dir}; its output goes to {_output_path(run_dir)}")
    return 0
