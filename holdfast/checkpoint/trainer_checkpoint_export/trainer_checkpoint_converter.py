"""Exports a trainer's own checkpoint: as safetensors, for torch.distributed.checkpoint, or for other ranks.

Its files are read in a process of its own with limited memory, since strangers may have written them.
"""

import pickle  # noqa: TID251 for what it raises
import warnings
from pathlib import Path

import msgspec
import torch

from holdfast.checkpoint.dcp.safetensors_export import write_safetensors
from holdfast.checkpoint.local_storage import LocalStorage
from holdfast.checkpoint.private_export_folder import move_out, private_folder
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.trainer_checkpoint_export.dcp_file_writer import write_dcp
from holdfast.checkpoint.trainer_checkpoint_export.dcp_reader import is_dcp, read_dcp
from holdfast.checkpoint.trainer_checkpoint_export.kept_pickle import NotUnderstoodError
from holdfast.checkpoint.trainer_checkpoint_export.universal_reader import is_universal, read_universal
from holdfast.checkpoint.trainer_checkpoint_export.whole_tensors import WholeState, make_whole
from holdfast.checkpoint.trainer_checkpoint_export.zero_reader import ZeroCheckpoint, read_zero
from holdfast.checkpoint.trainer_checkpoint_export.zero_writer import write_zero
from holdfast.core.terminal_sanitizer import plain_line
from holdfast.decoding import from_json
from holdfast.linux.limited_child import ChildEndedError, call_in_child

_MEMORY_BYTES, _COPIES = 8 << 30, 3  # a reader may take: files are mapped, and what is written is made from them
# What values of any kind may raise, in our hands or in torch's, when they are cut, compared and written.
_DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    AssertionError,
    pickle.PickleError,
)
_LATEST = "latest"  # names the checkpoint that DeepSpeed loads if it is told of none


class ExportForm(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is made into: safetensors, unless one of the others is chosen."""

    is_dcp: bool = False  # weights and the optimizer's state, for torch.distributed.checkpoint
    ranks: int = 0  # the trainer's own form, for so many data parallel ranks
    step: int = 0  # if the checkpoint's files do not tell it
    prefix: str = ""  # of the names of tensors in safetensors
    most_bytes: int = 5 * 10**9  # of a file of safetensors


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    files: tuple[str, ...] = ()  # or folders
    left_out: tuple[str, ...] = ()
    assumed: str = ""  # what a checkpoint does not tell, and what was believed instead
    fault: str = ""


def export_trainer_checkpoint(url: str, folder: Path, form: ExportForm) -> Exported:
    """Write what is chosen of a trainer's checkpoint to a folder, with nothing there that is not whole; StorageError
    with one sentence if that cannot be."""
    source = Path(url)
    storage = LocalStorage(str(folder))
    storage.make_folder()
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    with private_folder(folder) as private:
        try:
            told = call_in_child(
                lambda: msgspec.json.encode(_write_told(source, private, form)), _MEMORY_BYTES + _COPIES * size
            )
        except ChildEndedError as e:
            raise StorageError(f"{url} cannot be read: whoever read it {e}") from None
        made = from_json(told, Exported)
        if made.fault:
            raise StorageError(f"{url} cannot be exported: {made.fault}")
        files = move_out(private, folder, made.files)
    if form.ranks and storage.read(_LATEST) is None:
        storage.put_file(_LATEST, made.files[0].encode())
    return msgspec.structs.replace(made, files=tuple(map(str, files)))


def _write_told(source: Path, private: str, form: ExportForm) -> Exported:
    warnings.simplefilter("ignore")  # torch's, that there is no process group
    torch.set_num_threads(1)  # those of a large host would need more address space than there may be
    try:
        return _write(source, private, form)
    except (StorageError, OSError) as e:
        return Exported(fault=plain_line(str(e)))
    except _DAMAGE as e:
        return Exported(fault=plain_line(f"what it holds is not understood ({type(e).__name__}: {e})"))


def _write(source: Path, private: str, form: ExportForm) -> Exported:
    if form.ranks:
        if is_dcp(source):
            raise NotUnderstoodError("it is not DeepSpeed's; any number of ranks can load it as it is")
        name = source.resolve().name
        Path(private, name).mkdir()
        found = _read_deepspeed(source)
        write_zero(found, form.ranks, f"{private}/{name}")
        return Exported(files=(name,), assumed=found.slices[0].assumed)
    whole = read_dcp(source) if is_dcp(source) else make_whole(_read_deepspeed(source))
    whole = whole._replace(step=whole.step or form.step)
    left_out = tuple(map(plain_line, whole.left_out))
    if form.is_dcp:
        if whole.unclear:
            raise NotUnderstoodError(whole.unclear)
        return Exported(files=write_dcp(whole, private), left_out=left_out)
    return Exported(files=_write_weights(whole, private, form), left_out=left_out)


def _read_deepspeed(source: Path) -> ZeroCheckpoint:
    if not any(source.glob("*_states.pt")):
        raise NotUnderstoodError("it is neither DeepSpeed's nor a folder of torch.distributed.checkpoint")
    return read_universal(source) if is_universal(source) else read_zero(source)


def _write_weights(whole: WholeState, private: str, form: ExportForm) -> tuple[str, ...]:
    tensors = whole.tensors()
    return write_safetensors(
        private,
        {name: tensor.bytes for name, tensor in tensors.items()},
        lambda names: {name: tensors[name].make().contiguous() for name in names},
        step=whole.step,
        prefix=form.prefix,
        most_bytes=form.most_bytes,
    )
