"""Reads the plain values of a pickle, such as torch's, and creates no other objects.

Each class, function or tensor that the pickle names is replaced by a Blank, and the bytes of tensors are not read. So
reading needs no torch and runs no code from the file. It shows which numbers, texts, lists and dicts the file holds.
"""

import io
import pickle  # noqa: TID251 nothing that a pickle names is ever found: see find_class
from typing import Any, NoReturn

PICKLE_DAMAGE = (  # what reading a damaged pickle raises
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    MemoryError,
    OverflowError,
    RecursionError,
)


class OutlineError(Exception):
    """Raised if the bytes are no complete pickle; the text says why."""


class Blank:
    """Stands for an object of any class. The pickle may set a dict as the state of the object; that dict is `state`."""

    state: dict[str, Any]

    def __new__(cls, *args: object, **kwargs: object) -> "Blank":  # a pickle may make objects without __init__
        self = super().__new__(cls)
        self.state = {}
        return self

    def __setstate__(self, state: object) -> None:
        fields = state[1] if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict) else state
        if isinstance(fields, dict):
            self.state = fields

    def __setitem__(self, key: object, value: object) -> None:
        if isinstance(key, str):
            self.state[key] = value

    def __reduce__(self) -> NoReturn:
        raise TypeError("a blank is not written")

    def __call__(self, *args: object, **kwargs: object) -> "Blank":
        return Blank()

    def append(self, value: object) -> None:
        """Ignore one value that the pickle appends to a list-like object."""

    def extend(self, values: object) -> None:
        """Ignore the values that the pickle appends to a list-like object."""


class _Outliner(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Blank

    def persistent_load(self, pid: object) -> None:
        return None  # a tensor's bytes, which lie beside the pickle


def outline_pickle(content: bytes) -> Any:
    """Return the plain values of a pickle, with a Blank in place of every other object. Raises OutlineError if the
    pickle is not complete.

    A hostile pickle can still use up all memory, or crash the interpreter with deeply nested tuples. If a stranger may
    have written the pickle, call this in a `limited_child`.
    """
    try:
        return _Outliner(io.BytesIO(content)).load()
    except PICKLE_DAMAGE as e:
        raise OutlineError(f"{type(e).__name__}: {e}") from None
