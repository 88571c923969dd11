"""Checks with the ranks' interpreter that a staged release compiles and that its imports resolve."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

from holdfast.logs.secret_masking import env_secrets, last_bytes, make_secret_masker
from holdfast.model.code_release import Release
from holdfast.wire.releases.staged_release import StagedRelease, staged_entry
from holdfast.wire.run_and_node_specs import EntryPoint

READER = Path(__file__).with_name("static_import_check.py")
_DEADLINE_S = 60.0
_NICE = 10
_WORDS = 300  # characters of what it wrote on its standard error
_TAIL_BYTES = 1 << 16  # that are masked before


async def check_release(
    entry: EntryPoint, release: Release, staged: StagedRelease, env: dict[str, str], deadline_s: float = _DEADLINE_S
) -> tuple[str, bool]:
    """Return what is wrong, or "", and whether it is the release's fault. The release's code is not executed."""
    if not entry.python:
        return "the job runs a program other than Python, and only Python code has releases", True
    argv = staged_entry(entry, release, staged).argv
    asked = {
        "root": staged.at,
        "script": "" if entry.module else os.path.join(entry.cwd, argv[0]),
        "module": argv[0] if entry.module else "",
        "first": staged.staged_path(entry.cwd) if entry.module else "",
    }
    try:
        process = await asyncio.create_subprocess_exec(
            *("nice", f"-n{_NICE}", entry.python, "-u", str(READER)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**env, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=entry.cwd,
            start_new_session=True,
        )
    except OSError as e:
        return f"the check cannot run: {e}", False
    try:
        async with asyncio.timeout(deadline_s):
            said, words = await process.communicate(json.dumps(asked).encode())
    except TimeoutError:
        return f"the check did not finish within {deadline_s:g} s", False
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    try:
        fault = str(json.loads(said)["fault"])
    except (ValueError, KeyError, TypeError):
        why = _masked_end(words, env) or f"code {process.returncode}"
        return f"the check failed to run: {why}", False
    return fault, bool(fault)


def _masked_end(words: bytes, env: dict[str, str]) -> str:
    mask = make_secret_masker(env_secrets(env))
    return mask.mask_end(last_bytes(words, _TAIL_BYTES).decode(errors="replace"), _WORDS)
