"""Checkpoints as DeepSpeed writes them with ZeRO, made of whole tensors by torch alone.

Its classes are played: their names are DeepSpeed's while files are written and read, and nobody else finds them.
"""

import dataclasses
import enum
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

TAG = "global_step7"
SHAPES = {"embed.weight": (5, 3), "0.bias": (7,), "scale": (), "1.weight": (2, 2, 3), "head.bias": (1,)}
GROUPS = [["embed.weight", "scale", "1.weight"], ["0.bias", "head.bias"]]
KINDS = ("fp32", "exp_avg", "exp_avg_sq")


@dataclasses.dataclass
class LossScaler:
    """A plain object of DeepSpeed, with what it remembers."""

    cur_scale: float
    dynamic: bool = False


class ZeroStageEnum(int, enum.Enum):
    optimizer_states = 1
    gradients = 2
    weights = 3


@dataclasses.dataclass
class fragment_address:
    numel: int
    start: int


PLAYED = {
    LossScaler: "deepspeed.runtime.fp16.loss_scaler",
    ZeroStageEnum: "deepspeed.runtime.zero.config",
    fragment_address: "deepspeed.utils.tensor_fragment",
}


@contextmanager
def played_deepspeed() -> Iterator[None]:
    """Within, pickle finds the played classes where DeepSpeed has them."""
    names = {".".join(name.split(".")[:n]) for name in PLAYED.values() for n in range(1, 5)}
    before = {name: sys.modules.get(name) for name in names}
    homes = {cls: cls.__module__ for cls in PLAYED}
    try:
        sys.modules |= {name: ModuleType(name) for name in names}
        for cls, name in PLAYED.items():
            cls.__module__ = name
            setattr(sys.modules[name], cls.__name__, cls)
        yield
    finally:
        for cls, home in homes.items():
            cls.__module__ = home
        for name, module in before.items():
            sys.modules.pop(name)
            if module:
                sys.modules[name] = module


@dataclasses.dataclass(frozen=True)
class Zero:
    """A checkpoint to be made, and how it is."""

    stage: int = 1
    in_turns: bool = False
    is_bf16_optimizer: bool = False
    sub_group_values: int = 10**9
    has_steps: bool = True
    alignment: int = 0  # values

    @property
    def prefix(self) -> str:
        return "bf16_" if self.is_bf16_optimizer else ""


def whole_tensors() -> dict[str, dict[str, torch.Tensor]]:
    """By kind and name; each value occurs once."""
    count = iter(range(1, 10**6))
    return {
        kind: {
            name: torch.tensor([float(next(count)) for _ in range(torch.Size(shape).numel())]).reshape(shape)
            for name, shape in SHAPES.items()
        }
        for kind in KINDS
    }


def write_zero(folder: Path, ranks: int, zero: Zero) -> Path:
    """Write the checkpoint of this many ranks to `folder / TAG`."""
    to = folder / TAG
    to.mkdir(parents=True)
    with played_deepspeed():
        for name, content in (files_of_3 if zero.stage == 3 else files_of)(ranks, zero).items():
            torch.save(content, to / name)
    return to


def read_files(folder: Path) -> dict[str, Any]:
    with played_deepspeed():
        return {path.name: torch.load(path, weights_only=False) for path in sorted(folder.glob("*.pt"))}


def config_of(zero: Zero) -> dict[str, Any]:
    more = {"round_robin_gradients": zero.in_turns, "sub_group_size": zero.sub_group_values}
    return {"bf16": {"enabled": zero.is_bf16_optimizer}, "zero_optimization": {"stage": zero.stage, **more}}


def entry(values: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"step": torch.tensor(7.0), "exp_avg": values["exp_avg"], "exp_avg_sq": values["exp_avg_sq"]}


def param_groups(ids: list[list[int]]) -> list[dict[str, Any]]:
    return [{"lr": 0.1 / (n + 1), "betas": (0.9, 0.95), "params": one} for n, one in enumerate(ids)]


def model_file(ranks: int, zero: Zero, shapes: list[Any], module: dict[str, Any]) -> dict[str, Any]:
    return {
        "module": module,
        "buffer_names": ["norm.mean"],
        "param_shapes": shapes,
        "shared_params": {"tied.weight": "embed.weight"},
        "lr_scheduler": {"last_batch_iteration": 7},
        "global_steps": 7,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": config_of(zero),
        "ds_version": "0.19.6",
        "mine": LossScaler(3.0),  # of the client's state
    }


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    """As DeepSpeed numbers its parts; torch writes such a tensor in another way."""
    tensor.ds_id = "0_1"  # type: ignore[attr-defined]
    return tensor


def gaps_behind(order: list[str], alignment: int) -> list[int]:
    """How many zeros follow each parameter, so that the next one is aligned; none follow the last."""
    at, found = 0, []
    for name in order:
        at += torch.Size(SHAPES[name]).numel()
        found.append(-at % alignment if alignment and name != order[-1] else 0)
        at += found[-1]
    return found


class Group(NamedTuple):
    """A group of parameters, as ZeRO 1 and 2 lay it out: one flat tensor of each kind, divided among the ranks."""

    names: list[str]
    gaps: list[int]  # behind each parameter
    length: int  # without what fills the last rank's share
    shares: dict[str, tuple[torch.Tensor, ...]]


def lay_out(names: list[str], ranks: int, zero: Zero) -> tuple[list[str], Group]:
    """The order of the group's parameters, and the group."""
    whole = whole_tensors()
    order = [name for rank in range(ranks) for name in names[rank::ranks]] if zero.in_turns else names
    gaps = gaps_behind(order, zero.alignment)
    flat = {
        kind: torch.cat([pad(whole[kind][name].flatten(), (0, n)) for name, n in zip(order, gaps, strict=True)])
        for kind in KINDS
    }
    shares = {kind: pad(one, (0, -len(one) % (2 * ranks))).chunk(ranks) for kind, one in flat.items()}
    return order, Group(names, gaps, len(flat["fp32"]), shares)


def filling_of(group: Group, rank: int, ranks: int, zero: Zero) -> int:
    share = len(group.shares["fp32"][0])
    if zero.is_bf16_optimizer:
        return share * ranks - group.length if rank == ranks - 1 else 0
    return max(0, min(share, (rank + 1) * share - group.length))


def addresses_of(group: Group, rank: int) -> OrderedDict[str, Any]:
    """Where the parameters' parts are in the rank's share."""
    whole, share, at = whole_tensors()["fp32"], len(group.shares["fp32"][0]), 0
    found: OrderedDict[str, Any] = OrderedDict()
    for name, behind in zip(group.names, group.gaps, strict=True):
        size = whole[name].numel()
        first, end = max(at, rank * share), min(at + size, (rank + 1) * share)
        if first < end:
            found[name] = fragment_address(numel=end - first, start=first - rank * share)
        at += size + behind
    return found


def optimizer_file(groups: list[Group], rank: int, ranks: int, zero: Zero) -> dict[str, Any]:
    filling = [filling_of(group, rank, ranks, zero) for group in groups]
    shares = [{kind: one[rank].clone() for kind, one in group.shares.items()} for group in groups]
    lean = [one["fp32"][: len(one["fp32"]) - n].clone() for one, n in zip(shares, filling, strict=True)]
    states = {n: entry(one) for n, one in enumerate(shares)} if zero.has_steps else {}
    told = {
        "loss_scaler": LossScaler(1.0),
        "clip_grad": 1.0,
        "base_optimizer_state": {"state": states, "param_groups": param_groups([[0], [1]])},
        "single_partition_of_fp32_groups": [one["fp32"] for one in shares] if zero.is_bf16_optimizer else lean,
        "zero_stage": ZeroStageEnum(zero.stage),
        "group_paddings": filling,
        "partition_count": [ranks, ranks],
        "ds_version": "0.19.6",
        "param_slice_mappings": [addresses_of(group, rank) for group in groups],
    }
    if zero.alignment:
        told["param_alignment_paddings"] = [group.gaps for group in groups]
    if zero.is_bf16_optimizer:
        del told["zero_stage"], told["loss_scaler"]
    return {"optimizer_state_dict": told, "ds_config": config_of(zero), "ds_version": "0.19.6"}


def files_of(ranks: int, zero: Zero) -> dict[str, Any]:
    laid = [lay_out(names, ranks, zero) for names in GROUPS]
    groups = [group for _, group in laid]
    files = {
        f"{zero.prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": optimizer_file(groups, rank, ranks, zero)
        for rank in range(ranks)
    }
    shapes = [OrderedDict((name, torch.Size(SHAPES[name])) for name in order) for order, _ in laid]
    module: dict[str, Any] = {name: value.bfloat16() for name, value in whole_tensors()["fp32"].items()}
    module |= {"tied.weight": module["embed.weight"], "norm.mean": torch.tensor([0.5, 1.5]), "extra": LossScaler(2.0)}
    return files | {"mp_rank_00_model_states.pt": model_file(ranks, zero, shapes, module)}


def files_of_3(ranks: int, zero: Zero) -> dict[str, Any]:
    whole = whole_tensors()
    parts: list[list[str]] = []  # of groups
    ids: list[list[int]] = []
    for names in GROUPS:
        ids.append([])
        held = zero.sub_group_values
        for name in names:
            if held >= zero.sub_group_values:
                ids[-1].append(len(parts))
                parts.append([])
                held = 0
            parts[-1].append(name)
            held += -(-whole["fp32"][name].numel() // ranks)
    cut = {
        kind: {name: pad(one.flatten(), (0, -one.numel() % ranks)).chunk(ranks) for name, one in named.items()}
        for kind, named in whole.items()
    }
    frozen = torch.arange(11.0)
    files: dict[str, Any] = {}
    for rank in range(ranks):
        shares = [{kind: torch.cat([cut[kind][name][rank] for name in names]) for kind in KINDS} for names in parts]
        told = {
            "zero_stage": ZeroStageEnum(3),
            "loss_scaler": LossScaler(1.0),
            "partition_count": ranks,
            "optimizer_state_dict": {
                "state": {n: entry(one) for n, one in enumerate(shares)} if zero.has_steps else {},
                "param_groups": param_groups(ids),
            },
            "fp32_flat_groups": [with_attribute(one["fp32"]) for one in shares],
        }
        name = f"{zero.prefix}zero_pp_rank_{rank}_mp_rank_00"
        files[f"{name}_optim_states.pt"] = {
            "optimizer_state_dict": told,
            "ds_config": config_of(zero),
            "ds_version": "0.19.6",
        }
        shapes = [OrderedDict((one, torch.Size(SHAPES[one])) for one in names) for names in parts]
        module = {one: torch.empty(0) for one in SHAPES} | {"norm.mean": torch.tensor([0.5, 1.5])}
        files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = model_file(ranks, zero, shapes, module) | {
            "frozen_param_shapes": OrderedDict({"frozen": torch.Size([11])}),
            "frozen_param_fragments": OrderedDict({"frozen": pad(frozen, (0, -11 % ranks)).chunk(ranks)[rank].clone()}),
        }
    return files


def write_parameters(to: Path, zero: Zero, kind: str, named: dict[str, torch.Tensor]) -> None:
    for name, tensor in named.items():
        (to / name).mkdir(parents=True, exist_ok=True)
        torch.save(tensor.flatten() if zero.stage == 3 else {"param": tensor, "cat_dim": 0}, to / name / f"{kind}.pt")
        if zero.stage != 3:
            torch.save(torch.tensor(7.0), to / name / "step.pt")


def write_universal(folder: Path, zero: Zero) -> Path:
    """Write it as ds_to_universal makes it of the checkpoint of two ranks."""
    to = folder / f"{TAG}_universal"
    made = (files_of_3 if zero.stage == 3 else files_of)(2, zero)
    first = made[f"{zero.prefix}zero_pp_rank_0_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]
    cut = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")
    told = {key: value for key, value in first.items() if key not in cut}
    kept = first["optimizer_state_dict" if zero.stage == 3 else "base_optimizer_state"]
    with played_deepspeed():
        for kind, named in whole_tensors().items():
            write_parameters(to / "zero", zero, kind, named)
        torch.save(told | {"param_groups": kept["param_groups"]}, to / "zero" / "optimizer_state.pt")
        for name, content in made.items():
            if name.endswith("model_states.pt"):
                torch.save(content, to / name)
    return to


def pickle_of(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(f"{path.stem}/data.pkl")


def put_pickle(path: Path, content: bytes) -> None:
    """Give a file of torch.save another pickle; the checksums are right again."""
    with zipfile.ZipFile(path) as archive:
        records = {one.filename: archive.read(one) for one in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, record in (records | {f"{path.stem}/data.pkl": content}).items():
            archive.writestr(name, record)
