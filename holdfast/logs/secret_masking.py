"""Masks secrets in alarms, in our own logs, and in all that goes to hooks, collectors and language models.

Where an alarm is made, its texts are masked before they enter the journal, so reports and pages show no more. Language
models are not told private names either. What ranks print is masked in what we quote of it; their own log files stay
as they are.

In doubt a word is masked. But commit hashes, shapes, memory addresses and symbol names stay whole, because diagnoses
depend on them. Works one line at a time, but for the bodies of private keys (see also line_templates.py).
"""

import base64
import json
import logging
import os
import re
import socket
import sys
import threading
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib import resources
from types import TracebackType
from typing import Any
from urllib.parse import quote, quote_plus

import msgspec

from holdfast.core.terminal_sanitizer import CUT, cut_words, plain_lines
from holdfast.model.detector_alarm import Alarm

_FIXED = frozenset({"who", "owner", "node", "nodes", "suspects", "run_id", "digest", "signature"})
HIDDEN = "..."  # in the place of a value that may be a secret
_SHORTEST = 8  # a known secret that is shorter would mask ordinary words
_LONG_WORD = 16  # letters, more than ordinary words have
_NAMED = re.compile(
    r"PASS|SECRET|TOKEN(?!IZ)|CREDENTIAL|API_?KEY|ACCESS_?KEY|_KEY$|_PWD$|AUTH(?!OR(?!IZ))", re.IGNORECASE
)
_COUNTED = re.compile(r"TOKENS", re.IGNORECASE)  # MAX_TOKENS, where the value is a number
_FLAG = re.compile(r"([-+~]*[A-Za-z][\w.-]*)(=?)")  # of a command line; `hydra.key=value` is one, too
_HARMLESS = re.compile(r"(?i)true|false|none|null|yes|no|auto|")  # values of flags that only sound like a secret
_SURE = re.compile(r"PASS|SECRET|TOKEN|CREDENTIAL|API_?KEY|ACCESS_?KEY", re.IGNORECASE)  # no other kind of key
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", re.IGNORECASE)
_NUMBERED = re.compile(r"TOKEN|PASS(?:ES|_)", re.IGNORECASE)  # --pad-token-id 0, --passes 3
_ESCAPE = re.compile(r"%[0-9A-F]{2}")
_PARTED = re.compile(r"[\s,;]+")
_LOGIN = re.compile(r"(?:\w+://)?[^:/@\s]*:(?!//)(\S+)")  # user:password, also in an address
_PLACE = re.compile(r"^(?:~|\.\.?)/|^\w+://[^@]*$")  # paths of sockets and files, and addresses: no secrets
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
_KEY_BEGINS = re.compile(r"-{4,5} ?BEGIN[ A-Z0-9_-]{0,100}PRIVATE KEY|^Private-Lines: ")
_KEY_ENDS = re.compile(r"-{4,5} ?END[ A-Z0-9_-]{0,100}PRIVATE KEY|^Private-MAC: ")
# Of a key whose first line is not quoted. Hashes, in letters of one case, are none. Behind the prefix of a log's line
# only lines of the usual length are known.
_KEY_BODY = re.compile(
    r"(?=\S*[a-z])(?=\S*[A-Z])[A-Za-z0-9+/]{40,76}={0,2}"
    r"|.{0,200}\s(?=\S{64}\Z)(?=\S*[a-z])(?=\S*[A-Z])(?=\S*[0-9])[A-Za-z0-9+/]{64}"
)
_KEY_LAST = re.compile(r"[A-Za-z0-9+/]{2,76}={0,2}")  # before its END; its last line may be short
_HOME = re.compile(r"(?<=/home/)[\w.-]+|(?<=/Users/)[\w.-]+")
_FIRST_WORD, _LAST_WORD = re.compile(rb"\A\S+"), re.compile(r"(?<!\S)\S+$")
_LONG = 1 << 14  # characters of a line that are masked at most, where less than that is shown
_KEY_LINES = 256  # before a line: no private key has more


class SecretKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pattern of one kind of secret, and what replaces it."""

    put: str
    pattern: str
    sample: str


class Masker:
    """Masks lines one by one; the same address or host gets the same alias in all of them."""

    def __init__(
        self, *, hosts: bool, known: Iterable[str] = (), names: Iterable[str] = (), people: bool = True
    ) -> None:
        """With `hosts`, hosts and users are masked too; with `people`, mail addresses are."""
        self._hosts, self._people = hosts, people
        self.learned: frozenset[str] = frozenset()  # secrets that somebody has told us
        self._known: re.Pattern[str] | None = None
        self.learn(known)
        self._named = _any_of(names if hosts else ())
        self._aliases: dict[str, str] = {}

    def learn(self, secrets: Iterable[str]) -> None:
        """From now on mask these, too, unless they are so short that they would mask ordinary words. Mask them also as
        they stand in addresses, in JSON, in Python's own quotes and in base64."""
        known = [value for value in secrets if len(value) >= _SHORTEST]
        new = {form for value in known for form in _written_forms(value)} - self.learned
        if new:
            self.learned |= new
            self._known = _any_of(self.learned)

    @cached_property
    def kinds(self) -> list[tuple[re.Pattern[str], str]]:
        """The patterns of all kinds of secrets; compiled when they are first needed."""
        return [(re.compile(kind.pattern), kind.put) for kind in secret_kinds() if self._people or kind.put != "email"]

    def __call__(self, text: str) -> str:
        if self._known:
            text = self._without_heads(self._known.sub("<secret>", text))
        for pattern, put in self.kinds:
            text = pattern.sub(rf"\g<keep><{put}>" if "keep" in pattern.groupindex else f"<{put}>", text)
        return self._without_hosts(text) if self._hosts else text

    def mask_lines(self, lines: Iterable[str]) -> tuple[str, ...]:
        """Mask successive lines of a log. A private key is masked also if only some of its lines are among them."""
        masked, in_key = list[str](), False
        for line in lines:
            begins, ends = _KEY_BEGINS.search(line), _KEY_ENDS.search(line)
            hidden = in_key or begins or ends or _KEY_BODY.fullmatch(line.strip())
            if ends and not in_key and masked and _KEY_LAST.fullmatch(masked[-1].strip()):
                masked[-1] = "<private key>"
            in_key = (in_key or bool(begins)) and not ends
            masked.append("<private key>" if hidden else self(line))
        return tuple(masked)

    def mask_argv(self, argv: Sequence[str]) -> list[str]:
        """Mask the words of a command line, and the values of flags with names like --hub-token or --api_key=."""
        words = [self(word) for word in argv]
        for n, start, name, value in _flag_values(argv):
            if _is_flag_secret(name, value):
                words[n] = f"{argv[n][:start]}<secret>"
        return words

    def mask_commands(self, tree: Any) -> Any:
        """Return a tree of dicts and lists in which the command lines alone are masked."""
        if isinstance(tree, list | tuple):
            return [self.mask_commands(inner) for inner in tree]
        if not isinstance(tree, dict):
            return tree
        hidden = {"argv": self.mask_argv(tree["argv"])} if _is_argv(tree.get("argv")) else {}
        return {key: self.mask_commands(inner) for key, inner in tree.items()} | hidden

    def mask_end(self, text: str, most: int) -> str:
        """Return the last `most` characters of a text, which is masked before it is cut."""
        return "\n".join(self.mask_lines(text.splitlines())).strip()[-most:]

    def mask_last_line(self, text: str, most: int) -> str:
        """Return the last line of a text that is not blank, masked, then cut to at most `most` characters."""
        lines = [line.strip() for line in text.splitlines() if line.strip()][-_KEY_LINES:]
        return cut_words(self.mask_lines(map(trim_line, lines))[-1], most) if lines else ""

    def mask_alarm(self, alarm: Alarm) -> Alarm:
        """Mask the texts of an alarm; the names of its nodes stay."""
        names = ("reason", "raised", "title", "hint", "signature", "pressed")
        texts = {name: self(text) for name in names if (text := getattr(alarm, name))}
        return msgspec.structs.replace(alarm, **texts, evidence=self.mask_lines(alarm.evidence))

    def mask_tree(self, value: Any) -> Any:
        """Return a tree of dicts and lists with its texts masked, without the values of environments. Who is named in
        a field of his own, and what was signed, stay."""
        if isinstance(value, str):
            return "\n".join(self.mask_lines(value.split("\n"))) if value else value
        if isinstance(value, dict):
            return {key: self._mask_field(key, inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.mask_tree(inner) for inner in value]
        return value

    def _mask_field(self, name: object, value: Any) -> Any:
        if name == "env" and isinstance(value, dict):
            return dict.fromkeys(value, HIDDEN)
        if name == "argv" and _is_argv(value):
            return self.mask_argv(value)
        return value if name in _FIXED else self.mask_tree(value)

    def _without_heads(self, text: str) -> str:
        """Mask the beginnings of known secrets where a text was cut: at its end, and before the mark for cut text."""
        for secret in self.learned:
            at = text.find(head := secret[:_SHORTEST])
            while at >= 0:
                said = text[at : at + len(secret)]
                same = next((n for n, (a, b) in enumerate(zip(secret, said, strict=False)) if a != b), len(said))
                end = at + same
                if not text[end:] or text.startswith(CUT, end):
                    text, end = f"{text[:at]}<secret>{text[end:]}", at
                at = text.find(head, max(end, at + 1))
        return text

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


class MaskingFormatter(logging.Formatter):
    """Formats the lines of a log of ours, masked: they quote exceptions, and what commands of others have said."""

    def __init__(self, mask: Masker) -> None:
        super().__init__("%(asctime)s %(message)s")
        self._mask = mask

    def format(self, record: logging.LogRecord) -> str:
        lines = plain_lines(super().format(record))
        return "\n  ".join(self._mask.mask_lines(lines))  # indented: no text that is quoted can pose as an entry


def keep_masked_log(log: logging.Handler, mask: Masker) -> None:
    """Make `log` the log of this process, masked. Python would print exceptions that nobody catches, and warnings, to
    standard error as they are: they go through the log as well. Call this only where no ranks are forked, which would
    inherit it; programs forked by linux/preimported_fork.py begin without it."""
    log.setFormatter(MaskingFormatter(mask))
    logging.basicConfig(handlers=[log], level=logging.INFO)
    logging.captureWarnings(True)
    # Or an entry that cannot be formatted or written would be printed with its arguments.
    logging.raiseExceptions = False
    sys.excepthook = _log_uncaught
    threading.excepthook = sys.unraisablehook = _log_unraised


def _log_unraised(args: Any) -> None:
    """Log what a thread, or a finalizer, has raised; Python has a type of its own for either."""
    _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, tb: TracebackType | None) -> None:
    logging.critical("nobody has caught this:", exc_info=(kind, error or kind(), tb))


def make_secret_masker(known: Iterable[str] = ()) -> Masker:
    """Return a masker for our own journal, logs and notices: of secrets alone, also of this process's environment."""
    return Masker(hosts=False, known=[*env_secrets(os.environ), *known], people=False)


def make_masker(*, hosts: bool, known: Iterable[str] = ()) -> Masker:
    """Return a masker that also knows the secrets in this process's environment and the name of this host."""
    name = socket.gethostname()
    names = [name] if len(name) > 3 and name != "localhost" else []
    return Masker(hosts=hosts, known=[*env_secrets(os.environ), *known], names=names)


def env_secrets(env: Mapping[str, str]) -> list[str]:
    """Return the values of environment variables with names like PASSWORD, as they are and stripped, and their parts.
    Leave out addresses and paths."""
    return _with_parts((name, value) for name, value in env.items() if _is_secret(name, value))


def argv_secrets(argv: Sequence[str]) -> list[str]:
    """Return the values of flags with names like --hub-token, and their parts. Leave out ordinary words."""
    found = ((name, value) for _, _, name, value in _flag_values(argv))
    named = ((name, value) for name, value in found if _is_flag_secret(name, value))
    return [value for value in _with_parts(named) if not _is_wordy(value)]


def _with_parts(named: Iterable[tuple[str, str]]) -> list[str]:
    """Return the values, and then their parts, without repeats."""
    found = list(named)
    parts = [part for name, value in found for part in _parts_of(value) if _is_secret(name, part)]
    return list(dict.fromkeys([*(value for _, value in found), *parts]))


def _is_secret(name: str, value: str) -> bool:
    """Tell whether a variable's value is a secret. A key in base64 may begin with a slash, so a path is absolute only
    in a folder that this host has."""
    if not _NAMED.search(name) or _PLACE.search(value) or (value.isdigit() and _COUNTED.search(name)):
        return False
    # Its entries are not looked at: one may be a mount that hangs.
    return not (value.startswith("/") and value[1:].partition("/")[0] in os.listdir("/"))


def _is_flag_secret(name: str, value: str) -> bool:
    number = len(value) < _SHORTEST and _NUMBERED.search(name) and _NUMBER.fullmatch(value)
    word = _is_wordy(value) and not _SURE.search(name)  # --sort-key timestamp, --auth kerberos
    return not (number or word or _HARMLESS.fullmatch(value)) and _is_secret(name, value)


def _is_wordy(value: str) -> bool:
    return len(value) < _LONG_WORD and not any(c.isdigit() for c in value)


def _flag_values(argv: Sequence[str]) -> Iterator[tuple[int, int, str, str]]:
    """Yield of each value of a command line its word's number, where in that it begins, its flag's name as a variable
    would be called, and itself."""
    for n, word in enumerate(argv):
        flag = _FLAG.match(word)
        if not flag:
            continue
        name = "_" + flag[1].lstrip("-+~").replace("-", "_").replace(".", "_")
        if flag[2]:
            yield n, flag.end(), name, word[flag.end() :]
        elif word.startswith("-") and flag.end() == len(word) and n + 1 < len(argv) and not argv[n + 1].startswith("-"):
            yield n + 1, 0, name, argv[n + 1]


def _parts_of(value: str) -> Iterator[str]:
    """Yield what of a variable's value may be printed alone: it stripped, its lines, each of several values in a list,
    and a password behind its user. Ordinary words are none, nor are the words of JSON but in its lists."""
    lines = [line.strip() for line in value.splitlines()]
    yield from (value.strip(), *lines)
    if value.lstrip().startswith(("{", "[")):
        yield from _listed_in_json(value)
        return
    for line in lines:
        whole = len(lines) > 1 and " " in line  # a file's, such as YAML
        for part in (line,) if whole else (line, *_PARTED.split(line)):
            if not _is_ordinary(part):
                yield part
            if login := _LOGIN.fullmatch(part):
                yield from (login[1], login[1].rpartition("@")[0])


def _is_ordinary(word: str) -> bool:
    """Tell whether a part of a variable's value may also be a word of any text."""
    plain = word.isalpha() and len(word) < _LONG_WORD and (word.islower() or word.isupper() or word.istitle())
    return plain or word.startswith("-----") or word.endswith("-----")


def _listed_in_json(text: str) -> list[str]:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [one for one in said if isinstance(one, str)] if isinstance(said, list) else []


def _is_argv(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)


def _written_forms(value: str) -> Iterator[str]:
    """Yield a secret as it is, and as addresses, JSON, Python and base64 write it."""
    yield value
    for quoted in (
        quote(value, safe="", errors="replace"),
        quote(value, errors="replace"),
        quote(value, safe="!*'()", errors="replace"),
        quote_plus(value, errors="replace"),
    ):
        yield quoted
        yield _ESCAPE.sub(lambda m: m[0].lower(), quoted)
    for text in (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]):
        yield text
        yield text.replace("/", r"\/")
    raw, written = value.encode(errors="replace"), repr(value)[1:-1]
    yield from (written, repr(raw)[2:-1], value.replace("\\", "\\\\").replace("'", r"\'"))
    yield base64.b64encode(raw).decode().rstrip("=")
    yield base64.urlsafe_b64encode(raw).decode().rstrip("=")


def last_bytes(text: bytes, most: int) -> bytes:
    """Return the last bytes of a text, without the word that the cut made shorter: nobody could tell that it is a
    secret."""
    return text if len(text) <= most else _FIRST_WORD.sub(b"", text[-most:])


def trim_line(line: str) -> str:
    """Cut a line before it is masked, as masking a very long one would take too long. It loses the word that the cut
    made shorter, as nobody could tell that it is a secret. Less of the line is to be shown than is left."""
    return line if len(line) <= _LONG else (_LAST_WORD.sub("", line[:_LONG]) or "(one long word)") + CUT


@cache
def secret_kinds() -> tuple[SecretKind, ...]:
    text = resources.files("holdfast.core").joinpath("catalog/secrets.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["row"], tuple[SecretKind, ...])


def _any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted({word for word in words if word}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
