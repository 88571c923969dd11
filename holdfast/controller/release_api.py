"""Releases in the controller's API: their history, their archives for nodes, and checks of orders about them."""

import asyncio

from aiohttp import web

from holdfast.controller.control_loop import Controller
from holdfast.core.record.release_history import ReleaseOverview
from holdfast.model.code_release import Fate, Release
from holdfast.model.decider_events import Order
from holdfast.wire.releases import release_signature, tree_archive
from holdfast.wire.run_and_node_specs import COMPILED_ARCHIVES


def release_overview(controller: Controller) -> ReleaseOverview:
    view = controller.view
    ran = controller.ledger.list_releases(controller.reached_step)
    chapters = controller.history.list_chapters(view.releases, view.fates, view.fate_reasons, ran)
    return ReleaseOverview(running=view.running_release.number, releases=chapters)


def update_fault(controller: Controller, order: Order) -> str:
    """Say why an update cannot be taken; empty if it can, or if the order is not an update."""
    if order.verb != "update":
        return ""
    release = order.release
    if release is None or not tree_archive.DIGEST.fullmatch(release.digest):
        return "an update needs a release with the digest of its tree; send one with holdfast update"
    if not 0 <= order.window_s < float("inf"):
        return "window_s must be 0 or more: so many seconds a release waits for a restart to ride on"
    if not (controller.archives / f"{release.digest}.tar").is_file():
        return f"{controller.archives} holds no archive of {release.digest[:12]}; send it with holdfast update"
    for chapter in release_overview(controller).releases:
        same = chapter.release
        if chapter.fate is Fate.ROLLED_BACK and _launch_key(same) == _launch_key(release):
            return f"this is release {same.number} again, which was rolled back: {chapter.why}; change something first"
    return ""


async def signature_fault(controller: Controller, order: Order) -> str:
    """Return why an update's signature is not accepted; empty if it is accepted or none is required."""
    signers = controller.settings.release.signers
    if order.verb != "update" or order.release is None or not signers:
        return ""
    return await asyncio.to_thread(release_signature.signature_fault, order.release, signers)


def _launch_key(release: Release) -> tuple[object, ...]:
    return release.digest, release.argv, release.env


def release_archive(controller: Controller, digest: str) -> web.StreamResponse | None:
    """Return the response with an archive that nodes fetch, of a release or of compiled code; None if there is none."""
    if not tree_archive.DIGEST.fullmatch(digest):
        return None
    for folder in (controller.archives, controller.archives / COMPILED_ARCHIVES):
        if (path := folder / f"{digest}.tar").is_file():
            return web.FileResponse(path, headers={"Content-Type": "application/x-tar"})
    return None


def compiled_digest(controller: Controller) -> str:
    """Return the digest of the archive of compiled code; empty if there is none."""
    return max((path.stem for path in (controller.archives / COMPILED_ARCHIVES).glob("*.tar")), default="")
