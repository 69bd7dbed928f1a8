"""Backends are chosen by name, and a wrong name is answered with the choices."""

import pytest
import torch

from minisgl.attention.registry import HybridBackend, make_backend
from minisgl.attention.torch_backend import TorchBackend
from minisgl.config import UsageError

CPU = torch.device("cpu")


def test_a_cpu_gets_the_torch_backend() -> None:
    assert isinstance(make_backend("auto", CPU), TorchBackend)
    assert isinstance(make_backend("torch", CPU), TorchBackend)
    assert isinstance(make_backend("torch,torch", CPU), HybridBackend)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("triton", "'triton' is not known; choices: auto, torch"),
        ("fi", "'fi' is not available here; choices: auto, torch"),
        ("torch,fa", "'fa' is not available here"),
        ("torch,", "'' is not known"),
        ("torch,torch,torch", "one name or a pair PREFILL,DECODE"),
        ("", "'' is not known"),
        ("auto,torch", "'auto' is not known"),
    ],
)
def test_a_name_that_cannot_be_used_is_answered_with_the_choices(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_backend(name, CPU)
