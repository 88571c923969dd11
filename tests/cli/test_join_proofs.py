"""What lets a host into a job that spans hosts, and what no thief gets by it: over real sockets, by whole commands."""

import json
import signal
from pathlib import Path

import pytest

from holdfast.cli import main
from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.test_join import TOKEN, WHO, host, port
from tests.cli.test_run_state import TRAIN as SNAPSHOTS
from tests.wire.given import Organisation, settings

__all__ = ["port"]
pytestmark = pytest.mark.e2e


def audited(job: Job) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in (job.run_dir / "audit.log").read_text().splitlines()]
    return [(line["who"], line.get("refused", "")) for line in lines]


def minted(capsys: pytest.CaptureFixture[str], job: Job, *words: str) -> str:
    assert main(["token", "node", *words, "--run", str(job.run_dir)]) == 0
    return capsys.readouterr().out.strip()


@pytest.mark.slow
def test_a_thief_has_the_token_of_a_node(
    start: Start,
    port: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It enrols the node that it is for, once, though the controller die in between; the job's secret stays there."""
    endpoint, flags = f"127.0.0.2:{port}", ("--nnodes", "3")
    first = host(start, endpoint, *flags, name="first", script=WHO, HOLDFAST_TOKEN=TOKEN)
    first.until(first.status, "the controller")
    used, unused = minted(capsys, first, "n7"), minted(capsys, first, "n8", "--within", "600")
    friends = [host(start, endpoint, *flags, name="friend", script=WHO, HOLDFAST_TOKEN=used)]
    first.until(lambda: any(who.startswith("node's token") for who, _ in audited(first)), "the enrolment")
    before = first.controller()
    first.kill(before)
    first.until(lambda: first.controller() != before and first.status(), "another controller")
    for name, token, words in (
        ("again", used, "has already enrolled n7"),
        ("renamed", unused.replace(".n8", ".thief"), "is for node n8, not for thief"),
    ):
        thief = host(start, endpoint, *flags, name=name, script=WHO, HOLDFAST_TOKEN=token)
        thief.ends(2)
        assert words in thief.sentences()[-1] and "Traceback" not in thief.text()
        assert any(words in why for _, why in audited(first)), "it is written down"
    friends.append(host(start, endpoint, *flags, name="late", script=WHO, HOLDFAST_TOKEN=unused))
    for job in (first, *friends):
        job.ends(0)
    assert [job.run_dir.name.partition("-")[0] for job in friends] == ["n7", "n8"]


def test_tokens_that_nobody_can_make(start: Start, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = start()
    job.trains()
    for words, why in (
        (("--run", str(job.run_dir)), "token"),
        (("--run", str(tmp_path)), "run.json"),
    ):
        assert main(["token", "node", *words]) == 2
        said = capsys.readouterr()
        assert said.err.startswith("holdfast token: ") and why in said.err and not said.out
    job.finish()
    job.ends(0)
    assert main(["token", "node", "--run", str(job.run_dir)]) == 2
    assert "code 0" in capsys.readouterr().err


def test_whoever_is_stopped_before_a_controller_answers_keeps_no_secret(
    start: Start, port: int, tmp_path: Path
) -> None:
    keys = Organisation(tmp_path / "ours").keys("n1", leads=False)
    flags = ("--rdzv-endpoint", f"127.0.0.2:{port}", "--nnodes", "2")
    job = start(*flags, *settings(keys), script=WHO)
    job.says("waiting for the controller at")
    secrets = [path for path in job.run_dir.rglob("*") if path.is_file() and path.stat().st_mode & 0o77 == 0]
    assert {"key.pem", "env.json"} <= {path.name for path in secrets}
    job.process.send_signal(signal.SIGTERM)
    job.ends(128 + signal.SIGTERM)
    assert not any(path.exists() for path in secrets if path.name == "env.json" or "keys" in path.parts)


@pytest.mark.slow
def test_hosts_of_one_authority_need_no_token(start: Start, port: int, tmp_path: Path) -> None:
    """Whoever comes first: one that may not carry the controller waits for it, though it could have the port."""
    ours = Organisation(tmp_path / "ours")
    flags = ("--rdzv-endpoint", f"127.0.0.2:{port}", "--nnodes", "2")
    given = {"friend": ours.keys("n1", leads=False), "lead": ours.keys("lead", "r")}
    jobs = {}
    for name, keys in given.items():
        jobs[name] = start(*flags, *settings(keys), name=name, script=WHO, HOLDFAST_HOST="h")
        if name == "friend":
            jobs[name].says("waiting for the controller at")
    for job in jobs.values():
        job.ends(0)
    assert json.loads((tmp_path / "who-0.json").read_text())["TORCHELASTIC_RUN_ID"] == "r", "the certificate says so"


@pytest.mark.slow
def test_strangers_whom_another_authority_has_signed(start: Start, port: int, tmp_path: Path) -> None:
    """None gets in; and what becomes of the files of the user, or of the controller, shuts nobody out."""
    ours, theirs = Organisation(tmp_path / "ours"), Organisation(tmp_path / "theirs")
    endpoint, flags = f"127.0.0.2:{port}", ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "r")
    given = [ours.keys("lead", "r"), ours.keys("n1", leads=False)]
    first = host(start, endpoint, *flags, *settings(given[0]), name="first", script=SNAPSHOTS)
    first.until(first.status, "the controller")
    stranger, gullible = theirs.keys("n1"), theirs.keys("n1")
    gullible.authority.write_bytes(gullible.authority.read_bytes() + given[1].authority.read_bytes())
    for name, keys, words in (
        ("stranger", stranger, "is no controller by door.authority"),
        ("gullible", gullible, "door.authority on both hosts"),
        ("thief", stranger._replace(authority=given[1].authority), "is not trusted by door.authority"),
        ("neighbour", ours.keys("n1", "theirs"), "theirs, not for r"),
    ):
        other = start("--rdzv-endpoint", endpoint, *flags, *settings(keys), name=name)
        other.ends(2)
        assert words in other.sentences()[-1] and "Traceback" not in other.text()
    friend = host(start, endpoint, *flags, *settings(given[1]), name="friend", script=SNAPSHOTS)
    first.until(lambda: first.status().get("floor", 0) > 3, "copies on peers")
    for path in (*given[0], *given[1]):
        path.unlink()
    before, step = first.controller(), first.status()["step"]
    first.kill(before)
    first.until(lambda: first.controller() != before and first.status().get("step", 0) > step + 5, "training goes on")
    assert sorted(view["node"] for view in first.status()["nodes"]) == ["lead", "n1"]
    assert first.status()["incidents"] == 0
    first.finish()
    first.ends(0)
    friend.ends(0)
    assert not list(first.run_dir.glob("door/*")) and not list(friend.run_dir.glob("keys/*")), "nobody needs them"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--set", "door.key=k"), "door.authority, door.certificate and door.key"),
        (("--rdzv-endpoint", "127.0.0.2:1", "--rdzv-id", "s"), "door.certificate "),
        (("--rdzv-endpoint", "127.0.0.2:1", "--rdzv-id", "r", "--journal", "postgres://h/d"), "needs the job's secret"),
        ((), "--rdzv-endpoint"),
    ],
)
def test_settings_that_cannot_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    (tmp_path / "ok.py").touch()
    keys = Organisation(tmp_path / "ours").keys("n1", "r")
    given = () if "door.key=k" in flags else settings(keys)
    assert main(["run", *given, *flags, "ok.py"]) == 2
    said = capfd.readouterr().err
    assert words in said and said.startswith("holdfast run: ")


def test_a_host_that_may_not_carry_the_controller(start: Start, port: int, tmp_path: Path) -> None:
    keys = Organisation(tmp_path / "ours").keys("n1", leads=False)
    job = start("--rdzv-endpoint", f"127.0.0.2:{port}", "--rdzv-conf", "join_timeout=1", *settings(keys))
    job.ends(2)
    assert " 1 s;" in job.sentences()[-1] and "controller.holdfast" in job.sentences()[-1]
    assert not list(tmp_path.glob("run/n1-*/keys/*")), "nobody needs them"
