"""A host becomes a node only if both sides know the secret, and nobody stands in between."""

import asyncio
import gc
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from holdfast.cli.launch.enrolment_client import (
    EnrolmentClient,
    EnrolmentError,
    EnrolmentRefusedError,
    NoAnswerError,
    NotControllerError,
    UnknownTokenError,
    _refusal_text,
)
from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.enrolment_tokens import NodeTokens
from holdfast.controller.access.node_certificate_serials import NodeCertificates
from holdfast.controller.access.node_enrolment import NodeEnrolment
from holdfast.core.decide.decider import Decider
from holdfast.core.membership.host_blocking import BlockedHost
from holdfast.journal.journal_errors import JournalAwayError
from holdfast.model.decider_events import Ready
from holdfast.model.job_and_seats import HostIdentity
from holdfast.wire.credentials import enrolment, enrolment_token, job_secret_proof, mutual_tls
from holdfast.wire.credentials.certificate_authority import CertificateAuthority
from holdfast.wire.credentials.mutual_tls import KeyFiles
from tests.cli.driver import until
from tests.controller.fakes import MemoryBlockList, admission_of

TOKEN, OTHER = "60f4c1b97ad2e8537be01d94c2f86a35", "11f4c1b97ad2e8537be01d94c2f86a35"
AWAY = "the journal does not answer"


class Server:
    """The controller's two answers, in a thread, behind TLS."""

    def __init__(self, folder: Path, token: str, proof_of: CertificateAuthority | None = None) -> None:
        """`proof_of`: whose certificate the proofs are about, where that is not the one of the link."""
        self.authority, self.now = CertificateAuthority(folder), 1e9
        self.published: list[dict[str, str]] = []  # the serials that another host's controller would find
        self.away = False
        self.said: list[str] = []  # on the console
        self.tokens = NodeTokens(folder, self._publish, clock=lambda: self.now)
        self.audit = folder / "audit.log"
        self.blocked = MemoryBlockList()
        self.refused: list[Ready] = []
        self._enrolling = NodeEnrolment(
            proof_of or self.authority,
            token,
            "r",
            audit=AuditLog(folder),
            tokens=self.tokens,
            certificates=NodeCertificates(Decider().view, lambda node: False, self.said.append),
            admission=admission_of(self.blocked),
            announce=self.refused.append,
        )
        self.refusal_of = self._enrolling.certificate_refusal
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._up = threading.Event()
        self._thread.start()
        assert self._up.wait(30)

    def _publish(self) -> None:
        if self.away:
            raise JournalAwayError(AWAY)
        self.published.append(self.authority.node_serials().serials)

    def _run(self) -> None:
        self._loop.run_until_complete(self._open())
        self._up.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _open(self) -> None:
        app = web.Application()
        app.router.add_get(enrolment.PATH, self._enrolling.challenge_route)
        app.router.add_post(enrolment.PATH, self._enrolling.enrol_route)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        context = mutual_tls.server_tls(self.authority.keys, strangers=True)
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        self.address: tuple[str, int] = self._runner.addresses[0]

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "door", TOKEN)
    yield made
    made.close()


def test_a_host_enrols(server: Server, tmp_path: Path) -> None:
    call = EnrolmentClient(server.address, TOKEN)
    keys = call.enrol_node("host-1.a_b", tmp_path / "keys")
    call.close()
    assert {path.stat().st_mode & 0o777 for path in keys} == {0o600}
    shown = ssl._ssl._test_decode_cert(str(keys.certificate))  # type: ignore[attr-defined]
    assert mutual_tls.certificate_node(shown) == "host-1.a_b"
    assert server.authority.node_serials().serials == {"host-1.a_b": mutual_tls.certificate_serial(shown)}
    assert (
        mutual_tls.certificate_node(None) == ""
        and mutual_tls.certificate_node({"subjectAltName": (("DNS", mutual_tls.CONTROLLER),)}) == ""
    )
    assert keys.authority.read_bytes() == server.authority.keys.authority.read_bytes()
    again = CertificateAuthority(tmp_path / "door")  # of the next controller: the same
    assert again.keys.authority.read_bytes() == keys.authority.read_bytes()


def test_nobody_takes_the_name_of_a_node(server: Server, tmp_path: Path) -> None:
    for refused in (False, True):
        call = EnrolmentClient(server.address, TOKEN)
        if refused:
            with pytest.raises(EnrolmentRefusedError) as taken:
                call.enrol_node("a", tmp_path / "second")
            assert taken.value.status == 409
        else:
            call.enrol_node("a", tmp_path / "first")
        call.close()


@pytest.mark.parametrize("name", ["*", "", "../x", "[/x]", "a b", ".", "a" * 201, "a\n", "vm-\u0435615", "\u0661"])
def test_names_that_are_none(server: Server, tmp_path: Path, name: str) -> None:
    call = EnrolmentClient(server.address, TOKEN)
    with pytest.raises(EnrolmentRefusedError, match=enrolment.NAMES) as refused:
        call.enrol_node(name, tmp_path / "keys")
    assert refused.value.status == 400
    call.close()


def test_another_job_was_meant(server: Server, tmp_path: Path) -> None:
    call = EnrolmentClient(server.address, TOKEN)
    with pytest.raises(EnrolmentRefusedError, match=r"\br\b.*\btheirs$") as refused:
        call.enrol_node("a", tmp_path / "keys", "theirs")
    assert refused.value.status == 409
    call.close()


def test_a_proof_is_good_once(server: Server, tmp_path: Path) -> None:
    call = EnrolmentClient(server.address, TOKEN)
    call.enrol_node("a", tmp_path / "a")
    with pytest.raises(EnrolmentRefusedError) as refused:
        call.enrol_node("b", tmp_path / "b")
    assert refused.value.status == 403
    call.close()


def test_challenges_are_gone_with_their_links(server: Server, tmp_path: Path) -> None:
    """So a flood of them leaves nothing that could be full when an honest host comes."""
    for _ in range(30):
        EnrolmentClient(server.address, TOKEN).close()

    def left() -> int:
        gc.collect()
        return len(server._enrolling._open)

    until(lambda: left() == 0, "nothing is kept of links that are gone")
    call = EnrolmentClient(server.address, TOKEN)
    call.enrol_node("a", tmp_path / "a")
    call.close()


def test_a_link_has_one_challenge_and_one_refusal(server: Server) -> None:
    """Whoever floods us has to pay for a handshake each time."""
    ask = f"GET {enrolment.PATH}?nonce={'0' * 64} HTTP/1.1\r\nHost: h\r\n\r\n".encode()
    for first, answers in ((ask, [b"200", b"400"]), (ask.replace(b"0" * 64, b"0"), [b"400"])):
        with (
            socket.create_connection(server.address, timeout=30) as bare,
            mutual_tls.unproved_tls().wrap_socket(bare) as link,
        ):
            link.sendall(first + ask * 20)
            heard = b"".join(iter(lambda: link.recv(1 << 16), b""))
        assert re.findall(rb"HTTP/1.1 (\d+)", heard) == answers


def test_what_an_impostor_says_is_harmless_on_a_console() -> None:
    said = msgspec.json.encode({"error": "no\x1b]0;title\x07\nholdfast: done: all ranks ended well"})
    assert _refusal_text(said, 403) == "no holdfast: done: all ranks ended well"


def test_a_controller_that_does_not_know_the_secret_hears_nothing(server: Server) -> None:
    with pytest.raises(UnknownTokenError):
        EnrolmentClient(server.address, OTHER)


def test_nobody_stands_in_between(server: Server, tmp_path: Path) -> None:
    """Who passes our words on to the controller has another certificate, and the proof is about the controller's."""
    between = Server(tmp_path / "between", TOKEN, proof_of=server.authority)
    try:
        with pytest.raises(UnknownTokenError):
            EnrolmentClient(between.address, TOKEN)
    finally:
        between.close()


def test_a_host_that_only_guesses(server: Server, tmp_path: Path) -> None:
    call = EnrolmentClient(server.address, TOKEN)
    call._token = OTHER
    with pytest.raises(EnrolmentRefusedError) as refused:
        call.enrol_node("a", tmp_path / "a")
    assert refused.value.status == 403
    call.close()


def test_others_answer_or_nobody(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()

        def answer() -> None:
            with listener.accept()[0] as link:
                link.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(NotControllerError):
            EnrolmentClient(address, TOKEN)
        thread.join()
    with pytest.raises(NoAnswerError):
        EnrolmentClient(address, TOKEN)


def test_a_wrong_clock_shuts_nobody_out(tmp_path: Path) -> None:
    """Both sides of a link, whose certificates have long expired, or are not valid yet."""
    assert mutual_tls.client_tls(CertificateAuthority(tmp_path / "d").keys, controller=True).verify_flags & 0x200000
    assert mutual_tls.server_tls(KeyFiles.in_folder(tmp_path / "d"), strangers=False).verify_flags & 0x200000


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("", job_secret_proof.EMPTY),
        ("hunter2", job_secret_proof.GUESSABLE),
        ("a" * 64, job_secret_proof.GUESSABLE),
        ("01234567" * 5, job_secret_proof.GUESSABLE),
        ("60f4c1b97ad2e853", job_secret_proof.GUESSABLE),
        ("two words of a token that is long enough", job_secret_proof.UNPRINTABLE),
        ("\u00e9" * 40, job_secret_proof.UNPRINTABLE),
        (TOKEN, ""),
        ("kX9_v2-QpR7sT1uW3yZ5aB", ""),
    ],
)
def test_what_is_good_enough(token: str, why: str) -> None:
    assert job_secret_proof.secret_fault(token) == why


# --- tokens of one node's own ----------------------------------------------------------------------------------


def enrol(server: Server, token: object, name: str, folder: Path, identity: HostIdentity | None = None) -> KeyFiles:
    call = EnrolmentClient(server.address, str(token))
    try:
        return call.enrol_node(name, folder, identity=identity)
    finally:
        call.close()


def audited(server: Server) -> list[tuple[str, str, str]]:
    lines = [json.loads(line) for line in server.audit.read_text().splitlines()]
    return [(line["who"], line["what"], line.get("refused", "")) for line in lines]


def test_a_token_of_a_nodes_own_enrols_it_once(server: Server, tmp_path: Path) -> None:
    token = server.tokens.mint_token("", 60.0)
    keys = enrol(server, token, "a", tmp_path / "a")
    assert keys.authority.read_bytes() == server.authority.keys.authority.read_bytes()
    with pytest.raises(EnrolmentError, match=r"\ba\b"):
        enrol(server, token, "b", tmp_path / "b")
    assert list(server.authority.node_serials().serials) == ["a"] and not (tmp_path / "b").exists()
    who = f"node's token {token.id}"
    first, second = audited(server)
    assert first == (who, '{"enrol":"a"}', "")
    assert second[:2] == (who, '{"enrol":"b"}') and " a " in second[2]
    assert token.secret not in server.audit.read_text()


def test_a_token_for_another_name(server: Server, tmp_path: Path) -> None:
    """Whoever steals it cannot use it for a node of his own, nor use it up."""
    token = server.tokens.mint_token("host-1.a_b", 60.0)
    assert enrolment_token.parse_token(str(token)) == token and not job_secret_proof.secret_fault(str(token))
    with pytest.raises(EnrolmentError, match=r"\bhost.*\bthief$"):
        enrol(server, token, "thief", tmp_path / "thief")
    assert "thief" in audited(server)[0][2]
    enrol(server, token, "host-1.a_b", tmp_path / "a")


def test_a_token_whose_time_is_over(server: Server, tmp_path: Path) -> None:
    token = server.tokens.mint_token("", 60.0)
    server.now += 60.0
    with pytest.raises(EnrolmentRefusedError, match="2001-09-09 01:47:40 UTC"):
        enrol(server, token, "a", tmp_path / "a")
    assert "2001-09-09 01:47:40 UTC" in audited(server)[0][2]
    server.now += 86400.0
    fresh = server.tokens.mint_token("", 60.0)
    assert server.tokens.secret_of(token.id) is None and server.tokens.secret_of(fresh.id), "old ones are forgotten"
    with pytest.raises(UnknownTokenError):
        enrol(server, token, "a", tmp_path / "a")


def test_a_token_is_not_used_up_by_what_comes_to_nothing(server: Server, tmp_path: Path) -> None:
    first, token = server.tokens.mint_token("", 60.0), server.tokens.mint_token("", 60.0)
    enrol(server, first, "a", tmp_path / "a")
    for name in ("a", "../x"):
        with pytest.raises(EnrolmentRefusedError):
            enrol(server, token, name, tmp_path / "b")
    enrol(server, token, "b", tmp_path / "b")


BAD = BlockedHost(host="h1", id="id1", reason="has lost GPU 3", run_id="q", incident=3, at=0.0, until=9e9)


@pytest.mark.parametrize("name", ["", "n7"])
def test_a_blocked_host_keeps_its_token_until_it_may_join(server: Server, tmp_path: Path, name: str) -> None:
    token, lemon = server.tokens.mint_token(name, 60.0), HostIdentity(id="id1")
    server.blocked.entries = (BAD,)
    for _ in range(2):
        with pytest.raises(EnrolmentRefusedError, match=f"{BAD.reason}; .* --lift h1 ") as refused:
            enrol(server, token, "n7", tmp_path / "n7", lemon)
        assert refused.value.status == enrolment.BLOCKED_STATUS
    assert [(ready.node, ready.identity, bool(ready.blocked)) for ready in server.refused] == [("n7", lemon, True)] * 2
    assert "is blocked" in audited(server)[0][2] and not server.authority.node_serials().serials
    enrol(server, token, "n7", tmp_path / "n7", HostIdentity(id="id2"))
    with pytest.raises(EnrolmentRefusedError, match=r" n7, .* token node$") as used:
        enrol(server, token, "n7", tmp_path / "n7", lemon)
    assert used.value.status == 403, "another answer than to a block, and than to a name that is taken"


def test_who_has_proved_nothing_learns_of_no_block(server: Server, tmp_path: Path) -> None:
    server.blocked.entries = (BAD,)
    call = EnrolmentClient(server.address, str(server.tokens.mint_token("", 60.0)))
    call._token = OTHER
    with pytest.raises(EnrolmentRefusedError, match=r"\btoken\b") as refused:
        call.enrol_node("a", tmp_path / "a", identity=HostIdentity(id="id1"))
    assert refused.value.status == 403 and not server.refused
    assert [who for who, _, _ in audited(server)] == ["?"], "who has proved himself has a name there"
    call.close()


class Awaited(Future[tuple[BlockedHost, ...] | OSError]):
    """A list that is being read, and how many wait for it."""

    by = 0

    def add_done_callback(self, call: Callable[..., object]) -> None:
        super().add_done_callback(call)
        self.by += 1


def test_while_the_list_of_blocked_hosts_hangs_a_token_is_not_used_twice(server: Server, tmp_path: Path) -> None:
    token, waiting = server.tokens.mint_token("", 60.0), Awaited()
    server.blocked.waiting = waiting

    def try_once(name: str) -> bool:
        try:
            enrol(server, token, name, tmp_path / name, HostIdentity(id=name))
        except EnrolmentRefusedError:
            return False
        return True

    with ThreadPoolExecutor(2) as hosts:
        tries = [hosts.submit(try_once, name) for name in ("a", "b")]
        until(lambda: waiting.by == 2, "both to wait for the list")
        waiting.set_result(())
        assert sorted(one.result(60) for one in tries) == [False, True]


def test_the_next_controller_knows_which_tokens_are_used(server: Server, tmp_path: Path) -> None:
    used, unused = server.tokens.mint_token("", 60.0), server.tokens.mint_token("c", 60.0)
    enrol(server, used, "a", tmp_path / "a")
    server.close()
    [kept] = (tmp_path / "door").glob("tokens*")
    assert kept.stat().st_mode & 0o777 == 0o600
    again = Server(tmp_path / "door", TOKEN)
    try:
        with pytest.raises(EnrolmentRefusedError):
            enrol(again, used, "b", tmp_path / "b")
        enrol(again, unused, "c", tmp_path / "c")
    finally:
        again.close()


def test_damaged_notes_of_tokens_let_nobody_in(server: Server, tmp_path: Path) -> None:
    token = server.tokens.mint_token("", 60.0)
    server.close()
    (tmp_path / "door" / "tokens.json").write_bytes(b'{"x": {"sec')
    again = Server(tmp_path / "door", TOKEN)
    try:
        with pytest.raises(UnknownTokenError):
            enrol(again, token, "b", tmp_path / "b")
        enrol(again, TOKEN, "b", tmp_path / "b")  # the job's own secret is kept elsewhere
    finally:
        again.close()


def test_who_knows_only_the_id_of_a_token(server: Server, tmp_path: Path) -> None:
    token = server.tokens.mint_token("", 60.0)
    call = EnrolmentClient(server.address, str(token))
    call._token = OTHER
    with pytest.raises(EnrolmentRefusedError) as refused:
        call.enrol_node("a", tmp_path / "a")
    assert refused.value.status == 403
    call.close()
    enrol(server, token, "a", tmp_path / "a")


def test_a_token_of_another_job(server: Server) -> None:
    with pytest.raises(UnknownTokenError):
        EnrolmentClient(server.address, str(enrolment_token.make_token("a")))


def test_a_token_that_was_cut() -> None:
    whole = str(enrolment_token.make_token("a"))
    for token in (whole[:20], whole + "%", "hf-node.", whole.replace(".a", ".%2e%2e%2fx")):
        with pytest.raises(ValueError, match="holdfast token"):
            enrolment_token.parse_token(token)
    assert enrolment_token.parse_token(TOKEN) is None
