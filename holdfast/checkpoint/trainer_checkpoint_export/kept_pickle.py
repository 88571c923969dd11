"""Reads files of torch.save with their tensors and plain values, all else kept unmade; and writes such values again.

Whatever else a pickle names, such as a loss scaler of DeepSpeed, is never looked up: a stand-in keeps the name and what
it would be made of, and is written under that name again. So no code of a file runs, and no trainer need be installed.
"""

import collections
import copyreg
import os
import pickle  # noqa: TID251 nothing that a pickle names is found, but for what tensors are made of: see find_class
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch._utils import _rebuild_parameter, _rebuild_tensor_v2

from holdfast.checkpoint.pickle_outline import PICKLE_DAMAGE
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.linux.regular_files import open_file

_MOST_PICKLE_BYTES = 1 << 30  # it holds no tensors
_TORCHSCRIPT = "constants.pkl"  # torch.load would hand such a file to another loader


def _rebuild_without_state(func: Any, kind: object, args: Any, state: object) -> torch.Tensor:
    """Make a tensor that has attributes of Python, or a class of its own; it is written without them."""
    if func not in (_rebuild_tensor_v2, _rebuild_parameter):
        raise pickle.UnpicklingError("a tensor of a class of its own")
    found: torch.Tensor = func(*args)
    return found


def _rebuild_stateless(values: torch.Tensor, requires_grad: bool, hooks: Any, state: object) -> torch.Tensor:
    """Make a parameter that has attributes of Python, in the same way."""
    found: torch.Tensor = _rebuild_parameter(values, requires_grad, hooks)
    return found


_REAL: dict[tuple[str, str], Any] = {
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_without_state,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_stateless,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): collections.OrderedDict,
}


_make: Any = copyreg.__newobj__  # type: ignore[attr-defined]  # what pickle makes an object by that has no arguments


class NotUnderstoodError(StorageError):
    """Says in one sentence, with a file's name, what of a trainer's checkpoint cannot be read."""


class KeptObject:
    """Stands for an object that was not made; each class or function that a file names has a class of its own."""

    names: ClassVar[tuple[str, str]]  # the module, and what it is called there
    made_by: Any
    made_of: tuple[object, ...]
    is_called: bool
    state: Any
    values: list[object]
    pairs: list[tuple[object, object]]

    def __new__(cls, *made_of: object) -> "KeptObject":
        self = super().__new__(cls)
        self.made_by, self.made_of, self.is_called = cls, made_of, False
        self.state, self.values, self.pairs = None, [], []
        return self

    def __init__(self, *made_of: object) -> None:
        self.is_called = True  # and not made by `__new__` alone

    def __call__(self, *made_of: object) -> "KeptObject":
        """Stand for what a method returns, or whatever else the object may be."""
        made = type(self)(*made_of)
        made.made_by = self
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        self.pairs.append((key, value))

    def append(self, value: object) -> None:
        self.values.append(value)

    def extend(self, values: list[object]) -> None:
        self.values.extend(values)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        made = (self.made_by, self.made_of) if self.is_called else (_make, (type(self), *self.made_of))
        return (*made, self.state, iter(self.values), iter(self.pairs))


def stand_for(module: str, name: str) -> type[KeptObject]:
    """Return a class whose objects are written as those of the class with this name."""
    return type("Kept", (KeptObject,), {"names": (module, name)})


class _KeepingUnpickler(pickle.Unpickler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: dict[tuple[str, str], type[KeptObject]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if real := _REAL.get((module, name)):
            return real
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        return self._kept.setdefault((module, name), stand_for(module, name))


class _KeepingPickler(pickle._Pickler):  # the one in C cannot write a name that it does not find
    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, KeptObject):
            self.write(pickle.GLOBAL + "{}\n{}\n".format(*obj.names).encode())  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]
        else:
            super().save_global(obj, name)  # type: ignore[misc]


class _KeepingModule:
    """What torch asks of a module for pickles."""

    Unpickler = _KeepingUnpickler
    Pickler = _KeepingPickler


def load_kept(path: Path) -> Any:
    """Return what a file of torch.save holds; its tensors stay in the file until they are used. NotUnderstoodError if
    it cannot be read. A hostile file can still take much memory: call this in a `limited_child`."""
    try:
        with open_file(path) as file:
            _check_archive(file)
            place = f"/proc/self/fd/{file.fileno()}"
            return torch.load(place, "cpu", _KeepingModule, weights_only=False, mmap=True)
    except MemoryError:
        raise
    except (*PICKLE_DAMAGE, OSError, RuntimeError, AssertionError, zipfile.BadZipFile) as e:  # torch asserts, too
        raise NotUnderstoodError(
            f"{path.name} cannot be read ({type(e).__name__}: {str(e).partition(chr(10))[0]})"
        ) from None


def _check_archive(file: Any) -> None:
    with zipfile.ZipFile(file) as archive:
        for one in archive.infolist():
            if one.compress_type != zipfile.ZIP_STORED or one.filename.endswith(_TORCHSCRIPT):
                raise zipfile.BadZipFile("torch.save has not written it")
            if one.filename.endswith("/data.pkl") and one.file_size > _MOST_PICKLE_BYTES:
                raise zipfile.BadZipFile("its pickle is too large")


def save_kept(value: object, path: str) -> None:
    """Write a file as torch.save does, with what stand-ins stand for."""
    with open(path, "wb") as file:
        torch.save(value, file, _KeepingModule)
        file.flush()
        os.fsync(file.fileno())
