"""Samples the stack of a rank's main thread to learn how long the script imports and sets itself up."""

import sys
from time import monotonic

_IMPORTING = ("<frozen importlib._bootstrap>", "_find_and_load")
# What only a training loop does: it calls a module, compiled or not, takes a batch, goes back through the graph.
_LOOPING = (
    ("/torch/nn/modules/module.py", ("_call_impl",)),
    # Not the `_fn` of a DisableContext, through which fully_shard() and optimizers go when they are made.
    ("/torch/_dynamo/eval_frame.py", ("compile_wrapper", "_TorchDynamoContext.__call__.<locals>._fn")),
    ("/torch/utils/data/dataloader.py", ("__iter__", "__next__")),
    ("/torch/autograd/__init__.py", ("backward",)),
    ("/torch/optim/optimizer.py", ("Optimizer.profile_hook_step.<locals>.wrapper",)),  # step() itself
)
_CHECKPOINT = "/torch/distributed/checkpoint/"  # it makes an empty step, so that an optimizer has a state to load into


class SetUpWatch:
    """Remembers when the main thread was last seen importing, and when last seen outside of its training loop."""

    def __init__(self, main: int) -> None:
        self._main = main
        self._imported_at, self._set_up_at, self._is_over, self._looped = 0.0, 0.0, False, False

    def look(self) -> None:
        """Sample the main thread's stack. Until torch's training loop appears, note the times of imports and set-up."""
        frame = None if self._is_over else sys._current_frames().get(self._main)
        if frame is None:
            return
        now, imports, loops, loads = monotonic(), False, False, False
        while frame is not None:
            name, path, whole = frame.f_code.co_name, frame.f_code.co_filename, frame.f_code.co_qualname
            imports = imports or (path, name) == _IMPORTING
            loops = loops or any((name in names or whole in names) and path.endswith(end) for end, names in _LOOPING)
            loads = loads or _CHECKPOINT in path
            frame = frame.f_back
        if loops and not loads:
            self._is_over = self._looped = True
        elif not self._is_over:  # meanwhile
            self._set_up_at, self._imported_at = now, now if imports else self._imported_at

    def close(self, *, trained: bool) -> tuple[float, float]:
        """Stop sampling, at the first step. Return when the script was last seen importing, and when it was last seen
        setting itself up. The latter is 0 if the script may have been training by then: torch's training loop was not
        seen, and no optimizer of torch made the step (`trained` is False)."""
        self._is_over = True
        return self._imported_at, self._set_up_at if self._looped or trained else 0.0
