"""`minisgl bench attention` without a GPU: its flags, and the memory that backends share."""

import argparse

import pytest
import torch

from minisgl.bench import attention
from minisgl.bench.attention import Heads, Slots, ragged
from minisgl.config import UsageError


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    attention.add_arguments(parser)
    return parser.parse_args(flags)


def test_backends_and_heads_are_read_from_the_flags() -> None:
    args = parsed("--backend", "mini@16", "--backend", "fa@256", "--heads", "40x8x128")
    assert args.backend == [("mini", 16), ("fa", 256)]
    assert args.heads == [Heads(40, 8, 128)]


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("--backend", "mini", "must be NAME@PAGE_SIZE"),
        ("--backend", "torch@1", "but torch"),
        ("--backend", "mini@0", "a whole number over 0"),
        ("--heads", "16x8", "must be QUERYxKVxDIM"),
        ("--heads", "10x4x128", "must be QUERYxKVxDIM"),
    ],
)
def test_what_cannot_be_measured_is_refused(flag: str, text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=message):
        parsed(flag, text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so() -> None:
    with pytest.raises(UsageError, match="needs an NVIDIA GPU"):
        attention.run(parsed())


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_pages_and_slots_are_the_same_memory_and_layers_have_their_own(page_size: int) -> None:
    heads = Heads(4, 2, 8)
    slots = Slots(torch.arange(3 * 2 * 1000 * 16, dtype=torch.float32), 3, heads, page_size)
    assert slots.slots == 1000 // page_size * page_size
    seen = set()
    for layer in range(3):
        for flat, paged in (
            (slots.k(layer), slots.k_pages(layer)),
            (slots.v(layer), slots.v_pages(layer)),
        ):
            assert flat.shape == (slots.slots, 2, 8)
            assert paged.shape == (slots.slots // page_size, page_size, 2, 8)
            assert torch.equal(flat, paged.flatten(0, 1))
            seen.add(int(flat[0, 0, 0]))
    assert len(seen) == 6


def test_uneven_lengths_are_about_as_many_tokens_in_all() -> None:
    lens = ragged(64, 1024)
    assert lens.min() == 256 and lens.max() == 1792
    assert abs(lens.mean() - 1024) < 1
    assert (lens[1:] < lens[:-1]).any(), "in no order"
