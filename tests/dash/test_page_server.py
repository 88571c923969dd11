"""Who gets to see the page, and what its server answers."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession, CookieJar, web

from holdfast.dash import page_server
from holdfast.dash.page_assets import join_modules, read_assets
from holdfast.dash.page_server import PageServer
from holdfast.dash.page_session import PageSession
from holdfast.dash.page_source import SourceError
from tests.core.test_page_view import simulated
from tests.dash.test_page_feed import GrowingSource


class Place:
    """A server on a free port, and a browser that has not been there."""

    def __init__(self, client: ClientSession, port: int, session: PageSession, source: GrowingSource) -> None:
        self.client, self.session, self.source = client, session, source
        self.home = f"http://127.0.0.1:{port}"

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        async with self.client.get(f"{self.home}{path}", headers=headers) as answer:
            return answer.status, await answer.text()

    async def enter(self) -> None:
        status, text = await self.get(f"/?code={self.session.code}")
        assert status == 200 and "refresh" in text


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    source = GrowingSource()
    source.there = len(simulated()) - 10
    listener = await asyncio.get_running_loop().create_server(lambda: asyncio.Protocol(), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    session = PageSession(port)
    server = PageServer(source, session)
    runner = web.AppRunner(server.make_app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    following = asyncio.ensure_future(server.follow_job())
    async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as client:
        yield Place(client, port, session, source)
    following.cancel()
    server.close()
    await runner.cleanup()


async def test_only_the_code_opens_it_and_only_once(place: Place) -> None:
    for path in ("/", "/view", "/live?after=0", "/assets/page.js", "/story/1", "/?code=wrong", "/?code="):
        assert (await place.get(path))[0] == 403, path
    await place.enter()
    for path in ("/", "/view", "/assets/page.js", "/story/1"):
        assert (await place.get(path))[0] == 200, path
    place.client.cookie_jar.clear()
    status, text = await place.get(f"/?code={place.session.code}")
    assert status == 403 and "has been used" in text
    assert (await place.get("/view"))[0] == 403


async def test_other_pages_get_nothing(place: Place) -> None:
    await place.enter()
    assert (await place.get("/view", Host="evil.test"))[0] == 403
    assert (await place.get("/view", Origin="http://evil.test"))[0] == 403
    assert (await place.get("/view", Origin=place.home))[0] == 200
    for origin, status in (({}, 403), ({"Origin": "null"}, 403), ({"Origin": place.home}, 409)):
        async with place.client.post(f"{place.home}/order", json={"verb": "hold"}, headers=origin) as answer:
            assert answer.status == status, origin


async def test_its_answers_allow_no_script_but_its_own(place: Place) -> None:
    await place.enter()
    async with place.client.get(place.home) as answer:
        policy = answer.headers["Content-Security-Policy"]
    assert "script-src 'self'" in policy and "default-src 'none'" in policy and "unsafe" not in policy
    async with place.client.get(f"{place.home}/?code=x") as answer:
        cookie = next(iter(place.client.cookie_jar))
    assert cookie["httponly"] and cookie["samesite"] == "Strict"
    assert (await place.get("/assets/..%2Fpage_server.py"))[0] == 404
    assert (await place.get("/assets/page_server.py"))[0] == 404
    assert (await place.get("/story/99"))[0] == 404


async def test_changes_are_told_as_events_to_a_bounded_number(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "_LISTENERS", 1)
    monkeypatch.setattr(page_server, "_IDLE_S", 0.01)
    await place.enter()
    async with place.client.get(f"{place.home}/view") as answer:
        version = (await answer.json())["version"]
    async with place.client.get(f"{place.home}/live?after={version}") as events:
        assert events.content_type == "text/event-stream"
        assert (await place.get(f"/live?after={version}"))[0] == 503
        place.source.there = len(simulated())
        while not (line := await asyncio.wait_for(events.content.readline(), 60)).startswith(b"data: {"):
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
        async with place.client.post(f"{place.home}/order", json=body, headers={"Origin": place.home}) as answer:
            return answer.status, await answer.text()

    assert await order({"verb": "evict", "node": "n1", "preview": True}) == (
        200,
        '{"seq":1,"next":"n1 leaves now","taken":false}',
    )
    status, text = await order({"verb": "evict", "node": "n9"})
    assert status == 409 and "no node" in text
    assert [(await order(bad))[0] for bad in ({"verb": "update"}, {"verb": 1}, 7)] == [400, 400, 400]
    evict = {"verb": "evict", "node": "n1"}
    assert sent == [("/api/v1/orders/preview", evict), ("/api/v1/orders", evict | {"node": "n9"})]


def test_the_one_script_has_every_module_and_no_import() -> None:
    assets = read_assets()
    script = join_modules(assets)
    modules = [name for name in assets if name.endswith(".js")]
    assert len(modules) > 8 and all(f"const module_{name[:-3]} = " in script for name in modules)
    assert "\nimport " not in script and "\nexport " not in script
    assert script.index("const module_words = ") < script.index("const module_page = ")
    assert not any("innerHTML" in text or "outerHTML" in text or "eval(" in text for text in assets.values())
