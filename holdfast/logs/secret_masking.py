"""Masks secrets and private names in log lines before these leave the host.

In doubt a word is masked. But commit hashes, shapes, memory addresses and symbol names stay whole, because diagnoses
depend on them. Works one line at a time; the bodies of private keys, which span several lines, are removed where a
log is read (see line_templates.py).
"""

import os
import re
import socket
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources

import msgspec

_SHORTEST = 8  # a known secret that is shorter would mask ordinary words
_NAMED = re.compile(r"PASS|SECRET|TOKEN|CREDENTIAL|API_?KEY|ACCESS_?KEY|_KEY$|AUTH", re.IGNORECASE)
_PLACE = re.compile(r"^[~/.]|^\w+://[^@]*$")  # paths of sockets and files, and addresses: no secrets
_IP = re.compile(
    r"(?<![\w.=-])(?<!\w=)(?:10(?:\.\d{1,3}){3}|(?:192\.168|169\.254|172\.(?:1[6-9]|2\d|3[01])|100\.(?:6[4-9]|[7-9]\d"
    r"|1[01]\d|12[0-7]))(?:\.\d{1,3}){2})(?![\w.]*\d)"
    r"|(?<![\w:])(?:f[cd][0-9a-f]{2}|fe80):[0-9a-f:]{2,40}",
    re.IGNORECASE,
)
_HOST = re.compile(
    r"(?<![\w./-])(?:ip-\d{1,3}-\d{1,3}-\d{1,3}-\d{1,3}(?:\.[\w-]+)*"
    r"|(?:[\w-]+\.)+(?:internal|local|localdomain|lan|corp|intra|intranet|private|home\.arpa|svc))(?![\w-])",
    re.IGNORECASE,
)
_HOME = re.compile(r"(?<=/home/)[\w.-]+|(?<=/Users/)[\w.-]+")


class SecretKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pattern of one kind of secret, and what replaces it."""

    put: str
    pattern: str
    sample: str


class Masker:
    """Masks lines one by one; the same address or host gets the same alias in all of them."""

    def __init__(self, *, hosts: bool, known: Iterable[str] = (), names: Iterable[str] = ()) -> None:
        self._kinds = [(re.compile(kind.pattern), kind.put) for kind in secret_kinds()]
        self._hosts = hosts
        self._known = _any_of(value for value in known if len(value) >= _SHORTEST)
        self._named = _any_of(names if hosts else ())
        self._aliases: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        if self._known:
            text = self._known.sub("<secret>", text)
        for pattern, put in self._kinds:
            text = pattern.sub(rf"\g<keep><{put}>" if "keep" in pattern.groupindex else f"<{put}>", text)
        return self._without_hosts(text) if self._hosts else text

    def _without_hosts(self, text: str) -> str:
        text = _IP.sub(lambda m: self._alias_for("ip", m[0]), text)
        text = _HOST.sub(lambda m: self._alias_for("host", m[0]), text)
        if self._named:
            text = self._named.sub(lambda m: self._alias_for("host", m[0]), text)
        return _HOME.sub(lambda m: self._alias_for("user", m[0]), text)

    def _alias_for(self, kind: str, name: str) -> str:
        if name not in self._aliases:
            self._aliases[name] = f"<{kind}-{sum(a.startswith(f'<{kind}-') for a in self._aliases.values()) + 1}>"
        return self._aliases[name]


def make_masker(*, hosts: bool, known: Iterable[str] = ()) -> Masker:
    """Return a masker that also knows the secrets in this process's environment and the name of this host."""
    name = socket.gethostname()
    names = [name] if len(name) > 3 and name != "localhost" else []
    return Masker(hosts=hosts, known=[*env_secrets(os.environ), *known], names=names)


def env_secrets(env: Mapping[str, str]) -> list[str]:
    """Return the values of environment variables with names like PASSWORD; leave out paths and addresses."""
    return [value for name, value in env.items() if _NAMED.search(name) and not _PLACE.search(value)]


def secret_kinds() -> tuple[SecretKind, ...]:
    text = resources.files("holdfast.core").joinpath("catalog/secrets.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["row"], tuple[SecretKind, ...])


def _any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted({word for word in words if word}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
