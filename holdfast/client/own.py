"""A state dict that a script makes itself."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner

from holdfast.checkpoint.layout import Layout, Path, Ranks
from holdfast.checkpoint.state import Found, Held, Image
from holdfast.client.found import ChangedError, Rows, Things, Way, descend, write

State = dict[str, Any]


class Own:
    """Whatever the script's function answers; in its full form from the start, as torch wants it for loading too."""

    def __init__(
        self, state: State | Callable[[], State], load: Callable[[State], object] | None, group: Ranks
    ) -> None:
        self._make = state if callable(state) else lambda: state
        self._load = load
        self._group = group
        self._now: State = {}
        self._loading: State = {}
        self._rows: Rows
        self._keys: Collection[str] = ()

    def state(self) -> State | None:
        return self._make()

    def live(self) -> State:
        """The state dict, to be loaded into."""
        self._loading = self._make()
        return self._loading

    def holders(self, path: Path) -> Held:
        return Held(self._group, self._group)

    def bind(self, layout: Layout, found: Found) -> None:
        self._rows = Rows(layout, found, self._way)
        self._size = len(layout.items)
        self._keys = _flat(self._make()).keys()

    def read(self) -> Things:
        self._now = _flat(self._make())
        if self._now.keys() != self._keys:
            raise ChangedError("the state dict has other keys than before")
        try:
            return self._rows.read()
        finally:
            self._now = {}

    def write(self, image: Image, absent: Collection[str]) -> None:
        self.live()
        write(image, absent, self._target, self.put)
        self.loaded(absent)

    def put(self, path: Path, value: object) -> None:
        holder, key = descend(self._loading, path)
        holder[key] = value

    def loaded(self, absent: Collection[str]) -> None:
        if self._load:
            self._load(self._loading)
        self._loading = {}

    def _target(self, path: Path) -> torch.Tensor:
        holder, key = descend(self._loading, path)
        found = holder[key]
        if not isinstance(found, torch.Tensor):
            raise ChangedError(f"{'.'.join(map(str, path))} is no tensor any more")
        return found

    def guarded(self) -> list[bool]:
        """Nobody knows when a script changes its own tensors."""
        return [False] * self._size

    def before_step(self, call: Callable[..., None]) -> None:
        """Nor with which optimizers."""

    def _way(self, path: Path) -> Way:
        key = ".".join(map(str, path))
        return lambda: self._now[key]


def _flat(state: State) -> State:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    return planner.state_dict
