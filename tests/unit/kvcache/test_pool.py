"""Slots and pages are two views of one buffer."""

import os
from typing import Any

import pytest
import torch

from minisgl.config import StartError
from minisgl.kvcache.pool import KVPool, page_bytes
from minisgl_kernels.huge_pages import HUGE_PAGE
from tests.support import resident_bytes

SIZES: dict[str, Any] = {
    "layers": 2,
    "page_size": 4,
    "kv_heads": 3,
    "head_dim": 8,
    "dtype": torch.bfloat16,
}


def make_pool() -> KVPool:
    return KVPool(pages=5, device=torch.device("cpu"), **SIZES)


def test_the_buffer_has_one_page_more_for_padding() -> None:
    pool = make_pool()
    assert pool.buffer.shape == (2, 2, 6, 4, 3, 8)
    assert pool.dummy_page == 5
    assert pool.nbytes == 6 * page_bytes(**SIZES)


def test_what_is_stored_by_slot_is_found_by_page() -> None:
    pool = make_pool()
    k = torch.randn(2, 3, 8).bfloat16()
    v = torch.randn(2, 3, 8).bfloat16()
    pool.store(1, k, v, torch.tensor([23, 6]))
    assert torch.equal(pool.k(1)[[23, 6]], k)
    assert torch.equal(pool.v_pages(1)[5, 3], v[0])
    assert torch.equal(pool.k_pages(1)[1, 2], k[1])
    assert not pool.k(0).any()
    assert int(pool.v(1).any(-1).any(-1).sum()) == 2


@pytest.mark.parametrize("pages", [2**50, 2**70])
def test_a_cache_that_no_machine_can_hold_is_an_error_that_names_the_flag(pages: int) -> None:
    with pytest.raises(StartError, match=r"GiB of the KV cache; use a lower --num-pages"):
        KVPool(pages=pages, device=torch.device("cpu"), **SIZES)


def test_a_large_cache_begins_with_a_huge_page_and_holds_zeros_until_it_is_used() -> None:
    before = resident_bytes(os.getpid())
    pool = KVPool(pages=2**17, device=torch.device("cpu"), **SIZES)
    assert pool.buffer.data_ptr() % HUGE_PAGE == 0
    assert resident_bytes(os.getpid()) - before < pool.nbytes / 2, "untouched memory is taken"
    pool.store(1, *torch.ones(2, 1, 3, 8).bfloat16(), torch.tensor([2**19 + 3]))
    assert pool.k(1)[2**19 + 3].all()
    assert not pool.k(0)[:9].any()
