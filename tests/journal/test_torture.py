"""Damage of any sort: the same decisions, or a sentence; no other error, and no silence about what is lost."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.journal.torn import FILES, HARMS, Came, came, copied, made


def check(found: Came, where: str) -> str:
    assert "\n" not in found.said, where
    assert found.what != "refused" or "journal" in found.said, where
    return found.what


def strike(tmp_path: Path, seeds: range) -> Counter[tuple[str, str, str]]:
    written = made(tmp_path / "whole")
    outcomes: Counter[tuple[str, str, str]] = Counter()
    for seed in seeds:
        rng = Random(seed)
        name, harm = rng.choice(FILES), rng.choices(list(HARMS), (12, 6, 2, 1))[0]
        folder = copied(tmp_path / "whole", tmp_path / "harmed")
        HARMS[harm](folder / name, rng)
        where = f"seed {seed}: {harm} {name}"
        try:
            outcomes[(name, harm, check(came(folder, written), where))] += 1
        except Exception as e:
            e.add_note(where)
            raise
    return outcomes


def test_nothing_done_is_nothing_told(tmp_path: Path) -> None:
    written = made(tmp_path / "whole")
    assert came(copied(tmp_path / "whole", tmp_path / "copy"), written) == Came(what="same", kept=len(written))


def test_any_harm(tmp_path: Path) -> None:
    outcomes = strike(tmp_path, range(100))
    assert {what for _, _, what in outcomes} >= {"same", "told", "doubt"}


@pytest.mark.slow
@pytest.mark.search
@pytest.mark.timeout(1800)
def test_any_harm_at_length(tmp_path: Path) -> None:
    outcomes = strike(tmp_path, range(1000, 3000))
    for key, times in sorted(outcomes.items()):
        print(times, *key)


def test_a_write_ahead_log_that_is_gone(tmp_path: Path) -> None:
    written = made(tmp_path / "whole")
    folder = copied(tmp_path / "whole", tmp_path / "harmed")
    (folder / "journal.db-wal").unlink()
    found = came(folder, written)
    assert found.what == "told" and 0 < found.kept < len(written)


def test_all_of_it_is_gone_but_the_mark(tmp_path: Path) -> None:
    written = made(tmp_path / "whole")
    folder = copied(tmp_path / "whole", tmp_path / "harmed")
    for name in FILES[:2]:
        (folder / name).unlink()
    assert came(folder, written) == Came(what="told", kept=0)
