"""Releases on the controller's port: their history, their archives for nodes that fetch them, and orders about them."""

import msgspec
from aiohttp import web

from holdfast.controller.loop import Controller
from holdfast.core.history import Chapter
from holdfast.model.event import Order, Phase
from holdfast.wire import tree

_OVER = (Phase.ENDING, Phase.DONE)


class History(msgspec.Struct, frozen=True, kw_only=True):
    """All releases of a job, the oldest first."""

    running: int  # its number; 0: the job is from before there were any
    releases: tuple[Chapter, ...]


def history_of(controller: Controller) -> History:
    history = controller.history
    return History(running=history.running.number, releases=tuple(history.chapters.values()))


def fault(controller: Controller, order: Order) -> str:
    """Why an update cannot be taken that the decider would take; empty if it can, as other orders can."""
    if order.verb != "update":
        return ""
    release = order.release
    if release is None or not tree.DIGEST.fullmatch(release.digest):
        return "an update needs a release with the digest of its tree; send one with holdfast update"
    if not 0 <= order.window_s < float("inf"):
        return "window_s is how many seconds a release waits for a restart: 0 or more"
    if not (controller.archives / f"{release.digest}.tar").is_file():
        return f"{controller.archives} holds no archive of {release.digest[:12]}; send it with holdfast update"
    return ""


async def archive_of(controller: Controller, digest: str) -> web.StreamResponse | None:
    """The tree of a release, as nodes get it."""
    path = controller.archives / f"{digest}.tar"
    if not tree.DIGEST.fullmatch(digest) or not path.is_file():
        return None
    return web.FileResponse(path, headers={"Content-Type": "application/x-tar"})
