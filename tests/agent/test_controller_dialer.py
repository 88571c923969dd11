"""Where a node dials: the address that it was given, or the one in the run's own file if the controller has moved."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.connection.controller_dialer import BrokenLinkError, ControllerDialer
from holdfast.config import Settings
from holdfast.model.job_and_seats import Job
from holdfast.wire import run_and_node_specs
from holdfast.wire.credentials.certificate_authority import CertificateAuthority, enrol_local_node
from holdfast.wire.run_and_node_specs import EntryPoint, NodeSpec, RunSpec

ENTRY = EntryPoint(argv=("t.py",))
NAME = "train.test"


@contextlib.asynccontextmanager
async def closed_door(knocks: list[str], name: str, address: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
    """A port at which everybody is sent away; each who comes is noted."""

    def send_away(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        knocks.append(name)
        writer.close()

    async with await asyncio.start_server(send_away, address, port) as server:
        yield server.sockets[0].getsockname()[1]


def make_dialer(folder: Path, port: int, run_file: Path | str, host: str = "127.0.0.1") -> ControllerDialer:
    (folder / "door").mkdir()
    enrol_local_node(CertificateAuthority(folder / "door"), "n1", folder / "keys")
    spec = NodeSpec(
        node="n1",
        order=0,
        nproc=1,
        url=f"https://{host}:{port}",
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


class Names:
    """DNS with one name, which may be moved."""

    def __init__(self, patch: pytest.MonkeyPatch, *addresses: str) -> None:
        self.addresses, self._resolve = addresses, socket.getaddrinfo
        patch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, host: str, port: int, *words: Any, **named: Any) -> list[Any]:
        if host != NAME:
            return self._resolve(host, port, *words, **named)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.addresses]


async def test_a_name_of_several_addresses_leads_to_the_one_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Names(monkeypatch, "127.0.0.77", "127.0.0.78", "127.0.0.1")
    knocks: list[str] = []
    async with closed_door(knocks, "controller") as port:
        await dial_in_vain(make_dialer(tmp_path, port, "", NAME))
    assert {*knocks} == {"controller"}  # which is tried again after each of the others


async def test_a_name_is_looked_up_anew_at_every_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, "127.0.0.1")
    knocks: list[str] = []
    async with closed_door(knocks, "old") as port, closed_door(knocks, "new", "127.0.0.2", port):
        dialer = make_dialer(tmp_path, port, "", NAME)
        await dial_in_vain(dialer)
        names.addresses = ("127.0.0.2",)
        await dial_in_vain(dialer)
    assert knocks == ["old", "new"]
