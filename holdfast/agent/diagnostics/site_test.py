"""Runs a site's own test of a machine, such as a vendor's diagnostic; its exit code and last line become a finding."""

import asyncio
import os
import signal
import time

from holdfast.agent.system.child_last_line import read_last_line
from holdfast.core.incident.incident_text import describe_exit
from holdfast.linux import own_process_settings
from holdfast.model.probe_findings import Finding

SITE_TEST = "command"  # the name of its finding
SITE_LEVEL = 2  # the level of probes from which it runs
_NOT_RUN = (126, 127)  # exit codes of a shell that cannot run a command
_GONE_S = 10.0  # a process that can end has ended by then


async def run_site_test(command: str, limit_s: float, *, level: int, nice: int = 0) -> Finding:
    """Run the command in a shell. Exit code 0 means that the machine is well, any other code that it is not. A command
    that takes too long fails the test, because it may hang in a sick driver. If it cannot be run, `ok` is None."""
    words, began = os.memfd_create("holdfast-site-test"), time.monotonic()
    ok: bool | None = False
    try:
        process = await asyncio.create_subprocess_exec(
            *own_process_settings.shell_argv(command, nice),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            env={**os.environ, "HOLDFAST_PROBE_LEVEL": str(level)},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(limit_s):
                code = await process.wait()
        except TimeoutError:
            detail = f"did not end within {limit_s:g} s"
        else:
            ok, detail = _judge_exit(code, read_last_line(words))
        finally:
            detail_end = await _kill_group(process)
    finally:
        os.close(words)
    took_s = round(time.monotonic() - began, 3)
    return Finding(probe=SITE_TEST, level=SITE_LEVEL, ok=ok, detail=detail + detail_end, took_s=took_s)


def _judge_exit(code: int, said: str) -> tuple[bool | None, str]:
    told = f": {said}" if said else ""
    if code == 0:
        return True, said
    if code in _NOT_RUN:
        return None, f"probe.command cannot be run here{told}"
    return False, f"{describe_exit(code)}{told}"


async def _kill_group(process: asyncio.subprocess.Process) -> str:
    """Kill the command's process group. If the command does not die, return words to append to the finding."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        async with asyncio.timeout(_GONE_S):
            await process.wait()
    except ProcessLookupError:
        pass
    except TimeoutError:
        return ", and SIGKILL did not end it: it hangs in the kernel"
    return ""
