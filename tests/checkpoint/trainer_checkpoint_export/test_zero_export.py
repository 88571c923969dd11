"""What DeepSpeed's ranks held, for another number of ranks: the same files as if these had written them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.trainer_checkpoint_export.trainer_checkpoint_converter import (
    ExportForm,
    export_trainer_checkpoint,
)
from holdfast.checkpoint.trainer_checkpoints import find_trainer_checkpoints, verify_trainer_checkpoint
from tests.checkpoint.trainer_checkpoint_export.zero_making import (
    GROUPS,
    KINDS,
    SHAPES,
    TAG,
    LossScaler,
    Zero,
    pickle_of,
    played_deepspeed,
    put_pickle,
    read_files,
    whole_tensors,
    write_universal,
    write_zero,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
KINDS_OF_ZERO = {
    "ZeRO 1": Zero(),
    "ZeRO 2, gradients in turns": Zero(stage=2, in_turns=True),
    "ZeRO 2, aligned parameters": Zero(stage=2, alignment=4),
    "BF16_Optimizer": Zero(is_bf16_optimizer=True),
    "before its first step": Zero(has_steps=False),
    "ZeRO 3": Zero(stage=3),
    "ZeRO 3, divided groups": Zero(stage=3, sub_group_values=4),
}


def difference(one: Any, other: Any, where: str = "") -> str:
    """Where two values differ; empty if they are the same, tensors bit for bit."""
    if type(one) is not type(other):
        return f"{where}: {one!r} and {other!r}"
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        return "" if same else f"{where}: {one} and {other}"
    if isinstance(one, dict):
        if [*one] != [*other]:
            return f"{where}: {[*one]} and {[*other]}"
        return next((found for key in one if (found := difference(one[key], other[key], f"{where}/{key}"))), "")
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return f"{where}: {one} and {other}"
        pairs = enumerate(zip(one, other, strict=True))
        return next((found for n, pair in pairs if (found := difference(*pair, f"{where}/{n}"))), "")
    return "" if one == other else f"{where}: {one!r} and {other!r}"


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (1, 4), (3, 2), (4, 40)])
@pytest.mark.parametrize("kind", KINDS_OF_ZERO)
def test_another_number_of_ranks(kind: str, before: int, after: int, tmp_path: Path) -> None:
    zero = KINDS_OF_ZERO[kind]
    source = write_zero(tmp_path / "before", before, zero)
    expected = write_zero(tmp_path / "after", after, zero)
    made = export_trainer_checkpoint(str(source), tmp_path / "to", ExportForm(ranks=after))
    assert made.files == (str(tmp_path / "to" / TAG),) and not made.left_out
    assert (tmp_path / "to" / "latest").read_text() == TAG
    assert difference(read_files(tmp_path / "to" / TAG), read_files(expected)) == ""
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == [TAG, "latest"], "and nothing else"
    assert verify_trainer_checkpoint(made.files[0]).fault == ""


@pytest.mark.parametrize("kind", KINDS_OF_ZERO)
def test_a_universal_checkpoint(kind: str, tmp_path: Path) -> None:
    """It keeps no padding, no addresses and no count of ranks, and DeepSpeed writes it without them for any."""
    zero = KINDS_OF_ZERO[kind]
    if not zero.has_steps:
        pytest.skip("ds_to_universal needs a state of the optimizer")
    source = write_universal(tmp_path, zero)
    assert [one.ok for one in find_trainer_checkpoints(str(source))] == [True]
    assert verify_trainer_checkpoint(str(source)).fault == ""
    made = export_trainer_checkpoint(str(source), tmp_path / "to", ExportForm(ranks=3))
    expected = write_zero(tmp_path / "after", 3, zero)
    assert unordered_difference(read_files(Path(made.files[0])), read_files(expected)) == ""


def unordered_difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """As `difference`, but the order of entries is not that of the state that a rank saves itself."""

    def in_order(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: in_order(value[key]) for key in sorted(value, key=str)}
        return [in_order(entry) for entry in value] if isinstance(value, list) else value

    return difference(in_order(one), in_order(other))


def test_a_part_of_a_universal_checkpoint_is_missing(tmp_path: Path) -> None:
    source = write_universal(tmp_path, Zero())
    (source / "zero" / "scale" / "fp32.pt").unlink()
    assert [one.why for one in find_trainer_checkpoints(str(source))] == ["zero/scale/fp32.pt is missing"]
    assert verify_trainer_checkpoint(str(source)).fault == "zero/scale/fp32.pt is missing"


@pytest.mark.parametrize("kind", ["ZeRO 2, gradients in turns", "BF16_Optimizer", "ZeRO 3"])
@pytest.mark.parametrize("is_universal", [False, True])
def test_whole_tensors_for_torch(kind: str, is_universal: bool, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    zero = KINDS_OF_ZERO[kind]
    source = write_universal(tmp_path, zero) if is_universal else write_zero(tmp_path / "before", 3, zero)
    whole = whole_tensors()
    buffers = {"norm.mean": torch.tensor([0.5, 1.5])} | ({"frozen": torch.arange(11.0)} if zero.stage == 3 else {})
    expected = whole["fp32"] | buffers | {"tied.weight": whole["fp32"]["embed.weight"]}

    made = export_trainer_checkpoint(str(source), tmp_path / "weights", ExportForm(prefix="model."))
    assert made.files == (str(tmp_path / "weights" / "model.safetensors"),)
    assert made.left_out == (() if zero.stage == 3 else ("model.extra",))
    assert unordered_difference(load_file(made.files[0]), expected) == ""

    made = export_trainer_checkpoint(str(source), tmp_path / "dcp", ExportForm(is_dcp=True))
    assert {Path(one).name for one in made.files} == {"__0_0.distcp", ".metadata"}
    kept = {
        name: {"step": torch.tensor(0.0), **{kind: torch.zeros(shape) for kind in KINDS[1:]}}
        for name, shape in SHAPES.items()
    }
    state: dict[str, Any] = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in expected.items()},
        "optimizer": {"state": kept, "param_groups": [{"params": [], "lr": 0.0, "betas": ()} for _ in GROUPS]},
        "step": 0,
    }
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert difference(state["model"], expected) == "" and state["step"] == 7
    for name in SHAPES:
        averages = {kind: whole[kind][name] for kind in KINDS[1:]}
        assert difference(kept[name], {"step": torch.tensor(7.0), **averages}) == ""
    groups = state["optimizer"]["param_groups"]
    assert [(group["params"], group["lr"], group["betas"]) for group in groups] == [
        (["embed.weight", "scale", "1.weight"], 0.1, (0.9, 0.95)),
        (["0.bias", "head.bias"], 0.05, (0.9, 0.95)),
    ]


def test_latest_is_not_changed(tmp_path: Path) -> None:
    source = write_zero(tmp_path / "before", 2, Zero())
    (tmp_path / "before" / "latest").write_text("another")
    with pytest.raises(StorageError, match=TAG):
        export_trainer_checkpoint(str(source), tmp_path / "before", ExportForm(ranks=3))
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "latest").write_text("another")
    export_trainer_checkpoint(str(source), tmp_path / "to", ExportForm(ranks=3))
    assert (tmp_path / "to" / "latest").read_text() == "another"


@pytest.mark.parametrize(("before", "in_turns", "is_told"), [(2, True, True), (2, False, True), (1, False, False)])
def test_the_order_of_parameters_where_the_configuration_is_a_path(
    before: int, in_turns: bool, is_told: bool, tmp_path: Path
) -> None:
    """Then the ranks' maps of their parts show it, unless there is one rank."""
    zero = Zero(stage=2, in_turns=in_turns)
    for ranks, name in ((before, "before"), (3, "after")):
        folder = write_zero(tmp_path / name, ranks, zero)
        change(folder, lambda told: told.update(ds_config="config.json"))
    made = export_trainer_checkpoint(str(tmp_path / "before" / TAG), tmp_path / "to", ExportForm(ranks=3))
    assert bool(made.assumed) != is_told
    assert difference(read_files(Path(made.files[0])), read_files(tmp_path / "after" / TAG)) == ""


def test_counts_of_steps_are_tensors_of_their_own(tmp_path: Path) -> None:
    """An optimizer of torch would add up one that several parts of a group had."""
    source = write_zero(tmp_path / "before", 4, Zero(stage=3, sub_group_values=4))
    made = export_trainer_checkpoint(str(source), tmp_path / "to", ExportForm(ranks=1))
    told = read_files(Path(made.files[0]))["zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    counts = [entry["step"].data_ptr() for entry in states(told)["optimizer_state_dict"]["state"].values()]
    assert len(counts) > 2 and len({*counts}) == len(counts)


def test_the_division_of_groups_is_not_told(tmp_path: Path) -> None:
    """Under ZeRO 3, by a size that is in the configuration."""
    source = write_zero(tmp_path / "before", 2, Zero(stage=3, sub_group_values=4))
    change(source, lambda told: told.update(ds_config="config.json"))
    with pytest.raises(StorageError, match=r"\bsub_group_size\b"):
        export_trainer_checkpoint(str(source), tmp_path / "to", ExportForm(ranks=3))


def change(folder: Path, how: Callable[[dict[str, Any]], Any], name: str = "*.pt") -> None:
    with played_deepspeed():
        for path in folder.glob(name):
            told = torch.load(path, weights_only=False)
            how(told)
            torch.save(told, path)


def states(told: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = told["optimizer_state_dict"]
    return found


PART = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def other_step(folder: Path) -> None:
    change(folder, lambda told: states(told)["base_optimizer_state"]["state"][0].update(step=torch.tensor(8.0)), PART)


def other_shape(folder: Path) -> None:
    short = {"exp_avg": torch.ones(3)}
    change(folder, lambda told: states(told)["base_optimizer_state"]["state"][1].update(short), PART)


def more_kinds(folder: Path) -> None:
    change(folder, lambda told: states(told)["base_optimizer_state"]["state"][1].update(max=torch.ones(4)), PART)


def experts(folder: Path) -> None:
    group = "base_optimizer_state"
    change(folder, lambda told: states(told)[group]["param_groups"][0].update(moe=True), "*optim_states.pt")


def expert_files(folder: Path) -> None:
    (folder / "layer_0_expert_1_mp_rank_00_model_states.pt").write_bytes(b"")


def turns_and_gaps(folder: Path) -> None:
    told = {"round_robin_gradients": True, "parameter_alignment": True}
    change(folder, lambda model: model["ds_config"]["zero_optimization"].update(told), "mp_rank*")


def pipeline(folder: Path) -> None:
    (folder / "layer_00-model_00-model_states.pt").write_bytes(b"")


def offloaded(folder: Path) -> None:
    (folder / "offloaded_tensors").mkdir()


def elastic(folder: Path) -> None:
    change(folder, lambda told: states(told).update(base_optimizer_state=[]), "*optim_states.pt")


def no_stage(folder: Path) -> None:
    change(folder, lambda told: states(told).update(zero_stage=5), "*optim_states.pt")


def no_part(folder: Path) -> None:
    (folder / PART).rename(folder / PART.replace("rank_1", "rank_2"))


def no_zero(folder: Path) -> None:
    for path in folder.glob("*optim_states.pt"):
        path.unlink()


def no_archive(folder: Path) -> None:
    (folder / PART).write_bytes(b"\x80\x02}q\x00.")


def no_storage(folder: Path) -> None:
    put_pickle(folder / PART, pickle_of(folder / PART).replace(b"storage", b"strange", 1))


def no_shapes(folder: Path) -> None:
    change(folder, lambda told: told.update(param_shapes=None), "mp_rank*")


def shape_of_text(folder: Path) -> None:
    change(folder, lambda told: told["param_shapes"][0].update(scale="text"), "mp_rank*")


def huge_shape(folder: Path) -> None:
    change(folder, lambda told: told["param_shapes"][0].update(scale=(1 << 50,)), "mp_rank*")


def negative_shape(folder: Path) -> None:
    change(folder, lambda told: told["param_shapes"][0].update(scale=(-4,)), "mp_rank*")


REFUSED: dict[Callable[[Path], None], str] = {
    other_step: "step",
    other_shape: "exp_avg",
    more_kinds: "max",
    experts: "experts",
    expert_files: "layer_0_expert_1_mp_rank_00_model_states.pt",
    turns_and_gaps: "parameter_alignment",
    pipeline: "layer_00-model_00-model_states.pt",
    offloaded: "offloaded_tensors",
    elastic: "elastic_checkpoint",
    no_stage: "5",
    no_part: "2 parts",
    no_zero: TAG,
    no_archive: PART,
    no_storage: PART,
    no_shapes: "mp_rank_00_model_states.pt",
    shape_of_text: "scale",
    huge_shape: "fp32",
    negative_shape: "scale",
}


@pytest.mark.parametrize("spoil", REFUSED)
@pytest.mark.parametrize("form", [ExportForm(ranks=1), ExportForm(is_dcp=True)], ids=["ranks", "dcp"])
def test_what_is_not_understood_is_said_in_one_sentence(
    spoil: Callable[[Path], None], form: ExportForm, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_zero(tmp_path / "before", 2, Zero())
    spoil(source)
    with pytest.raises(StorageError) as caught:
        export_trainer_checkpoint(str(source), tmp_path / "to", form)
    assert REFUSED[spoil] in str(caught.value) and "\n" not in str(caught.value)
    assert not [*(tmp_path / "to").iterdir()], "nothing half is left"
    assert capfd.readouterr().err == ""


def test_slices_of_tensor_parallel_ranks(tmp_path: Path) -> None:
    """Each is divided anew; how they make whole tensors is not told."""
    for ranks, name in ((2, "before"), (3, "after")):
        folder = write_zero(tmp_path / name, ranks, Zero())
        for path in [*folder.glob("*_mp_rank_00_*"), folder / "mp_rank_00_model_states.pt"]:
            (folder / path.name.replace("mp_rank_00", "mp_rank_01")).write_bytes(path.read_bytes())
        change(folder, lambda told: states(told)["single_partition_of_fp32_groups"][0].neg_(), "zero*mp_rank_01*")
    source = tmp_path / "before" / TAG
    export_trainer_checkpoint(str(source), tmp_path / "to", ExportForm(ranks=3))
    assert difference(read_files(tmp_path / "to" / TAG), read_files(tmp_path / "after" / TAG)) == ""
    with pytest.raises(StorageError, match=r"\bmp_rank_01_model_states\.pt"):
        export_trainer_checkpoint(str(source), tmp_path / "whole", ExportForm(is_dcp=True))


class Spiteful:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, ("touched",)


def test_no_code_of_a_file_runs_and_what_it_names_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_zero(tmp_path / "before", 2, Zero())
    change(source, lambda told: told.update(spite=[Spiteful(), {1, 2}, b"bytes", Path.touch]), "mp_rank*")
    made = export_trainer_checkpoint(str(source), tmp_path / "to", ExportForm(ranks=1))
    assert not Path("touched").exists()
    with played_deepspeed():
        told = torch.load(Path(made.files[0]) / "mp_rank_00_model_states.pt", weights_only=False)
    assert Path("touched").exists(), "as the file that was read would have done"
    assert told["spite"][1:] == [{1, 2}, b"bytes", Path.touch]
    assert difference(told["mine"], LossScaler(3.0)) == ""
