"""The catalogs as parsed values, for detectors that may not read files; a bad one is refused with one sentence."""

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.config import ConfigError, Settings, WordLimits
from holdfast.core.decoding import from_toml
from holdfast.core.detect import health, lines
from holdfast.core.words.rows import Catalog, Klass, Row
from holdfast.logs import own
from holdfast.logs.bounds import explosive

T = TypeVar("T")


_CLASSES = "classes.toml"


def load(limits: WordLimits | None = None) -> Catalog:
    """Last words: the classes of failure, the rows of every file beside them, and, if asked for, the user's own."""
    more = _own(limits, frozenset(klass.klass for klass in classes())) if limits else ()
    return _with(more) if more else built_in()


@cache
def built_in() -> Catalog:
    """It takes most of a second, and is the same for whoever asks."""
    return _with(())


def _with(more: tuple[Row, ...]) -> Catalog:
    folder = resources.files("holdfast.core").joinpath("catalog/words")
    texts = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir() if file.name.endswith(".toml")}
    del texts[_CLASSES]
    try:
        return Catalog((*(row for name in sorted(texts) for row in _rows(texts[name], name, Row)), *more), classes())
    except (re.error, ValueError) as e:
        raise ConfigError(f"the catalog of last words cannot be used: {e}") from None


def classes() -> tuple[Klass, ...]:
    return _rows(_ours(f"words/{_CLASSES.removesuffix('.toml')}"), _CLASSES, Klass, table="klass")


def _own(limits: WordLimits, classes: frozenset[str]) -> tuple[Row, ...]:
    """The user's rows. Only `holdfast catalog` holds them against ours: a newer version of ours must not stop a job."""
    path = own.place(limits)
    rows = _rows(_theirs(limits.catalog), limits.catalog, Row) if limits.catalog else own.own_rows(path)
    for row in rows:
        if fault := own.fault_of(row, (), classes):
            raise ConfigError(f"the catalog {path}: the row '{row.pattern[:60]}' {fault}")
    return rows


def load_lines(path: str = "") -> lines.LineCatalog:
    """Our rows, and those of a user's file: no line may be known to two of them."""
    rows = _rows(_ours("lines"), "lines.toml", lines.Row)
    if path:
        rows = (*rows, *_rows(_theirs(path), path, lines.Row))
        for row in rows:
            if not lines.fault(row) and (fault := explosive(row.pattern)):
                raise ConfigError(f"the catalog {path}: the row '{row.say}' {fault}")
    where = path or "lines.toml"
    for row in rows:
        if fault := lines.fault(row):
            raise ConfigError(f"the catalog {where}: the row '{row.say}' {fault}")
    catalog = lines.LineCatalog(rows)
    for row in rows:
        if len(found := catalog.match(row.sample, rank=row.rank)) > 1:
            named = " and ".join(f"'{other.say}'" for other, _ in found)
            raise ConfigError(
                f"the catalog {where}: the sample of '{row.say}' is matched by {named}; one must be narrower"
            )
    return catalog


def load_health(path: str = "") -> tuple[health.Row, ...]:
    """Our rows, with those of a user's file in the place of ours for the same gauge."""
    rows = {row.gauge: row for row in _once(_rows(_ours("health"), "health.toml", health.Row), "health.toml")}
    if path:
        rows |= {row.gauge: row for row in _once(_rows(_theirs(path), path, health.Row), path)}
    for row in rows.values():
        if fault := health.fault(row):
            raise ConfigError(f"the catalog {path or 'health.toml'}: the row for {row.gauge} {fault}")
    return tuple(rows.values())


def check(settings: Settings) -> None:
    """Before anything starts: what the settings name can be used. Our own can, and to read it takes half a second."""
    if settings.words.catalog or own.place(settings.words).exists():
        load(settings.words)
    if settings.lines.catalog:
        load_lines(settings.lines.catalog)
    for rule in settings.rules.rule:
        if fault := explosive(rule.pattern):
            raise ConfigError(f"rules.rule '{rule.name}' {fault}")
    if settings.health.catalog:
        load_health(settings.health.catalog)


def _once(rows: Iterable[health.Row], where: str) -> list[health.Row]:
    seen: dict[str, health.Row] = {}
    for row in rows:
        if row.gauge in seen:
            raise ConfigError(f"the catalog {where} has two rows for {row.gauge}; one gauge has one meaning")
        seen[row.gauge] = row
    return list(seen.values())


def _ours(name: str) -> str:
    return resources.files("holdfast.core").joinpath(f"catalog/{name}.toml").read_text(encoding="utf-8")


def _theirs(path: str) -> str:
    if not Path(path).is_absolute():
        raise ConfigError(f"the catalog {path}: give its absolute path, as every node is to find it")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read the catalog {path}: {e}") from None


def _rows(text: str, where: str, kind: type[T], table: str = "row") -> tuple[T, ...]:
    try:
        tree = from_toml(text)
        return msgspec.convert(tree.get(table, []), tuple[kind, ...])  # type: ignore[valid-type]
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as e:
        raise ConfigError(f"the catalog {where} cannot be understood: {e}") from None
