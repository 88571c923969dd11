"""`holdfast sbatch` and the command line of `--fleet slurm`, where no Slurm is needed."""

import shlex
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.cli.launch import slurm_launch
from holdfast.cli.launch.supervisor import StopSignals
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.run_flags.run_arguments import parse_run_args
from holdfast.wire import run_and_node_specs
from holdfast.wire.run_and_node_specs import RunEnd


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('here')\n")
    return "train.py"


def test_the_script_is_what_a_person_would_have_written(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--nnodes",
        "4",
        "--standbys",
        "1",
        "--run-dir",
        "my run",
        "--slurm",
        "partition=gpu time=60 'comment=a b'",
    )
    assert main(["sbatch", "--dry-run", *flags, script, "--lr", "1 2"]) == 0
    text = capsys.readouterr().out
    head = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=5", "--no-kill", "--requeue", "--partition=gpu", "--time=60", '"--comment=a b"'} <= set(head)
    assert f"run --resume '{tmp_path}/my run' &" in text
    assert "--fleet slurm" in text and text.count("train.py --lr '1 2' &") == 1
    [name] = [line.removeprefix("--job-name=holdfast-") for line in head if line.startswith("--job-name=")]
    assert f"--rdzv-id {name} " in text, "its jobs are called like the run"
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    "case",
    [
        (0, "", {}, []),
        (95, "", {}, ["sbatch"]),
        (0, "USR1", {}, ["sbatch", "scancel 77"]),
        (95, "USR1", {}, ["sbatch"]),
        (95, "TERM", {}, []),
        (95, "TERM", {"PREEMPTED": "1"}, ["sbatch"]),
        # Slurm has started it again; the one that it had queued before still waits.
        (95, "", {"SLURM_RESTART_COUNT": "1", "NOTED": "77"}, []),
        (0, "", {"SLURM_RESTART_COUNT": "1", "NOTED": "77"}, ["scancel 77"]),
        (95, "", {"SLURM_RESTART_COUNT": "1"}, ["sbatch"]),
        (95, "", {"SLURM_RESTART_COUNT": "1", "NOTED": "76"}, ["sbatch"]),  # it is itself
        (0, "", {"SLURM_RESTART_COUNT": "1", "NOTED": "70"}, []),  # that one waits no more
        (0, "", {"NOTED": "77"}, []),
    ],
)
def test_the_script_queues_its_successor_if_the_run_goes_on(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: tuple[int, str, dict[str, str], list[str]]
) -> None:
    code, signals, told, said = case
    assert main(["sbatch", "--dry-run", "--run-dir", "a run", script]) == 0
    text = capsys.readouterr().out
    note, output = tmp_path / "a run.job", tmp_path / "a run.out"
    for name, does in (("sbatch", f'for last; do :; done; cp "$last" {tmp_path}/successor; echo "77;here"'),):
        write_program(tmp_path / name, f'echo "{name} $*" >> {tmp_path}/said\n{does}')
    write_program(tmp_path / "scancel", f'echo "scancel $*" >> {tmp_path}/said')
    write_program(
        tmp_path / "squeue",
        """case "$*" in
*PreemptTime*) [ -n "$PREEMPTED" ] && echo 2026-11-18T02:15:57 || echo N/A ;;
"-h -t PD -n holdfast-r -j 77 "*) echo 77 ;;
esac""",
    )
    if "NOTED" in told:
        note.write_text(told["NOTED"] + "\n")
    output.touch(0o644)
    # What stands for the run tells the script of the signals that Slurm would send it.
    begin = next(line.strip() for line in text.splitlines() if "-m holdfast run --fleet slurm" in line)
    sends = f"kill -{signals} $$; sleep 0.5; " if signals else ""
    stands = f"( trap '' TERM; cp '{note}' {tmp_path}/noted; {sends}exit {code} ) &"
    path = tmp_path / "slurm_script"  # by whatever name Slurm keeps it
    path.write_text(text.replace(begin, stands))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "76", "SLURM_JOB_NAME": "holdfast-r", **told}
    done = subprocess.run(["bash", str(path)], env=env, check=False, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")
    heard = (tmp_path / "said").read_text().splitlines() if (tmp_path / "said").exists() else []
    assert [line if line.startswith("scancel") else line.split()[0] for line in heard] == said
    assert all("--dependency=singleton" in line for line in heard if line.startswith("sbatch"))
    if "sbatch" in said:
        assert (tmp_path / "successor").read_text() == path.read_text(), "a successor is the script that has run"
    waits = code == 95 and ("sbatch" in said or told.get("NOTED") == "77")
    assert (note.read_text().strip() if note.exists() else "") == ("77" if waits else "")
    takes_over = "SLURM_RESTART_COUNT" in told and told.get("NOTED") == "77"
    assert (tmp_path / "noted").read_text().strip() == ("77" if takes_over else "76")
    assert stat.S_IMODE(output.stat().st_mode) == 0o600, "Slurm made it for everybody"


def test_a_note_of_the_job_follows_no_link(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sbatch", "--dry-run", "--run-dir", "run", script]) == 0
    text = capsys.readouterr().out
    begin = next(line.strip() for line in text.splitlines() if "-m holdfast run --fleet slurm" in line)
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "precious").chmod(0o644)
    for name in ("run.job", "run.out"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    env = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "76"}
    stands = f"( cp -P run.job {tmp_path}/noted; exit 3 ) &"
    done = subprocess.run(["bash", "-c", text.replace(begin, stands)], env=env, check=False, timeout=60)
    assert done.returncode == 3 and (tmp_path / "precious").read_text() == "kept"
    assert stat.S_IMODE((tmp_path / "precious").stat().st_mode) == 0o644
    assert (tmp_path / "noted").read_text() == "76\n" and not (tmp_path / "noted").is_symlink()
    assert not (tmp_path / "run.job").exists()


@pytest.mark.parametrize("known", [True, False])
def test_a_successor_avoids_the_hosts_of_evicted_nodes(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], known: bool
) -> None:
    assert main(["sbatch", "--dry-run", "--run-dir", "run", "--slurm", "exclude=c9", script]) == 0
    text = capsys.readouterr().out
    begin = next(line.strip() for line in text.splitlines() if "-m holdfast run --fleet slurm" in line)
    refuses = "" if known else 'case "$*" in *exclude*) exit 1 ;; esac;'
    write_program(tmp_path / "sbatch", f'echo "$*" >> {tmp_path}/said; {refuses} echo 77')
    write_program(tmp_path / "squeue", ":")
    (tmp_path / "run" / "slurm").mkdir(parents=True)
    (tmp_path / "run" / "slurm" / "excluded").write_text("c1,c9")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "76"}
    done = subprocess.run(["bash", "-c", text.replace(begin, "( exit 95 ) &")], env=env, check=False, timeout=60)
    assert done.returncode == 95 and (tmp_path / "run.job").read_text() == "77\n"
    asked = [line.split() for line in (tmp_path / "said").read_text().splitlines()]
    assert ["--exclude=c1,c9" in words for words in asked] == ([True] if known else [True, False])
    assert all("--dependency=singleton" in words for words in asked)


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    "case",
    [
        (40, 3000, "SPEC_NODES", "--begin=now+"),
        (40, None, "DAILY,SPEC_NODES", "--begin=now+"),
        (40, 30, "SPEC_NODES", ""),  # its time limit is first
        (5000, 9000, "SPEC_NODES", ""),  # a preemption: much of the reservation is left
        (-5, 3000, "SPEC_NODES", ""),
        (40, 3000, "FLEX,SPEC_NODES", ""),
        (None, 3000, "", ""),
    ],
)
def test_a_successor_does_not_begin_in_what_is_left_of_a_reservation(
    script: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    case: tuple[int | None, int | None, str, str],
) -> None:
    left_s, limit_s, flags, begin = case
    assert main(["sbatch", "--dry-run", "--run-dir", "run", script]) == 0
    text = capsys.readouterr().out
    now = int(time.time())
    limit = "NONE" if limit_s is None else str(now + limit_s)
    one = f"ReservationName=r StartTime={now - 9} EndTime={now + (left_s or 0)} Nodes=c1 Flags={flags} State=ACTIVE"
    for name, does in (
        ("sbatch", f'echo "$*" > {tmp_path}/said; echo 77'),
        ("squeue", f'[ "$SLURM_TIME_FORMAT" = %s ] && echo {limit}'),
        ("scontrol", f'[ "$SLURM_TIME_FORMAT" = %s ] && echo "{one}"'),
    ):
        write_program(tmp_path / name, does)
    run = next(line.strip() for line in text.splitlines() if "-m holdfast run --fleet slurm" in line)
    path = tmp_path / "run.sbatch"
    path.write_text(text.replace(run, "( exit 95 ) &"))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "76", "SLURM_JOB_NAME": "holdfast-r"}
    env |= {} if left_s is None else {"SLURM_JOB_RESERVATION": "r"}
    done = subprocess.run(["bash", str(path)], env=env, check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 95 and not done.stderr
    said = (tmp_path / "said").read_text()
    assert "--dependency=singleton" in said and ("--begin=" in said) == bool(begin)
    if begin:
        assert 30 <= int(said.partition(begin)[2].split()[0]) <= 40


def test_what_is_written_beside_the_run_is_for_its_owner_alone(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words of a command line may have a hook's address among them; and ranks may print what they like."""
    write_program(tmp_path / "sbatch", "echo Submitted batch job 46")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "state" / "home"))
    runs = tmp_path / "state" / "home" / "runs"
    words = ["sbatch", "--run-dir", str(runs / "r"), "--set", "hook.url=https://hooks.test/5ec2e7", script]
    for old in (False, True):
        assert main(words) == 0
        paths = (tmp_path / "state", runs, runs / "r.sbatch", runs / "r.out", runs / "r.job")
        assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o700, 0o700, 0o600, 0o600, 0o600], old
        assert (runs / "r.job").read_text() == "46\n"
        assert "5ec2e7" in (runs / "r.sbatch").read_text() and (runs / "r.out").read_text() == ("kept" if old else "")
        (runs / "r.out").write_text("kept")
        (runs / "r.out").chmod(0o644)
    (tmp_path / "precious").write_text("")
    for lead in (Path.symlink_to, Path.hardlink_to):
        (runs / "r.out").unlink()
        lead(runs / "r.out", tmp_path / "precious")
        capsys.readouterr()
        assert main(words) == 2
        assert capsys.readouterr().err.startswith(f"holdfast sbatch: cannot write {runs}/r.out: ")


def test_a_run_and_its_directory_have_one_name_and_no_other_run_has_it(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path / "sbatch", "echo Submitted batch job 46")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    runs = tmp_path / "home" / "runs"
    assert main(["sbatch", script]) == 0
    [first] = runs.glob("*.sbatch")
    assert run_args_of(first.read_text()) == (str(runs / first.stem), first.stem)
    assert f"holdfast-{first.stem}" in first.read_text()
    for count in (1, 2):
        assert main(["sbatch", "--rdzv-id", "train", script]) == 0
        found = [run_args_of(path.read_text()) for path in runs.glob("train*.sbatch")]
        assert len(found) == len({place for place, _ in found}) == count and {name for _, name in found} == {"train"}
    ended = tmp_path / "over"
    ended.mkdir()
    run_and_node_specs.write_json(ended / "exit.json", RunEnd(code=0, reason="done"))
    capsys.readouterr()
    assert main(["sbatch", "--run-dir", str(ended), script]) == 2
    assert capsys.readouterr().err == f"holdfast sbatch: {ended} holds a run that has ended; give another --run-dir\n"


def run_args_of(text: str) -> tuple[str, str]:
    """The directory and the id of the run that a script begins."""
    [line] = [line for line in text.splitlines() if "-m holdfast run --fleet slurm" in line]
    words = shlex.split(line.rstrip("& "))
    args = parse_run_args(words[words.index("run") + 1 :], {})
    return args.run_dir or "", args.run_id or ""


def test_a_script_that_is_printed_has_a_place_for_its_output(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm opens it before the script begins, and ends a job for which it cannot."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "state" / "home"))
    assert main(["sbatch", "--dry-run", script]) == 0
    [output] = [line.partition("--output=")[2] for line in capsys.readouterr().out.splitlines() if "--output=" in line]
    assert stat.S_IMODE(Path(output).parent.stat().st_mode) == 0o700 and not list(Path(output).parent.iterdir())


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--nproc-per-node", "auto"), "--nproc-per-node auto: give a number, since this host is none of the nodes"),
        (("--nnodes", "2", "--mesh", "dp=3"), "--mesh has 3 ranks, but 2 x 1 are 2; change one of them"),
        (("--set", "node.lost_s=soon"), "node.lost_s must be a number, not 'soon'"),
    ],
)
def test_what_the_job_would_be_refused_is_refused_before_it_is_submitted(
    flags: tuple[str, ...], told: str, script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sbatch", "--dry-run", "--run-dir", str(tmp_path / "r"), *flags, script]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("holdfast sbatch: ") and told in err and err.count("\n") == 1


def test_a_refusal_of_sbatch_is_its_own_sentence(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = """Try "sbatch --help" for more information"""
    refuses = f"""printf '%s\\n' "sbatch: unrecognized option '--bogus'" '{advice}' >&2; exit 255"""
    write_program(tmp_path / "sbatch", refuses)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(["sbatch", "--run-dir", str(tmp_path / "r"), "--slurm", "bogus", script]) == 2
    assert capsys.readouterr().err == "holdfast sbatch: sbatch: unrecognized option '--bogus'\n"
    assert not list(tmp_path.glob("r.*")), "nothing is left of what was refused"
    (tmp_path / "r.out").write_text("of an earlier job")
    assert main(["sbatch", "--run-dir", str(tmp_path / "r"), "--slurm", "bogus", script]) == 2
    assert (tmp_path / "r.out").read_text() == "of an earlier job"


@pytest.mark.parametrize("flags", [("--detach",), ("--standbys", "auto"), ("--slurm", "'")])
def test_what_does_not_go_with_it(script: str, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sbatch", *flags, script]) == 2
    assert capsys.readouterr().err.startswith("holdfast sbatch: --")


def test_a_login_node_is_told_what_it_lacks(
    script: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["run", "--fleet", "slurm", script]) == 2
    assert " sbatch " in capsys.readouterr().err
    for name in ("sbatch", "srun", "squeue", "scancel"):
        (tmp_path / name).touch(mode=0o755)
    assert main(["run", "--fleet", "slurm", "--nproc-per-node", "gpu", script]) == 2
    assert "give a number" in capsys.readouterr().err
    assert main(["run", "--fleet", "slurm", "--local-addr", "localhost", script]) == 2
    assert "localhost " in (said := capsys.readouterr().err) and " 127.0.0.1, " in said


def test_flags_for_sbatch_come_with_and_without_dashes(script: str) -> None:
    args = parse_run_args(["--fleet", "slurm", "--slurm=-p gpu --exclusive", "--slurm", "time=5 requeue", script], {})
    assert args.journal is None
    assert parse_run_args(["--fleet", "slurm", "--journal", "postgres://db/x", script], {}).journal == "postgres://db/x"
    assert args.slurm == ("-p", "gpu", "--exclusive", "--time=5", "--requeue")
    mixed = parse_run_args(["--fleet", "slurm", "--slurm", "partition=gpu --exclusive -t5", script], {})
    assert mixed.slurm == ("--partition=gpu", "--exclusive", "-t5")
    with pytest.raises(UsageError) as told:
        parse_run_args(["--slurm", "time=5", script], {})
    assert str(told.value) == "--slurm time=5 is for nodes from Slurm; give --fleet slurm too", (
        "or it trains right here"
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("nodes=3", "leave --nodes=3 out; the number of hosts is that of --nnodes"),
        ("--nodes 3", "leave --nodes out"),
        ("-N3", "leave -N3 out"),
        ("exclusive job-name=train", "leave --job-name=train out; holdfast names"),
        ("-p gpu -J train", "leave -J out"),
    ],
)
def test_flags_for_sbatch_that_are_ours_are_refused(flags: str, told: str, script: str) -> None:
    """In a batch script they would have come after ours, and so before them: two runs of one name would have taken each
    other's jobs for their successors."""
    with pytest.raises(UsageError, match=f"^--slurm: {told}"):
        parse_run_args(["--fleet", "slurm", f"--slurm={flags}", script], {})


def test_an_address_is_one_that_others_reach() -> None:
    assert slurm_launch.find_own_address("192.0.2.7") == "192.0.2.7"
    with pytest.raises(UsageError, match="cannot resolve"):
        slurm_launch.find_own_address("no-such-host.invalid")


def test_slurms_sigterm_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, deed: None)
    asked = StopSignals(once=(15,))
    for number in (15, 15, 2, 2):
        asked._note_signal(number, (15,))
    assert asked.numbers == [15, 2, 2]
