"""The environment that ranks, and whatever imports modules for them, are started in."""

import os
from collections.abc import Mapping

_SECRET = ("HOLDFAST_TOKEN", "HOLDFAST_TOKEN_FILE")
_FR_BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # of torch's flight recorder


def make_rank_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The user's, without our secrets, and with what is ours to set where the user has not."""
    found = {k: v for k, v in env.items() if k not in _SECRET and _is_text(k) and _is_text(v)}
    found.setdefault("OMP_NUM_THREADS", "1")
    if not found.keys() & set(_FR_BUFFER):
        found[_FR_BUFFER[0]] = "64"  # entries: what is read once a second must not be 2,000
    return found


def with_whole_paths(env: Mapping[str, str], cwd: str) -> dict[str, str]:
    """Folders of PYTHONPATH are meant from where the command was typed, wherever they are read."""
    found = dict(env)
    if given := found.get("PYTHONPATH"):
        paths = (os.path.normpath(os.path.join(cwd, path)) for path in given.split(os.pathsep))
        found["PYTHONPATH"] = os.pathsep.join(paths)
    return found


def _is_text(value: str) -> bool:
    """Whether it can be sent on; bytes that are no UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
