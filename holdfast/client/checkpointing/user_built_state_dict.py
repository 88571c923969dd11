"""Reads and restores a state dict that the script builds itself."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner

from holdfast.checkpoint.image_layout import ImageLayout, Path, Ranks
from holdfast.checkpoint.state_image import FlatState, StateImage, TensorHolders
from holdfast.client.checkpointing.optimizer_step_pre_hook import StepAnnouncement
from holdfast.client.snapshot.state_item_locations import (
    ChangedError,
    CurrentItems,
    StateLocations,
    Way,
    descend_path,
    load_image,
)

State = dict[str, Any]


class UserState:
    """The script's own state dict. It must be complete at the first save or restore: torch loads into its tensors."""

    is_followed = False  # by torch: what changes it is the script's own

    def __init__(
        self,
        state: State | Callable[[], State],
        load: Callable[[State], object] | None,
        group: Ranks,
        steps: StepAnnouncement,
    ) -> None:
        self._make = state if callable(state) else lambda: state
        self._load = load
        self._group = group
        self._steps = steps
        self._now: State = {}
        self._loading: State = {}
        self._rows: StateLocations
        self._keys: Collection[str] = ()

    def build_state(self) -> State | None:
        return self._make()

    def loadable_state(self) -> State:
        """Return the state dict for torch to load into."""
        self._loading = self._make()
        return self._loading

    def holders_of(self, path: Path) -> TensorHolders:
        return TensorHolders(self._group, self._group)

    def bind_layout(self, layout: ImageLayout, found: FlatState) -> None:
        self._rows = StateLocations(layout, found, self._way_to)
        self._size = len(layout.items)
        self._keys = _flatten_state(self._make()).keys()

    def read(self) -> CurrentItems:
        self._now = _flatten_state(self._make())
        if self._now.keys() != self._keys:
            raise ChangedError("the keys of the state dict have changed")
        try:
            return self._rows.read()
        finally:
            self._now = {}

    def restore_image(self, image: StateImage, absent: Collection[str]) -> None:
        self.loadable_state()
        load_image(image, absent, self._target_tensor, self.put_value)
        self.finish_load(absent)

    def put_value(self, path: Path, value: object) -> None:
        holder, key = descend_path(self._loading, path)
        holder[key] = value

    def finish_load(self, absent: Collection[str]) -> None:
        if self._load:
            self._load(self._loading)
        self._loading = {}

    def _target_tensor(self, path: Path) -> torch.Tensor:
        holder, key = descend_path(self._loading, path)
        found = holder[key]
        if not isinstance(found, torch.Tensor):
            raise ChangedError(f"{'.'.join(map(str, path))} is no longer a tensor")
        return found

    def guarded_items(self) -> list[bool]:
        """Return True for each item: the script must announce every change, and holdfast checks that it does."""
        return [True] * self._size

    def before_step(self, call: Callable[[], None]) -> None:
        """Call `call` before every step of the script's optimizers, if they were given."""
        self._steps.call_before_steps(call)

    def _way_to(self, path: Path) -> Way:
        key = ".".join(map(str, path))
        return lambda: self._now[key]


def _flatten_state(state: State) -> State:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    return planner.state_dict
