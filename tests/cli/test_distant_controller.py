"""A controller that is asked at an address: whose certificate is believed, and what is said where none answers."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from holdfast.cli.commands import status_command
from holdfast.cli.run_dirs.distant_controller import DistantController
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.wire.agent_messages import TOKEN_HEADER
from holdfast.wire.controller_request import ControllerNotRunning, NotAController, RequestRefused
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.credentials.certificate_authority import CertificateAuthority, enrol_local_node
from holdfast.wire.credentials.mutual_tls import KeyFiles
from tests.wire.given import Organisation

TOKEN = "a token"
TOLD = {"run_id": "gpt", "generation": 3}


async def answer(request: web.Request) -> web.Response:
    if request.path == "/strange":
        return web.Response(text="hello")
    if request.headers.get(TOKEN_HEADER) != TOKEN:
        return web.json_response({"error": "show a token"}, status=401)
    return web.json_response(TOLD if request.method == "GET" else await request.json())


class Port:
    """A server on loopback that proves itself with these keys."""

    def __init__(self, keys: KeyFiles) -> None:
        self._keys = keys
        self.number = 0

    async def __aenter__(self) -> int:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=mutual_tls.server_tls(self._keys, strangers=True))
        await site.start()
        return int(self._runner.addresses[0][1])

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


@pytest.fixture
async def job(tmp_path: Path) -> AsyncIterator[tuple[int, Path]]:
    """The port of a controller that has made its own authority, and the file of that authority."""
    keys = CertificateAuthority(tmp_path / "door").keys
    async with Port(keys) as port:
        yield port, keys.authority


async def ask(port: int, authority: Path | None, token: str = TOKEN, path: str = "/api/v1/status") -> object:
    return await asyncio.to_thread(DistantController(f"https://localhost:{port}", token, authority).ask, path)


async def test_a_controller_proves_itself_by_its_own_name_whatever_the_address_is(job: tuple[int, Path]) -> None:
    port, authority = job
    assert await ask(port, authority) == TOLD
    order = {"verb": "hold"}
    controller = DistantController(f"https://127.0.0.1:{port}", TOKEN, authority)
    assert await asyncio.to_thread(controller.ask, "/api/v1/orders", order) == order
    with pytest.raises(RequestRefused, match="show a token"):
        await ask(port, authority, "guess")
    with pytest.raises(NotAController, match=f"localhost:{port}"):
        await ask(port, authority, path="/strange")


async def test_whoever_else_answers_gets_no_token(job: tuple[int, Path], tmp_path: Path) -> None:
    port, _ = job
    for authority in (CertificateAuthority(tmp_path / "other").keys.authority, None):
        with pytest.raises(ControllerNotRunning, match="CERTIFICATE_VERIFY_FAILED"):
            await ask(port, authority)
    ours = Organisation(tmp_path / "ours")
    node = ours.keys("n1", leads=False)  # of the same authority, but it may carry no controller
    async with Port(node) as port:
        with pytest.raises(ControllerNotRunning, match="CERTIFICATE_VERIFY_FAILED"):
            await ask(port, node.authority)


async def test_a_node_is_nobody_whatever_the_address_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All certificates of a job have the common name holdfast, as a Service in Kubernetes may have."""
    authority = CertificateAuthority(tmp_path / "door")
    async with Port(enrol_local_node(authority, "n1", tmp_path / "keys")) as port:
        monkeypatch.setattr(DistantController, "_dial", lambda self: socket.create_connection(("127.0.0.1", port), 20))
        controller = DistantController("https://holdfast", TOKEN, authority.keys.authority)
        with pytest.raises(ControllerNotRunning, match="CERTIFICATE_VERIFY_FAILED"):
            await asyncio.to_thread(controller.ask, "/api/v1/status")


async def test_what_stands_in_front_of_a_controller_proves_itself_by_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Organisation(tmp_path / "ours").keys("", leads=False)
    async with Port(keys) as port:
        monkeypatch.setattr(DistantController, "_dial", lambda self: socket.create_connection(("127.0.0.1", port), 20))
        controller = DistantController("https://host.example.org", TOKEN, keys.authority)
        assert await asyncio.to_thread(controller.ask, "/api/v1/status") == TOLD


@pytest.mark.parametrize(
    ("address", "files", "code"),
    [
        ("https://127.0.0.1:1", ("token", "authority"), 1),
        ("https://127.0.0.1:x", ("token", "authority"), 2),
        ("https://127.0.0.1:1", ("nowhere", "authority"), 2),
        ("https://127.0.0.1:1", ("", "authority"), 2),
        ("http://127.0.0.1:1", ("token", "authority"), 1),
        ("http://[::1]:1", ("token", "authority"), 1),
        ("http://192.0.2.1:1", ("token", "authority"), 2),  # the token would cross a network in the clear
        ("http://host0:1", ("token", "authority"), 2),
        ("https://127.0.0.1:1", ("binary", "authority"), 2),
        ("https://127.0.0.1:1", ("two lines", "authority"), 2),
        ("https://127.0.0.1:1", ("letters", "authority"), 2),
        ("https://127.0.0.1:1", ("empty", "authority"), 2),
        ("https://", ("token", "authority"), 2),
        ("https://:1", ("token", "authority"), 2),
        ("https://[::1", ("token", "authority"), 2),
        ("https://[abc]:1", ("token", "authority"), 2),
        ("https://me@host:1", ("token", "authority"), 2),
        ("https://a b:1", ("token", "authority"), 2),
        ("https://a\x07:1", ("token", "authority"), 2),
        ("https://a\udcff:1", ("token", "authority"), 2),
        ("https://..:1", ("token", "authority"), 2),
        (f"https://{'a' * 300}:1", ("token", "authority"), 2),
    ],
)
def test_status_of_an_address_that_does_not_answer(
    address: str, files: tuple[str, str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "two lines").write_text("one\ntwo")
    (tmp_path / "letters").write_text("t\u20ac")
    (tmp_path / "empty").touch()
    authority = CertificateAuthority(tmp_path / "door").keys.authority
    token = ("--token-file", str(tmp_path / files[0])) if files[0] else ()
    assert status_command.main([address, *token, "--cacert", str(authority)]) == code
    said = capsys.readouterr()
    assert said.err.startswith("holdfast status: ") and said.err.count("\n") == 1 and not said.out


def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"https://127.0.0.1:{listener.getsockname()[1]}"
        for content in (None, "no certificate"):
            path = tmp_path / "authority.pem"
            if content:
                path.write_text(content)
            words = [address, "--token-file", str(tmp_path / "token"), "--cacert", str(path)]
            assert status_command.main(words) == 2
            assert str(path) in capsys.readouterr().err


async def test_status_of_an_address(
    job: tuple[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, authority = job
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    words = [f"https://localhost:{port}", "--token-file", str(tmp_path / "token"), "--cacert", str(authority), "--json"]
    assert await asyncio.to_thread(status_command.main, words) == 0
    assert json.loads(capsys.readouterr().out) == TOLD
    monkeypatch.delitem(TOLD, "generation")
    assert await asyncio.to_thread(status_command.main, words) == 1
    assert f"localhost:{port}" in capsys.readouterr().err, "JSON, but not of holdfast"


def test_an_address_without_a_port_number() -> None:
    with pytest.raises(UsageError, match="https://host:x"):
        DistantController("https://host:x", TOKEN, None)
