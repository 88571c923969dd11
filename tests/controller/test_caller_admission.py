"""Rights at the port: who may look, order, and bring code; and that every order is written down."""

import contextlib
import json
import os
import threading
from functools import partial
from pathlib import Path

import msgspec
import pytest

from holdfast.controller.access import caller_admission, user_tokens
from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.caller_admission import PortAccess, Right, UserToken, make_user_token
from holdfast.controller.access.enrolment_token_api import TokenMinting
from holdfast.controller.access.enrolment_tokens import NodeTokens
from holdfast.controller.access.user_tokens import UserTokenError, UserTokens
from holdfast.wire.credentials import enrolment_token
from holdfast.wire.request_rates import RequestRates
from tests.controller.conftest import Open

MAY = {
    "view": {"status": 200, "hold": 403, "update": 403, "trace": 403, "archive": 403},
    "operate": {"status": 200, "hold": 200, "update": 403, "trace": 200, "archive": 403},
    # 400: it lacks a release, but might be ordered
    "admin": {"status": 200, "hold": 200, "update": 400, "trace": 200, "archive": 200},
    "nobody": {"status": 401, "hold": 401, "update": 401, "trace": 401, "archive": 401},
}


def port(people: Path) -> PortAccess:
    return PortAccess(UserTokens(people, (make_user_token("RUN_DIR/token", Right.ADMIN, "own"),)), "h")


@pytest.mark.parametrize("right", MAY)
async def test_what_a_token_opens(desk_of: Open, tmp_path: Path, right: str) -> None:
    people = tmp_path / "home" / "people.json"
    token = user_tokens.add_token(people, "ann", Right[right.upper()]) if right != "nobody" else "guess"
    async with desk_of(port=port(people)) as desk:
        client = desk.client
        found = {"status": (await client.get("/api/v1/status", headers=shown(token))).status}
        for verb in ("hold", "update"):
            answer = await client.post("/api/v1/orders", json={"verb": verb}, headers=shown(token))
            found[verb] = answer.status
        found["trace"] = (await client.post("/api/v1/trace", json={"deadline_s": 0.1}, headers=shown(token))).status
        (tmp_path / f"{'ab' * 32}.tar").write_bytes(b"an archive")
        answer = await client.get(f"/api/v1/releases/{'ab' * 32}", headers=shown(token))
        found["archive"] = answer.status
        assert found == MAY[right] and ("an archive" in await answer.text()) is (right == "admin")
        assert (await client.get("/agent", headers=shown(token))).status in (401, 403)
    lines = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    if right == "nobody":
        assert {(line["who"], line["refused"][:12]) for line in lines} == {("?", "send a token")}
    else:
        assert {line["who"] for line in lines} == {"ann"} and all(line["origin"] == "127.0.0.1" for line in lines)
        held = [line for line in lines if "hold" in line["what"]]
        assert bool(held) is (right != "view") and all("refused" not in line for line in held)
    assert os.stat(tmp_path / "audit.log").st_mode & 0o777 == 0o600


@pytest.mark.parametrize("right", Right)
async def test_who_may_have_a_token_made_for_a_node(desk_of: Open, tmp_path: Path, right: Right) -> None:
    token, audit = user_tokens.add_token(tmp_path / "people.json", "ann", right), AuditLog(tmp_path)
    minting = TokenMinting(audit, NodeTokens(tmp_path, lambda: None))
    async with desk_of(port=port(tmp_path / "people.json"), minting=minting) as desk:
        post = partial(desk.client.post, "/api/v1/node-tokens", headers=shown(token))
        answer = await post(json={"node": "n7"})
        assert answer.status == (200 if right is Right.ADMIN else 403)
        if right is not Right.ADMIN:
            assert not (tmp_path / "tokens.json").exists()
            return
        made = enrolment_token.parse_token((await answer.json())["token"])
        assert made and made.name == "n7"
        for body in ({"node": "../x"}, {"within_s": 0}, {"within_s": 1e9}, {"node": 7}):
            assert (await post(json=body)).status == 400
    text = (tmp_path / "audit.log").read_text()
    assert text.count("n7") == 1 and made.secret not in text


def shown(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_a_token_is_revoked_while_the_job_runs(
    desk_of: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_tokens, "_LOOK_S", 0.0)
    people = tmp_path / "people.json"
    token = user_tokens.add_token(people, "ann", Right.VIEW)
    assert token not in people.read_text() and os.stat(people).st_mode & 0o777 == 0o600
    async with desk_of(port=port(people)) as desk:
        client = desk.client
        assert (await client.get("/api/v1/status", headers=shown(token))).status == 200
        user_tokens.revoke_token(people, "ann")
        assert (await client.get("/api/v1/status", headers=shown(token))).status == 401
        os.chmod(people, 0o666)
        again = user_tokens.add_token(people, "ann", Right.VIEW)
        os.chmod(people, 0o622)  # whoever may write here could give himself any right
        assert (await client.get("/api/v1/status", headers=shown(again))).status == 401
        assert (await client.get("/api/v1/status", headers=shown("own"))).status == 200


ARGV = ("t.py", "--hub-token", "ArgTok55aaQQ1")


@pytest.mark.parametrize("right", [Right.VIEW, Right.ADMIN])
async def test_environments_and_secret_arguments_are_for_those_who_may_set_them(
    desk_of: Open, tmp_path: Path, right: Right
) -> None:
    people, digest = tmp_path / "people.json", "ab" * 32
    token = user_tokens.add_token(people, "ann", right)
    (tmp_path / f"{digest}.tar").write_bytes(b"an archive")
    async with desk_of(port=port(people)) as desk:
        release = {"number": 0, "digest": digest, "argv": list(ARGV), "env": {"WANDB_API_KEY": "s3cret"}}
        body = {"verb": "update", "release": release}
        answer = await desk.client.post("/api/v1/orders", json=body, headers=shown("own"))
        assert answer.status == 200, await answer.text()
        for path in ("/api/v1/entries", "/api/v1/releases"):
            text = await (await desk.client.get(path, headers=shown(token))).text()
            assert "WANDB_API_KEY" in text and ("s3cret" in text) is (right is Right.ADMIN)
            assert "--hub-token" in text and ("ArgTok55aaQQ1" in text) is (right is Right.ADMIN)
        known = desk.controller.view.releases
        assert known[max(known)].argv == ARGV, "what ranks get is what was given"


def test_names(tmp_path: Path) -> None:
    user_tokens.add_token(tmp_path / "p", "ann", Right.VIEW)
    for name, why in (("ann", "already"), ("", "printable"), ("a\x1b[2J", "printable")):
        with pytest.raises(UserTokenError, match=why):
            user_tokens.add_token(tmp_path / "p", name, Right.ADMIN)
    with pytest.raises(UserTokenError, match=r"^bob .* ann$"):
        user_tokens.revoke_token(tmp_path / "p", "bob")
    (tmp_path / "link").symlink_to(tmp_path / "p")
    with pytest.raises(OSError, match="symbolic links"):
        user_tokens.read_tokens(tmp_path / "link")


def test_a_token_that_is_revoked_while_another_is_made_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    people, write, both = tmp_path / "p", user_tokens._write_tokens, threading.Barrier(2)
    user_tokens.add_token(people, "ann", Right.ADMIN)

    def write_late(path: Path, badges: tuple[UserToken, ...]) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # for the other, if it has read the file too
        write(path, badges)

    monkeypatch.setattr(user_tokens, "_write_tokens", write_late)
    adding = threading.Thread(target=user_tokens.add_token, args=(people, "bob", Right.VIEW))
    adding.start()
    user_tokens.revoke_token(people, "ann")
    adding.join()
    assert [token.name for token in user_tokens.read_tokens(people)] == ["bob"]


def test_secrets_are_not_written_down(tmp_path: Path) -> None:
    class Body(msgspec.Struct):
        verb: str
        release: dict[str, object]

    AuditLog(tmp_path).record_order(
        "ann", "here", Body("update", {"env": {"WANDB_API_KEY": "s3cret"}, "argv": ARGV, "message": "faster"})
    )
    text = (tmp_path / "audit.log").read_text()
    assert "s3cret" not in text and "ArgTok55aaQQ1" not in text and "--hub-token" in text
    assert "WANDB_API_KEY" in text and "faster" in text


def test_a_flood_of_strangers_is_a_line_a_second(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path)
    for _ in range(1000):
        audit.record_refusal("192.0.2.1", "GET /", "no token")
    assert len((tmp_path / "audit.log").read_text().splitlines()) < 5


def test_what_is_refused_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by whoever has a token that opens little either; what is ordered is written all the same."""
    monkeypatch.setattr("holdfast.controller.access.audit_log._MOST_BYTES", 20_000)
    audit = AuditLog(tmp_path)
    for _ in range(100):
        audit.record_order("ann", "here", {"path": "/" + "x" * 60_000}, "ann may look, and order nothing")
    written = (tmp_path / "audit.log").read_text()
    assert 0 < len(written) < 30_000
    audit.record_order("bob", "here", {"verb": "stop"})
    assert (tmp_path / "audit.log").read_text().splitlines()[-1].count("bob") == 1


async def test_a_token_that_asks_without_end_gets_429_and_no_other(
    desk_of: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller_admission, "_AT_ONCE", 5.0)
    monkeypatch.setattr(caller_admission, "_A_SECOND", 0.0)
    people = tmp_path / "people.json"
    ann, bob = (user_tokens.add_token(people, name, Right.VIEW) for name in ("ann", "bob"))
    async with desk_of(port=port(people)) as desk:

        async def ask(token: str) -> tuple[int, str]:
            answer = await desk.client.get("/api/v1/status", headers=shown(token))
            return answer.status, await answer.text()

        assert [(await ask(ann))[0] for _ in range(7)] == [200] * 5 + [429] * 2
        status, text = await ask(ann)
        assert status == 429 and "phase" not in text
        assert (await ask(bob))[0] == 200
        assert (await ask("own"))[0] == 200, "the owner can still stop the job"
        order = await desk.client.post("/api/v1/orders", json={"verb": "hold"}, headers=shown(ann))
        assert order.status == 429, "one count for all that it asks"


def test_rates() -> None:
    clock = [0.0]
    rates = RequestRates(a_second=2.0, at_once=3.0, now=lambda: clock[0])
    assert [rates.may_call("a") for _ in range(4)] == [True, True, True, False]
    assert rates.may_call("b")
    clock[0] = 1.0
    assert [rates.may_call("a") for _ in range(3)] == [True, True, False]
    for number in range(5000):
        rates.may_call(str(number))
    assert len(rates._left) <= 1024
