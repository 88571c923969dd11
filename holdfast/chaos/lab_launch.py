"""Starts the jobs that chaos makes: on this host, or on several hosts with their own networks and a switch."""

import contextlib
import functools
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from holdfast.chaos import link_faults, linux_namespaces, local_lab_job
from holdfast.chaos.injection_records import CannotInject
from holdfast.chaos.local_lab_job import LabJob, job_flags, tie_to_parent
from holdfast.chaos.network_switch import port_address
from holdfast.chaos.scenario import ScenarioJob

_PORT = 29400  # nobody else is in this network


@contextlib.contextmanager
def run_lab_job(job: ScenarioJob, folder: Path, env: dict[str, str] | None = None) -> Iterator[LabJob]:
    """Run a job in this folder for the duration of the block."""
    if why := missing_reason(job):
        raise CannotInject(why)
    folder.mkdir(parents=True, exist_ok=True)
    made = LabJob(folder)
    switch = None
    try:
        if job.hosts:
            switch = _start_hosts(made, job, env or {})
        else:
            local_lab_job.start_job(made, job, env or {})
        yield made
    finally:
        made.end_job()
        _end_switch(made, switch)


def missing_reason(job: ScenarioJob) -> str:
    """Return why a lab job cannot be made here; empty if it can."""
    if (job.disk_mib or job.shm_mib) and os.geteuid() != 0:
        return "a job with its own disk or /dev/shm needs root, to mount them out of sight of other processes"
    if job.hosts and (job.disk_mib or job.shm_mib or job.machines):
        return "a job of several hosts cannot have its own disks or machines; drop disk_mib, shm_mib and machines"
    return link_faults.missing_reason() if job.hosts else ""


def _start_hosts(made: LabJob, job: ScenarioJob, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the same command on every host. Return the switch process: when it ends, all networks end."""
    made.links = made.folder / "links.json"
    made.links.write_text("{}")
    switch = subprocess.Popen(
        [sys.executable, "-P", "-m", "holdfast.chaos.network_switch", str(job.hosts), str(made.links)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert switch.stdout
    told = switch.stdout.readline()
    if not told:
        _end_switch(made, switch)
        raise CannotInject(f"no networks for {job.hosts} hosts can be made here; see the output of the switch above")
    fds = json.loads(told)
    flags, more = job_flags(made, job)
    more |= {"HOLDFAST_TOKEN": secrets.token_hex(16), "GLOO_SOCKET_IFNAME": "eth0"}
    for port, fd in enumerate(fds):
        space = os.open(f"/proc/{switch.pid}/fd/{fd}", os.O_RDONLY)
        made.spaces.append(space)
        place = (
            "--rdzv-endpoint",
            f"{port_address(0)}:{_PORT}",
            "--node-rank",
            str(port),
            "--run-dir",
            str(made.run_dir),
        )
        argv = [sys.executable, "-P", "-m", "holdfast.cli", "run", *place, *flags, *made.command_words(job)]
        with (made.folder / f"output-{port}").open("ab") as output:
            made.fronts.append(
                subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=os.environ | more | env,
                    preexec_fn=functools.partial(_enter_host, port, space, os.getpid()),  # noqa: PLW1509 - no threads here
                )
            )
    return switch


def _enter_host(port: int, space: int, parent: int) -> None:
    """Enter a host's network; runs in the child, before it becomes `holdfast run` of that host."""
    tie_to_parent(parent)
    linux_namespaces.unshare(linux_namespaces.NEWUTS)
    link_faults.name_host(port)
    linux_namespaces.enter_namespace(space, linux_namespaces.NEWNET)


def _end_switch(made: LabJob, switch: subprocess.Popen[bytes] | None) -> None:
    for space in made.spaces:
        os.close(space)
    if switch is not None:
        assert switch.stdin and switch.stdout
        switch.stdin.close()
        switch.wait()
        switch.stdout.close()
