"""Where a node dials: the address that it was given, or the one in the run's own file if the controller has moved."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.agent.connection.controller_dialer import BrokenLinkError, ControllerDialer
from holdfast.config import Settings
from holdfast.model.job_and_seats import Job
from holdfast.wire import run_and_node_specs
from holdfast.wire.credentials.certificate_authority import CertificateAuthority, enrol_local_node
from holdfast.wire.run_and_node_specs import EntryPoint, NodeSpec, RunSpec

ENTRY = EntryPoint(argv=("t.py",))


@contextlib.asynccontextmanager
async def closed_door(knocks: list[str], name: str) -> AsyncIterator[int]:
    """A port at which everybody is sent away; each who comes is noted."""

    def send_away(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        knocks.append(name)
        writer.close()

    async with await asyncio.start_server(send_away, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


def make_dialer(folder: Path, port: int, run_file: Path) -> ControllerDialer:
    (folder / "door").mkdir()
    enrol_local_node(CertificateAuthority(folder / "door"), "n1", folder / "keys")
    spec = NodeSpec(
        node="n1",
        order=0,
        nproc=1,
        url=f"https://127.0.0.1:{port}",
        run_file=str(run_file),
        keys=str(folder / "keys"),
        log_dir="",
        entry=ENTRY,
        settings=Settings(),
        run_id="r",
    )
    return ControllerDialer(spec)


async def dial_in_vain(dialer: ControllerDialer) -> None:
    with pytest.raises(BrokenLinkError):
        async with dialer.open_link():
            pass


async def test_a_controller_that_has_moved_is_found_in_the_run_s_own_file(tmp_path: Path) -> None:
    knocks: list[str] = []
    run_file = tmp_path / "run.json"
    async with closed_door(knocks, "old") as old, closed_door(knocks, "new") as new:
        dialer = make_dialer(tmp_path, old, run_file)
        job = Job(run_id="r", min_nodes=1, max_nodes=1)
        moved = RunSpec(job=job, entry=ENTRY, settings=Settings(), fleet="slurm", nproc=1, log_dir="", port=new)
        await dial_in_vain(dialer)
        run_file.write_bytes(b"{torn")
        await dial_in_vain(dialer)
        run_and_node_specs.write_json(run_file, moved)
        await dial_in_vain(dialer)
    assert knocks == ["old", "old", "new"], "what cannot be read says nothing"
