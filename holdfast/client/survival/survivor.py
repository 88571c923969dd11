"""Lets a rank outlive its generation: when another rank fails, this process goes on in the next generation. An
exception ends the function marked with `survive`, and the rank leaves its process groups. It waits for the environment
of the next generation, makes the groups again, binds the model to them and calls the function again."""

import functools
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeVar

import torch

from holdfast.checkpoint.keeper_client import current_generation
from holdfast.client.checkpointing.replicated_restore import WorldSizes
from holdfast.client.snapshot.seal_fence import SEAL_FENCE
from holdfast.client.survival import torch_groups
from holdfast.client.survival.group_making_gate import await_ranks
from holdfast.client.survival.order_line import OrderLine
from holdfast.client.survival.survival_refusal import find_fixed_size, find_refusal
from holdfast.client.training.p2p_counts import find_counts
from holdfast.client.training.process_group_replay import GROUP_CALLS, GroupCall, list_groups
from holdfast.client.training.progress import here as progress
from holdfast.linux.regular_files import open_log
from holdfast.wire.progress_environment import KEEPER, PATIENCE, REHEARSAL, RESUME, SEATLESS, STANDING
from holdfast.wire.replay_environment import is_replay
from holdfast.wire.survivor_messages import SOCKET

if TYPE_CHECKING:
    from holdfast.client.elastic.pipeline import ElasticPipeline
    from holdfast.wire.rank_memory.slot_writer import SlotWriter

Result = TypeVar("Result")
_BROKEN = re.compile(r"gloo|\bpair\.cc|Connection (?:closed|reset)|Broken pipe", re.I)  # what broken groups raise


class Here(NamedTuple):
    """The argument of the function that survives: this rank, the world size, the generation, and the step that all
    ranks are to restore, 0 if there is none.

    >>> holdfast.Here(rank=1, world=4, generation=2, step=120).step
    120
    """

    rank: int
    world: int
    generation: int
    step: int


def survive(
    *,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    mesh: object = None,
    semantics: Literal["exact", "fp_order"] = "exact",
    rehearsal: Callable[[], object] | None = None,
    pipeline: "ElasticPipeline | None" = None,
) -> Callable[[Callable[[Here], Result]], Callable[[], Result]]:
    """Mark the training function: when another rank fails, it is interrupted and called again, in the same process.

    Make groups, `model` and `optimizer` before calling it; make and restore a Checkpointer inside it. All else that the
    function changes must be made inside it too, or be an extra of the Checkpointer. After an interruption, the
    gradients of `model` and of the parameters of `optimizer` (one or several) are dropped. `mesh` is as in `attach`.

    `semantics` is the least that a recovery must guarantee. "exact" means the bits of a run without failures.
    "fp_order" means the same samples in the same steps, but sums of floats in another order. With "fp_order", ranks
    also go on when a node is missing, if `--min-nodes` allows it, and when nodes come. The function is then called with
    another `here.rank` and `here.world`, and must give its ranks the same batch, as `holdfast.GlobalBatch` does.

    `rehearsal` makes one step like those of the function, with made-up samples and without the Checkpointer. A spare
    rank (`recovery.spares`) calls it while the job trains, so that its own first step is as fast as any other's. No
    other rank takes part, and the result is discarded. With `pipeline` the ranks hold the state and send it to one
    another in `pipeline.steps`; no Checkpointer is needed.

    >>> @holdfast.survive(model=torch.nn.Linear(2, 1))
    ... def train(here):
    ...     return here.rank
    >>> train()
    0
    """

    if semantics not in ("exact", "fp_order"):
        raise ValueError(f'semantics must be "exact" or "fp_order", not {semantics!r}')
    owners = [] if optimizer is None else list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    if strange := [type(one).__name__ for one in owners if not hasattr(one, "zero_grad")]:
        raise TypeError(f"optimizer must be an optimizer, or several, not {strange[0]}: it has no zero_grad")

    def decorate(function: Callable[[Here], Result]) -> Callable[[], Result]:
        @functools.wraps(function)
        def survivor() -> Result:
            if mesh is not None:
                progress.attach(mesh=mesh)
            any_size = semantics == "fp_order" or pipeline is not None
            script = Script(model, owners, any_size=any_size, carries=pipeline is not None, rehearsal=rehearsal)
            return run_surviving(script, function)

        return survivor

    return decorate


class Script(NamedTuple):
    """What a script has declared for ranks that survive, except the function that they run."""

    model: torch.nn.Module | None
    optimizers: list[Any]
    any_size: bool = False  # it goes on with any number of ranks
    carries: bool = False  # its state lives in its ranks
    rehearsal: Callable[[], object] | None = None


def run_surviving(script: Script, function: Callable[[Here], Result]) -> Result:
    """Call `function` until it returns: now, and after each failure that this rank survives."""
    model, any_size = script.model, script.any_size
    slot, patience_s = progress.find_slot(), float(os.environ.get(PATIENCE, "0"))
    if slot is None or is_replay() or not patience_s:
        return function(_read_place())
    made = list(GROUP_CALLS.made)
    holders = torch_groups.find_holders(list_groups(made)) if made else None
    if holders is None or (why := find_refusal(model, holders.unknown, list_groups(made))):
        reason = why if holders else "its process groups were made before holdfast could see it"
        if GROUP_CALLS.rehearses:
            raise RuntimeError(f"this rank cannot join others that went on: {reason}")
        _say_first(f"no rank survives the failure of another one: {reason}")
        return function(_read_place())
    if fixed := find_fixed_size(model, made) if any_size else "":
        _say_first(f"the number of ranks cannot change while they go on: {fixed}")
    WorldSizes.any = any_size and not fixed
    survivor = Survivor(script, holders, patience_s)
    del made  # groups that were left end with their last reference
    try:
        result = survivor.run(function, slot)
    finally:
        survivor.hang_up()
    survivor.retire()
    return result


def _say_first(sentence: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"holdfast: {sentence}", file=sys.stderr, flush=True)


def _read_place() -> Here:
    rank, world, step = (int(os.environ.get(*named)) for named in (("RANK", "0"), ("WORLD_SIZE", "1"), (RESUME, "0")))
    return Here(rank, world, current_generation(), step)


class Survivor:
    """Calls the function that survives once per generation, and makes its process groups again in between."""

    def __init__(self, script: Script, holders: torch_groups.GroupHolders, patience_s: float) -> None:
        self._model, self._optimizers, self._rehearsal = script.model, script.optimizers, script.rehearsal
        self._holders, self._patience_s, self._carries = holders, patience_s, script.carries
        self._line = OrderLine(Path(os.environ[KEEPER]).with_name(SOCKET), _break_off)
        self._slot: SlotWriter | None = None
        self._due = False  # groups are to be made again

    def run(self, function: Callable[[Here], Result], slot: "SlotWriter") -> Result:
        self._slot, SEAL_FENCE.armed = slot, True
        if (how := os.environ.get(REHEARSAL)) in (SEATLESS, STANDING):
            torch_groups.warm_gpu(self._model)
            if how == STANDING:
                import holdfast.client.checkpointing.checkpointer  # noqa: F401  the function will most likely want it

                self._rehearse()
            self._rejoin(self._line.wait_for_seat(_read_place().rank))
        elif GROUP_CALLS.rehearses:
            self._due = True
        while True:
            if self._due and not self._carries:
                self._regroup()
            self._announce()
            place = _read_place()
            self._line.enter(place.rank, place.generation)
            failure: BaseException | None = None
            try:
                try:
                    return self._call(function, place)
                finally:
                    self._line.leave()
            except BaseException as e:
                self._line.leave()  # again: the order to leave may have been raised in the first
                failure = e
            if not self._is_over(failure):
                raise failure
            if stuck := torch_groups.await_gpus(self._model, self._patience_s):
                _end_for_good(stuck)
            traceback.clear_frames(failure.__traceback__)  # what the function had is free for the next time
            del failure
            self._rejoin(self._line.park())

    def _call(self, function: Callable[[Here], Result], place: Here) -> Result:
        if self._due:
            self._regroup()
        return function(place)

    def _announce(self) -> None:
        """Tell the agent that this rank survives the failure of others, and whether its state stays in its memory."""
        if self._slot is None:
            return
        self._slot.mark_survives(True)
        if self._carries:
            self._slot.mark_carries()
        if self._carries and WorldSizes.any:
            self._slot.mark_resizes()

    def _rehearse(self) -> None:
        """Run the script's rehearsal of a step, in groups of this process alone. If the script needs a fixed number of
        ranks, the rehearsal uses fake groups; with DDP it is left out. A dead rank's state will later replace our
        state."""
        if self._rehearsal is None:
            return
        made = list(GROUP_CALLS.made)
        fixed = find_fixed_size(self._model, made)
        if fixed and torch_groups.has_ddp(self._model):  # whose sums do not end in fake groups
            print(f"holdfast: the step is not rehearsed: {fixed}", file=sys.stderr, flush=True)
            return
        if not fixed:
            torch_groups.forget_groups()
            self._bind_groups(made, alone=True)
        with torch_groups.unsaved_buffers(self._model), GROUP_CALLS.rehearsed_step():
            self._rehearsal()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        made = list(GROUP_CALLS.made)
        torch_groups.forget_groups()
        GROUP_CALLS.made[:] = made

    def hang_up(self) -> None:
        self._line.close()
        SEAL_FENCE.armed = False

    def retire(self) -> None:
        """Tell the agent that this rank no longer survives the failure of others. Call this when its function has
        returned, but not after an exception: the rank then ends by itself, and the other ranks survive its failure."""
        if self._slot is not None:
            self._slot.mark_survives(False)

    def _is_over(self, failure: BaseException) -> bool:
        """Return whether the function failed because its generation is over. Only a message of the agent tells. If a
        process group raised the error, wait a little for the message."""
        if isinstance(failure, SystemExit | KeyboardInterrupt):
            return False
        return self._line.was_told(self._patience_s if _is_broken_group(failure) else 0.0, failure)

    def _rejoin(self, env: dict[str, str]) -> None:
        os.environ.update(env)
        os.environ.pop(REHEARSAL, None)
        _move_output(Path(env["TORCHELASTIC_ERROR_FILE"]).parent)
        made = list(GROUP_CALLS.made)
        torch_groups.forget_groups()
        if (counts := find_counts()) is not None:
            counts.posted.clear()
        self._slot = progress.rejoin()
        GROUP_CALLS.made[:] = made
        SEAL_FENCE.lower()
        self._due = True

    def _regroup(self) -> None:
        """Make all process groups again, with all other ranks, in place of the old ones, and bind the model to them."""
        made = list(GROUP_CALLS.made)
        torch_groups.forget_groups()
        os.environ.pop(REHEARSAL, None)
        GROUP_CALLS.be_lenient()
        try:
            if self._carries:
                await_ranks()
            self._bind_groups(made)
            self._due = False
        finally:
            if self._due:  # another rank failed, or the order to leave has come: they are made in the next generation
                torch_groups.forget_groups()
                GROUP_CALLS.made[:] = made
        progress.on_group_teardown("")
        progress.on_group()

    def _bind_groups(self, made: list[GroupCall], *, alone: bool = False) -> None:
        """Make these groups in place of the old ones, bind the model to them, and drop all gradients."""
        shows = sys.excepthook
        self._holders.replace_groups(GROUP_CALLS.make_again(made, alone=alone))
        sys.excepthook = shows  # torch has put the rank before its lines when the first group was made
        if self._model is not None:
            torch_groups.bind_model(self._model)
        for optimizer in self._optimizers:
            optimizer.zero_grad()


def _break_off() -> None:
    """Forbid all further seals of snapshots; only then abort the collectives that are under way."""
    SEAL_FENCE.raise_fence()
    torch_groups.abort_groups()


def _end_for_good(why: str) -> NoReturn:
    """Print the reason and end this process at once. The agent will start another process for the next generation."""
    print(f"holdfast: this rank cannot go on in its process: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def _is_broken_group(failure: BaseException) -> bool:
    seen: BaseException | None = failure
    while seen is not None:
        if isinstance(seen, torch.distributed.DistError) or (
            isinstance(seen, RuntimeError) and _BROKEN.search(str(seen))
        ):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _move_output(folder: Path) -> None:
    """Redirect stdout and stderr to the log files of the next generation in `folder`."""
    for stream, number, name in ((sys.stdout, 1, "stdout.log"), (sys.stderr, 2, "stderr.log")):
        with suppress(OSError, ValueError):
            stream.flush()
            file = open_log(str(folder / name))
            os.dup2(file, number)
            os.close(file)
