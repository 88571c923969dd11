"""Files of layers: whole steps are found, damaged and missing ones are said, old ones go."""

from pathlib import Path

import pytest
import torch

from holdfast.client.elastic.layer_files import LayerFileError, LayerFiles


def packed(number: int) -> torch.Tensor:
    return torch.arange(40, dtype=torch.uint8) + number


def write(files: LayerFiles, step: int, line: str = "a") -> None:
    for layer in range(2):
        files.write(layer, step, line, packed(step + layer))


def test_only_whole_steps_count(tmp_path: Path) -> None:
    files = LayerFiles(tmp_path / "new" / "layers", 2)
    assert files.newest_whole() == -1
    files.write(0, 3, "a", packed(3))
    files.write(1, 3, "b", packed(4))
    assert files.newest_whole() == -1, "halves of two lines are no whole"
    files.write(0, 3, "b", packed(5))
    assert files.newest_whole() == 3
    assert torch.equal(files.read(0, 3), packed(5)) and torch.equal(files.read(1, 3), packed(4))


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    files = LayerFiles(tmp_path, 2)
    with pytest.raises(LayerFileError) as caught:
        files.read(0, 3)
    assert str(caught.value) == f"step 3 is not whole in {tmp_path} any more"
    write(files, 2)
    write(files, 3)
    path = tmp_path / "step-3-a" / "layer-1"
    path.write_bytes(path.read_bytes()[:-20] + b"x" * 20)
    with pytest.raises(LayerFileError) as caught:
        files.read(1, 3)
    assert str(caught.value) == f"{path} is damaged; its checkpoint is set aside as damaged-step-3-a"
    assert files.newest_whole() == 2 and (tmp_path / "damaged-step-3-a" / "layer-1").exists()


def test_two_whole_steps_are_kept(tmp_path: Path) -> None:
    files = LayerFiles(tmp_path, 2)
    for step in (1, 2, 3):
        write(files, step)
    files.write(0, 4, "a", packed(4))
    files.drop_old()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2-a", "step-3-a", "step-4-a"]


def test_without_a_path_there_are_none() -> None:
    assert LayerFiles(None, 2).newest_whole() == -1
