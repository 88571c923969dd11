"""Jobs that chaos makes itself: on this host, or on hosts with networks of their own on a switch of ours."""

import contextlib
import functools
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from holdfast.chaos import links, making, spaces
from holdfast.chaos.fault import Cannot
from holdfast.chaos.making import Made, flags_of, tie
from holdfast.chaos.scenario import Job
from holdfast.chaos.switch import address

_PORT = 29400  # nobody else is in this network


@contextlib.contextmanager
def made(job: Job, folder: Path, env: dict[str, str] | None = None) -> Iterator[Made]:
    """A job in this folder that ends with the block."""
    if why := missing(job):
        raise Cannot(why)
    folder.mkdir(parents=True, exist_ok=True)
    made = Made(folder)
    switch = None
    try:
        if job.hosts:
            switch = _start_hosts(made, job, env or {})
        else:
            making.start(made, job, env or {})
        yield made
    finally:
        made.end()
        _end_switch(made, switch)


def missing(job: Job) -> str:
    """Why such a job cannot be made here; empty: it can."""
    if (job.disk_mib or job.shm_mib) and os.geteuid() != 0:
        return "a job with a disk or a /dev/shm of its own takes root, to mount them where nobody else sees them"
    if job.hosts and (job.disk_mib or job.shm_mib or job.machines):
        return "a job of several hosts has no disks or machines of its own; leave disk_mib, shm_mib and machines out"
    return links.missing() if job.hosts else ""


def _start_hosts(made: Made, job: Job, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Every host runs the same command; the switch ends with what is returned, and all networks with the switch."""
    made.links = made.folder / "links.json"
    made.links.write_text("{}")
    switch = subprocess.Popen(
        [sys.executable, "-m", "holdfast.chaos.switch", str(job.hosts), str(made.links)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert switch.stdout
    told = switch.stdout.readline()
    if not told:
        _end_switch(made, switch)
        raise Cannot(f"no networks for {job.hosts} hosts can be made here; what the switch said stands above")
    fds = json.loads(told)
    flags, more = flags_of(made, job)
    more |= {"HOLDFAST_TOKEN": secrets.token_hex(16), "GLOO_SOCKET_IFNAME": "eth0"}
    for port, fd in enumerate(fds):
        space = os.open(f"/proc/{switch.pid}/fd/{fd}", os.O_RDONLY)
        made.spaces.append(space)
        place = ("--rdzv-endpoint", f"{address(0)}:{_PORT}", "--node-rank", str(port), "--run-dir", str(made.run_dir))
        argv = [sys.executable, "-m", "holdfast.cli", "run", *place, *flags, *made.words_of(job)]
        with (made.folder / f"output-{port}").open("ab") as output:
            made.fronts.append(
                subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=os.environ | more | env,
                    preexec_fn=functools.partial(_before, port, space, os.getpid()),  # noqa: PLW1509 - no threads here
                )
            )
    return switch


def _before(port: int, space: int, parent: int) -> None:
    """In the child, before it becomes `holdfast run` of one host."""
    tie(parent)
    spaces.unshare(spaces.NEWUTS)
    links.name_host(port)
    spaces.enter(space, spaces.NEWNET)


def _end_switch(made: Made, switch: subprocess.Popen[bytes] | None) -> None:
    for space in made.spaces:
        os.close(space)
    if switch is not None:
        assert switch.stdin and switch.stdout
        switch.stdin.close()
        switch.wait()
        switch.stdout.close()
