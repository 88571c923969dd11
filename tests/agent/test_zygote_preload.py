"""What a node's zygote imports, and when."""

import json
import os
import time
from pathlib import Path

import msgspec
import pytest

from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.rank.zygote_preload import ZygotePreload
from tests.fleet.places import TEMPLATE

ABSENT = "a_module_that_nobody_has"


def preloading(folder: Path, learned: str = "", **node_has: int) -> ZygotePreload:
    entry = msgspec.structs.replace(TEMPLATE.entry, preload=("torch",), later=(ABSENT, "json"))
    node = msgspec.structs.replace(TEMPLATE, entry=entry, learned=learned, **node_has)
    return ZygotePreload(node, folder / "imports.json", SystemClock())


def test_before_the_first_launch_only_what_ranks_wait_for_or_what_is_there(tmp_path: Path) -> None:
    assert preloading(tmp_path).first_preload().modules == ("torch", "json")


def test_the_rest_comes_with_the_first_step_and_once(tmp_path: Path) -> None:
    made = preloading(tmp_path)
    made.first_preload()
    assert made.better_preload(held=True, trains=False, key="") is None, "ranks that start need all processors"
    (tmp_path / "imports.json").write_text("[]")
    better = made.better_preload(held=True, trains=True, key="")
    assert better and set(better.names()) == {"torch", "json", ABSENT}
    assert made.better_preload(held=True, trains=True, key="") is None


def test_a_step_that_is_seen_before_its_rank_has_written_its_imports_makes_no_zygote_without_them(
    tmp_path: Path,
) -> None:
    made = preloading(tmp_path)
    made.first_preload()
    assert made.better_preload(held=True, trains=True, key="") is None
    (tmp_path / "imports.json").write_text('["rich"]')
    better = made.better_preload(held=True, trains=True, key="")
    assert better and better.learned == ("rich",) and ABSENT in better.modules
    mute = preloading(tmp_path)
    mute.first_preload()
    assert mute.better_preload(held=True, trains=True, key="") is None
    assert mute._trains_since is not None
    mute._trains_since -= 60.0
    assert mute.better_preload(held=True, trains=True, key=""), "a rank that never does is not waited for"


async def test_a_launch_does_not_wait_for_what_ranks_can_import_as_soon(tmp_path: Path) -> None:
    made = preloading(tmp_path)
    made.first_preload()
    (tmp_path / "imports.json").write_text("[]")
    assert made.better_preload(held=True, trains=True, key="")
    began_at = time.monotonic()
    await made.wait_until_made(ranks=1)
    assert time.monotonic() - began_at < 9, "it was waited for as long as ranks need to import all that"


def test_a_node_that_has_just_come_is_no_standby_yet(tmp_path: Path) -> None:
    made = preloading(tmp_path)
    made.first_preload()
    made.on_warm(())
    assert made.better_preload(held=False, trains=True, key="") is None
    made._idle_since -= 60.0
    better = made.better_preload(held=False, trains=True, key="")
    assert better and ABSENT in better.modules


def test_a_zygote_that_is_being_made_is_not_begun_anew(tmp_path: Path) -> None:
    """A standby that hears what the script imports would have no better zygote for as long again."""
    made = preloading(tmp_path)
    made.first_preload()
    made.on_warm(())
    made._idle_since -= 60.0
    assert made.better_preload(held=False, trains=True, key="")
    made.on_told(("rich",))
    assert made.better_preload(held=False, trains=True, key="") is None
    made.on_warm(())
    better = made.better_preload(held=False, trains=True, key="")
    assert better and better.learned == ("rich",) and ABSENT in made._asked


def test_what_the_script_imports_can_be_done_without(tmp_path: Path) -> None:
    shared = tmp_path / "learned.json"
    made = preloading(tmp_path, str(shared))
    made.first_preload()
    (tmp_path / "imports.json").write_text('["rich", "torch", "rich.table"]')
    better = made.better_preload(held=True, trains=True, key='{"A": "1"}')
    assert better and better.learned == ("rich", "rich.table") and ABSENT in better.modules
    assert better.env["A"] == "1" and better.key == '{"A": "1"}'
    assert json.loads(shared.read_bytes()) == ["rich", "rich.table"]


def test_a_node_without_ranks_takes_what_another_host_has(tmp_path: Path) -> None:
    made = preloading(tmp_path, str(tmp_path / "learned.json"))
    made.first_preload()
    made.on_told(("rich", "wave"))
    busy = made.better_preload(held=True, trains=False, key="")
    assert busy is None, "a rank here says so itself"
    better = made.better_preload(held=False, trains=False, key="")
    assert better and better.learned == ("rich", "wave") and not made.proven
    assert made.better_preload(held=False, trains=False, key="") is None
    made.on_warm(("rich",))
    assert made.proven == ("rich",) and not (tmp_path / "learned.json").exists()


def test_what_an_earlier_run_has_learned_waits_where_ranks_that_start_leave_no_processor_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they share processors, the launch waits for it, so that it is imported once."""
    for processors, crowded, early in (
        (1, True, True),
        (2, False, False),
        (3, False, False),
        (4, False, False),
        (5, False, True),
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=processors: set(range(count)))
        made = preloading(tmp_path, nproc=2, host_nodes=2)
        made.first_preload()
        made.on_warm(())
        made.on_told(("rich",))
        assert made.is_crowded is crowded
        better = made.better_preload(held=False, trains=True, key="")
        assert (better is not None and better.learned == ("rich",)) is early, processors
        if not early:
            made._idle_since -= 60.0
            assert made.better_preload(held=False, trains=True, key=""), "it is a standby"


def test_an_agent_that_comes_later_asks_for_nothing_twice(tmp_path: Path) -> None:
    first, second = preloading(tmp_path), preloading(tmp_path)
    first.first_preload()
    (tmp_path / "imports.json").write_text('["rich"]')
    asked = first.better_preload(held=True, trains=True, key="")
    assert asked
    second.adopt_modules(asked.names())
    assert second.better_preload(held=True, trains=True, key="") is None
    (tmp_path / "imports.json").write_text('["wave"]')
    more = second.better_preload(held=True, trains=True, key="")
    assert more and more.learned == ("rich", "wave")
