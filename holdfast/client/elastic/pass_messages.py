"""Posts one worker's messages of a step, in the order that is common to all workers."""

import time
from collections import deque
from collections.abc import Sequence

import torch

from holdfast.client.elastic.rank_traffic import ComingTensor, RankTraffic
from holdfast.core.elastic.task_order import Message

BorderKey = tuple[int, int, bool]  # microbatch, border between layers, backward


class PassMessages:
    """The tensors that go between the passes of one worker and those of the others. What goes between two passes of the
    same worker is kept here too."""

    def __init__(self, messages: Sequence[Message], worker: int, traffic: RankTraffic) -> None:
        self._worker, self._traffic = worker, traffic
        self._due = deque(message for message in messages if worker in (message.source, message.target))
        self._ready: dict[BorderKey, torch.Tensor] = {}  # made here, and not sent yet, or for this worker itself
        self._coming: dict[BorderKey, ComingTensor] = {}
        self.sending_s, self.sent = 0.0, 0  # what it took to post so many tensors, without waiting for others

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors that are sent."""
        return self._traffic.device

    def hand_over(self, tensor: torch.Tensor, to: int, key: BorderKey) -> None:
        """Give a tensor to the pass that needs it. If it goes to another worker, first post the messages before it."""
        self._ready[key] = tensor
        while to != self._worker and key in self._ready:
            self._post_next()

    def fetch(self, source: int, key: BorderKey) -> torch.Tensor:
        """Return the tensor that a pass needs; if another worker makes it, first post the messages before it."""
        if source == self._worker:
            return self._ready.pop(key)
        while key not in self._coming:
            self._post_next()
        return self._coming.pop(key).take()

    def _post_next(self) -> None:
        message = self._due.popleft()
        key = (message.microbatch, message.border, message.backward)
        if message.source == self._worker:
            since = time.perf_counter()
            self._traffic.send_shaped(self._ready.pop(key), message.target)
            self.sending_s, self.sent = self.sending_s + time.perf_counter() - since, self.sent + 1
        else:
            self._coming[key] = self._traffic.start_shaped(message.source)
