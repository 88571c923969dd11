"""How many parameters a script trains; a part of a model is never taken for the whole."""

import pytest
import torch

from holdfast.client.training.parameter_count import NOT_KNOWN, ParameterCount


def test_parameters_of_all_optimizers_count_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(10, 4), torch.nn.Linear(4, 2))  # 44 and 10
    count = ParameterCount()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    assert count.add_optimizer(first) == 44
    assert count.add_optimizer(first) is None
    assert count.add_optimizer(torch.optim.AdamW(model.parameters())) == 54


@pytest.mark.parametrize("mark", ["_is_flat_param", "_fsdp_flattened"])
def test_a_part_of_flat_parameters_is_no_count(mark: str) -> None:
    part = torch.nn.Parameter(torch.zeros(5))
    setattr(part, mark, True)
    assert ParameterCount().add_optimizer(torch.optim.SGD([part], lr=0.1)) == NOT_KNOWN


def test_masters_of_mixed_precision_are_no_count() -> None:
    master = torch.zeros(5, requires_grad=True)
    assert ParameterCount().add_optimizer(torch.optim.SGD([master], lr=0.1)) == NOT_KNOWN
