"""The verbs of a training script: each returns in microseconds, never raises, and does nothing without an agent.

Losses may be numbers or tensors. A tensor on the CPU is read at once. One on an accelerator is never waited for: it is
copied on the current stream and reported by a later call, so it shows a step or two late, under its own step.
"""

import os
import sys

from holdfast.wire.record import RING_AT, SLOT_BYTES, Busy, Slot, claim, lives, newest, open_arena, owner, was_claimed
from holdfast.wire.replaying import is_replay
from holdfast.wire.skipping import EASE

TYPE_CHECKING = False  # importing typing would take longer than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from holdfast.client.device import Copies
    from holdfast.client.easing import Easing
    from holdfast.client.marking import Marking
    from holdfast.client.origin import Reads
    from holdfast.client.watching import Watching

    Model = TypeVar("Model")

SLOT = "HOLDFAST_SLOT"  # "<path of the arena>:<index>"
GENERATION = "HOLDFAST_GENERATION"
EVERY = "HOLDFAST_REPLICA_EVERY"  # steps between comparisons of replicas
FLIGHT = "HOLDFAST_FLIGHT"  # "<path of the arena>:<where the flight log begins>"


class Progress:
    """What this process tells its node."""

    def __init__(self) -> None:
        self._slot: Slot | None = None
        self._sought = False  # the environment is looked at once
        self._claimed = self._refused = False  # whether this process makes the rank's steps, or another one does
        self._before = 0  # steps that were counted by a process of the rank that is gone
        self._told = False  # the script tells its steps itself
        self._copies: Copies | None = None
        self._marking: Marking | None = None
        self._watching: Watching | None = None
        self._easing: Easing | None = None
        self._on_first: Callable[[], None] | None = None
        self.reads: Reads | None = None  # what this rank reads up to its first step
        self._unread: set[str] = set()  # of what is told to `step`, what cannot be read; said once
        # Children are not the rank: what they say would overwrite what it said. Only the first that makes a step is,
        # where the rank itself has made none.
        os.register_at_fork(after_in_child=self._leave)

    def attach(self, model: "Model" = None, replicas: object = None, mesh: object = None) -> "Model":  # type: ignore[assignment]
        """Report from here on; a DistributedDataParallel model gets the same reduction layout in every generation.

        Call it on every rank, after wrapping the model and before its first backward pass. Returns the model. With
        `replicas` (True for all ranks, or a process group) parameters are compared with those of these ranks now and
        then; with a Checkpointer that is done without it, and without the rank. `mesh` tells the parallel groups, where
        --mesh does not: a DeviceMesh over all ranks, or {"pp": 2, "dp": 4}; those of Megatron are found without it.

        >>> model = holdfast.attach(torch.nn.Linear(2, 1))
        """
        try:
            if self.slot() is not None and (mesh is not None or "megatron.core.parallel_state" in sys.modules):
                from holdfast.client import topology

                topology.tell(mesh)
            if self.slot() is not None and model is not None:
                self._fix_layout(model)
                if is_replay():
                    from holdfast.client.replaying import sign_gradients

                    sign_gradients(model)
                if replicas:
                    self._mark(model, None if replicas is True else replicas)
        except Exception as e:
            print(f"holdfast: the model was not wholly attached: {e!r}", file=sys.stderr)
        return model

    def watch(self, optimizer: object, model: object = None) -> None:
        """Have updates of this optimizer (Adam or its kin) judged, too: a pass over its state at every step.

        With a DistributedDataParallel model also the norm of the rank's own gradient, which takes a communication hook.

        >>> holdfast.watch(torch.optim.AdamW(torch.nn.Linear(2, 1).parameters()))
        """
        try:
            if self.slot() is not None:
                from holdfast.client.watching import Watching

                self._watching = Watching(optimizer, model)  # type: ignore[arg-type]
        except Exception as e:
            print(f"holdfast: the optimizer is not watched: {e!r}", file=sys.stderr)

    def step(self, step: int, loss: object = None, grad_norm: object = None) -> None:
        """Step number `step` is done, with this loss and this gradient norm, if they are told.

        >>> for step in range(1, 4):
        ...     holdfast.step(step, loss=1 / step, grad_norm=0.5)
        """
        try:
            slot = self._slot if self._claimed else self._claim()
            if slot is None and self._easing is None:
                return
            if type(step) is not int:
                step = int(step) if _is_here(step) else -1
            if not 0 <= step < 1 << 63:
                return
            if self._easing is not None:
                self._easing.done = step
            if slot is None:
                return
            self._told = True
            if self._copies is not None:
                self._copies.collect(slot)
            if loss is not None or grad_norm is not None or self._watching is not None:
                try:
                    self._note(slot, step, loss, grad_norm)
                except Exception:
                    pass  # the step itself counts all the same
            if self._marking is not None:
                self._marking.step(slot, step)
            slot.step(step)
            if self._on_first is not None:
                self._first()
        except Exception:
            return  # whatever was passed, training goes on

    def count(self, steps: int) -> None:
        """The optimizer hook has seen this many steps; superseded for good once the script tells its own."""
        if self._told or (slot := self._slot if self._claimed else self._claim()) is None:
            return
        if steps == 1 and not self._before:
            slot.hold(steps)
        else:
            slot.step(steps + self._before, counted=True)
            if self._on_first is not None:
                self._first()

    def goes_on_from(self, step: int) -> None:
        """So many steps were made before the first that is counted; -1: nobody knows. Shown with the next.

        A process that goes on for another one of its rank does not know.
        """
        slot = self._slot if self._claimed else self._claim()
        if slot is not None and not self._before:
            slot.goes_on_from(step)

    def phase(self, name: str) -> "Phase":
        """The rank is in phase `name` from now on; as a context manager, until the block ends.

        >>> with holdfast.phase("eval"):
        ...     accuracy = 0.5
        """
        try:
            slot = self.slot()
            before = slot.phase if slot else ""
            if slot:
                slot.enter(str(name))
            return Phase(slot, before)
        except Exception:
            return Phase(None, "")

    def astray(self) -> bool:
        """Whether the newest loss that the script told of is not finite."""
        slot = self._slot or self.slot()
        return slot is not None and slot.astray

    def asked(self, step: int) -> None:
        """The script is about to make this step, or to leave it out."""
        if self._easing is not None:
            self._easing.at = step

    def grouped(self) -> None:
        """The rank has its process group."""
        if (slot := self._slot or self.slot()) is not None:
            slot.grouped()

    def restored(self, step: int) -> None:
        """The rank has the state of this step, or knows that there is none."""
        if (slot := self._slot or self.slot()) is not None:
            slot.restored()
        if self._easing is not None:
            self._easing.done = step

    def returned(self) -> None:
        """The script is over, and well."""
        if (slot := self._last_slot()) is not None:
            slot.returned()

    def parting(self, begins: bool) -> None:
        """The script takes its process groups apart, or has done so."""
        if self._slot is not None:
            self._slot.parting(begins)

    def fail(self, text: str) -> None:
        """The rank ends by this failure."""
        if (slot := self._last_slot()) is not None:
            slot.fail(text)

    def _last_slot(self) -> Slot | None:
        """At the end, whether or not the script has ever told anything."""
        try:
            return self._slot if self._sought else _open(os.environ)
        except (OSError, ValueError):
            return None

    def begin(self, on_first: "Callable[[], None] | None" = None) -> Slot | None:
        """Look at the environment anew, as a rank that was just forked must; `on_first` is called at its first step."""
        self._sought, self._on_first = False, on_first
        slot, generation = self.slot(), int(os.environ.get(GENERATION, "0"))
        if slot is not None and generation > 1:
            from holdfast.client import origin

            self.reads = origin.watch(os.environ)
            self._on_first = origin.until_first(self.reads, self._on_first)
        return slot

    def begin_child(self) -> None:
        """In a child of a rank that was started afresh, whose steps may be the rank's: what it reads nobody sees."""
        if int(os.environ.get(GENERATION, "0")) > 1:
            from holdfast.client import origin

            self.reads = origin.Reads(0.0)
            self.reads.lose()

    def _first(self) -> None:
        on_first, self._on_first = self._on_first, None
        if on_first is not None:
            on_first()

    def slot(self) -> Slot | None:
        """This rank's slot; None without an agent, and in children of the rank."""
        if self._sought:
            return self._slot
        self._sought = True
        self.seek_groups()
        try:
            self._slot = _open(os.environ)
        except (OSError, ValueError):
            self._slot = None
        if self._slot is not None and is_replay():
            from holdfast.client.replaying import guard

            self._on_first = guard(self._on_first)
        if os.environ.get(EASE):
            self._ease(os.environ[EASE])
        if self._slot is not None and FLIGHT in os.environ:
            from holdfast.client import flight

            flight.start(os.environ[FLIGHT], int(os.environ.get(GENERATION, "0")), int(os.environ.get("RANK", "0")))
        return self._slot

    def _claim(self) -> Slot | None:
        """The slot, for a process of the rank that makes its first step; None if another makes the rank's steps."""
        mine = self.slot()
        place = os.environ.get(SLOT, "")
        if self._refused or not place:
            return None
        path, _, index = place.rpartition(":")
        try:
            slot = claim(path, int(index), int(os.environ.get(GENERATION, "0")), mine)
        except Busy:
            return None  # the next step asks again
        except (OSError, ValueError):
            slot = None
        if slot is None:
            self._refused = True
            return None
        self._slot, self._claimed, self._before = slot, True, slot.counted
        return slot

    def _leave(self) -> None:
        self._slot, self._sought, self._copies, self._on_first = None, True, None, None
        self._claimed = self._refused = False
        self._marking = self._watching = self._easing = None

    def _ease(self, told: str) -> None:
        try:
            from holdfast.client.easing import Easing

            self._easing = self._easing or Easing(told)
        except (ImportError, ValueError) as e:
            print(f"holdfast: the learning rate is not eased, as {EASE}={told} asks for: {e}", file=sys.stderr)

    def seek_groups(self) -> None:
        """Where no zygote has seen to it: be told when this rank has its process group."""
        if SLOT in os.environ and "torch.distributed.distributed_c10d" in sys.modules:
            from holdfast.client import hook

            hook.tell_groups()

    def _note(self, slot: Slot, step: int, loss: object, grad_norm: object) -> None:
        own_norm = update = None
        loss, grad_norm = self._readable(step, "loss", loss), self._readable(step, "grad_norm", grad_norm)
        if self._watching is not None:
            own_norm, update = self._watching.own_norm, self._watching.update
            grad_norm = self._watching.norm if grad_norm is None else grad_norm
        if _is_here(loss) and _is_here(grad_norm) and _is_here(update):
            slot.note(step, _number(loss), _number(grad_norm), _number(own_norm), _number(update))
            return
        if self._copies is None:
            from holdfast.client.device import Copies

            self._copies = Copies()
        self._copies.start(step, loss, grad_norm, own_norm, update)

    def _readable(self, step: int, name: str, value: object) -> object:
        """What is here of a distributed tensor, if that is all of it: asking the others would have them waited for."""
        if not hasattr(value, "device_mesh"):
            return value
        if all(placement.is_replicate() for placement in value.placements):  # type: ignore[attr-defined]
            return value.to_local()  # type: ignore[attr-defined]
        if name not in self._unread and not (name == "grad_norm" and self._watching is not None):
            self._unread.add(name)
            also = ", or have it seen by holdfast.watch(optimizer)" if name == "grad_norm" else ""
            print(
                f"holdfast: the {name} of step {step} is not judged: each rank has a part of it; "
                f"tell {name}.full_tensor(){also}",
                file=sys.stderr,
            )
        return None

    def _mark(self, model: object, group: object) -> None:
        from holdfast.client.marking import Marking

        every = int(os.environ.get(EVERY, "0"))
        self._marking = Marking(model.parameters(), group, every) if every else None  # type: ignore[attr-defined, arg-type]

    def _fix_layout(self, model: object) -> None:
        if "torch.nn.parallel.distributed" in sys.modules:
            from holdfast.client.layout import fix

            fix(model)


class Phase:
    """What `phase` returns, so that `with` can end it."""

    def __init__(self, slot: Slot | None, before: str) -> None:
        self._slot = slot
        self._before = before

    def __enter__(self) -> None:
        return

    def __exit__(self, *exc: object) -> None:
        if self._slot is not None:
            self._slot.enter(self._before)


def _open(environ: "os._Environ[str]") -> Slot | None:
    place = environ.get(SLOT)
    if not place:
        return None
    path, _, number = place.rpartition(":")
    index, generation, rank = int(number), int(environ.get(GENERATION, 0)), int(environ.get("RANK", 0))
    arena = open_arena(path)
    image = arena[index * SLOT_BYTES : (index + 1) * SLOT_BYTES]
    if len(image) < SLOT_BYTES:
        raise ValueError(f"{place} has no slot {index}")
    before = newest(image[:RING_AT])
    told = owner(before) if before else (0, 0, 0)
    if before and told[0] == generation and told[2] != os.getpid() and (was_claimed(before) or lives(told[2])):
        return None  # the environment is inherited; this is some child of the rank
    return Slot(arena, index, generation=generation, rank=rank)


def _is_here(value: object) -> bool:
    """Whether the value can be read without waiting for a device."""
    if value is None or type(value) is float or type(value) is int:
        return True
    return str(getattr(value, "device", "cpu")) == "cpu"


def _number(value: object) -> float | None:
    if value is None:
        return None
    return float(value.item() if hasattr(value, "item") else value)  # type: ignore[arg-type]


here = Progress()
