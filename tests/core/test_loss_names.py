"""Names of metrics: which one is the training loss, and which one the norm of the whole gradient."""

import pytest

from holdfast.core.log_analysis.loss_names import is_loss_name, is_norm_name


@pytest.mark.parametrize(
    "name",
    [
        "loss",
        "Loss",
        "train/loss",
        "train_loss",
        "training loss",
        "Loss/train",
        "lm loss",
        "lm-loss",
        "train_loss_step",
        "loss_metrics/global_avg_loss",
        "train/total_loss",
    ],
)
def test_training_losses(name: str) -> None:
    assert is_loss_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "val/loss",
        "val_loss",
        "eval_loss",
        "test/loss",
        "loss_scale",
        "loss scale",
        "train_loss_epoch",
        "train/train_loss",
        "moe/load_balancing_loss",
        "mtp_1 loss",
        "loss/critic",
        "glossary",
        "",
    ],
)
def test_other_metrics(name: str) -> None:
    assert not is_loss_name(name)


def test_norms() -> None:
    assert all(
        map(is_norm_name, ("grad_norm", "train/grad_norm", "grad norm", "gradient-norm", "train/global_grad_norm"))
    )
    assert not any(map(is_norm_name, ("grad_norm/layer1", "params norm", "grad", "norm", "val/grad_norm")))
