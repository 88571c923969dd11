"""What is seen of a state before it is restored is what will be restored."""

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.client.checkpointing.state_preview import PeekedState, peek_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def save_steps(path: Path, *steps: int) -> None:
    extra = {"place": ""}
    ckpt = holdfast.Checkpointer(model=torch.nn.Linear(2, 1), extra=extra, path=path)
    for step in steps:
        extra["place"] = f"after step {step}"
        assert ckpt.save(step, force=True)
        assert ckpt.wait(60)
    ckpt.close()


def test_nothing(tmp_path: Path) -> None:
    assert peek_state(None) == peek_state(tmp_path / "none-yet") == PeekedState()


def test_the_newest(tmp_path: Path) -> None:
    save_steps(tmp_path, 3, 5)
    assert peek_state(tmp_path) == PeekedState(5, {"place": "after step 5"}, is_chosen=False)


def test_a_damaged_one_is_passed_over_as_a_restore_does(tmp_path: Path) -> None:
    save_steps(tmp_path, 3, 5)
    [part] = (tmp_path / "step-00000005").glob("*.distcp")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    peeked = peek_state(tmp_path)
    restored = holdfast.Checkpointer(model=torch.nn.Linear(2, 1), extra={"place": ""}, path=tmp_path).restore()
    assert peeked.step == restored == 3
    assert peeked.extra == {"place": "after step 3"}
