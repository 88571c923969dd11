"""Chooses the modules that a node's zygote imports: few before the first launch, later all that the script imports."""

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

import msgspec

from holdfast.agent.agent_clock import AgentClock
from holdfast.decoding import from_json
from holdfast.linux.regular_files import read_start
from holdfast.wire import run_and_node_specs
from holdfast.wire.holder_messages import PreloadZygote
from holdfast.wire.rank_environment_defaults import make_rank_environment, with_whole_paths
from holdfast.wire.run_and_node_specs import NodeSpec

_IDLE_S = 5.0  # a node that has been without ranks for so long is a standby
# A launch waits as long for a zygote that is being made. What that one has yet to import, ranks forked from the old one
# import themselves meanwhile, and in no more time; unless they would have to share processors.
_SOON_S = 1.0
_BETTER_S = 45.0
_NAMES_BYTES = 4 << 20
_NAMES_S = 5.0  # after its first step is seen, a rank has so long to write what it has imported


class ZygotePreload:
    def __init__(self, node: NodeSpec, imports: Path, clock: AgentClock) -> None:
        self._clock = clock
        self._nproc, self._beside = node.nproc, node.nproc * node.host_nodes  # the latter on this host
        self._entry = node.entry
        self._shared = Path(node.learned) if node.learned else None
        self._imports = imports  # written by a rank at its first step
        self._learned: tuple[str, ...] = ()
        self._told: tuple[str, ...] = ()  # by the controller
        self._heard = False  # a rank has written what it has imported
        self._trains_since: float | None = None
        self.proven: tuple[str, ...] = ()  # of what was learned: the zygote has it, and ranks can be forked with it
        self._asked: tuple[str, ...] = ()  # what the zygote has, or the one that is being made will have
        self._idle_since = self._clock.monotonic()
        self._making = False
        self._made = asyncio.Event()  # or waited for in vain
        self._made.set()

    def first_preload(self) -> PreloadZygote:
        """Return the first zygote's preload: few modules, as ranks wait for it, plus those already imported here."""
        self._asked = (*self._entry.preload, *(name for name in self._entry.later if name in sys.modules))
        return PreloadZygote(modules=self._asked, env=self._environment({}), ranks=self._nproc)

    def adopt_modules(self, modules: tuple[str, ...]) -> None:
        """Take over the list of modules that an earlier agent had the zygote import."""
        own = {*self._entry.preload, *self._entry.later}
        self._asked, self._learned = modules, tuple(name for name in modules if name not in own)

    def preload_for(self, env: dict[str, str], key: str) -> PreloadZygote:
        """Return the request for a new zygote with this environment. Ranks get the environment of their zygote."""
        return self._make_preload((*self._entry.preload, *self._entry.later), self._environment(env), key)

    def on_warm(self, proven: tuple[str, ...]) -> None:
        """Note that the requested zygote is warm and has these modules of the script, or that it cannot be made."""
        self.proven, self._idle_since = proven, self._clock.monotonic()
        self._making = False
        self._made.set()

    def on_told(self, modules: tuple[str, ...]) -> None:
        """Note the script's modules that another host's zygote has preloaded, as reported by the controller."""
        self._told = modules

    async def wait_until_made(self, ranks: int) -> None:
        """Wait a short time for a zygote that is being made. After a timeout, further calls return at once."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BETTER_S if ranks > _processors() else _SOON_S):
                await self._made.wait()
        self._made.set()

    @property
    def is_crowded(self) -> bool:
        """Return whether the node's ranks share processors, so that one import for all of them is soonest."""
        return self._nproc > _processors()

    def better_preload(self, held: bool, trains: bool, key: str) -> PreloadZygote | None:
        """Return the request for a new zygote with more of the modules that the script imports up to its first step.
        Return None if the zygote has them all, if a new one is being made, or if training ranks have yet to list their
        imports.

        `held` says whether ranks run here. If not, as on a standby, the imports that other nodes reported are used.
        Some modules (the entry point's `later`) would slow ranks that start. So they wait until ranks train (`trains`)
        or, on a node without ranks, until the node has been idle for a while. The script's imports wait as well if an
        earlier run has learned them and ranks that start leave no processor free, unless the launch waits for them.
        """
        self._learn_imports(held)
        calm = trains if held else self._clock.monotonic() > self._idle_since + _IDLE_S
        modules = (*self._entry.preload, *(self._entry.later if calm else ()))
        if not held and not calm and not self.is_crowded and self._beside >= _processors():
            return None
        if self._making or {*modules, *self._learned} <= set(self._asked):  # another would begin anew
            return None
        if held and trains and self._awaits_names():  # the one without them would be made first, and theirs long after
            return None
        self._making = True
        self._made.clear()
        return self._make_preload(modules, self._environment(json.loads(key) if key else {}), key)

    def forgo_names(self) -> None:
        """Stop waiting for ranks to write down what they imported, because the next ranks are about to start."""
        self._heard = True

    def _awaits_names(self) -> bool:
        now = self._clock.monotonic()
        self._trains_since = now if self._trains_since is None else self._trains_since
        return not self._heard and now < self._trains_since + _NAMES_S

    def _make_preload(self, modules: tuple[str, ...], env: dict[str, str], key: str) -> PreloadZygote:
        preload = PreloadZygote(modules=modules, learned=self._learned, env=env, key=key, ranks=self._nproc)
        self._asked = tuple(dict.fromkeys((*self._asked, *preload.names())))
        return preload

    def _environment(self, changes: dict[str, str]) -> dict[str, str]:
        return with_whole_paths(make_rank_environment(os.environ) | changes, self._entry.cwd)

    def _learn_imports(self, held: bool) -> None:
        self._heard = self._heard or self._imports.exists()
        names = _read_names(self._imports)
        with contextlib.suppress(OSError):  # a rank has put something else there
            self._imports.unlink(missing_ok=True)
        if not names and not held:
            names = (*(_read_names(self._shared) if self._shared else ()), *self._told)
        known = {*self._asked, *self._learned}
        if new := tuple(name for name in dict.fromkeys(names) if name not in known):
            self._learned += new
            if held and self._shared:
                with contextlib.suppress(OSError):
                    run_and_node_specs.publish_file(self._shared, json.dumps(self._learned).encode())


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _read_names(path: Path) -> tuple[str, ...]:
    """Return the module names listed in a file; empty if the file cannot be read."""
    try:
        return from_json(read_start(path, _NAMES_BYTES), tuple[str, ...])
    except (OSError, msgspec.DecodeError, RecursionError):
        return ()
