"""Slots and pages are two views of one buffer."""

from typing import Any

import pytest
import torch

from minisgl.config import StartError
from minisgl.kvcache.pool import KVPool, page_bytes

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
