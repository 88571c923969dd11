"""The environment variables of ranks, and of the processes that import modules for ranks."""

import os
from collections.abc import Mapping

_SECRET = ("HOLDFAST_TOKEN", "HOLDFAST_TOKEN_FILE")
_FR_BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # of torch's flight recorder


def make_rank_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the user's environment plus holdfast's defaults, without holdfast's secrets and non-UTF-8 text."""
    found = {k: v for k, v in env.items() if k not in _SECRET and _is_text(k) and _is_text(v)}
    found.setdefault("OMP_NUM_THREADS", "1")
    found.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")  # its recorder then tells what has begun on the GPU
    if not found.keys() & set(_FR_BUFFER):
        found[_FR_BUFFER[0]] = "64"  # entries: what is read once a second must not be 2,000
    return found


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
