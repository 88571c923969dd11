"""Recognizes the training loss and the gradient norm among logged metrics by their names."""

import re

_WORD = re.compile(r"[a-z0-9]+")
_AROUND_LOSS = frozenset("loss train training lm total step batch global avg average mean metrics".split())
_AROUND_NORM = frozenset("norm grad gradient gradients train training total global optim optimizer".split())


def is_loss_name(name: str) -> bool:
    """Return whether a metric of this name is the training loss: "train/loss", not "val/loss" or "loss_scale"."""
    words = _WORD.findall(name.lower())
    whole_run = words.count("train") > 1  # transformers logs the mean of a whole run as train/train_loss
    return "loss" in words and not whole_run and _AROUND_LOSS.issuperset(words)


def is_norm_name(name: str) -> bool:
    """Return whether a metric of this name is the norm of the whole gradient, not of one layer."""
    words = _WORD.findall(name.lower())
    grad = any(word.startswith("grad") for word in words)
    return grad and "norm" in words and _AROUND_NORM.issuperset(words)
