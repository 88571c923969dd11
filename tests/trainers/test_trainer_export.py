"""Checkpoints that the trainers themselves have written, exported, and loaded by them on other numbers of ranks.

DeepSpeed's own state, gathered by DeepSpeed, is compared bit for bit, and so is the step that it makes next.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from holdfast.cli import main
from tests.conftest import job_environment
from tests.trainers.ranks.rank_forks import ENDED

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
RANKS = Path(__file__).parent / "ranks"
needs_deepspeed = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed")
needs_megatron = pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="megatron-core is not installed")
KINDS = ("exp_avg", "exp_avg_sq")
RunRanks = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """servers(script) is a process that forks ranks of it."""
    started: dict[str, subprocess.Popen[str]] = {}
    env = job_environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

    def serve(script: str) -> subprocess.Popen[str]:
        if script not in started:
            started[script] = subprocess.Popen(
                [sys.executable, str(RANKS / script)],
                env=env,
                cwd=tmp_path_factory.mktemp("ranks"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return started[script]

    yield serve
    for server in started.values():
        server.communicate()
        assert server.returncode == 0


@pytest.fixture
def run_ranks(tmp_path: Path, servers: Callable[[str], subprocess.Popen[str]]) -> RunRanks:
    """run_ranks(script, world, words) runs so many ranks of a script; it returns what the first has told."""
    count = iter(range(100))

    def run(script: str, world: int, *words: str) -> dict[str, Any]:
        place = tmp_path / f"ranks-{next(count)}"
        place.mkdir()
        server = servers(script)
        assert server.stdin and server.stdout
        print(json.dumps({"world": world, "place": str(place), "words": words}), file=server.stdin, flush=True)
        answer = next((line for line in server.stdout if line.startswith(ENDED)), "")  # libraries print as well
        logs = "\n".join(path.read_text()[-3000:] for path in sorted(place.glob("*.log")))
        assert answer and not any(json.loads(answer.removeprefix(ENDED))), logs
        return torch.load(place / "told") if (place / "told").exists() else {}

    return run


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name], name


DEEPSPEED = {
    "ZeRO 1": (),
    "ZeRO 1, BF16_Optimizer": ("--bf16", "--fp32-grads"),
    "ZeRO 2, 16 bits": ("--stage", "2", "--bf16"),
    "ZeRO 2, gradients in turns": ("--stage", "2", "--in-turns"),
    "ZeRO 2, aligned parameters": ("--stage", "2", "--bf16", "--aligned"),
    "ZeRO 3": ("--stage", "3"),
    "ZeRO 3, 16 bits": ("--stage", "3", "--bf16"),
}


@needs_deepspeed
@pytest.mark.parametrize("kind", DEEPSPEED)
def test_deepspeed_goes_on_with_other_numbers_of_ranks(kind: str, run_ranks: RunRanks, tmp_path: Path) -> None:
    words = DEEPSPEED[kind]
    saved = run_ranks("deepspeed_rank.py", 2, *words, "--save", str(tmp_path / "saved"))
    for ranks in (1, 4, 3):
        to = tmp_path / f"for-{ranks}"
        assert main(["ckpt", "export", str(tmp_path / "saved"), str(to), "--ranks", str(ranks)]) == 0
        loaded = run_ranks("deepspeed_rank.py", ranks, *words, "--load", str(to / "global_step3"))
        assert_same(loaded["before"], saved["before"])
        if ranks != 3:  # a third of three equal gradients is not the gradient
            assert_same(loaded["after"], saved["after"])


@needs_deepspeed
@pytest.mark.parametrize("kind", ["ZeRO 1", "ZeRO 2, 16 bits", "ZeRO 3"])
def test_deepspeed_goes_on_from_its_universal_checkpoint(kind: str, run_ranks: RunRanks, tmp_path: Path) -> None:
    words = DEEPSPEED[kind]
    saved = run_ranks("deepspeed_rank.py", 2, *words, "--save", str(tmp_path / "saved"))
    universal = make_universal(tmp_path / "saved" / "global_step3")
    assert main(["ckpt", "verify", str(universal)]) == 0
    assert main(["ckpt", "export", str(universal), str(tmp_path / "to"), "--ranks", "4"]) == 0
    loaded = run_ranks("deepspeed_rank.py", 4, *words, "--load", str(tmp_path / "to" / universal.name))
    assert_same(loaded["before"], saved["before"])
    assert_same(loaded["after"], saved["after"])


def make_universal(folder: Path) -> Path:
    to = folder.with_name(f"{folder.name}_universal")
    words = ("--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state")
    code = "import sys\nfrom deepspeed.checkpoint import ds_to_universal as d\nd.main(d.parse_arguments())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--input_folder", str(folder), "--output_folder", str(to), *words],
        env=job_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return to


@needs_deepspeed
@pytest.mark.parametrize("kind", ["ZeRO 2, 16 bits", "ZeRO 3"])
def test_torch_alone_goes_on_from_deepspeeds(kind: str, run_ranks: RunRanks, tmp_path: Path) -> None:
    """The weights and the optimizer's state are those that DeepSpeed gathers."""
    saved = run_ranks("deepspeed_rank.py", 2, *DEEPSPEED[kind], "--save", str(tmp_path / "saved"))["before"]
    assert main(["ckpt", "export", str(tmp_path / "saved"), str(tmp_path / "to"), "--dcp"]) == 0
    model, groups = make_plain_model()
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    whole, kept = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": whole, "optimizer": kept}
    dcp.load(state, checkpoint_id=tmp_path / "to", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for name, values in model.named_parameters():
        if values.requires_grad:
            assert torch.equal(values, saved[f"fp32 {name}"]), name
            for one in KINDS:
                assert torch.equal(optimizer.state[values][one], saved[f"{one} {name}"]), name
            assert optimizer.state[values]["step"] == 3
    assert [group["lr"] for group in optimizer.param_groups] == saved["lr"]
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, saved[f"buffer {name}"].to(buffer.dtype)), name


def make_plain_model() -> tuple[torch.nn.Module, list[dict[str, Any]]]:
    model = torch.nn.Module()
    model.embed = torch.nn.Parameter(torch.zeros(7, 5))
    model.register_buffer("batches", torch.zeros(3))
    model.frozen = torch.nn.Linear(5, 5)
    model.one, model.two = torch.nn.Linear(5, 3), torch.nn.Linear(3, 7, bias=False)
    model.frozen.requires_grad_(False)
    trained = {name: values for name, values in model.named_parameters() if values.requires_grad}
    return model, [
        {"params": [values for name, values in trained.items() if "weight" in name or name == "embed"]},
        {"params": [values for name, values in trained.items() if "bias" in name], "weight_decay": 0.0},
    ]


@needs_megatron
def test_megatron_as_it_loads_it_itself_on_another_number_of_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    source = tmp_path / "saved" / "iter_0000003"
    run_ranks("megatron_rank.py", 2, "--save", str(source))
    loaded = run_ranks("megatron_rank.py", 1, "--load", str(source))
    assert main(["ckpt", "export", str(tmp_path / "saved"), str(tmp_path / "to"), "--dcp"]) == 0
    names = [name.removeprefix("param ") for name in loaded if name.startswith("param ")]
    weights = {name: torch.zeros_like(loaded[f"param {name}"]) for name in names}
    kept = {
        name: {"step": torch.tensor(0.0)} | {kind: torch.zeros_like(weights[name]) for kind in KINDS} for name in names
    }
    dcp.load({"model": weights, "optimizer": {"state": kept}}, checkpoint_id=tmp_path / "to", no_dist=True)
    assert len(names) > 10
    for name in names:
        assert torch.equal(weights[name], loaded[f"param {name}"]), name
        assert all(torch.equal(kept[name][kind], loaded[f"{kind} {name}"]) for kind in KINDS), name
        assert kept[name]["step"] == 3


@needs_megatron
def test_weights_of_megatron_whose_optimizer_lies_in_buckets(run_ranks: RunRanks, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    source = tmp_path / "saved" / "iter_0000003"
    run_ranks("megatron_rank.py", 2, "--save", str(source), "--way", "dp_reshardable")
    loaded = run_ranks("megatron_rank.py", 1, "--load", str(source), "--way", "dp_reshardable")
    assert main(["ckpt", "export", str(source), str(tmp_path / "to")]) == 0
    found = load_file(tmp_path / "to" / "model.safetensors")
    weights = {name.removeprefix("model "): tensor for name, tensor in loaded.items() if name.startswith("model ")}
    assert weights and all(torch.equal(tensor, found[name]) for name, tensor in weights.items())
    assert main(["ckpt", "export", str(source), str(tmp_path / "state"), "--dcp"]) == 2
