"""Loads the catalogs that detectors use, because detectors may not read files. A bad catalog raises ConfigError."""

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast import core
from holdfast.config import ConfigError, Settings, WordLimits
from holdfast.core.detect import health, lines
from holdfast.core.log_analysis.failure_catalog import CatalogRow, FailureCatalog, FailureClass
from holdfast.core.record.gpu_peak import GpuPeak
from holdfast.decoding import from_toml
from holdfast.logs import prepared_catalog, user_rows
from holdfast.logs.regex_safety import find_explosive_part

T = TypeVar("T")

_OURS = Path(core.__path__[0]) / "catalog"
WORDS = _OURS / "words"
_CLASSES = "classes.toml"


def load_failures(limits: WordLimits | None = None) -> FailureCatalog:
    """Return the catalog of failures that logs can show: the built-in classes and rows, and the user's own rows if
    `limits` is given."""
    more = _user_rows(limits, frozenset(klass.klass for klass in load_classes())) if limits else ()
    return _built_in_with(more) if more else load_built_in()


@cache
def load_built_in() -> FailureCatalog:
    """Return the built-in catalog; the result is cached."""
    return _built_in_with(())


def _built_in_with(more: tuple[CatalogRow, ...]) -> FailureCatalog:
    sources = read_sources()
    prepared = prepared_catalog.read_prepared(WORDS, sources)
    rows = parse_sources(sources) if prepared is None else tuple(one.row for one in prepared)
    try:
        return FailureCatalog(rows, load_classes(), {one.row: one.alternatives for one in prepared or ()}, more)
    except (re.error, ValueError) as e:
        raise ConfigError(f"the catalog of last words cannot be used: {e}") from None


def read_sources() -> dict[str, bytes]:
    """Return the TOML files of the built-in rows about last words, by name."""
    return {file.name: file.read_bytes() for file in sorted(WORDS.glob("*.toml")) if file.name != _CLASSES}


def parse_sources(sources: Mapping[str, bytes]) -> tuple[CatalogRow, ...]:
    return tuple(row for name, text in sources.items() for row in _parse_rows(text.decode(), name, CatalogRow))


@cache
def load_classes() -> tuple[FailureClass, ...]:
    return _parse_rows(_read_ours(f"words/{_CLASSES.removesuffix('.toml')}"), _CLASSES, FailureClass, table="klass")


def _user_rows(limits: WordLimits, classes: frozenset[str]) -> tuple[CatalogRow, ...]:
    """Return the user's rows. Raise ConfigError if one is faulty by itself. Only `holdfast catalog` compares them with
    the built-in rows: a comparison here would let an update of holdfast stop a job."""
    path = user_rows.user_rows_path(limits)
    rows = (
        _parse_rows(_read_users(limits.catalog), limits.catalog, CatalogRow)
        if limits.catalog
        else user_rows.read_user_rows(path)
    )
    for row in rows:
        if fault := user_rows.find_row_fault(row, (), classes):
            raise ConfigError(f"the catalog {path}: the row '{row.pattern[:60]}' {fault}")
    return rows


def load_lines(path: str = "") -> lines.LineCatalog:
    """Return the catalog of log lines: the built-in rows, and those of the user's file at `path`. Raise ConfigError if
    a row is faulty or if two rows match the same sample."""
    rows = _parse_rows(_read_ours("lines"), "lines.toml", lines.LineRow)
    if path:
        rows = (*rows, *_parse_rows(_read_users(path), path, lines.LineRow))
        for row in rows:
            if not lines.find_row_fault(row) and (fault := find_explosive_part(row.pattern)):
                raise ConfigError(f"the catalog {path}: the row '{row.say}' {fault}")
    where = path or "lines.toml"
    for row in rows:
        if fault := lines.find_row_fault(row):
            raise ConfigError(f"the catalog {where}: the row '{row.say}' {fault}")
    catalog = lines.LineCatalog(rows)
    for row in rows:
        if len(found := catalog.match_line(row.sample, rank=row.rank)) > 1:
            named = " and ".join(f"'{other.say}'" for other, _ in found)
            raise ConfigError(
                f"the catalog {where}: the sample of '{row.say}' is matched by {named}; one must be narrower"
            )
    return catalog


def load_health(path: str = "") -> tuple[health.GaugeRow, ...]:
    """Return the built-in gauge rows; a row in the user's file replaces the built-in row for the same gauge."""
    rows = {
        row.gauge: row
        for row in _check_unique(_parse_rows(_read_ours("health"), "health.toml", health.GaugeRow), "health.toml")
    }
    if path:
        rows |= {row.gauge: row for row in _check_unique(_parse_rows(_read_users(path), path, health.GaugeRow), path)}
    for row in rows.values():
        if fault := health.find_row_fault(row):
            raise ConfigError(f"the catalog {path or 'health.toml'}: the row for {row.gauge} {fault}")
    return tuple(rows.values())


def load_gpu_peaks() -> tuple[GpuPeak, ...]:
    """Return the table of GPUs and their peak FLOP/s."""
    return _parse_rows(_read_ours("gpus"), "gpus.toml", GpuPeak)


def check_catalogs(settings: Settings) -> None:
    """Check the user's catalogs and rules before anything starts; raises ConfigError. The built-in catalogs are read
    only if a user's catalog exists."""
    if settings.words.catalog or user_rows.user_rows_path(settings.words).exists():
        load_failures(settings.words)
    if settings.lines.catalog:
        load_lines(settings.lines.catalog)
    for rule in settings.rules.rule:
        if fault := find_explosive_part(rule.pattern):
            raise ConfigError(f"rules.rule '{rule.name}' {fault}")
    if settings.health.catalog:
        load_health(settings.health.catalog)


def _check_unique(rows: Iterable[health.GaugeRow], where: str) -> list[health.GaugeRow]:
    seen: dict[str, health.GaugeRow] = {}
    for row in rows:
        if row.gauge in seen:
            raise ConfigError(f"the catalog {where} has two rows for {row.gauge}; one gauge has one meaning")
        seen[row.gauge] = row
    return list(seen.values())


def _read_ours(name: str) -> str:
    return (_OURS / f"{name}.toml").read_text(encoding="utf-8")


def _read_users(path: str) -> str:
    if not Path(path).is_absolute():
        raise ConfigError(f"the catalog {path}: give its absolute path, because every node must find it")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read the catalog {path}: {e}") from None


def _parse_rows(text: str, where: str, kind: type[T], table: str = "row") -> tuple[T, ...]:
    try:
        tree = from_toml(text)
        return msgspec.convert(tree.get(table, []), tuple[kind, ...])  # type: ignore[valid-type]
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as e:
        raise ConfigError(f"the catalog {where} cannot be understood: {e}") from None
