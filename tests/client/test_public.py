"""What the package shows to a script: nothing but its API, and each name of it with an example that runs."""

import contextlib
import doctest
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.checkpoint import dcp
from tests.client.conftest import Zygote

METHODS = ("save", "before_step", "restore", "wait", "close")
# dcp.save without a process group says so; that is what the examples are about.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def public() -> Iterator[tuple[str, object]]:
    """Every name that a script may use."""
    yield from ((name, getattr(holdfast, name)) for name in holdfast.__all__)
    yield from ((f"Checkpointer.{name}", getattr(holdfast.Checkpointer, name)) for name in METHODS)
    yield from (("Writer", dcp.Writer), ("Reader", dcp.Reader))


def test_dir_is_the_api_and_nothing_else(warm: Zygote) -> None:
    (warm.folder / "shown.py").write_text(
        "import holdfast, holdfast.cli, holdfast.checkpoint.dcp; print(*dir(holdfast))"
    )
    told = warm.run("shown.py").out.split()
    assert told == sorted([*holdfast.__all__, "__version__"])
    assert [name for name in vars(holdfast.Checkpointer) if name[0] != "_"] == sorted(METHODS, key=_place)


def _place(name: str) -> int:
    return list(vars(holdfast.Checkpointer)).index(name)


@pytest.mark.parametrize(("name", "thing"), list(public()), ids=[name for name, _ in public()])
def test_every_public_name_has_an_example_that_runs(
    name: str, thing: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one process without a job, where all calls do nothing but what they say."""
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(thing) or ""
    example = doctest.DocTestParser().get_doctest(text, {"holdfast": holdfast, "torch": torch}, name, None, None)
    assert example.examples, f"{name} has no example"
    said: list[str] = []
    with contextlib.redirect_stderr(sys.stdout):
        ran = doctest.DocTestRunner().run(example, out=said.append, clear_globs=False)
    assert ran.attempted and not ran.failed, "".join(said)
    if isinstance(ckpt := example.globs.get("ckpt"), holdfast.Checkpointer):
        ckpt.close()
