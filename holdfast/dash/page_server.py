"""The page's server on loopback: serves files, the view and its changes, and passes orders to the controller."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import msgspec
from aiohttp import web

from holdfast.core.terminal_sanitizer import strip_tree
from holdfast.dash.page_assets import TYPES, served_assets
from holdfast.dash.page_feed import PageFeed
from holdfast.dash.page_session import ENTER, HEADERS, USED_UP, PageSession
from holdfast.dash.page_source import PageSource, SourceError
from holdfast.dash.stack_picture import RankStack, StackPicture, draw_rank, draw_stacks
from holdfast.decoding import from_json

_LISTENERS = 16  # pages that are told of changes at once
_REFRESH_S, _IDLE_S = 2.0, 10.0  # while the job runs, and when it is over
_QUIET_S = 15.0  # then a listener hears that the server is there
_SLOW_S = 10.0  # a listener that does not read for so long is dropped
_ALL_S, _ONE_S = 5.0, 3.0  # that nodes get to look at their processes
_MAX_BODY = 1 << 14
_OLDER = "this controller is older than the page and cannot say what the order would do; use the command line"
_ORDERS = ("hold", "resume", "approve", "evict", "drain", "stop")

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Proved = Callable[[asyncio.BaseTransport | None], None]  # is told of links on which the page's key was shown


class PageOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order that a person gives on the page; with `preview`, the page only asks what the order would do."""

    verb: str
    node: str = ""
    preview: bool = False


class StackQuestion(msgspec.Struct, frozen=True):
    """Whose stacks the page asks for."""

    rank: Annotated[int, msgspec.Meta(ge=0, le=10**9)] | None = None  # None: those of all ranks


class PageCode(msgspec.Struct, frozen=True):
    """The one-time code in the page's address, as the page sends it."""

    code: str


class PageServer:
    def __init__(self, source: PageSource, session: PageSession, proved: Proved) -> None:
        self._source = source
        self._session = session
        self._proved = proved
        self._feed = PageFeed(source)
        self._reader = ThreadPoolExecutor(1)  # the journal belongs to one thread
        self._news = asyncio.Condition()
        self._listeners = 0
        self._wanted = asyncio.Event()

    def make_app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard()], client_max_size=_MAX_BODY)
        app.router.add_get("/", self._show_page)
        app.router.add_get("/assets/{name}", self._show_asset)
        app.router.add_get("/view", self._show_view)
        app.router.add_get("/live", self._tell_changes)
        app.router.add_get("/story/{number:[0-9]{1,9}}", self._show_story)
        app.router.add_get("/release/{number:[0-9]{1,9}}", self._show_release)
        app.router.add_get("/rank/{rank:[0-9]{1,9}}", self._show_rank)
        app.router.add_post(ENTER, self._take_code)
        app.router.add_post("/order", self._take_order)
        app.router.add_post("/trace", self._take_stacks)
        return app

    async def follow_job(self) -> None:
        """Keep the view up to date while a page is open; never returns."""
        while True:
            await self._refresh()
            if self._feed.behind:
                continue
            if not self._listeners:
                self._wanted.clear()
                await self._wanted.wait()
            await asyncio.sleep(_REFRESH_S if self._feed.is_watched else _IDLE_S)

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def _refresh(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._reader, self._feed.refresh_view)
        async with self._news:
            self._news.notify_all()

    def _guard(self) -> Any:
        @web.middleware
        async def guard(request: web.Request, handler: Answer) -> web.StreamResponse:
            try:
                if why := self._session.refuse(request):
                    raise web.HTTPForbidden(text=why)
                if self._session.has_key(request):
                    self._proved(request.transport)
                answer = await handler(request)
            except web.HTTPException as e:
                answer = _refuse(e.status, e.text or e.reason)
            except SourceError as e:
                answer = _refuse(409, str(e))
            if not answer.prepared:
                answer.headers.update(HEADERS)
            return answer

        return guard

    async def _take_code(self, request: web.Request) -> web.Response:
        try:
            shown = from_json(await request.read(), PageCode).code
        except msgspec.DecodeError as e:
            raise web.HTTPBadRequest(text=f"this is no code: {e}") from None
        key = self._session.take_code(shown)
        if not key:
            raise web.HTTPForbidden(text=USED_UP)
        return _json({"key": key})

    async def _show_page(self, request: web.Request) -> web.Response:
        return _asset("page.html")

    async def _show_asset(self, request: web.Request) -> web.Response:
        return _asset(request.match_info["name"])

    async def _show_view(self, request: web.Request) -> web.Response:
        async with self._news:  # the reader counts a version before it has written the view
            await self._news.wait_for(lambda: self._feed.whole)
        self._wanted.set()
        answer = web.Response(body=self._feed.whole, content_type="application/json")
        answer.enable_compression()
        return answer

    async def _await_news(self, version: int) -> None:
        async with self._news:
            await self._news.wait_for(lambda: self._feed.version > version)

    async def _tell_changes(self, request: web.Request) -> web.StreamResponse:
        """Send every change as a line of JSON until the page is closed or reads too slowly."""
        after = request.query.get("after", "")
        if not after.isdecimal() or len(after) > 18:
            return _refuse(400, "after must be the number of a version")
        if self._listeners >= _LISTENERS:
            return _refuse(503, f"{_LISTENERS} pages are open already; close one")
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", **HEADERS})
        self._listeners += 1
        self._wanted.set()
        try:
            await answer.prepare(request)
            await self._send_changes(answer, int(after))
        except (ConnectionError, TimeoutError):
            pass  # it has gone, or is too slow; a page that wants to go on comes back
        finally:
            self._listeners -= 1
        return answer

    async def _send_changes(self, answer: web.StreamResponse, version: int) -> None:
        while True:
            patches = self._feed.patches_since(version)
            lines = patches if patches is not None else [b"{}"]  # it is to fetch the view anew
            version = self._feed.version
            async with asyncio.timeout(_SLOW_S):
                await answer.write(b"\n".join([*lines, b""]) or b"\n")
            try:
                async with asyncio.timeout(_QUIET_S):
                    await self._await_news(version)
            except TimeoutError:
                continue

    async def _show_story(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        story = await asyncio.get_running_loop().run_in_executor(self._reader, self._feed.tell_story, number)
        if story is None:
            raise web.HTTPNotFound(text=f"there is no incident {number}")
        return _json(story)

    async def _show_release(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        found = await asyncio.get_running_loop().run_in_executor(self._reader, self._feed.compare_release, number)
        if found is None:
            raise web.HTTPNotFound(text=f"there is no release {number}, or none before it")
        return _json(found)

    async def _show_rank(self, request: web.Request) -> web.Response:
        return _json(await asyncio.to_thread(self._describe_rank, int(request.match_info["rank"])))

    def _describe_rank(self, rank: int) -> Any:
        """Return a rank's last lines, or why there are none here, and what the controller knows of it now."""
        lines: tuple[str, ...] = ()
        absence = ""
        try:
            lines = self._source.read_log(rank)
        except SourceError as e:
            absence = str(e)
        return strip_tree({"lines": list(lines), "absence": absence, "now": self._source.look_at_rank(rank)})

    async def _take_order(self, request: web.Request) -> web.Response:
        try:
            order = from_json(await request.read(), PageOrder)
        except msgspec.DecodeError as e:
            raise web.HTTPBadRequest(text=f"this is no order: {e}") from None
        if order.verb not in _ORDERS:
            raise web.HTTPBadRequest(text=f"the page gives these orders: {', '.join(_ORDERS)}")
        path = "/api/v1/orders/preview" if order.preview else "/api/v1/orders"
        body = {"verb": order.verb, "node": order.node}
        try:
            taken = await asyncio.to_thread(self._source.ask_controller, path, body)
        except SourceError as e:
            raise SourceError(_OLDER if order.preview and str(e) == "HTTP 404" else str(e)) from None
        return _json(strip_tree(taken))

    async def _take_stacks(self, request: web.Request) -> web.Response:
        try:
            asked = from_json(await request.read() or b"{}", StackQuestion)
        except msgspec.DecodeError as e:
            raise web.HTTPBadRequest(text=f"name a rank, or none: {e}") from None
        return _json(strip_tree(msgspec.to_builtins(await asyncio.to_thread(self._look_at_stacks, asked))))

    def _look_at_stacks(self, asked: StackQuestion) -> StackPicture | RankStack:
        body: dict[str, Any] = (
            {"deadline_s": _ALL_S} if asked.rank is None else {"deadline_s": _ONE_S, "rank": asked.rank}
        )
        found = self._source.ask_controller("/api/v1/trace", body)
        return draw_stacks(found) if asked.rank is None else draw_rank(found, asked.rank)


def _asset(name: str) -> web.Response:
    found = served_assets().get(name)
    if found is None:
        raise web.HTTPNotFound(text="there is no such file")
    return web.Response(text=found, content_type=TYPES[name.rpartition(".")[2]], charset="utf-8")


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _refuse(status: int, why: str) -> web.Response:
    return web.json_response({"error": why}, status=status)
