"""Stages releases of the user's code on this node: fetches them, verifies their digest, unpacks and checks them."""

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import aiohttp
import msgspec

from holdfast.agent.agent_clock import AgentClock
from holdfast.agent.connection.controller_dialer import ControllerDialer
from holdfast.agent.releases import import_check_runner
from holdfast.agent.releases.output_return import OutputReturn
from holdfast.agent.releases.release_trust import ReleaseTrust
from holdfast.model.code_release import Release
from holdfast.model.node_errands import StageHere
from holdfast.wire.releases import release_tree_sync, tree_archive
from holdfast.wire.releases.host_release_copies import NAME, ReleaseFolder
from holdfast.wire.releases.staged_release import StagedRelease, staged_environment
from holdfast.wire.releases.tree_archive import ArchiveError
from holdfast.wire.run_and_node_specs import NodeSpec

_FETCH_S = 600.0
_STALLED_S = 30.0
_CHUNK = 1 << 20
_KEPT = 5  # releases that nobody needs now, for a rollback
_log = logging.getLogger("holdfast.agent")


class ReleaseStager:
    """Stages releases in a folder that nodes of one host share. The first node that needs a tree puts it there."""

    def __init__(
        self,
        node: NodeSpec,
        node_dir: Path,
        dialing: ControllerDialer,
        clock: AgentClock,
        say: Callable[[str], None],
    ) -> None:
        self._node = node
        self._clock = clock
        self._say = say
        self._dialing = dialing
        self._folder = Path(node.releases) if node.releases else node_dir / "releases"
        self._kept = ReleaseFolder(self._folder)
        # The run's own folder of archives, if this host sees it: then nothing is fetched, and copies are made only when
        # they are needed, as each would be one more tree on a file system that all hosts share.
        self._shared = ReleaseFolder(Path(node.run_file).parent / "releases") if node.run_file else None
        self._having: dict[str, asyncio.Task[str]] = {}
        self._wanted: list[str] = []  # digests, the newest last: what may run next is never removed
        self._launched: list[str] = []  # the same: nor what runs, and what ran before
        self._later: dict[str, Release] = {}  # not here yet, as the user's own tree will do
        self._in_place = ""  # the digest of what is run from the user's own tree
        self._differs = ""  # what was said of that tree
        self._homecoming = OutputReturn(self._folder, clock)
        self._trust = ReleaseTrust(node.settings.release.signers, node.first_release, node_dir)

    async def release_fault(self, release: Release) -> str:
        """Return why this node must not run a release; "" if it may."""
        return await asyncio.to_thread(self._trust.fault, release)

    def staged_location(self, release: Release) -> StagedRelease:
        if not release.digest:
            return StagedRelease()
        copy = self.staged_tree(release)
        return msgspec.structs.replace(copy, at="") if release.digest == self._in_place else copy

    def staged_tree(self, release: Release) -> StagedRelease:
        root = os.path.realpath(release.root) if release.root else ""
        return StagedRelease(root=root, at=str(self._kept.copy_of(release.digest)))

    async def begin_launch(self, release: Release, *, first: bool = True) -> str:
        """Prepare the tree that ranks run from; if `first`, report the user's edits. Return an error or ""."""
        if why := await self.release_fault(release):
            return why
        self._launched = [*(d for d in self._launched if d != release.digest), release.digest][-2:]
        stands = await self._stand(release)
        if not stands and ((error := await self.ensure_staged(release)) or not release.digest):
            self._in_place = ""
            return error
        await self.gather_outputs()
        if stands:  # compared just now
            self._in_place, self._differs = release.digest, ""
            return ""
        try:
            differs = await asyncio.to_thread(self._choose_tree, release)
        except (OSError, ArchiveError) as e:
            return f"release {release.number} cannot be run: {e}"
        if first and differs and differs != self._differs:
            self._say(differs)
        self._differs = differs
        return ""

    async def gather_outputs(self) -> None:
        """Bring files that ranks have made in staged trees to the user's tree, after the ranks have ended."""
        try:
            found = await asyncio.to_thread(lambda: [*release_tree_sync.gather_all(self._folder)])
            for index, gathered in found:
                self._say(release_tree_sync.describe_gathered(index, gathered))
            if not any(gathered.stuck for _, gathered in found):
                await self._homecoming.close()
        except OSError as e:
            self._say(f"files that ranks wrote beside the script stay in {self._folder}: {e}")

    async def watch(self) -> None:
        """Bring files that ranks write to the user's tree, until this task is cancelled."""
        await self._homecoming.run(self._in_copy, self._say)

    def _in_copy(self) -> Path | None:
        """Return the staged tree that ranks of this node run in; None if they run in the user's own tree."""
        if not self._launched:
            return release_tree_sync.newest(self._folder)  # they were started before this agent was
        digest = self._launched[-1]
        return self._kept.copy_of(digest) if digest and digest != self._in_place else None

    def _choose_tree(self, release: Release) -> str:
        """Let ranks run in the user's own tree if it equals the release, else in a copy; return a notice of edits."""
        at = self._kept.copy_of(release.digest)
        self._in_place = ""
        if (index := release_tree_sync.read_index(at)) is None:
            raise FileNotFoundError(f"the list of files of {at} is missing or damaged")
        here = _is_own(index, release)
        differ = _compare_tree(at, index) if here else []
        if here and not differ:
            self._in_place = release.digest
        else:
            if not at.is_dir():  # it was edited just now
                self._kept.put_release(release, self._find_archive(release.digest))
            with release_tree_sync.lock_trees(self._folder):
                release_tree_sync.prepare_tree(at, index)
        if not differ:
            return ""
        more = len(differ) - 1
        others = f" and {more} more {'file' if more == 1 else 'files'} were" if more else " was"
        edited = f"{differ[0]}{others} edited after release {release.number} was made"
        return f"{edited}; ranks run release {release.number} unchanged, from a copy; holdfast update brings the edit"

    async def ensure_staged(self, release: Release) -> str:
        """Stage a release unless it is here; return an error in words, empty if there is none."""
        if not release.digest:
            return ""
        if not tree_archive.DIGEST.fullmatch(release.digest):
            return f"release {release.number}: {release.digest!r} is not a digest"
        task = self._having.get(release.digest)
        if task is None or task.done():
            task = self._having[release.digest] = asyncio.create_task(self._bring_release(release))
        error = await asyncio.shield(task)
        return f"release {release.number} cannot be staged: {error}" if error else ""

    async def _have_or_stand(self, release: Release) -> str:
        """Stage a release unless the user's own tree stands in for it; return an error in words, or ""."""
        return "" if await self._stand(release) else await self.ensure_staged(release)

    async def _stand(self, release: Release) -> bool:
        """Return whether the user's own tree stands in for a release. Then postpone the staging of the release, as
        starting ranks need the processors."""
        stands = await asyncio.to_thread(self._stands, release)
        if stands:
            self._later[release.digest] = release
        return stands

    def _stands(self, release: Release) -> bool:
        """Return whether the user's own tree stands in for the release: it is equal, and no copy has been made."""
        if not tree_archive.DIGEST.fullmatch(release.digest):
            return False
        at = self._kept.copy_of(release.digest)
        index = release_tree_sync.read_index(at) or self._adopt_index(release.digest)
        if index is None or at.exists() or not _is_own(index, release):
            return False
        return not _compare_tree(at, index)

    def _adopt_index(self, digest: str) -> release_tree_sync.TreeIndex | None:
        """Copy a release's index of files from the run's own folder and return it; None if the folder has none."""
        index = release_tree_sync.read_index(self._shared.copy_of(digest)) if self._shared else None
        if index is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            release_tree_sync.write_index(self._kept.copy_of(digest), index)
        return index

    def _find_archive(self, digest: str) -> Path:
        """Return the path at which a release's archive is, or would be, on this host."""
        own = self._folder / f"{digest}.tar"
        shared = self._shared.path / own.name if self._shared else own
        return shared if shared.exists() and not own.exists() else own

    def complete(self, trains: bool) -> None:
        """If `trains`, stage postponed releases now. They stay postponed if this host sees the run's own archives."""
        if trains and not self._shared:
            self._bring_postponed()

    def _bring_postponed(self) -> None:
        for digest in [*self._later]:
            release = self._later.pop(digest)
            self._having[digest] = asyncio.create_task(self._bring_release(release))

    async def stage_all(self, releases: tuple[Release, ...]) -> str:
        """Stage the releases that a node needs before it is ready; return errors in words, empty if none."""
        errors = [await self.release_fault(one) or await self._have_or_stand(one) for one in releases]
        await asyncio.to_thread(self._look_ahead, [r for r, error in zip(releases, errors, strict=True) if not error])
        return "; ".join(error for error in errors if error)

    def _look_ahead(self, releases: list[Release]) -> None:
        """Compare the user's trees with these releases in advance, so that a launch need not wait for comparisons."""
        for release in releases:
            at = self._kept.copy_of(release.digest)
            index = release_tree_sync.read_index(at) if release.digest else None
            if index is not None and not index.equal and _is_own(index, release):
                _compare_tree(at, index)

    async def stage_and_check(self, errand: StageHere) -> tuple[str, bool]:
        """Stage a release and, if asked, check it. Return an error or "", and whether the release is its cause."""
        if why := await self.release_fault(errand.release):
            return why, True
        if error := await self.ensure_staged(errand.release):
            return error, False
        self._bring_postponed()  # it may be rolled back to, when the user's own tree is no longer it
        if not errand.check:
            return "", False
        copy = self.staged_tree(errand.release)
        env = staged_environment(dict(os.environ), self._node.entry, errand.release, copy)
        return await import_check_runner.check_release(self._node.entry, errand.release, copy, env)

    # --- one release -------------------------------------------------------------------------------------------

    async def _bring_release(self, release: Release) -> str:
        self._wanted = [*(d for d in self._wanted if d != release.digest), release.digest][-3:]
        began = self._clock.monotonic()
        try:
            if await asyncio.to_thread(self._kept.holds_release, release):
                return ""
            fetched = self._kept.draft_path(release.digest, "fetched")
            archive = self._find_archive(release.digest)
            try:
                if not archive.exists():
                    await fetch_archive(self._dialing, self._kept, release.digest, fetched)
                    archive = fetched
                await asyncio.to_thread(self._kept.put_release, release, archive)
            finally:
                fetched.unlink(missing_ok=True)
            await asyncio.to_thread(self._prune_trees)
        except (OSError, ArchiveError, aiohttp.ClientError, TimeoutError) as e:
            return str(e) or type(e).__name__
        _log.info("release %d staged in %.2f s", release.number, self._clock.monotonic() - began)
        return ""

    def _prune_trees(self) -> None:
        """Remove unneeded trees, except the newest few, and what dead agents left unfinished: trees and archives."""
        trees = [path for path in self._folder.iterdir() if len(path.name) == NAME and path.is_dir()]
        needed = {digest[:NAME] for digest in (*self._wanted, *self._launched)}
        spare = sorted((p for p in trees if p.name not in needed), key=lambda p: p.stat().st_mtime)
        for path in spare[: max(0, len(spare) - _KEPT)]:
            self._kept.remove_copy(path)
        for path in self._folder.glob("*.*-*"):
            owner = path.name.rpartition(".")[2].split("-")[1]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


async def fetch_archive(dialing: ControllerDialer, kept: ReleaseFolder, digest: str, to: Path) -> None:
    """Download a release's archive from the controller. Raises ArchiveError, also if the disk has too little room."""
    timeout = aiohttp.ClientTimeout(total=_FETCH_S, sock_read=_STALLED_S)
    url = dialing.url_for(f"/api/v1/releases/{digest}")
    async with dialing.open_session(timeout) as session, session.get(url) as answer:
        if answer.status != 200:
            raise ArchiveError(f"the controller answers HTTP {answer.status} when asked for its archive")
        await asyncio.to_thread(kept.check_room, 2 * (answer.content_length or 0))
        with to.open("wb") as file:
            async for chunk in answer.content.iter_chunked(_CHUNK):
                await asyncio.to_thread(file.write, chunk)


def _compare_tree(at: Path, index: release_tree_sync.TreeIndex) -> list[str]:
    """Return the user's files that differ from the release; record the others, so that they are not read again."""
    differ, seen = release_tree_sync.find_edits(index)
    if seen != index:
        with contextlib.suppress(OSError):  # a full disk: then all is read again next time
            release_tree_sync.write_index(at, seen)
    return differ


def _is_own(index: release_tree_sync.TreeIndex, release: Release) -> bool:
    """Return whether ranks may run in the user's own tree; never if the release is signed, as trees can be edited."""
    own = os.path.isdir(index.root) and os.path.realpath(index.root) == os.path.realpath(index.home)
    return own and not release.signature
