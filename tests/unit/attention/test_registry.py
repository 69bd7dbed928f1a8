"""Backends are chosen by name or by device, and a wrong name is answered with the choices."""

import logging

import pytest
import torch

from minisgl.attention.base import AttentionContext, Needs
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
HOPPER, BLACKWELL = (9, 0), (10, 0)


def test_a_cpu_gets_its_own_kernels_where_they_compile_and_torch_elsewhere() -> None:
    assert backend_names("auto", None, compiles_cpu=lambda: True) == ("cpu",)
    assert backend_names("auto", None, compiles_cpu=lambda: False) == ("torch",)


def test_the_backends_of_a_cpu_have_single_slots_and_read_any_pages() -> None:
    assert choose_page_size(("cpu",), None) == 1
    assert choose_page_size(("torch",), None) == 1
    assert choose_page_size(("torch",), 24) == 24
    assert isinstance(make_backend(("torch",), CPU), TorchBackend)
    assert isinstance(make_backend(backend_names("torch,torch", None), CPU), HybridBackend)


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        (HOPPER, ("fa", "mini")),
        (BLACKWELL, ("trtllm",)),
        ((10, 3), ("trtllm",)),
        ((8, 0), ("fi",)),
        ((8, 9), ("fi",)),
        ((12, 0), ("fi",)),
        ((7, 5), ("torch",)),
    ],
)
def test_auto_takes_what_suits_the_capability(
    capability: tuple[int, int], names: tuple[str, ...]
) -> None:
    assert backend_names("auto", capability, compiles=lambda: True) == names


def test_auto_decodes_by_flashinfer_what_has_no_kernel_of_our_own() -> None:
    def names(needs: Needs, compiles: bool = True) -> tuple[str, ...]:
        return backend_names("auto", HOPPER, needs, compiles=lambda: compiles)

    assert names(Needs(torch.float16, 64, 8)) == ("fa", "mini")
    assert names(Needs(head_dim=96)) == ("fa", "fi")
    assert names(Needs(group=16)) == ("fa", "fi")
    assert names(Needs(), compiles=False) == ("fa", "fi")


def test_float32_is_for_the_torch_backend() -> None:
    floats = Needs(torch.float32)
    assert backend_names("auto", HOPPER, floats) == ("torch",)
    with pytest.raises(UsageError, match="fi computes in bfloat16 or float16; use --dtype"):
        backend_names("torch,fi", HOPPER, floats)


@pytest.mark.parametrize("requested", [1, 128, 24])
def test_trtllm_turns_a_page_size_that_it_cannot_read_into_64_with_a_warning(
    requested: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_page_size(backend_names("auto", BLACKWELL), requested) == 64
    assert f"--page-size {requested} is not one of 16, 32, 64" in caplog.text


def test_page_sizes_that_suit_are_kept_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert [choose_page_size(("trtllm",), size) for size in (16, 32, 64, None)] == [16, 32, 64, 64]
    assert choose_page_size(("fa", "trtllm"), 32) == 32
    assert choose_page_size(("fi",), 7) == 7
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("triton", "'triton' is not known; choices: auto, torch, fi, fa, trtllm, mini, cpu"),
        ("torch,", "'' is not known"),
        ("torch,torch,torch", "one name or a pair PREFILL,DECODE"),
        ("", "'' is not known"),
        ("auto,torch", "'auto' is not known"),
    ],
)
def test_a_name_that_cannot_be_used_is_answered_with_the_choices(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        backend_names(name, None)


@pytest.mark.parametrize(
    ("name", "capability", "message"),
    [
        ("trtllm", HOPPER, "trtllm computes no prefill on compute capability 9.0.*fa,trtllm"),
        ("trtllm,fi", HOPPER, "computes no prefill"),
        ("trtllm", (12, 0), "no prefill on compute capability 12.0.*fi,trtllm"),
        ("fi,trtllm", (8, 6), "trtllm needs a GPU of compute capability 9.0"),
        ("mini", HOPPER, "mini computes decode alone.*fa,mini"),
        ("torch,mini", (7, 5), "mini needs a GPU of compute capability 8.0"),
        ("fa", BLACKWELL, "fa is FlashAttention 3, for compute capability 9.0"),
        ("fa,fi", None, "fa is FlashAttention 3"),
        ("fi", None, "fi needs a GPU"),
        ("torch,trtllm", None, "trtllm needs a GPU"),
    ],
)
def test_what_a_device_cannot_do_is_refused_with_what_it_can(
    name: str, capability: tuple[int, int] | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        backend_names(name, capability)


@pytest.mark.parametrize("name", ["fa,trtllm", "fi,trtllm", "fa,mini", "fi,mini", "fa", "fi"])
def test_hopper_can_do_the_rest(name: str) -> None:
    assert backend_names(name, HOPPER) == tuple(name.split(","))
