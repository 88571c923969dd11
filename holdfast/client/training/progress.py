"""The calls of a training script: each takes microseconds, never raises, and does nothing without an agent.

Losses may be numbers or tensors. A CPU tensor is read at once. No call waits for a tensor on an accelerator: the tensor
is copied on the current stream, and a later call, a step or two late, reports it under its own step.
"""

import os
import sys

from holdfast.client.training.optimizer_steps_so_far import StepNumbers
from holdfast.client.training.phase_block import PhaseBlock
from holdfast.client.training.reported_numbers import MOST_STEP, MOST_WORK, is_on_host, read_amount, read_number
from holdfast.client.training.stderr_sentence import say
from holdfast.wire.progress_environment import EVERY, FLIGHT, GENERATION, SLOT, TOLD
from holdfast.wire.rank_memory.slot_writer import (
    SlotBusy,
    SlotWriter,
    claim_slot,
    open_own_slot,
)
from holdfast.wire.replay_environment import is_replay
from holdfast.wire.skip_ease_environment import EASE

TYPE_CHECKING = False  # importing typing would take longer than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from holdfast.client.training.gpu_losses import LossFetches
    from holdfast.client.training.inferred_resume_step import ReadWatch
    from holdfast.client.training.learning_rate_ease import LearningRateEase
    from holdfast.client.training.logged_losses import LoggedLosses
    from holdfast.client.training.parameter_hash import ParameterHash
    from holdfast.client.training.set_up_times import SetUpWatch
    from holdfast.client.training.update_norm import UpdateWatch

    Model = TypeVar("Model")


class RankProgress:
    """Reports the progress of this process to its node through the rank's slot."""

    def __init__(self) -> None:
        self._slot: SlotWriter | None = None
        self._sought = False  # the environment is looked at once
        self._claimed = self._refused = False  # whether this process makes the rank's steps, or another one does
        self._before = 0  # steps that were counted by a process of the rank that is gone
        self.numbers = StepNumbers()
        self._copies: LossFetches | None = None
        self._marking: ParameterHash | None = None
        self._watching: UpdateWatch | None = None
        self._easing: LearningRateEase | None = None
        self._on_first: Callable[[], None] | None = None
        self._set_up: SetUpWatch | None = None  # until the first step
        self.reads: ReadWatch | None = None  # what this rank reads up to its first step
        self.logged: LoggedLosses | None = None  # what the script's loggers get, where it reports no loss itself
        self.life = 0  # generations that this process was in before
        self._unread: set[str] = set()  # of what is told to `step`, what cannot be read; said once
        # Children are not the rank: what they say would overwrite what it said. Only the first that makes a step is,
        # where the rank itself has made none.
        os.register_at_fork(after_in_child=self._drop_slot)

    def attach(self, model: "Model" = None, replicas: object = None, mesh: object = None) -> "Model":  # type: ignore[assignment]
        """Start reporting; a DistributedDataParallel model also gets the same reduction layout in every generation.

        Call this on every rank, after wrapping the model and before the model's first backward pass. Returns the model.
        `replicas` names ranks whose parameters are compared now and then: True for all ranks, or a process group.
        Scripts with a Checkpointer need no such comparison. `mesh` names the parallel groups, unless --mesh does: a
        DeviceMesh over all ranks, or {"pp": 2, "dp": 4}. Megatron's groups are found without `mesh`.

        >>> model = holdfast.attach(torch.nn.Linear(2, 1))
        """
        try:
            if self.find_slot() is not None and (mesh is not None or "megatron.core.parallel_state" in sys.modules):
                from holdfast.client.training import mesh_report

                mesh_report.report_mesh(mesh)
            if self.find_slot() is not None and model is not None:
                self._fix_layout(model)
                if is_replay():
                    from holdfast.client.training.script_replay import sign_gradients

                    sign_gradients(model)
                if replicas:
                    self._start_hashing(model, None if replicas is True else replicas)
        except Exception as e:
            say(f"only part of the model was attached: {e!r}")
        return model

    def watch(self, optimizer: object, model: object = None) -> None:
        """Report how large the updates of an Adam-like optimizer are. This reads the optimizer's state at every step.

        With a DistributedDataParallel model, a communication hook also reports the norm of the rank's own gradient.

        >>> holdfast.watch(torch.optim.AdamW(torch.nn.Linear(2, 1).parameters()))
        """
        try:
            if self.find_slot() is not None:
                from holdfast.client.training.update_norm import UpdateWatch

                self._watching = UpdateWatch(optimizer, model)  # type: ignore[arg-type]
        except Exception as e:
            say(f"the optimizer is not watched: {e!r}")

    def step(
        self, step: int, loss: object = None, grad_norm: object = None, *, tokens: object = None, flops: object = None
    ) -> None:
        """Report that step number `step` is done, with its loss and gradient norm if given.

        `tokens` and `flops` are those of this step on all ranks together: pass the same number on every rank. They give
        tokens per second and MFU. With `tokens` alone, FLOPs are estimated from the optimizers' parameters.

        >>> for step in range(1, 4):
        ...     holdfast.step(step, loss=1 / step, grad_norm=0.5, tokens=8 * 1024)
        """
        try:
            slot = self._slot if self._claimed else self._claim_slot()
            if slot is None and self._easing is None:
                return
            if type(step) is not int:
                step = int(step) if is_on_host(step) else -1
            if not 0 <= step <= MOST_STEP:
                if step > 0:
                    self._say_once("step", f"step {step} is not reported: such a number has at most 53 bits")
                return
            if self._easing is not None:
                self._easing.done = step
            if slot is None:
                return
            self.numbers.told = step
            if self.logged is not None:
                self.logged.close() if loss is not None else self.logged.on_step(step)
            if self._copies is not None:
                self._copies.collect_arrived(slot)
            try:
                if tokens is not None or flops is not None:
                    slot.add_work(self._count_work(step, "tokens", tokens), self._count_work(step, "flops", flops))
                if loss is not None or grad_norm is not None or self._watching is not None:
                    self._note_values(slot, step, loss, grad_norm)
            except Exception:
                pass  # the step itself counts all the same
            if self._marking is not None:
                self._marking.on_step(slot, step)
            if self._set_up is not None:
                self._note_set_up(slot, self._set_up, trained=False)
            slot.step(step)
            if self._on_first is not None:
                self._call_on_first()
        except Exception:
            return  # whatever was passed, training goes on

    def count_steps(self, steps: int) -> None:
        """Report the number of steps that the optimizer hook has counted; ignored once the script reports its own."""
        self.numbers.counted = steps
        if self.numbers.told >= 0 or (slot := self._slot if self._claimed else self._claim_slot()) is None:
            return
        if self._copies is not None:
            self._copies.collect_arrived(slot)
        if self._set_up is not None:
            self._note_set_up(slot, self._set_up, trained=True)
        if steps == 1 and not self._before:
            slot.remember_first_step(steps, numbered=self.numbers.is_restored or os.environ.get(TOLD) != "1")
        else:
            slot.step(steps + self._before, counted=True)
            if self._on_first is not None:
                self._call_on_first()
        if self.logged is not None:
            self.logged.on_step(steps + self._before)

    def note_parameters(self, count: int) -> None:
        """Report how many parameters the script trains; 0 if that is not known."""
        slot = self._slot if self._claimed else self._claim_slot()
        if slot is not None:
            slot.note_parameters(count)

    def note_skipped_updates(self, count: int) -> None:
        """Report how many updates in a row a GradScaler has skipped."""
        slot = self._slot if self._claimed else self._claim_slot()
        if slot is not None:
            slot.note_skipped_updates(count)

    def note_logged(self, step: int, loss: object, grad_norm: object) -> None:
        """Report values that the script gave to its loggers, about a step that is done."""
        if self._claimed and (slot := self._slot) is not None:
            self._note_values(slot, step, loss, None if self._watching is not None else grad_norm)
            slot.show_values()

    def goes_on_from(self, step: int, *, made_up: bool) -> None:
        """Report how many steps the job had made before this rank's first counted step; -1 if unknown. If a restored
        state had a count, that count is reported instead. `made_up` says that the optimizer counts one step too many.
        This call has no effect if another process of this rank has already counted steps."""
        slot = self._slot if self._claimed else self._claim_slot()
        if slot is not None and not self._before:
            slot.resume_from(self.numbers.go_on_from(step), made_up=made_up)

    def phase(self, name: str) -> PhaseBlock:
        """Report that the rank is in phase `name`. In a `with` statement, the phase ends with the block.

        >>> with holdfast.phase("eval"):
        ...     accuracy = 0.5
        """
        try:
            slot = self.find_slot()
            before = slot.phase if slot else ""
            if slot:
                slot.enter_phase(str(name))
            return PhaseBlock(slot, before)
        except Exception:
            return PhaseBlock(None, "")

    def is_astray(self) -> bool:
        """Return whether the last loss that the script reported is infinite or NaN."""
        slot = self._slot or self.find_slot()
        return slot is not None and slot.is_loss_bad

    def announce_step(self, step: int) -> None:
        """Note that the script is about to make this step, or to skip it."""
        if self._easing is not None:
            self._easing.at = step

    def on_group(self) -> None:
        """Report that the rank has its process group."""
        if (slot := self._slot or self.find_slot()) is not None:
            slot.mark_grouped()

    def on_restored(self, step: int, took_s: float, made: int = -1) -> None:
        """Report that the rank has restored `step` (0: none), with the state's count of optimizer steps (-1:
        unknown)."""
        self.numbers.on_restored(made)
        if (slot := self._slot or self.find_slot()) is not None:
            slot.mark_restored(took_s, step)
        if self._easing is not None:
            self._easing.done = step

    def on_returned(self) -> None:
        """Report that the script has ended well."""
        if (slot := self._last_slot()) is not None:
            slot.mark_returned()

    def on_group_teardown(self, ending: str) -> None:
        """Report that the script destroys a process group ("parting"), has none left ("parted") or has groups ("")."""
        if self._slot is not None:
            self._slot.mark_parting(ending)

    def record_failure(self, text: str) -> None:
        """Report the failure that ends the rank."""
        if (slot := self._last_slot()) is not None:
            slot.write_failure(text)

    def _last_slot(self) -> SlotWriter | None:
        """Return the slot in which to report the rank's end, opening it if need be; None if there is no slot."""
        try:
            return self._slot if self._sought else open_own_slot(os.environ)
        except (OSError, ValueError):
            return None

    def begin_rank(self, on_first: "Callable[[], None] | None" = None) -> SlotWriter | None:
        """Read the environment again in a freshly forked rank; `on_first` is called at its first step."""
        self._sought, self._on_first = False, on_first
        slot, generation = self.find_slot(), int(os.environ.get(GENERATION, "0"))
        if slot is not None and generation > 1:
            from holdfast.client.training import inferred_resume_step

            self.reads = inferred_resume_step.watch_reads(os.environ)
            self._on_first = inferred_resume_step.stop_at_first_step(self.reads, self._on_first)
        return slot

    def begin_child(self) -> None:
        """Prepare a spawned child that may make the rank's steps. Assume that it has read saved state."""
        if int(os.environ.get(GENERATION, "0")) > 1:
            from holdfast.client.training import inferred_resume_step

            self.reads = inferred_resume_step.ReadWatch(0.0)
            self.reads.lose()

    def rejoin(self) -> SlotWriter | None:
        """Start reporting for the generation that the environment names now. Called in a rank that has survived."""
        self.life, self._before, self._copies = self.life + 1, 0, None
        self._sought = self._claimed = self._refused = self._told = False
        self.begin_child()
        return self.find_slot()

    def _call_on_first(self) -> None:
        on_first, self._on_first = self._on_first, None
        if on_first is not None:
            on_first()

    def find_slot(self) -> SlotWriter | None:
        """Return this rank's slot; None without an agent, and in children of the rank."""
        if self._sought:
            return self._slot
        self._sought = True
        self.seek_groups()
        try:
            self._slot = open_own_slot(os.environ)
        except (OSError, ValueError):
            self._slot = None
        if self._slot is not None and is_replay():
            from holdfast.client.training.script_replay import guard_first_step

            self._on_first = guard_first_step(self._on_first)
        if os.environ.get(EASE):
            self._install_ease(os.environ[EASE])
        if self._slot is not None and FLIGHT in os.environ:
            from holdfast.client.training import rank_flight_recorder

            self._set_up = rank_flight_recorder.start_recorder(
                os.environ[FLIGHT],
                int(os.environ.get(GENERATION, "0")),
                int(os.environ.get("RANK", "0")),
                os.environ[SLOT],
            )
        return self._slot

    def _note_set_up(self, slot: SlotWriter, watch: "SetUpWatch", *, trained: bool) -> None:
        self._set_up = None
        slot.note_set_up(*watch.close(trained=trained))

    def _claim_slot(self) -> SlotWriter | None:
        """Claim the slot at a process's first step; return None if another process makes the rank's steps."""
        mine = self.find_slot()
        place = os.environ.get(SLOT, "")
        if self._refused or not place:
            return None
        path, _, index = place.rpartition(":")
        try:
            slot = claim_slot(path, int(index), int(os.environ.get(GENERATION, "0")), mine)
        except SlotBusy:
            return None  # the next step asks again
        except (OSError, ValueError):
            slot = None
        if slot is None:
            self._refused = True
            return None
        self._slot, self._claimed, self._before = slot, True, slot.counted_steps
        return slot

    def _drop_slot(self) -> None:
        self._slot, self._sought, self._copies, self._on_first = None, True, None, None
        self._claimed = self._refused = False
        self._marking = self._watching = self._easing = self._set_up = None

    def _install_ease(self, told: str) -> None:
        try:
            from holdfast.client.training.learning_rate_ease import LearningRateEase

            self._easing = self._easing or LearningRateEase(told)
        except (ImportError, ValueError) as e:
            say(f"the learning rate is not eased, because {EASE}={told} is invalid: {e}")

    def seek_groups(self) -> None:
        """Install the hooks of process groups if torch is loaded; a zygote may have installed them already."""
        if SLOT in os.environ and "torch.distributed.distributed_c10d" in sys.modules:
            from holdfast.client.training import process_group_lifecycle

            process_group_lifecycle.report_groups(self.on_group, self.on_group_teardown)

    def _note_values(self, slot: SlotWriter, step: int, loss: object, grad_norm: object) -> None:
        own_norm = update = None
        loss, grad_norm = self._local_value(step, "loss", loss), self._local_value(step, "grad_norm", grad_norm)
        if self._watching is not None:
            own_norm, update = self._watching.own_norm, self._watching.update
            grad_norm = self._watching.norm if grad_norm is None else grad_norm
        if is_on_host(loss) and is_on_host(grad_norm) and is_on_host(update):
            slot.write_values(
                step, read_number(loss), read_number(grad_norm), read_number(own_norm), read_number(update)
            )
            return
        if self._copies is None:
            from holdfast.client.training.gpu_losses import LossFetches

            self._copies = LossFetches()
        self._copies.start_fetch(step, loss, grad_norm, own_norm, update)

    def _count_work(self, step: int, name: str, value: object) -> float:
        """Return the amount of work as a number; 0 if it is no valid amount, or if reading it would wait for a GPU."""
        if (amount := read_amount(value)) is None:
            why = f"pass a plain number, at most {MOST_WORK:g}, not {value!r:.80}"
            self._say_once(name, f"the {name} of step {step} are not counted: {why}")
        return amount or 0.0

    def _say_once(self, name: str, sentence: str) -> None:
        if name not in self._unread:
            self._unread.add(name)
            say(sentence)

    def _local_value(self, step: int, name: str, value: object) -> object:
        """Return the local tensor of a DTensor if every rank holds the whole value, else None; never gathers."""
        if not hasattr(value, "device_mesh"):
            return value
        if all(placement.is_replicate() for placement in value.placements):  # type: ignore[attr-defined]
            return value.to_local()  # type: ignore[attr-defined]
        if not (name == "grad_norm" and self._watching is not None):
            also = ", or call holdfast.watch(optimizer)" if name == "grad_norm" else ""
            mend = f"pass {name}.full_tensor(){also}"
            self._say_once(name, f"the {name} of step {step} is not checked: each rank has only a part of it; {mend}")
        return None

    def _start_hashing(self, model: object, group: object) -> None:
        from holdfast.client.training.parameter_hash import ParameterHash

        every = int(os.environ.get(EVERY, "0"))
        self._marking = ParameterHash(model.parameters(), group, every) if every else None  # type: ignore[attr-defined, arg-type]

    def _fix_layout(self, model: object) -> None:
        if "torch.nn.parallel.distributed" in sys.modules:
            from holdfast.client.training.fixed_ddp_buckets import fix_buckets

            fix_buckets(model)


here = RankProgress()
