"""Secrets in a script's exception: none of the ways by which holdfast tells of it shows them."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.conftest import Start
from tests.cli.driver import ROOT, TRAIN, Job, run_command
from tests.otlp_collector import collecting

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

IN_ENVIRONMENT, BY_UPDATE = "correct-horse-battery", "donkey-stapler-11"
TOKEN, KEY = "hf_" + "aB3dE5fG7hJ9kL1m", "MIIEow" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY" * 2
# Told to, it fails once in each of two releases, with all that it should have kept to itself. No secret stands in it.
LEAKS = TRAIN.replace(
    "    holdfast.step(step, loss=1 / step)",
    """    holdfast.step(step, loss=1 / step)
    now = "updated" if "HOLDFAST_HUB_PASSWORD" in os.environ else "begun"
    slips = os.path.exists(f"{folder}/slip-{now}")
    if slips and rank == "1" and not os.path.exists(f"{folder}/failed-{now}"):
        open(f"{folder}/failed-{now}", "w").close()
        token, key = "hf_" + "aB3dE5fG7hJ9kL1m", "MIIEow" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY" * 2
        for line in ("-----BEGIN RSA PRIVATE KEY-----", key, key, "-----END RSA PRIVATE KEY-----"):
            print(line, file=sys.stderr)
        words = [os.environ.get(name, "") for name in ("HOLDFAST_MY_API_KEY", "HOLDFAST_HUB_PASSWORD")]
        raise RuntimeError(f"no login with {token}, {words[0]} and {words[1]}")""",
)


def test_no_exit_shows_what_the_script_let_slip(start: Start, tmp_path: Path) -> None:
    hook = f"cat >> {tmp_path}/hooked; echo >> {tmp_path}/hooked"
    with collecting() as collector:
        traced = _tracing(collector.server_port)
        job = start(
            "--nnodes", "2", "--set", f"hook.command={hook}", "--set", "hook.least_s=0",
            script=LEAKS, HOLDFAST_MY_API_KEY=IN_ENVIRONMENT, OWN_SERVER="1", **traced,
        )  # fmt: skip
        job.trains()
        (tmp_path / "slip-begun").touch()
        job.trains(2)
        words = ("update", "--run", "run", "--now", "--env", f"HOLDFAST_HUB_PASSWORD={BY_UPDATE}")
        done = run_command(*words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        (tmp_path / "slip-updated").touch()
        job.until(lambda: len(job.report().incidents) >= 2 and job.phase() == "training", "the second failure")
        told = {"status": str(job.status()), "page": _report(tmp_path, "--html")}
        if traced:
            job.until(lambda: len(collector.bodies) >= 2, "the traces")
        job.finish()
        job.ends(0)
    told |= {str(number): body.decode("latin-1") for number, (_, _, body) in enumerate(collector.bodies)}
    told |= {form: _report(tmp_path, form) for form in ("", "--json")}
    told["console"] = "\n".join(job.sentences())
    told["hooked"] = (tmp_path / "hooked").read_text()
    told |= _files(job)
    secrets = (IN_ENVIRONMENT, BY_UPDATE, TOKEN, KEY)
    leaks = [(name, secret) for name, text in told.items() for secret in secrets if secret in text]
    assert not leaks
    page = _report(tmp_path, "--html")  # which quotes the output of ranks, and nobody knows their environment now
    assert not [secret for secret in (TOKEN, KEY) if secret in page]
    masked = [one for one in job.report().incidents if "<token>" in one.sentence or "<token>" in one.cause]
    assert len(masked) == 2, "what was masked was there"
    assert "<token>" in told["hooked"] and "<token>" in told["--json"]


def _tracing(port: int) -> dict[str, str]:
    """The environment of a job that exports traces; empty if OpenTelemetry is not installed here."""
    found = find_spec("opentelemetry.sdk") if find_spec("opentelemetry") else None
    if found is None or not found.submodule_search_locations:
        return {}
    path = f"{ROOT}{os.pathsep}{Path(next(iter(found.submodule_search_locations))).parents[1]}"
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "PYTHONPATH": path}


def _report(folder: Path, form: str) -> str:
    page = folder / "page.html"
    flags = () if not form else (form, str(page)) if form == "--html" else (form,)
    done = run_command("report", "run", *flags, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout + (page.read_text() if form == "--html" else "")


def _files(job: Job) -> dict[str, str]:
    """All that is left in the run directory, but for the output of ranks, which is the script's own."""
    files = (path for path in job.run_dir.rglob("*") if path.is_file() and not path.is_symlink())
    paths = [path for path in files if job.run_dir / "logs" not in path.parents]
    assert {"journal.db", "controller.log", "said.log", "audit.log"} <= {path.name for path in paths}
    return {str(path): path.read_bytes().decode("latin-1") for path in paths}
