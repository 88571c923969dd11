"""torch.compile under holdfast: a rank that starts again finds what was compiled, on its own host and on another."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main
from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.test_join import host, port

__all__ = ["port"]
pytestmark = pytest.mark.e2e

# Products of matrices alone: the compiler has its graphs, keys and caches, and needs no g++ for them.
COMPILED = """
import json, os, sys, time
import torch
from torch._dynamo.utils import counters

model = torch.nn.Linear(8, 8, bias=False)
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
began = time.perf_counter()
for step in range(100_000):
    (compiled(torch.ones(4, 8)) @ torch.ones(8)).sum().backward()
    optimizer.step()
    if step == 0:
        seen = dict(counters["inductor"]) | dict(counters["aot_autograd"])
        seen |= {"folder": os.environ["TORCHINDUCTOR_CACHE_DIR"], "first_s": time.perf_counter() - began}
        with open(f"{sys.argv[1]}/seen-{os.environ['TORCHELASTIC_RESTART_COUNT']}.json", "w") as file:
            json.dump(seen, file)
    if os.path.exists(f"{sys.argv[1]}/finish"):
        break
    time.sleep(0.02)
"""


def seen(folder: Path, restart: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"seen-{restart}.json").read_text())
    return found


def hits_and_misses(found: dict[str, Any]) -> tuple[int, int]:
    return found.get("fxgraph_cache_hit", 0), found.get("fxgraph_cache_miss", 0)


@pytest.mark.slow
def test_nothing_is_compiled_twice(start: Start, port: int, tmp_path: Path) -> None:
    """Neither by a rank that is started again where it was, nor by one on a host that has never had a rank."""
    endpoint, flags = f"127.0.0.1:{port}", ("--nnodes", "1", "--standbys", "1", "--set", "silence.silence_s=2")

    def begin(name: str) -> Job:
        (tmp_path / f"tmp-{name}").mkdir()
        own = {"TMPDIR": str(tmp_path / f"tmp-{name}")}
        return host(start, endpoint, *flags, name=name, script=COMPILED, zygote=True, **own)

    first = begin("first")
    first.trains()
    cold = seen(tmp_path, 0)
    hits, compiled = hits_and_misses(cold)
    assert (hits, compiled) == (0, 2), "forward and backward"
    assert Path(cold["folder"]) == first.run_dir / "torchinductor_cache"
    first.kill(first.rank(0))
    first.trains(generation=2)
    assert hits_and_misses(seen(tmp_path, 1)) == (compiled, 0)

    second = begin("second")
    [log] = second.until(lambda: list(second.run_dir.glob("nodes/*/agent.log")), "its agent")
    second.until(lambda: "compiled code: brought" in log.read_text(), "what the first host has compiled")
    first.until(lambda: "ready" in [node["role"] for node in first.status()["nodes"]], "a standby")
    [seated] = [node["node"] for node in first.status()["nodes"] if node["ranks"] == "0"]
    assert main(["evict", seated, "--run", str(first.run_dir)]) == 0
    first.trains(generation=3)
    elsewhere = seen(tmp_path, 2)
    assert Path(elsewhere["folder"]) == second.run_dir / "torchinductor_cache"
    assert hits_and_misses(elsewhere) == (compiled, 0)
    first.finish()
    second.ends(0)
    first.ends(0)
    for job in (first, second):
        assert not list(job.run_dir.glob("torchinductor*")) and not (job.run_dir / "releases" / "compiled").exists()
