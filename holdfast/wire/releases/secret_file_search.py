"""Finds the files of a folder that contain secrets of holdfast; no release contains them, whatever their names."""

import os
import re
from collections.abc import Collection, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from holdfast.config import Settings
from holdfast.decoding import from_json

_MOST_BYTES = 1 << 20  # of a file that is searched: keys, tokens, settings and scripts are smaller
_LEAST_CHARS = 16  # of a secret; less may stand in any file
Word = bytes


_HOME = ("elsewhere", "join", "people.json")  # in a home of holdfast, beside `newest`
_HOME_SECRET = re.compile(r"(^|/)(join/\d+\.token|people\.json)$")
_SECRET = re.compile(rb"[0-9a-f]{32}\s*")
_NODE_TOKEN = re.compile(rb"hf-node\.[0-9a-f]{16}\.[0-9a-f]{32}")
_USER_TOKEN = re.compile(rb"(?<![0-9a-fA-F])[0-9a-f]{32}(?![0-9a-fA-F])")


class _PersonNote(msgspec.Struct):
    """The fields of a person's token in people.json."""

    name: str
    right: str
    digest: str


class _RunNote(msgspec.Struct):
    """The fields of run.json that every version of holdfast writes. A folder with such a file is a run directory."""

    job: dict[str, Any]
    entry: dict[str, Any]
    nproc: int
    log_dir: str


def read_secrets(run_dir: Path, settings: Settings, token_file: str | None, env: Mapping[str, str]) -> tuple[Word, ...]:
    """Return a run's secrets: the job's secret, the run's own token, two private keys, and the address of the hook."""
    files = (
        token_file or env.get("HOLDFAST_TOKEN_FILE"),
        f"{run_dir}/door/secret",
        f"{run_dir}/token",
        settings.door.key,
    )
    url = settings.hook.url
    secret_url = url if len(url.partition("://")[2].partition("/")[2]) >= _LEAST_CHARS else ""  # as those of webhooks
    texts = (env.get("HOLDFAST_TOKEN", "").encode("utf-8", "replace"), secret_url.encode(), *map(_read_small, files))
    return tuple({text.strip() for text in texts if len(text.strip()) >= _LEAST_CHARS})


def find_secrets(
    root: Path, paths: Collection[str], secrets: Collection[Word], digests: Collection[str] = ()
) -> dict[str, str]:
    """Find the files that no release may contain. Return their paths, each with the path that is the reason. If a file
    lies in a run directory or a home of holdfast, the reason is that folder. If a file contains a secret, the reason is
    the file itself. Secrets are `secrets`, the secrets of other jobs, node tokens, and people's tokens with one of
    these `digests`."""

    @cache
    def private_folder(folder: str) -> str:
        if not folder:
            return ""  # the root itself is the user's tree
        return private_folder(os.path.dirname(folder)) or (folder if _is_private(os.path.join(root, folder)) else "")

    found = {path: private_folder(os.path.dirname(path)) for path in paths}
    for path in paths:
        if found[path]:
            continue
        content = _read_small(os.path.join(root, path))
        known = any(secret in content for secret in secrets)
        if known or _is_home_secret(path, content) or _has_token(content, digests):
            found[path] = path
    return {path: named for path, named in found.items() if named}


def _has_token(content: bytes, digests: Collection[str]) -> bool:
    """Return whether a file contains a node's token, or a person's token with one of these digests."""
    if _NODE_TOKEN.search(content):
        return True
    return bool(digests) and any(sha256(word).hexdigest() in digests for word in set(_USER_TOKEN.findall(content)))


def is_run_folder(folder: str) -> bool:
    """Return whether a folder is a run directory."""
    try:
        from_json(_read_small(os.path.join(folder, "run.json")), _RunNote)
    except msgspec.DecodeError:
        return False
    return True


def _is_private(folder: str) -> bool:
    if is_run_folder(folder) or _is_home(folder):
        return True
    try:  # a run directory that is only being made has its environment first
        return "PATH" in from_json(_read_small(f"{folder}/env.json"), dict[str, str])
    except msgspec.DecodeError:
        return False


def _is_home(folder: str) -> bool:
    """Return whether a folder is a home of holdfast, which has a link `newest`, or else tokens."""
    if os.path.islink(f"{folder}/newest"):
        return is_run_folder(f"{folder}/newest") or any(map(os.path.exists, (f"{folder}/{name}" for name in _HOME)))
    tokens = (f"join/{name}" for name in _list_names(f"{folder}/join"))
    return any(_is_home_secret(name, _read_small(f"{folder}/{name}")) for name in ("people.json", *tokens))


def _is_home_secret(path: str, content: bytes) -> bool:
    """Return whether a file in a home of holdfast holds a job's secret or people's tokens. Path and content decide."""
    if not _HOME_SECRET.search(path):
        return False
    if path.endswith(".token"):
        return bool(_SECRET.fullmatch(content))
    try:
        return bool(from_json(content, list[_PersonNote]))
    except msgspec.DecodeError:
        return False


def _list_names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read_small(path: str | None) -> bytes:
    """Return the content of a small file; b"" for anything else, such as a pipe, which could block for ever."""
    try:
        if path and os.path.isfile(path) and os.path.getsize(path) <= _MOST_BYTES:
            return Path(path).read_bytes()
    except OSError:
        pass  # it has just gone, or cannot be read; then it cannot be packed either
    return b""
