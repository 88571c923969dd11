"""The catalogs as parsed values, for detectors that may not read files."""

import tomllib
from importlib import resources

import msgspec

from holdfast.core.detect.crash import Catalog, Row


def load() -> Catalog:
    text = resources.files("holdfast.core").joinpath("catalog/words.toml").read_text(encoding="utf-8")
    return Catalog(msgspec.convert(tomllib.loads(text)["row"], tuple[Row, ...]))
