"""Keeps the log files of running ranks below their size limit."""

import asyncio
import logging
from collections.abc import Callable, Iterable

from holdfast.agent.rank import last_words
from holdfast.wire.holder_messages import HolderRank, RankKey
from holdfast.wire.run_and_node_specs import NodeSpec

_LOOK_S = 1.0  # how often their sizes are looked at
_log = logging.getLogger("holdfast.agent")


class LogRotation:
    def __init__(self, node: NodeSpec) -> None:
        self._node = node
        self._flooded: set[RankKey] = set()

    async def run(self, ranks: Callable[[], Iterable[HolderRank]]) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            # In a thread: a slow disk must not keep us from speaking.
            await asyncio.to_thread(self.rotate_logs, [held.rank_key for held in ranks()])

    def rotate_logs(self, keys: list[RankKey]) -> None:
        for key in keys:
            where = last_words.rank_folder(self._node.log_dir, key.generation, key.rank)
            limit_bytes = self._node.settings.logs.file_bytes
            rotated = [last_words.rotate_file(where / name, limit_bytes) for name in ("stdout.log", "stderr.log")]
            if any(rotated) and key not in self._flooded:
                self._flooded.add(key)
                _log.warning("rank %d writes more than logs.file_bytes; its older output is dropped", key.rank)
