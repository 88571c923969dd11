"""Checks whether a checkpoint fits the state of a script, and names the first tensor that differs."""

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from holdfast.checkpoint.image_layout import EXTRA

_MODEL, _OPTIMIZER, _RANK = "model.", "optimizer.", "@"


def describe_mismatch(url: str, stored: Metadata, ours: Metadata, *, trained: bool) -> str:
    """Return how the checkpoint differs from our state, or "". With `trained`, our state is a model's, not a dict."""
    there, here = _tensor_shapes(stored), _tensor_shapes(ours)
    if trained and (rest := _forgotten_optimizer(there, here)):
        give = "give optimizer=, or another path"
        return f"{url} holds the state of an optimizer ({rest}), and this Checkpointer was given none: {give}"
    found = [_describe_difference(key, there.get(key), here[key]) for key in here if there.get(key) != here[key]]
    if trained:
        lost = [key for key in there if key.startswith(_MODEL) and key not in here]
        found += [f"{key} is {there[key]} there and missing here" for key in lost]
    if not found:
        return ""
    more = f", and {len(found) - 1} more tensors differ" if len(found) > 1 else ""
    return f"{url} holds the state of another model or optimizer: {found[0]}{more}"


def _forgotten_optimizer(there: dict[str, str], here: dict[str, str]) -> str:
    """If only the checkpoint has an optimizer, return one of its tensors by name and how many more it has; else ""."""
    if any(key.startswith(_OPTIMIZER) for key in here):
        return ""
    lost = [key for key in there if key.startswith(_OPTIMIZER)]
    return f"{lost[0]}{f' and {len(lost) - 1} more tensors' if len(lost) > 1 else ''}" if lost else ""


def _describe_difference(key: str, there: str | None, here: str) -> str:
    return f"{key} is {here} here and missing there" if there is None else f"{key} is {there} there and {here} here"


def _tensor_shapes(metadata: Metadata) -> dict[str, str]:
    """Return each tensor's shape as text. A tensor that each rank stores under a key of its own appears only once."""
    found = sorted(metadata.state_dict_metadata.items(), reverse=True)
    tensors = {key: one for key, one in found if isinstance(one, TensorStorageMetadata) and key != EXTRA}
    shapes = {key.partition(_RANK)[0]: "x".join(map(str, one.size)) or "a number" for key, one in tensors.items()}
    return dict(sorted(shapes.items()))
