"""Commands about journals in a database: `ls --journal`, `journal`, and what `run` refuses."""

import json
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.cli.run_dirs import run_dir_creation
from holdfast.config import Settings
from holdfast.model.action import Launch
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Progress, Tick
from holdfast.model.job_and_seats import Job, Seat
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry
from holdfast.wire.run_and_node_specs import EntryPoint, RunSpec

TOKEN = "0b1c8e93d7a24f56b8e1902c7d3f4a65"


def write(url: str, run_id: str, phase: Phase, lease_s: float = 60.0) -> None:
    from holdfast.journal.journal_key import JournalKey
    from holdfast.journal.postgres_journal import LeaseHolder, PostgresJournal

    lease = LeaseHolder(name="h0 abc", address="h0:29400", lease_s=lease_s)
    journal = PostgresJournal(url, run_id, lease, JournalKey(TOKEN, run_id))
    seats = tuple(Seat(node=f"n{i}", group_rank=i, first_rank=i, nproc=1) for i in range(2))
    launch = Launch(id=1, generation=1, seats=seats, release=Release(number=1))
    seen = Progress(generation=1, step=7, at=1.0, first_step=1, first_at=1.0, counted=False)
    launched = Decision(phase=phase, actions=(launch,) if phase is Phase.TRAINING else ())
    journal.append(Entry(seq=1, at=1.0, event=Tick(), decision=launched), durable=True)
    if phase is Phase.TRAINING:
        journal.append(Entry(seq=2, at=1.0, event=seen, decision=Decision(phase=phase)), durable=True)
    journal._link.close()  # as if killed


def test_runs_of_a_database_are_listed(
    shared_postgres: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = {phase: f"{tmp_path} {phase.value}" for phase in (Phase.TRAINING, Phase.DONE, Phase.HELD)}
    for phase, run_id in ids.items():
        write(shared_postgres, run_id, phase, lease_s=0.0 if phase is Phase.HELD else 60.0)
    assert main(["ls", "--journal", shared_postgres, "--json"]) == 0
    rows = {row["run_id"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows[ids[Phase.TRAINING]]["state"] == "training"
    assert rows[ids[Phase.TRAINING]]["detail"] == " with 2 nodes, step 7, carried by h0 at h0:29400"
    assert (rows[ids[Phase.TRAINING]]["step"], rows[ids[Phase.TRAINING]]["nodes"]) == (7, 2)
    assert rows[ids[Phase.DONE]]["state"] == "ended"
    assert rows[ids[Phase.HELD]]["state"] == "left" and rows[ids[Phase.HELD]]["detail"].startswith(", step unknown: ")
    assert main(["ls", "--journal", shared_postgres]) == 0
    assert f"{ids[Phase.DONE]}  ended  started " in capsys.readouterr().out

    assert main(["journal", shared_postgres, "--forget", ids[Phase.TRAINING]]) == 2
    assert f"run {ids[Phase.TRAINING]} " in capsys.readouterr().err
    assert main(["journal", shared_postgres, "--forget", ids[Phase.DONE]]) == 0
    capsys.readouterr()
    assert main(["ls", "--journal", shared_postgres, "--json"]) == 0
    left = {row["run_id"] for row in json.loads(capsys.readouterr().out)}
    assert left & {*ids.values()} == {ids[Phase.TRAINING], ids[Phase.HELD]}
    assert main(["journal", shared_postgres, "--forget", ids[Phase.DONE]]) == 2
    assert f"run {ids[Phase.DONE]}\n" in capsys.readouterr().err


def test_tables_are_looked_after(shared_postgres: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = ["blocked", "--journal", shared_postgres]
    assert main(["journal", shared_postgres, "--schema", "5"]) == 0
    assert main([*blocked, "--add", "gpu-a", "--why", "it burns"]) == 0
    assert main(["journal", shared_postgres, "--schema", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the tables are of version 4; they were of 5"
    for words in (["ls", "--journal", shared_postgres], blocked):
        assert main(words) == 2
        assert "--schema 5" in capsys.readouterr().err
    assert main(["journal", shared_postgres]) == 0
    assert capsys.readouterr().out == "the tables are of version 4, this holdfast wants 5\n"
    assert main(["journal", shared_postgres, "--schema", "5"]) == 0
    assert main(blocked) == 0
    assert "gpu-a" in capsys.readouterr().out, "version 4 knows the list"
    assert main([*blocked, "--lift", "gpu-a"]) == 0


def test_blocked_hosts_of_a_database(shared_postgres: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = ["blocked", "--journal", shared_postgres]
    assert main([*blocked, "--add", "gpu-a", "--why", "it burns"]) == 0
    assert main(blocked) == 0
    assert "gpu-a  since " in capsys.readouterr().out
    assert main([*blocked, "--list", "x"]) == 2
    assert main([*blocked, "--lift", "gpu-a"]) == 0
    assert main([*blocked, "--lift", "gpu-a"]) == 2
    assert ": gpu-a " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["ls", "--journal"], ["journal"], ["blocked", "--journal"], ["ckpt", "ls", "--journal"]]
)
@pytest.mark.parametrize("url", ["me:s3cret@127.0.0.1:1/db", "127.0.0.1:1/db?sslpassword=s3cret"])
def test_an_address_with_a_password_is_refused(words: list[str], url: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("psycopg")
    assert main([*words, f"postgres://{url}"]) == 2
    said = capsys.readouterr()
    assert "~/.pgpass" in said.err and "s3cret" not in said.out + said.err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--journal", "postgres://h/d"], "needs --rdzv-endpoint"),
        (["--journal", "postgres://h/d", "--rdzv-endpoint", "127.0.0.1:1"], "needs --rdzv-id"),
        (["--rdzv-endpoint", "one:1,two:2"], "only with --journal"),
        (["--journal", "postgres://h/d", "--rdzv-id", "x", "--rdzv-endpoint", "one:1,two:0"], "port 0"),
        (["--journal", "mysql://h/d", "--rdzv-id", "x", "--rdzv-endpoint", "127.0.0.1:1"], "no address of a database"),
        (["--journal", "postgres://127.0.0.1:1/d", "--rdzv-id", "x", "--rdzv-endpoint", "127.0.0.1:1"], "not answer"),
    ],
)
def test_what_run_refuses(
    flags: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN)
    (tmp_path / "train.py").write_text("")
    assert main(["run", *flags, str(tmp_path / "train.py")]) == 2
    assert why in capsys.readouterr().err


def test_a_journal_file_on_a_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(run_dir_creation, "network_kind", lambda path: "nfs4")
    (tmp_path / "train.py").write_text("")
    assert main(["run", str(tmp_path / "train.py")]) == 2
    said = capsys.readouterr().err
    assert " nfs4" in said and "--journal" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("of", "kind", "shared", "word"),
    [
        ({"fleet": "slurm"}, "nfs4", True, " nfs4, "),
        ({"fleet": "slurm"}, "", True, ""),  # hosts share it, whatever the file system is called
        ({"fleet": "kubernetes"}, "nfs4", True, " nfs4, "),
        ({"fleet": "kubernetes"}, "", False, ""),
        ({"fleet": "slurm", "journal": "postgres://h/d"}, "nfs4", True, ""),
        ({"fleet": "local"}, "", False, ""),
    ],
)
def test_a_journal_that_hosts_of_a_cluster_share_is_of_another_sort_and_that_is_said(
    of: dict[str, str], kind: str, shared: bool, word: str, *, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir_creation, "network_kind", lambda path: kind)
    job, entry = Job(run_id="r", min_nodes=1, max_nodes=1), EntryPoint(argv=("x",))
    run = RunSpec(job=job, entry=entry, settings=Settings(), nproc=1, log_dir="/l", **of)
    assert run_dir_creation.is_shared(run, tmp_path) is shared
    said = run_dir_creation.shared_journal_text(run, tmp_path)
    assert word in said and bool(said) is bool(word)
