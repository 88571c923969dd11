"""Releases on the controller's port."""

from pathlib import Path
from typing import Any

from holdfast.config import ReleaseLimits, Settings
from holdfast.model.job_phase import Phase
from holdfast.model.node_errands import Errand, StageHere
from tests.controller.conftest import HEADERS, Agent, Desk, Open

DIGEST = "ab" * 32
RELEASE = {"number": 0, "digest": DIGEST, "root": "/proj", "script": "t.py", "argv": ["t.py"], "message": "faster"}


async def order(desk: Desk, verb: str, **more: Any) -> tuple[int, Any]:
    answer = await desk.client.post("/api/v1/orders", json={"verb": verb, **more}, headers=HEADERS)
    return answer.status, await answer.json()


async def told(desk: Desk) -> dict[int, Any]:
    answer = await desk.client.get("/api/v1/releases", headers=HEADERS)
    assert answer.status == 200
    return {one["release"]["number"]: one for one in (await answer.json())["releases"]}


async def stage(desk: Desk, agent: Agent, **more: Any) -> Errand:
    status, _ = await order(desk, "update", release=RELEASE, **more)
    assert status == 200
    errand = await agent.errand()
    assert isinstance(errand, StageHere) and errand.check
    return errand


async def test_an_update_is_staged_and_launched(desk_of: Open, tmp_path: Path) -> None:
    async with desk_of() as desk:
        (tmp_path / f"{DIGEST}.tar").write_bytes(b"an archive")
        agent = await desk.train()
        errand = await stage(desk, agent, window_s=3600.0)
        assert isinstance(errand, StageHere)
        assert (errand.release.number, errand.release.who, errand.release.message) == (2, "Ada", "faster")
        assert (await told(desk))[2]["fate"] == "staging"
        await agent.answer(errand)
        await desk.until(lambda: desk.controller.view.waiting_release, "it is staged")
        late = await desk.link("b")
        await late.hello(ready=False)
        welcome = await late.hear()
        assert [release.number for release in welcome.releases] == [1, 2]  # type: ignore[union-attr]
        errand = await stage(desk, agent, now=True)
        await agent.answer(errand)
        await agent.answer(await agent.errand())  # Stop
        launch = await agent.errand()
        assert launch.release.number == 3  # type: ignore[union-attr]
        await agent.answer(launch)
        await agent.beat(2, generation=2)
        await desk.phase(Phase.TRAINING)
        assert {number: one["fate"] for number, one in (await told(desk)).items()} == {
            1: "replaced",
            2: "merged",
            3: "running",
        }
        third = (await told(desk))[3]
        assert (third["steps"], third["redone"]) == (1, 1), "step 1 was made again"
        archive = await desk.client.get(f"/api/v1/releases/{DIGEST}", headers=HEADERS)
        assert await archive.read() == b"an archive"


async def test_what_is_refused(desk_of: Open, tmp_path: Path) -> None:
    async with desk_of() as desk:
        await desk.train()
        bad: list[tuple[dict[str, Any], str]] = [
            ({}, "release"),
            ({"release": {**RELEASE, "digest": ""}}, "digest"),
            ({"release": {**RELEASE, "digest": "../../etc/passwd"}}, "digest"),
            ({"release": RELEASE}, DIGEST[:12]),
            ({"release": RELEASE, "window_s": -1.0}, "window_s"),
        ]
        for body, words in bad:
            status, answer = await order(desk, "update", **body)
            assert status == 400 and words in answer["error"]
        for path in (DIGEST, "..%2F..%2Fjournal.db", "x"):
            answer = await desk.client.get(f"/api/v1/releases/{path}", headers=HEADERS)
            assert answer.status == 404
        assert [one["fate"] for one in (await told(desk)).values()] == ["running"]


async def test_one_that_was_rolled_back_is_not_taken_again(desk_of: Open, tmp_path: Path) -> None:
    async with desk_of() as desk:
        (tmp_path / f"{DIGEST}.tar").write_bytes(b"an archive")
        agent = await desk.train()
        for verb, generation in (("update", 2), ("rollback", 3)):
            if verb == "update":
                await agent.answer(await stage(desk, agent, now=True))
            else:
                assert (await order(desk, verb))[0] == 200
            for _ in range(2):  # Stop and Launch
                await agent.answer(await agent.errand())
            await agent.beat(2 * generation, generation=generation)
            await desk.phase(Phase.TRAINING)
        status, answer = await order(desk, "update", release=RELEASE)
        assert status == 400
        assert "release 2 " in answer["error"] and "by Ada" in answer["error"]


async def test_a_job_that_takes_signed_releases_only(desk_of: Open, tmp_path: Path) -> None:
    (tmp_path / "signers").touch()
    signers = ReleaseLimits(signers=str(tmp_path / "signers"))
    async with desk_of(settings=Settings(release=signers)) as desk:
        (tmp_path / f"{DIGEST}.tar").write_bytes(b"an archive")
        await desk.train()
        for signature, why in (("", "requires signed releases"), ("junk", "none of the signers")):
            status, answer = await order(desk, "update", release=RELEASE | {"signature": signature})
            assert status == 400 and why in answer["error"]
        assert list(await told(desk)) == [1]
