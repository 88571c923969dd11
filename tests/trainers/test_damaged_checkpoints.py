"""A trainer's newest checkpoint is damaged: it is refused, and the newest whole one is used. The trainers are real."""

import importlib.util
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from holdfast.checkpoint.state_image import StateError
from holdfast.trainers import newest_trainer_checkpoint
from tests.trainers.played_ranks import PlayedRanks

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]  # of libraries


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def remove(path: Path) -> None:
    path.unlink()


def tell_weights(model: torch.nn.Module) -> list[bytes]:
    return [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]


def check_said(capsys: pytest.CaptureFixture[str], left_out: Path, fault: str, used: Path | None) -> None:
    """One sentence says what is refused, why, and what is used."""
    instead = f"{used}, the newest whole one, is used" if used else "none is whole"
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("holdfast: ")]
    assert len(said) == 1, said
    assert re.fullmatch(rf"holdfast: {re.escape(str(left_out))} is left out: {fault}; {re.escape(instead)}", said[0]), (
        said
    )


# --- Hugging Face ---------------------------------------------------------------------------------------------------


def make_hf_trainer(out: Path, steps: int) -> Any:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=32, **sizes))
    rows = [{"input_ids": torch.arange(8) % 32, "labels": torch.tensor(n % 2)} for n in range(64)]
    args = TrainingArguments(
        output_dir=str(out), max_steps=steps, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True
    )
    return Trainer(model=model, args=args, train_dataset=rows)


def shard_weights(folder: Path) -> None:
    """Save the model of a checkpoint in several files with an index, as large models are."""
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="4KB")
    assert (folder / "model.safetensors.index.json").is_file()


HF_DAMAGES = {
    "weights-cut": ("model.safetensors", False, cut_short, "model.safetensors is cut short"),
    "optimizer-missing": ("optimizer.pt", False, remove, "optimizer.pt is missing"),
    "shard-missing": ("model-00002-of-*.safetensors", True, remove, r"model-00002-of-\d+.safetensors is missing"),
    "shard-cut": ("model-00002-of-*.safetensors", True, cut_short, r"model-00002-of-\d+.safetensors is .*"),
}


@pytest.mark.slow
@needs("transformers")
@pytest.mark.parametrize("damage", HF_DAMAGES)
def test_hugging_face(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import TrainerCallback

    from holdfast.trainers.huggingface import train

    name, is_sharded, harm, fault = HF_DAMAGES[damage]
    train(make_hf_trainer(tmp_path, 4))
    newest, before = tmp_path / "checkpoint-4", tmp_path / "checkpoint-2"
    if is_sharded:
        shard_weights(newest)
    harm(next(newest.glob(name)))
    capsys.readouterr()
    began: list[int] = []

    class Noted(TrainerCallback):  # type: ignore[misc]  # of a library that may be missing
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            began.append(state.global_step)

    again = make_hf_trainer(tmp_path, 6)
    again.add_callback(Noted())
    train(again)
    assert began == [2] and again.state.global_step == 6
    check_said(capsys, newest, fault, before)


@pytest.mark.slow
@needs("transformers")
def test_hugging_face_with_parts_of_fsdp(tmp_path: Path) -> None:
    """FSDP's parts lie in folders of their own."""
    from holdfast.trainers.huggingface import _find_own

    trainer = make_hf_trainer(tmp_path, 4)
    trainer.train()
    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            torch_dcp.save({"weight": torch.ones(100)}, checkpoint_id=folder / name, no_dist=True)
    found = _find_own(trainer.args)
    assert found and found.step == 4
    remove(tmp_path / "checkpoint-4" / "optimizer_0" / "__0_0.distcp")
    found = _find_own(trainer.args)
    assert found and found.step == 2


# --- Accelerate -----------------------------------------------------------------------------------------------------


class AccelerateLoop:
    """Two models and two optimizers; it saves after each of four batches of an epoch."""

    def __init__(self, folder: Path, batches: int) -> None:
        from accelerate import Accelerator
        from accelerate.utils import ProjectConfiguration, set_seed

        from holdfast.trainers.accelerate import HeldTraining

        set_seed(0)
        project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=project)
        models = [torch.nn.Linear(4, 4) for _ in range(2)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizers[0])
        loader: Any = torch.utils.data.DataLoader([*torch.eye(4).repeat(4, 1)], batch_size=2)  # type: ignore[arg-type]
        *parts, schedule, loader = accelerator.prepare(*models, *optimizers, schedule, loader)
        self.models = parts[:2]
        self.training = HeldTraining(
            accelerator, model=torch.nn.ModuleList(self.models), optimizer=parts[2:], extra={"schedule": schedule}
        )
        self.restored = self.training.step
        self.after: dict[int, list[bytes]] = {}
        for batch in self.training.batches(loader):
            accelerator.backward(self.models[1](self.models[0](batch)).square().sum())
            for optimizer in parts[2:]:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            accelerator.save_state()
            self.after[self.training.step + 1] = tell_weights(torch.nn.ModuleList(self.models))
            if len(self.after) == batches:
                break


ACCELERATE_DAMAGES = {
    "weights-cut": ("model.safetensors", cut_short, "model.safetensors is not whole .*"),
    "weights-missing": ("model.safetensors", remove, "model.safetensors is missing"),
    "second-weights-missing": ("model_1.safetensors", remove, "model_1.safetensors is missing"),
    "optimizer-cut": ("optimizer.bin", cut_short, "optimizer.bin is not whole .*"),
    "second-optimizer-missing": ("optimizer_1.bin", remove, "optimizer_1.bin is missing"),
    "schedule-missing": ("scheduler.bin", remove, "scheduler.bin is missing"),
    "random-states-missing": ("random_states_0.pkl", remove, "random_states_0.pkl is missing"),
    "position-missing": ("custom_checkpoint_0.pkl", remove, "custom_checkpoint_0.pkl is missing"),
}


@pytest.mark.slow
@needs("accelerate")
@pytest.mark.parametrize("damage", ACCELERATE_DAMAGES)
def test_accelerate(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, harm, fault = ACCELERATE_DAMAGES[damage]
    first = AccelerateLoop(tmp_path, 3)
    folders = [tmp_path / "checkpoints" / f"checkpoint_{n}" for n in range(3)]
    harm(folders[2] / name)
    again = AccelerateLoop(tmp_path, 1)
    assert again.restored == 2
    assert again.after == {3: first.after[3]}
    check_said(capsys, folders[2], fault, folders[1])


@needs("accelerate")
def test_accelerate_with_parts_of_fsdp(tmp_path: Path) -> None:
    """FSDP's parts lie in folders of their own."""
    from holdfast.trainers.accelerate import _fault_of

    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        torch_dcp.save({"weight": torch.ones(100)}, checkpoint_id=tmp_path / name, no_dist=True)
    needed: list[tuple[str, ...]] = [("model.safetensors", "pytorch_model_fsdp_0"), ("optimizer.bin", "optimizer_0")]
    assert _fault_of(tmp_path, needed) == ""
    remove(tmp_path / "optimizer_0" / "__0_0.distcp")
    assert _fault_of(tmp_path, needed) == "optimizer_0: __0_0.distcp is missing"
    shutil.rmtree(tmp_path / "optimizer_0")
    assert _fault_of(tmp_path, needed) == "optimizer.bin is missing"


# --- Lightning ------------------------------------------------------------------------------------------------------

Fit = Callable[..., Any]


@pytest.fixture
def fit(tmp_path: Path) -> Fit:
    """fit(epochs, ...) trains a small module, from a checkpoint if there is one, and returns it and its Trainer."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):  # type: ignore[misc]  # of a library that may be missing
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 4)
            self.made: list[int] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.made.append(self.global_step + 1)
            loss: torch.Tensor = self.net(batch).square().sum()
            return loss

        def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("error", self.net(batch).square().sum())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    def fit(epochs: int, *plugins: Any, ckpt_path: str | None = None, tests: bool = False, callbacks: Any = ()) -> Any:
        lightning.seed_everything(0)
        saver = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1, save_last=True)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=epochs, plugins=[*plugins], callbacks=[saver, *callbacks],
            logger=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = Module()
        loader: Any = torch.utils.data.DataLoader([*torch.eye(4)], batch_size=2)  # type: ignore[arg-type]
        (trainer.test if tests else trainer.fit)(module, loader, ckpt_path=ckpt_path)
        return module

    return fit


@pytest.mark.slow
@needs("lightning")
@pytest.mark.parametrize(
    "case",
    [
        (("last.ckpt",), cut_short, "last", "step=6.ckpt", [7, 8]),
        (("last.ckpt", "step=6.ckpt"), cut_short, "last", "step=4.ckpt", [5, 6, 7, 8]),
        (("last.ckpt",), remove, "last.ckpt", "step=6.ckpt", [7, 8]),
        (("last.ckpt", "step=6.ckpt"), remove, "step=6.ckpt", "step=4.ckpt", [5, 6, 7, 8]),
    ],
    ids=["cut", "both-cut", "missing", "both-missing"],
)
def test_lightning(
    case: tuple[tuple[str, ...], Callable[[Path], None], str, str, list[int]],
    fit: Fit,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from holdfast.trainers.lightning import HoldfastPlugin

    harmed, harm, asked, used, made = case
    calm = fit(4)
    assert calm.made == [*range(1, 9)]
    shutil.rmtree(tmp_path)
    fit(3, HoldfastPlugin(tmp_path))
    for name in harmed:
        harm(tmp_path / name)
    capsys.readouterr()
    again = fit(4, HoldfastPlugin(tmp_path), ckpt_path=asked if asked == "last" else str(tmp_path / asked))
    assert again.made == made and tell_weights(again) == tell_weights(calm)
    told = re.findall(
        r"holdfast: \S+/(\S+) is left out: .*; \S+/(\S+), the newest whole one, is used", capsys.readouterr().err
    )
    there = [name for name in harmed if harm is cut_short] or [asked]
    assert told == [(name, used) for name in there]


@pytest.mark.slow
@needs("lightning")
def test_lightning_refuses_a_damaged_checkpoint_that_nothing_may_replace(
    fit: Fit, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An older one, which somebody wants as it is, as the best; one of another folder; one beside which none is."""
    from holdfast.trainers.lightning import HoldfastPlugin

    fit(2, HoldfastPlugin(tmp_path))
    cut_short(tmp_path / "step=2.ckpt")
    for more in ({}, {"tests": True}):
        shutil.copy2(tmp_path / "last.ckpt", tmp_path / "newer.ckpt")
        touch_later(tmp_path / "newer.ckpt")
        with pytest.raises(StateError, match=r"/step=2\.ckpt .* step=2\.ckpt "):
            fit(3, HoldfastPlugin(tmp_path), ckpt_path=str(tmp_path / "step=2.ckpt"), **more)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.copy(tmp_path / "step=2.ckpt", elsewhere / "bert.ckpt")
    shutil.copy(tmp_path / "step=4.ckpt", elsewhere / "gpt.ckpt")
    touch_later(elsewhere / "bert.ckpt")
    with pytest.raises(StateError, match=r"/bert\.ckpt .* bert\.ckpt "):
        fit(3, HoldfastPlugin(tmp_path), ckpt_path=str(elsewhere / "bert.ckpt"))
    (elsewhere / "gpt.ckpt").unlink()
    with pytest.raises(StateError, match=r"/bert\.ckpt .*; "):
        fit(3, HoldfastPlugin(elsewhere), ckpt_path=str(elsewhere / "bert.ckpt"))


def touch_later(path: Path) -> None:
    """As if it had been written after all others."""
    latest = max(other.stat().st_mtime_ns for other in path.parent.iterdir()) + 1_000_000_000
    os.utime(path, ns=(latest, latest))


@needs("lightning")
def test_a_kill_while_lightning_saves_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.trainers.lightning import HoldfastPlugin

    plugin, path = HoldfastPlugin(tmp_path), tmp_path / "last.ckpt"
    plugin.save_checkpoint({"step": 1}, path)

    def die(checkpoint: object, file: Any) -> None:
        file.write(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("torch.save", die)
        with pytest.raises(KeyboardInterrupt):
            plugin.save_checkpoint({"step": 2}, path)
    assert plugin.load_checkpoint(path) == {"step": 1}
    plugin.save_checkpoint({"step": 3}, path)
    assert plugin.load_checkpoint(path) == {"step": 3}
    assert [one.name for one in tmp_path.iterdir()] == ["last.ckpt"]


@needs("lightning")
@pytest.mark.parametrize(
    ("make_missing", "fault"),
    [
        ("__0_0.distcp", "__0_0.distcp is missing"),
        (".metadata", ".metadata is missing"),
        ("meta.pt", "meta.pt is missing"),
    ],
)
def test_a_folder_of_shards_is_whole_only_with_all_of_them(
    make_missing: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ModelParallelStrategy writes them."""
    from holdfast.trainers.lightning import HoldfastCallback

    folder = tmp_path / "step=2.ckpt"
    for n in (1, 2):
        folder = tmp_path / f"step={n}.ckpt"
        torch_dcp.save({"weight": torch.ones(100)}, checkpoint_id=folder, no_dist=True)
        torch.save({"global_step": n}, folder / "meta.pt")
    touch_later(folder)
    assert HoldfastCallback().newest_checkpoint(tmp_path) == str(folder)
    remove(folder / make_missing)
    touch_later(folder)
    assert HoldfastCallback().newest_checkpoint(tmp_path) == str(tmp_path / "step=1.ckpt")
    check_said(capsys, folder, fault, tmp_path / "step=1.ckpt")


@needs("lightning")
def test_all_ranks_of_lightning_load_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One node of two cannot read the newest."""
    from holdfast.trainers import lightning_plugin

    plugin = lightning_plugin.HoldfastPlugin(tmp_path)
    for step in (1, 2, 3):
        plugin.save_checkpoint({"step": step}, tmp_path / f"step={step}.ckpt")
        touch_later(tmp_path / f"step={step}.ckpt")
    ranks = PlayedRanks(2)
    monkeypatch.setattr(newest_trainer_checkpoint, "RankWorld", lambda: ranks)
    monkeypatch.setattr(lightning_plugin, "RankWorld", lambda: ranks)
    find = lightning_plugin.find_lightning_fault
    half = ("step=3.ckpt", "step=2.ckpt")
    monkeypatch.setattr(
        lightning_plugin,
        "find_lightning_fault",
        lambda path: "it is half" if path.name in half[: ranks.rank + 1] else find(path),
    )
    loaded = ranks.run(lambda rank: plugin.load_checkpoint(tmp_path / "step=3.ckpt"))
    assert loaded == [{"step": 1}] * 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"holdfast: {tmp_path}/{name} is left out: it is half; {tmp_path}/step=1.ckpt, the newest whole one, is used"
        for name in half
    ]
