"""Brings the torch.compile caches of ranks to standbys. Each host of a job has one folder for compiled code."""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import aiohttp

from holdfast.agent.connection.controller_dialer import ControllerDialer
from holdfast.agent.releases.release_stager import fetch_archive
from holdfast.wire.releases import tree_archive
from holdfast.wire.releases.host_release_copies import ReleaseFolder
from holdfast.wire.releases.tree_archive import MIB, ArchiveError, ArchiveLimits
from holdfast.wire.run_and_node_specs import CACHE_VARIABLE, COMPILED_ARCHIVES, NodeSpec

_LOOK_S = 5.0  # files that stay the same for so long are whole
_FILE_BYTES = 4096  # that each file takes beside its content
_ASK_S = 10.0
_UNSHARED = ("locks", ".lock", ".tmp")  # how the names of files end, or of their folder: nobody reads these
_log = logging.getLogger("holdfast.agent")


class _CachedFile(NamedTuple):
    path: str  # in the folder
    bytes: int
    mtime_ns: int


class TorchCompileCache:
    """Archives the compile cache on the controller's host. Hosts that have had no ranks yet unpack the archive."""

    def __init__(
        self, node: NodeSpec, dialing: ControllerDialer, has_ranks: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        mine = node.compiled and not os.environ.get(CACHE_VARIABLE)  # another folder is the user's own business
        self._folder = Path(node.compiled) if mine else None
        self._archives = Path(node.compiled_archives) if node.compiled_archives else None
        self._limit = ArchiveLimits(bytes=node.settings.release.compiled_mb * MIB)
        self._dialing, self._has_ranks, self._say = dialing, has_ranks, say
        self._had_ranks = False
        self._seen: tuple[_CachedFile, ...] = ()
        self._done: tuple[_CachedFile, ...] = ()  # packed, or found to be too large
        self._brought = ""  # the digest of what was last brought here
        self._trouble = ""

    async def run(self) -> None:
        """Share what ranks compile until this task is cancelled. Return at once if no compile cache is in use."""
        while self._folder:
            await asyncio.sleep(_LOOK_S)
            trouble = ""
            try:
                self._had_ranks |= self._has_ranks()  # between a stop and a launch there are none
                if self._had_ranks and self._archives:
                    await asyncio.to_thread(self.pack_folder, self._folder, self._archives)
                elif not self._had_ranks and not self._archives:
                    await self.bring_archive(self._folder)
            except (OSError, ArchiveError, aiohttp.ClientError, TimeoutError) as e:
                trouble = str(e) or type(e).__name__
            if trouble and trouble != self._trouble:
                _log.warning("compiled code is not shared: %s", trouble)
            self._trouble = trouble

    def pack_folder(self, folder: Path, archives: Path) -> None:
        """Replace the archive if `folder` has other files than the archive and has stopped changing."""
        before, self._seen = self._seen, _list_files(folder)
        if not self._seen or self._seen != before or self._seen == self._done:
            return
        total = sum(file.bytes + _FILE_BYTES for file in self._seen)
        if total > self._limit.bytes:
            self._say(
                f"standbys do not get what ranks have compiled: it takes {total / MIB:.0f} MiB, "
                f"and release.compiled_mb allows {self._limit.bytes // MIB}"
            )
            self._done = self._seen
            _remove_archives(archives, but="")  # an older one would lack most of it
            return
        packed = tree_archive.pack_files(folder, [file.path for file in self._seen], archives, self._limit)
        self._done = self._seen
        _remove_archives(archives, but=packed.digest)
        _log.info("compiled code: packed %d files as %s", packed.files, packed.digest[:12])

    async def bring_archive(self, folder: Path) -> None:
        """Fetch the newest archive of compiled code and merge it into the folder, unless this was done before."""
        digest = await self._ask_digest()
        if not digest or digest == self._brought:
            return
        # Its own: other nodes of this host may fetch it, too.
        kept = ReleaseFolder(Path(tempfile.mkdtemp(prefix=f"{folder.name}.coming-", dir=folder.parent)))
        try:
            archive = kept.draft_path(digest, "fetched")
            await fetch_archive(self._dialing, kept, digest, archive)
            count = await asyncio.to_thread(self._merge_archive, archive, digest, folder)
        finally:
            await asyncio.to_thread(shutil.rmtree, kept.path, ignore_errors=True)
        self._brought = digest
        _log.info("compiled code: brought %d files of %s", count, digest[:12])

    async def _ask_digest(self) -> str:
        timeout, url = (
            aiohttp.ClientTimeout(total=_ASK_S),
            self._dialing.url_for(f"/api/v1/releases/{COMPILED_ARCHIVES}"),
        )
        async with self._dialing.open_session(timeout) as session, session.get(url) as answer:
            text = (await answer.content.read(65)).decode("ascii", "replace") if answer.status == 200 else ""
        return text if tree_archive.DIGEST.fullmatch(text) else ""

    def _merge_archive(self, archive: Path, digest: str, folder: Path) -> int:
        """Verify and unpack the archive, and move to `folder` the files that it lacks. Return how many were moved."""
        if tree_archive.unpacked_bytes(archive) > self._limit.bytes:
            raise ArchiveError(f"it is above release.compiled_mb={self._limit.bytes // MIB}")
        whole = archive.with_suffix(".tree")
        tree_archive.unpack_archive(archive, whole, digest)
        count = 0
        for file in _list_files(whole):
            if not (to := folder / file.path).exists():
                to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                (whole / file.path).rename(to)
                count += 1
        return count


def _remove_archives(archives: Path, but: str) -> None:
    for old in archives.glob("*.tar"):
        if old.stem != but:
            old.unlink(missing_ok=True)


def _list_files(folder: Path) -> tuple[_CachedFile, ...]:
    """Return the cache's files, without locks and temporary files. Equal names mean equal content."""
    found = []
    for at, _, names in os.walk(folder):
        for name in names:
            if name.endswith(_UNSHARED) or at.endswith(_UNSHARED):
                continue
            with contextlib.suppress(FileNotFoundError):
                path = Path(at, name)
                seen = path.lstat()
                found.append(_CachedFile(str(path.relative_to(folder)), seen.st_size, seen.st_mtime_ns))
    return tuple(sorted(found))
