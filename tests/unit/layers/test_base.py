"""Operators keep their parameters by name."""

import pytest
import torch

from minisgl.layers.base import BaseOP, OPList
from minisgl.layers.linear import Linear


class Pair(BaseOP):
    def __init__(self) -> None:
        self.first = Linear(3, 2, True, torch.float32)
        self.rest = OPList([Linear(2, 2, False, torch.float32)])
        self._constant = torch.ones(5)


NAMES = {"first.weight", "first.bias", "rest.0.weight"}


def test_parameters_are_named_by_their_path_and_start_without_memory() -> None:
    state = Pair().state_dict()
    assert state.keys() == NAMES
    assert all(t.is_meta for t in state.values())


def test_loaded_tensors_are_used_themselves() -> None:
    pair = Pair()
    state = {name: torch.ones(t.shape) for name, t in pair.state_dict().items()}
    pair.load_state_dict(state)
    assert pair.first.weight is state["first.weight"]
    assert torch.equal(pair.first.forward(torch.ones(1, 3)), torch.full((1, 2), 4.0))


def test_a_missing_parameter_and_a_wrong_shape_are_named() -> None:
    pair = Pair()
    state = {name: torch.ones(t.shape) for name, t in pair.state_dict().items()}
    with pytest.raises(KeyError, match=r"rest\.0\.weight"):
        pair.load_state_dict({k: v for k, v in state.items() if k != "rest.0.weight"})
    with pytest.raises(ValueError, match=r"first\.bias has shape \(2,\), not \(3,\)"):
        pair.load_state_dict({**state, "first.bias": torch.ones(3)})
