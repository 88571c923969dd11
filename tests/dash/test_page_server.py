"""Who gets to see the page, and what its server answers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession, CookieJar, web

from holdfast.dash import page_server
from holdfast.dash.page_assets import join_modules, read_assets
from holdfast.dash.page_server import PageServer
from holdfast.dash.page_session import USED_UP, PageSession
from holdfast.dash.page_source import SourceError
from holdfast.dash.stack_picture import RankStack, StackPicture, draw_rank, draw_stacks
from tests.core.test_page_view import simulated
from tests.dash.test_page_feed import GrowingSource
from tests.dash.test_stack_picture import answer, stalled


class Place:
    """A server on a free port, and a browser that has not been there."""

    server: PageServer

    def __init__(self, client: ClientSession, port: int, session: PageSession, source: GrowingSource) -> None:
        self.client, self.session, self.source = client, session, source
        self.home = f"http://127.0.0.1:{port}"

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        async with self.client.get(f"{self.home}{path}", headers=headers) as answer:
            return answer.status, await answer.text()

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, str]:
        async with self.client.post(f"{self.home}{path}", json=body, headers=headers) as answer:
            return answer.status, await answer.text()

    async def enter(self) -> None:
        """As session.js does it."""
        status, text = await self.post("/enter", {"code": self.session.code}, Origin=self.home)
        assert status == 200
        self.client.headers["X-Holdfast-Page"] = msgspec.json.decode(text)["key"]


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    source = GrowingSource()
    source.there = len(simulated()) - 10
    listener = await asyncio.get_running_loop().create_server(lambda: asyncio.Protocol(), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    session = PageSession(port)
    proved: list[object] = []
    server = PageServer(source, session, proved.append)
    runner = web.AppRunner(server.make_app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    following = asyncio.ensure_future(server.follow_job())
    async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as client:
        there = Place(client, port, session, source)
        there.server = server
        yield there
        assert not list(client.cookie_jar), "a browser would send one to all ports of this host"
    following.cancel()
    server.close()
    await runner.cleanup()


JOB = ("/view", "/live?after=0", "/story/1", "/rank/0")


async def test_only_the_code_opens_it_and_only_once(place: Place) -> None:
    for path in JOB:
        assert (await place.get(path))[0] == 403, path
    for wrong in ("wrong", "", "\ud800"):
        assert (await place.post("/enter", {"code": wrong}, Origin=place.home))[0] in (400, 403)
    await place.enter()
    for path in ("/", "/view", "/assets/page.js", "/story/1"):
        assert (await place.get(path))[0] == 200, path
    del place.client.headers["X-Holdfast-Page"]
    status, text = await place.post("/enter", {"code": place.session.code}, Origin=place.home)
    assert status == 403 and USED_UP in text
    assert (await place.get("/view"))[0] == 403


async def test_nothing_that_a_browser_sends_by_itself_opens_it(place: Place) -> None:
    """Another user's server at another port of this host gets every cookie of 127.0.0.1, and may send what it got."""
    await place.enter()
    key = place.client.headers.pop("X-Holdfast-Page")
    stolen = {"Cookie": f"holdfast-{place.home.rpartition(':')[2]}={key}; X-Holdfast-Page={key}", "Origin": place.home}
    for path in JOB:
        status, text = await place.get(path, **stolen)
        assert status == 403 and "n0" not in text
    for path, body in (("/order", {"verb": "stop"}), ("/trace", {})):
        assert (await place.post(path, body, **stolen))[0] == 403


async def test_other_pages_get_nothing(place: Place) -> None:
    assert (await place.post("/enter", {"code": place.session.code}))[0] == 403, "no Origin"
    assert (await place.post("/enter", {"code": place.session.code}, Origin="http://127.0.0.1:1"))[0] == 403
    await place.enter()
    assert (await place.get("/view", Host="evil.test"))[0] == 403
    assert (await place.get("/view", Origin="http://evil.test"))[0] == 403
    assert (await place.get("/view", Origin=place.home))[0] == 200
    for site, expected in (("same-site", 403), ("cross-site", 403), ("none", 403), ("same-origin", 200)):
        assert (await place.get("/view", **{"Sec-Fetch-Site": site}))[0] == expected, site
    assert (await place.get("/", **{"Sec-Fetch-Site": "cross-site"}))[0] == 200, "a file or a page may lead there"
    for origin, status in (({}, 403), ({"Origin": "null"}, 403), ({"Origin": place.home}, 409)):
        assert (await place.post("/order", {"verb": "hold"}, **origin))[0] == status, origin


async def test_its_answers_allow_no_script_but_its_own(place: Place) -> None:
    async with place.client.get(place.home) as answer:
        policy = answer.headers["Content-Security-Policy"]
    assert "script-src 'self'" in policy and "default-src 'none'" in policy and "unsafe" not in policy
    assert (await place.get("/assets/..%2Fpage_server.py"))[0] == 404
    assert (await place.get("/assets/page_server.py"))[0] == 404
    await place.enter()
    assert (await place.get("/story/99"))[0] == 404


async def test_changes_are_told_to_a_bounded_number(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "_LISTENERS", 1)
    monkeypatch.setattr(page_server, "_IDLE_S", 0.01)
    await place.enter()
    async with place.client.get(f"{place.home}/view") as answer:
        version = (await answer.json())["version"]
    async with place.client.get(f"{place.home}/live?after={version}") as events:
        assert events.content_type == "application/x-ndjson"
        assert (await place.get(f"/live?after={version}"))[0] == 503
        place.source.there = len(simulated())
        while not (line := await asyncio.wait_for(events.content.readline(), 60)).startswith(b"{"):
            pass
        assert b'"changed"' in line
    assert (await place.get("/live?after=x"))[0] == 400


async def test_an_order_goes_to_the_controller_and_its_refusal_back(place: Place) -> None:
    sent = []

    def ask(path: str, body: dict[str, object]) -> object:
        sent.append((path, body))
        if body["node"] == "n9":
            raise SourceError("there is no node 'n9' in this job")
        return {"seq": 1, "next": "n1 leaves now", "taken": False}

    place.source.ask_controller = ask  # type: ignore[method-assign]
    await place.enter()

    async def order(body: object) -> tuple[int, str]:
        return await place.post("/order", body, Origin=place.home)

    assert await order({"verb": "evict", "node": "n1", "preview": True}) == (
        200,
        '{"seq":1,"next":"n1 leaves now","taken":false}',
    )
    status, text = await order({"verb": "evict", "node": "n9"})
    assert status == 409 and "no node" in text
    assert [(await order(bad))[0] for bad in ({"verb": "update"}, {"verb": 1}, 7)] == [400, 400, 400]
    evict = {"verb": "evict", "node": "n1"}
    assert sent == [("/api/v1/orders/preview", evict), ("/api/v1/orders", evict | {"node": "n9"})]


async def test_stacks_come_from_the_controller_as_the_page_draws_them(place: Place) -> None:
    asked = []

    def ask(path: str, body: dict[str, object]) -> object:
        asked.append((path, body))
        return answer(*stalled()) if len(asked) < 3 else {"at": "no time"}

    place.source.ask_controller = ask  # type: ignore[method-assign]
    await place.enter()

    async def look(body: object) -> tuple[int, Any]:
        status, text = await place.post("/trace", body, Origin=place.home)
        return status, msgspec.json.decode(text)

    status, drawn = await look({})
    assert status == 200 and msgspec.convert(drawn, StackPicture) == draw_stacks(answer(*stalled()))
    status, drawn = await look({"rank": 3})
    assert status == 200 and msgspec.convert(drawn, RankStack) == draw_rank(answer(*stalled()), 3)
    assert [body.get("rank") for _, body in asked] == [None, 3] and {path for path, _ in asked} == {"/api/v1/trace"}
    assert (await look({"rank": 3}))[0] == 409, "the answer is none"
    assert [(await look(bad))[0] for bad in ({"rank": -1}, {"rank": "3"}, 7)] == [400, 400, 400]
    assert len(asked) == 3


async def test_a_rank_is_told_with_its_lines_and_what_the_controller_knows(place: Place) -> None:
    place.source.ranks[3] = {"rank": 3, "node": "n1", "step": 12, "phase": "eval\x1b[31m"}
    await place.enter()
    told = msgspec.json.decode((await place.get("/rank/3"))[1])
    assert told == {"lines": [], "absence": "there is no output", "now": place.source.ranks[3] | {"phase": "eval"}}
    place.source.read_log = lambda rank, generation=0: ("generation 1", "out  hello")  # type: ignore[method-assign]
    told = msgspec.json.decode((await place.get("/rank/4"))[1])
    assert told == {"lines": ["generation 1", "out  hello"], "absence": "", "now": None}


def test_the_one_script_has_every_module_and_no_import() -> None:
    assets = read_assets()
    script = join_modules(assets)
    modules = [name for name in assets if name.endswith(".js")]
    assert len(modules) > 8 and all(f"const module_{name[:-3]} = " in script for name in modules)
    assert "\nimport " not in script and "\nexport " not in script
    assert script.index("const module_words = ") < script.index("const module_page = ")
    assert not any("innerHTML" in text or "outerHTML" in text or "eval(" in text for text in assets.values())


async def test_a_page_that_asks_while_the_first_view_is_being_written_gets_all_of_it(place: Place) -> None:
    """Its number is known before its bytes are: another thread makes both."""
    await place.enter()
    feed = place.server._feed
    assert (await place.get("/view"))[0] == 200
    whole, feed.whole = feed.whole, b""
    asked = asyncio.ensure_future(place.get("/view"))
    await asyncio.sleep(0.1)
    assert not asked.done() and feed.version == 1
    feed.whole = whole
    async with place.server._news:
        place.server._news.notify_all()
    assert msgspec.json.decode((await asked)[1])["version"] == 1
