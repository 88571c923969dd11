"""The environment variables of ranks, and of the processes that import modules for ranks."""

import os
from collections.abc import Mapping

_SECRET = ("HOLDFAST_TOKEN", "HOLDFAST_TOKEN_FILE")
_FR_BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # of torch's flight recorder
RECORDER_ENTRIES = 64  # of it, unless a pipeline needs more: what is read once a second must not be 2,000


def make_rank_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the user's environment plus holdfast's defaults, without holdfast's secrets and non-UTF-8 text."""
    found = {k: v for k, v in env.items() if k not in _SECRET and _is_text(k) and _is_text(v)}
    found.setdefault("OMP_NUM_THREADS", "1")
    found.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")  # its recorder then tells what has begun on the GPU
    if not found.keys() & set(_FR_BUFFER):
        found[_FR_BUFFER[0]] = str(RECORDER_ENTRIES)
    return found


def recorder_size(given: Mapping[str, str], entries: int) -> dict[str, str]:
    """Return the variable that gives torch's recorder so many entries; nothing if the environment has another size
    than our default, which the user must have set."""
    name, other = _FR_BUFFER
    ours = given.get(name) == str(RECORDER_ENTRIES) and other not in given
    return {name: str(entries)} if ours and entries != RECORDER_ENTRIES else {}


def with_whole_paths(env: Mapping[str, str], cwd: str) -> dict[str, str]:
    """Return the environment with absolute paths in PYTHONPATH. Its relative paths start at `cwd`."""
    found = dict(env)
    if given := found.get("PYTHONPATH"):
        paths = (os.path.normpath(os.path.join(cwd, path)) for path in given.split(os.pathsep))
        found["PYTHONPATH"] = os.pathsep.join(paths)
    return found


def _is_text(value: str) -> bool:
    """Return whether the value can be encoded as UTF-8. Only such values can be sent to other processes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
