"""`holdfast.replayable()`: lets machines repeat a script's work, to find the machine whose results are wrong.

    replay = holdfast.replayable(seed=args.seed)     # call this first; the result is false unless this is a replay
    out = replay.path(args.out)                      # in a replay, a file in the replay's own folder
    for step in range(start, steps + 1):
        ...
        if replay.done(step, model.parameters()):    # in a replay: reports the parameters' hash; true at the last step
            break

A replay touches nothing that training keeps: it takes no snapshots, reads checkpoints but never writes them, and prints
to its own logs.
"""

import os
import sys

from holdfast.wire import replay_environment
from holdfast.wire.progress_environment import GENERATION, KEEPER

TYPE_CHECKING = False  # importing typing would take longer than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeVar

    import torch

    Tensor = TypeVar("Tensor", bound=torch.Tensor)

REFUSED = 78  # exit code of a script that was to be replayed and had not said that it may be

_CHAIN, _WORD = 0x9E3779B97F4A7C15, 2**64 - 1


class ScriptReplay:
    """The replay that this process takes part in. Its truth value is False if there is none."""

    def __init__(self) -> None:
        self.opted = False  # the script called `replayable`
        self.read_environment()

    def read_environment(self) -> None:
        """Read the replay's settings from the environment, which a freshly forked rank must do again."""
        environ = os.environ
        self.is_replay = replay_environment.is_replay()
        self.name = environ.get(replay_environment.REPLAY, "")
        self.steps = int(environ.get(replay_environment.STEPS, "0")) if self.is_replay else 0
        self.folder = environ.get(replay_environment.FOLDER, "") if self.is_replay else ""
        self.not_after = int(environ.get(replay_environment.NOT_AFTER, "-1")) if self.is_replay else -1
        self.ranks = int(environ.get(replay_environment.RANKS, "0")) if self.is_replay else 0
        self.job_ranks = int(environ.get(replay_environment.JOB_RANKS, "0")) if self.is_replay else 0
        self.marks: dict[int, int] = {}  # step -> signature of all that was told up to it
        self._boundary: torch.Tensor | None = None
        self._chain = 0
        self._file = -1

    def __bool__(self) -> bool:
        return self.is_replay

    def path(self, path: "str | os.PathLike[str]") -> str:
        """Return the path unchanged; in a replay, return a path in the replay's own folder instead."""
        return replay_environment.redirect_path(os.fspath(path))

    def layers(self, total: int, stages: int = 1) -> int:
        """Return how many layers to build the model with: `total` in training, fewer in a replay.

        A replay's group has fewer ranks than the job, so each rank holds a larger shard of the state. The number of
        layers is therefore reduced in proportion to the ranks, equally for all pipeline `stages`, to at least one for
        each stage. Such a model cannot load the job's checkpoints: initialize it from the seed.
        """
        if not 0 < self.ranks < self.job_ranks:
            return total
        each = total * self.ranks // (self.job_ranks * stages)
        return min(total, max(1, each) * stages)

    def boundary(self, tensor: "Tensor") -> "Tensor":
        """In a replay, hash a tensor that this rank sends to another stage or adds to a sum. Returns the tensor."""
        if self.is_replay:
            from holdfast.client.training.parameter_hash import hash_tensors

            found = hash_tensors([tensor])
            self._boundary = found if self._boundary is None else self._boundary + found
        return tensor

    def done(self, step: int, tensors: "Iterable[torch.Tensor]" = ()) -> bool:
        """In a replay, report the tensors' hash after this step; return True after its last step. Else return False."""
        if not self.is_replay:
            return False
        from holdfast.client.training.parameter_hash import hash_tensors

        step = int(step)

        places: dict[str, list[torch.Tensor]] = {}  # optimizers keep some of theirs on another device
        for tensor in tensors:
            places.setdefault(str(tensor.device), []).append(tensor)
        found = [int(hash_tensors(some)) for some in places.values()]
        sent, self._boundary = None if self._boundary is None else int(self._boundary) & _WORD, None
        for value in found if sent is None else (*found, sent):
            self._chain = (self._chain * _CHAIN + value) & _WORD
        self.marks[step] = self._chain
        self._write_marks(step, sent)
        return 0 < self.steps <= len(self.marks)

    def _write_marks(self, step: int, sent: int | None) -> None:
        if not self.folder:
            return
        if self._file < 0:
            os.makedirs(self.folder, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(
                replay_environment.signature_path(self.folder, int(os.environ.get("RANK", "0"))), flags, 0o600
            )
        os.write(self._file, replay_environment.encode_signature(step, self._chain, sent))


_this = ScriptReplay()


def replayable(seed: int | None = None) -> ScriptReplay:
    """Declare that this script may be replayed. Call it first, on every rank.

    With `seed` you promise that all random numbers and batches follow from the seed, the step and the rank. Then the
    results of two machines can be compared bit by bit. A replay seeds the generators of python, numpy and torch; a
    training run does not. Without a seed, a replay shows a fault only by a crash or by a loss that is not finite.

    >>> replay = holdfast.replayable(seed=1)
    >>> replay.is_replay
    False
    """
    if _this.name != os.environ.get(replay_environment.REPLAY, ""):  # forked from a zygote, which knew nothing of it
        _this.read_environment()
    _this.opted = True
    if _this.is_replay:
        _end_with_agent()
        if _this.folder:
            os.makedirs(_this.folder, exist_ok=True)
        if seed is not None:
            _seed_generators(seed + int(os.environ.get("RANK", "0")))
    else:
        _write_note(seed is not None)
    return _this


def sign_gradients(model: object) -> None:
    """Hash this rank's own gradients of a DistributedDataParallel model before the ranks sum them."""
    from torch.nn.parallel import DistributedDataParallel

    ddp = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    if isinstance(ddp, DistributedDataParallel):
        for parameter in ddp.parameters():
            if parameter.requires_grad:
                parameter.register_hook(_sign_gradient)


def _sign_gradient(grad: "torch.Tensor") -> None:
    """Hash a gradient before the ranks sum it. If torch cannot hash it, print that and leave it out."""
    try:
        for part in (grad.coalesce().indices(), grad.coalesce().values()) if grad.is_sparse else (grad,):
            _this.boundary(part)
    except (RuntimeError, TypeError, NotImplementedError) as e:  # what torch raises of kinds of tensors it cannot do
        print(f"holdfast: a gradient was not signed: {e!r}", file=sys.stderr)


def current_replay() -> ScriptReplay:
    """Return this process's replay, for a Checkpointer. Raises RuntimeError if a replayed script has not opted in."""
    if replay_environment.is_replay() and not _this.opted:
        raise RuntimeError("this is a replay, and the script has not called holdfast.replayable(): it does not run")
    return _this


def guard_first_step(on_first: "Callable[[], None] | None") -> "Callable[[], None] | None":
    """Return the function to call at a replay's first step. It ends the script if that has not called replayable()."""

    def first() -> None:
        if not _this.opted:
            print("holdfast: no replay: this script has not called holdfast.replayable()", file=sys.stderr)
            os._exit(REFUSED)
        if on_first is not None:
            on_first()

    return first


def _write_note(seeded: bool) -> None:
    """Tell the node that this script may be replayed."""
    keeper = os.environ.get(KEEPER)
    if not keeper or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    note = f'{{"generation": {int(os.environ.get(GENERATION, "0"))}, "seeded": {str(seeded).lower()}}}'
    path = os.path.join(os.path.dirname(keeper), replay_environment.NOTE)
    try:
        with open(f"{path}.{os.getpid()}", "w") as file:
            file.write(note)
        os.replace(file.name, path)
    except OSError as e:
        print(f"holdfast: cannot record that this script may be replayed: {e}", file=sys.stderr)


def _end_with_agent() -> None:
    """Make this process die with its parent, the agent, so that a replay cannot outlast it into the next training."""
    from holdfast.linux import own_process_settings

    own_process_settings.die_with_parent(os.getppid(), REFUSED)


def _seed_generators(seed: int) -> None:
    import random

    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
