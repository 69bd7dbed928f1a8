"""Backends are chosen by name, and a wrong name is answered with the choices."""

import pytest
import torch

from minisgl.attention.base import AttentionContext
from minisgl.attention.registry import (
    HybridBackend,
    backend_names,
    choose_page_size,
    make_backend,
)
from minisgl.attention.torch_backend import TorchBackend
from minisgl.config import UsageError

CPU = AttentionContext(
    device=torch.device("cpu"), dtype=torch.float32, num_qo_heads=4, num_kv_heads=2, head_dim=64,
    page_size=1, max_running=4, max_seq_len=128,
)  # fmt: skip


def test_a_cpu_gets_the_torch_backend_with_single_slots() -> None:
    assert backend_names("auto", None) == ("torch",)
    assert choose_page_size(("torch",), None) == 1
    assert choose_page_size(("torch",), 24) == 24
    assert isinstance(make_backend(("torch",), CPU), TorchBackend)
    assert isinstance(make_backend(backend_names("torch,torch", None), CPU), HybridBackend)


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
        backend_names(name, None)
