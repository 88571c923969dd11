"""Fleet of nodes on Slurm: one Slurm job for the first nodes, and one more for each node that replaces another.

A node is a named step of its Slurm job, so that Slurm can end it alone. The job itself only keeps its hosts."""

import asyncio
import logging
import shlex
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.controller_interfaces import FleetRefusal
from holdfast.fleet import slurm_node_file, slurm_node_presence
from holdfast.fleet.local_process_fleet import MARK
from holdfast.fleet.slurm_commands import ClusterView, SlurmCommands, is_alive, split_exclusions
from holdfast.fleet.slurm_node_presence import NodeRecord, judge_node, step_name
from holdfast.journal.lease_term import no_lease
from holdfast.model.action import Dismissal
from holdfast.model.fleet_node_reports import FleetNode, FleetState
from holdfast.model.observation import Departure
from holdfast.wire import run_and_node_specs

FOLDER = "slurm"  # of the run directory, and of what nodes keep: their hosts see the same file system
_log = logging.getLogger(__name__)
_SOON_S, _STEADY_S = 2.0, 10.0  # between surveys while nodes are on their way, and else
_MOST_QUEUED = 8  # jobs that wait for single nodes; Slurm's queue is for others, too
_END_S = 60.0  # for Slurm to confirm the end of a step
_LOOK_S = 0.5
_SWEEP_S = 60.0
_BEAT_S = 15
_LAST_S = 900.0  # before the end of the controller's own allocation no more nodes are asked for, if it is a long one
_AVOIDED = (Dismissal.EVICTED, Dismissal.LATE)  # an idle host would be given again

# The job's own script. It keeps the hosts while somebody writes the beat, and so ends soon after its controller.
_KEEPER = """#!/bin/sh
left={times}
while [ "$left" -gt 0 ]; do
    now=$(cat {beat} 2>/dev/null)
    if [ "$now" = "$seen" ]; then left=$((left - 1)); else seen=$now; left={times}; fi
    sleep {beat_s}
done
"""


class SlurmPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A run's settings for Slurm, such as flags, allocation and time limits."""

    run_id: str
    flags: tuple[str, ...] = ()  # further flags of `sbatch`, the user's
    allocation: int = 0  # a job whose hosts are used first; 0: there is none
    drain: bool = False  # whether hosts of evicted nodes are drained
    lost_s: float = 1800.0  # without a controller this long, nodes leave
    leave_s: float = 5.0  # for a node that was told to leave, before Slurm ends it
    starts: tuple[str, ...]  # the command that starts a node; its name follows


class SlurmFleet:
    can_acquire = True

    def __init__(
        self,
        run_dir: Path,
        plan: SlurmPlan,
        env: Mapping[str, str],
        mint: Callable[[str], str],
        epoch: Callable[[], int],
    ) -> None:
        """Read the records of this run's nodes. `mint` returns the token with which a node of a given name joins.
        `epoch` returns this controller's number, and raises if another controller acts by now; threads call it."""
        self._epoch = epoch
        self.survey_s = _SOON_S
        self._dir, self._plan, self._env, self._mint = run_dir / FOLDER, plan, dict(env), mint
        self._dir.mkdir(parents=True, exist_ok=True)
        self._commands = SlurmCommands(env, str(self._dir), before_change=epoch)
        self._writing, self._starting = threading.Lock(), threading.Lock()
        self._store(slurm_node_file.read_records(self._dir).nodes)  # with our epoch: no earlier controller starts steps
        self._own_end_at = 0.0  # of the allocation that the controller is in; 0: there is none, or it has no end
        self._own_ending = ""  # why that is, if it is not its time limit
        self._own_last_s = 0.0  # before that end no more nodes are asked for; half of it, if it is near at first sight
        self._swept_at = -_SWEEP_S
        self._submitting: set[str] = set()  # nodes whose jobs are being asked for
        self._unanswered = {name for name, record in self._records.items() if not record.job}
        self._excluded = {one.host for one in self._records.values() if one.cause in _AVOIDED and one.host}

    def nodes(self) -> tuple[str, ...]:
        return tuple(name for name, record in self._records.items() if not record.released)

    def departures(self) -> tuple[Departure, ...]:
        found = []
        for node in self.nodes():
            for path in self._dir.glob(f"{node}-*/nodes/{node}/departure.json"):
                try:
                    found.append(run_and_node_specs.read_json(path, Departure))
                except (OSError, msgspec.DecodeError):
                    continue  # a torn one is none
        return tuple(found)

    # --- acquire ------------------------------------------------------------------------------------------------

    async def acquire(self, count: int, evicted: Collection[str] = ()) -> tuple[str, ...]:
        return await asyncio.to_thread(self._acquire_nodes, count)  # without all hosts that nodes have now

    def _acquire_nodes(self, count: int) -> tuple[str, ...]:
        self.survey_s = _SOON_S
        if self._own_end_at and time.time() > self._own_end_at - self._own_last_s:
            raise OSError(f"job {self._plan.allocation}, in which the controller runs, is about to end")
        lent = self._take_lent_hosts(count)
        missing = count - len(lent)
        together = missing > 1 and not lent and all(record.released for record in self._records.values())
        most = missing if together else min(missing, _MOST_QUEUED - self._count_queued())
        names = self._new_names(max(0, most))
        if together:
            return self._submit(names)
        return (*lent, *self._submit_each(names, bool(lent)))

    def _take_lent_hosts(self, count: int) -> tuple[str, ...]:
        """Make nodes on hosts of the user's own allocation that have no node of ours yet."""
        job = self._plan.allocation
        if not job or not count:
            return ()
        view = self._commands.look([job], ())
        if job not in view.jobs or not view.jobs[job].is_running:
            return ()
        used = {record.host for record in self._records.values() if not record.released} | self._excluded
        answering = {name for name, host in view.hosts.items() if host.answers}
        free = [host for host in view.jobs[job].hosts if host in answering - used][:count]
        names = self._new_names(len(free))
        self._add({name: NodeRecord(job=job, lent=True, host=host) for name, host in zip(names, free, strict=True)})
        return names

    def _new_names(self, count: int) -> tuple[str, ...]:
        first = max((int(name[1:]) for name in self._records), default=-1) + 1
        return tuple(f"n{number}" for number in range(first, first + count))

    def _submit_each(self, names: tuple[str, ...], some: bool) -> tuple[str, ...]:
        """Submit one Slurm job per node, and return the nodes that have one. If Slurm refuses a job, the jobs before it
        stay. Raise OSError if there are none, unless `some` nodes have a job already."""
        asked: list[str] = []
        for name in names:
            try:
                asked += self._submit((name,))
            except OSError as e:
                if not asked and not some:
                    raise
                _log.warning("no job for %s: %s", name, e)
                break
        return tuple(asked)

    def _submit(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Write the nodes' records, so that the next controller finds the job. Then submit one Slurm job for all."""
        if not names:
            return ()
        job_name = f"holdfast-{self._plan.run_id}-{names[0]}"
        self._submitting.update(names)
        self._add({name: NodeRecord(job_name=job_name, order=order) for order, name in enumerate(names)})
        try:
            job = self._commands.submit(self._job_flags(job_name, len(names)), self._keeper_script())
            self._change({name: {"job": job} for name in names})
        except FleetRefusal:
            self._forget(names)
            raise
        except OSError:
            job = self._find_job(job_name)  # it may have arrived, whatever we heard
            if not job:
                self._forget(names)
                raise
            self._change({name: {"job": job} for name in names})
        finally:
            self._submitting.difference_update(names)
        return names

    def _find_job(self, name: str) -> int:
        try:
            return self._commands.find_job(name)
        except OSError:
            return 0

    def _job_flags(self, name: str, nodes: int) -> list[str]:
        own, avoided = split_exclusions(self._plan.flags)
        avoided |= self._excluded | {record.host for record in self._records.values() if not record.released}
        flags = ["--no-kill", "--no-requeue", f"--output={self._dir}/job-%j.log", *own]
        flags += [f"--chdir={self._dir}", f"--job-name={name}", f"--nodes={nodes}", "--ntasks-per-node=1"]
        return [*flags, *([f"--exclude={','.join(sorted(filter(None, avoided)))}"] if any(avoided) else [])]

    def _keeper_script(self) -> str:
        times = int(self._plan.lost_s / _BEAT_S) + 4
        return _KEEPER.format(times=times, beat=shlex.quote(str(self._dir / "beat")), beat_s=_BEAT_S)

    # --- survey -------------------------------------------------------------------------------------------------

    async def survey(self) -> dict[str, FleetNode]:
        view = await asyncio.to_thread(self._look)
        for name in self._startable(view):
            token = self._mint(name)
            await asyncio.to_thread(self._start_step, name, token)
        found = await asyncio.to_thread(self._judge_all, view)
        coming = any(node.state in (FleetState.QUEUED, FleetState.STARTING) for node in found.values())
        self.survey_s = _SOON_S if coming else _STEADY_S
        return found

    def _look(self) -> ClusterView:
        self._check_newest()
        run_and_node_specs.publish_file(self._dir / "beat", str(time.time()).encode())
        for name in [name for name in self._unanswered if name in self._records]:
            self._change({name: {"job": self._commands.find_job(self._records[name].job_name)}})
            self._unanswered.discard(name)
        if time.monotonic() > self._swept_at + _SWEEP_S:
            self._cancel_strays()
        live = {name: record for name, record in self._records.items() if not record.released}
        jobs = {record.job for record in live.values()} | {self._plan.allocation}
        view = self._commands.look(filter(None, jobs), (record.host for record in live.values() if record.host))
        if own := view.jobs.get(self._plan.allocation):
            self._own_end_at, self._own_ending = own.ends_at, own.ending
            self._own_last_s = self._own_last_s or max(1.0, min(_LAST_S, (own.ends_at - time.time()) / 2))
        used = {record.host for record in live.values()}
        found = {name: self._news_of(name, record, view, used) for name, record in live.items()}
        self._change({name: news for name, news in found.items() if news})
        return view

    def _cancel_strays(self) -> None:
        """Cancel jobs of this run that no record tells of: Slurm took them after we had given up asking for them."""
        self._swept_at = time.monotonic()
        jobs = self._commands.find_jobs()
        for job in slurm_node_presence.find_strays(jobs, self._records.values()):
            _log.warning("job %d (%s) came after it was given up; it is cancelled", job, jobs[job])
            self._commands.cancel(str(job))

    def _news_of(self, name: str, record: NodeRecord, view: ClusterView, used: set[str]) -> dict[str, Any]:
        """Return those fields of a node's record that Slurm's answers change, such as its host or its place."""
        job, news = view.jobs.get(record.job), dict[str, Any]()
        if job is not None and job.is_running and not record.host and record.order < len(job.hosts):
            host = job.hosts[record.order]
            news |= {"host": host, "doubled": host in used}
            used.add(host)
        if not record.seen and view.find_step(record.job, step_name(name)):
            news["seen"] = True
        if not record.cut_off and slurm_node_presence.is_cut_off(record, view):
            news["cut_off"] = True
        if record.seen and not record.near and (place := self._read_place(name)):
            news["near"] = place
        return news

    def _read_place(self, node: str) -> tuple[str, ...]:
        """Return the node's own report of its place in the network's tree: the switches from the top down."""
        try:
            return tuple((self._dir / f"{node}.topology").read_text(encoding="utf-8").split(".")[:-1])
        except (OSError, UnicodeDecodeError):
            return ()

    def _startable(self, view: ClusterView) -> list[str]:
        return [
            name
            for name, record in self._records.items()
            if not (record.released or record.srun or record.doubled)
            and record.host
            and record.job in view.jobs
            and view.jobs[record.job].is_running
            and record.host in view.jobs[record.job].hosts
        ]

    def _start_step(self, node: str, token: str) -> None:
        with self._starting:  # one that is given back meanwhile is started, or will never be
            if not self._records[node].released:
                self._check_newest()
                self._change({node: {"srun": self._run_step(node, token)}})

    def _run_step(self, node: str, token: str) -> int:
        record = self._records[node]
        log = str(self._dir / f"{node}.log")
        words = [f"--jobid={record.job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={record.host}"]
        words += [f"--job-name={step_name(node)}", f"--output={log}", "--open-mode=append", "--input=none"]
        words += ["--mem=0", "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", "--export=ALL"]
        env = {**self._env, MARK: self._mark(node), "HOLDFAST_TOKEN": token}
        return self._commands.start_step([*words, *self._plan.starts, node], env, log)

    def _mark(self, node: str) -> str:
        return str(self._dir / node)

    def _is_launching(self, node: str, record: NodeRecord) -> bool:
        return node in self._submitting or (record.srun > 0 and is_alive(record.srun, f"{MARK}={self._mark(node)}"))

    def _judge_all(self, view: ClusterView) -> dict[str, FleetNode]:
        found = {}
        for name, record in list(self._records.items()):
            if not record.released:
                found[name] = judge_node(name, record, view, launching=self._is_launching(name, record))
        if not self._own_end_at:
            return found
        return {name: _end_with(node, self._own_end_at, self._own_ending) for name, node in found.items()}

    # --- give back ----------------------------------------------------------------------------------------------

    async def give_back(self, node: str, reason: str, cause: Dismissal = Dismissal.UNTOLD) -> None:
        record = self._records.get(node)
        if record is None:
            return
        if not record.released:
            await asyncio.to_thread(self._release, node, reason, cause)
        await asyncio.to_thread(self._end_node, node)

    def _release(self, node: str, reason: str, cause: Dismissal) -> None:
        with self._starting:
            self._change({node: {"released": reason or "given back", "cause": cause}})
        record = self._records[node]
        if record.host and cause in _AVOIDED:
            self._excluded.add(record.host)
            slurm_node_file.note_excluded(self._dir, split_exclusions(self._plan.flags)[1] | self._excluded)
            if self._plan.drain:
                try:
                    self._commands.drain_host(record.host, f"holdfast {self._plan.run_id}: {reason}")
                except OSError as e:
                    _log.warning("%s is not drained: %s", record.host, e)

    def _end_node(self, node: str) -> None:
        """End a node's job step, then give up its host. Raise OSError unless Slurm has seen the step end."""
        record = self._records[node]
        if not record.job:
            self._change({node: {"job": self._commands.find_job(record.job_name)}})
            record = self._records[node]
        try:
            if record.srun:
                self._end_step(node, record)
        finally:
            self._let_go(record)

    def _end_step(self, node: str, record: NodeRecord) -> None:
        began_at, cancelled = time.monotonic(), False
        while True:
            view = self._commands.look([record.job], [record.host])
            if slurm_node_presence.is_cut_off(record, view):
                self._cancel_step(node, record, view)
                raise OSError(f"Slurm gets no answer from {record.host}, so {node} may run on")
            state = judge_node(node, record, view, launching=self._is_launching(node, record)).state
            if state is FleetState.GONE:
                return
            waited_s = time.monotonic() - began_at
            if waited_s > self._plan.leave_s and not cancelled:
                cancelled = self._cancel_step(node, record, view)
            if waited_s > _END_S:
                raise OSError(f"Slurm has not confirmed the end of {node} on {record.host} for {waited_s:.0f} s")
            time.sleep(_LOOK_S)

    def _cancel_step(self, node: str, record: NodeRecord, view: ClusterView) -> bool:
        step = view.find_step(record.job, step_name(node))
        if step is not None:
            self._commands.cancel(step.id)
        return step is not None

    def _let_go(self, record: NodeRecord) -> None:
        """Cancel the node's Slurm job if no other node uses it; otherwise remove the node's host from that job."""
        if record.lent or not record.job:
            return
        kept = [r.host for r in self._records.values() if r.job == record.job and not r.released]
        if not kept:
            self._commands.cancel(str(record.job))
        elif record.host and all(kept):
            try:
                self._commands.shrink_job(record.job, kept)
            except OSError as e:  # as of the host of the job's own script, which Slurm does not let go
                _log.info("%s stays in job %s: %s", record.host, record.job, e)

    # --- records ------------------------------------------------------------------------------------------------

    def _count_queued(self) -> int:
        return sum(not record.released and not record.host for record in self._records.values())

    def _add(self, records: dict[str, NodeRecord]) -> None:
        with self._writing:
            self._store({**self._records, **records})

    def _change(self, news: dict[str, dict[str, Any]]) -> None:
        """Replace fields of nodes' records and store them, under a lock because several threads do so."""
        if news:
            with self._writing:
                new = {name: msgspec.structs.replace(self._records[name], **fields) for name, fields in news.items()}
                self._store({**self._records, **new})

    def _forget(self, names: tuple[str, ...]) -> None:
        with self._writing:
            self._store({name: record for name, record in self._records.items() if name not in names})

    def _store(self, records: dict[str, NodeRecord]) -> None:
        slurm_node_file.write_records(self._dir, self._epoch(), records)
        self._records = records

    def _check_newest(self) -> None:
        """Raise LeaseLostError if another controller acts, or has acted, since this one began."""
        slurm_node_file.check_newest(self._dir, self._epoch())


def _end_with(node: FleetNode, end_at: float, why: str) -> FleetNode:
    """Return `node` with an end no later than `end_at`, which is when the controller's own allocation ends."""
    if node.state not in (FleetState.STARTING, FleetState.UP):
        return node
    return msgspec.structs.replace(node, ends_at=min(node.ends_at or end_at, end_at), reason=node.reason or why)


def end_all(run_dir: Path, env: Mapping[str, str]) -> None:
    """Cancel all remaining Slurm jobs and steps of a run whose controller was on this host, as a last resort. Raise
    OSError if that fails."""
    folder = run_dir / FOLDER
    found = slurm_node_file.read_records(folder)
    if not found.is_ours:
        return  # they are those of a controller on another host
    commands = SlurmCommands(env, str(folder), before_change=no_lease)
    left = {name: record for name, record in found.nodes.items() if not record.released and record.job}
    view = commands.look((record.job for record in left.values()), ())
    for name, record in left.items():
        step = view.find_step(record.job, step_name(name))
        if record.lent and step is not None:
            commands.cancel(step.id)
    for job in {record.job for record in left.values() if not record.lent}:
        commands.cancel(str(job))
