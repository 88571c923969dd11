"""Starts, signals and talks to the holder's child processes: each leads its own session and dies with its parent."""

import functools
import os
import signal
import socket
import subprocess

from holdfast.linux import own_process_settings


def start(argv: list[str], env: dict[str, str], cwd: str | None, files: tuple[int, int, int]) -> int:
    """Start a program in its own session; it dies with this process. Return its pid, which the caller must reap."""
    process = subprocess.Popen(
        argv,
        env=env,
        cwd=cwd,
        stdin=files[0],
        stdout=files[1],
        stderr=files[2],
        start_new_session=True,
        preexec_fn=functools.partial(own_process_settings.die_with_parent, os.getpid()),  # noqa: PLW1509 - we have no threads
    )
    process.returncode = 0  # not Popen's to wait for
    return process.pid


def signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def receive_packet(sock: socket.socket, limit_bytes: int) -> bytes:
    """Return the next packet; empty when the other end is gone."""
    try:
        return sock.recv(limit_bytes)
    except OSError:
        return b""


def send_packet(sock: socket.socket, packet: bytes) -> bool:
    """Send a packet; return False if the other end is gone or does not read."""
    try:
        sock.send(packet)
    except OSError:
        return False
    return True
