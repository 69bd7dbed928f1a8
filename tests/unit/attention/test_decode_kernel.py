"""The sources of the decode kernel and of block tables on a CPU: their logic without a GPU."""

import numpy as np
import pytest
import torch

from minisgl_kernels import block_table as tables
from minisgl_kernels import decode_attention as decode
from minisgl_kernels.qk_rope_store import qk_rope_store_reference
from tests.unit.emulator import emulated_module

PAGE = 16


def dealt_slots(
    lens: list[int], boxes: bool, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A page table [B, width] of random slots or pages, the order of its rows, and all slots."""
    width, batch = -(-(max(lens) + 3) // PAGE) * PAGE, len(lens)
    if boxes:
        pages = torch.randperm(batch * width // PAGE, generator=random).view(batch, -1)
        table = (pages[:, :, None] * PAGE + torch.arange(PAGE)).view(batch, width).int()
    else:
        table = torch.randperm(batch * width, generator=random).view(batch, width).int()
    return table, torch.randperm(batch, generator=random).int(), batch * width


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl_kernels.cuda_build.cuda_module", emulated_module)
    for family in (decode._plan, decode._attention, tables._family):
        monkeypatch.setattr(family, "_made", {})


@pytest.mark.parametrize("boxes", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "lens"),
    [
        (4, 2, 128, torch.bfloat16, [1, 16, 17, 200]),
        (5, 1, 64, torch.float16, [33, 5, 290, 64, 2]),
        (3, 1, 64, torch.bfloat16, [500]),
        (8, 1, 64, torch.bfloat16, [15] * 9),
        (8, 8, 64, torch.bfloat16, [150, 160, 220]),
        (3, 3, 64, torch.bfloat16, [300, 520]),
    ],
)
def test_decode_attention_is_exact_and_leaves_its_counters_at_zero(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, lens: list[int], boxes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """And gives the same bits, whichever part of a request is done last."""
    random = torch.Generator().manual_seed(len(lens))
    batch = len(lens)
    slots, rows, count = dealt_slots(lens, boxes, random)
    k, v = torch.randn(2, count, kv_heads, dim, generator=random).to(dtype)
    q = torch.randn(batch, heads, dim, generator=random).to(dtype)
    for row, length in zip(rows, lens, strict=True):
        k[slots[row, length:]] = v[slots[row, length:]] = torch.nan  # what an earlier request left
        slots[row, length:] = 2**31 - 1  # never read: it would be out of range
    kernel = decode.DecodeAttention(
        max_batch=batch, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype,
        device=torch.device("cpu"), sm_count=2, boxes=boxes,
    )  # fmt: skip
    shares = None
    if kernel.places:
        speeds = np.linspace(1, 1.4, kernel.places)
        kernel.share_out(speeds)
        shares = decode.shares_of(speeds, len(kernel.chunks), kv_heads)
    kernel.plan(torch.tensor(lens, dtype=torch.int32), rows)
    chunks, requests = decode.plan_reference(
        np.array(lens, np.int32), rows.numpy(), len(kernel.chunks), group=heads // kv_heads,
        shares=shares,
    )  # fmt: skip
    np.testing.assert_array_equal(kernel.chunks.numpy(), chunks)
    np.testing.assert_array_equal(kernel.requests.numpy(), requests)
    exact = decode.decode_attention_reference(q, k, v, slots, lens, rows.tolist())
    results = []
    for backwards in (False, True):
        if backwards:
            monkeypatch.setenv("EMULATOR_BACKWARDS", "1")
        kernel._partial.fill_(torch.nan)
        times = torch.zeros(8 * kernel.places, 2, dtype=torch.int64) if kernel.places else None
        out = kernel.attention(q, k, v, slots, times)
        for mine, want in zip(out.float(), exact, strict=True):
            assert (mine - want).norm() < 8e-3 * want.norm()
        assert not kernel._arrived.any()
        results.append(out)
    assert torch.equal(*results)
    kernel.plan(torch.tensor(lens, dtype=torch.int32), rows, even=True)
    for mine, want in zip(kernel.attention(q, k, v, slots).float(), exact, strict=True):
        assert (mine - want).norm() < 8e-3 * want.norm()


@pytest.mark.parametrize("boxes", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "lens", "normalised"),
    [
        (4, 2, 128, torch.bfloat16, [2, 16, 17, 200, 33], True),
        (5, 1, 64, torch.float16, [33, 5, 290, 64, 2], False),
        (8, 1, 64, torch.bfloat16, [15] * 9, True),
    ],
)
def test_attention_of_the_qkv_product_is_rope_and_store_and_attention(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, lens: list[int], normalised: bool,
    boxes: bool,
) -> None:  # fmt: skip
    random = torch.Generator().manual_seed(len(lens))
    batch = len(lens)
    table, rows, count = dealt_slots(lens, boxes, random)
    width = table.shape[1]
    slots = torch.randn(2, count, kv_heads, dim, generator=random).to(dtype)
    qkv = torch.randn(batch, (heads + 2 * kv_heads) * dim, generator=random).to(dtype)
    weights = (torch.rand(2, dim, generator=random) + 0.5).to(dtype) if normalised else (None, None)
    cos_sin = torch.randn(width, dim, generator=random)
    positions = torch.tensor(lens) - 1
    new = torch.stack([table[row, at] for row, at in zip(rows, positions, strict=True)])
    for row, length in zip(rows, lens, strict=True):
        slots[:, table[row, length - 1 :]] = torch.nan  # of no use before it is stored, or at all
    expected = slots.clone()
    q = qk_rope_store_reference(
        qkv, *weights, 1e-6, cos_sin, positions, new, *expected, heads, kv_heads
    )
    exact = decode.decode_attention_reference(q, *expected, table, lens, rows.tolist())
    kernel = decode.DecodeAttention(
        max_batch=batch, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype,
        device=torch.device("cpu"), sm_count=2, boxes=boxes,
    )  # fmt: skip
    kernel.plan(torch.tensor(lens, dtype=torch.int32), rows)
    out = kernel.attention_of_qkv(qkv, *weights, 1e-6, cos_sin, *slots, table)
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-4}
    torch.testing.assert_close(slots, expected, **close, equal_nan=True)
    for mine, want in zip(out.float(), exact, strict=True):
        assert (mine - want).norm() < 8e-3 * want.norm()


def test_block_tables_are_those_of_the_reference() -> None:
    table = (torch.arange(3).unsqueeze(1) * 160 + torch.arange(150)).int()
    rows, lens = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([150, 17]).int()
    starts = torch.tensor([0, 10, 12], dtype=torch.int32)
    results = []
    for function in (tables.block_table, tables.block_table_reference):
        square = torch.full((2, 10), -1, dtype=torch.int32)
        flat = torch.full((21,), -1, dtype=torch.int32)
        function(square, table, rows, lens, 16)
        function(flat, table, rows, lens, 16, starts)
        results.append((square[0], square[1, :2], flat[:12]))
    for mine, want in zip(*results, strict=True):
        assert torch.equal(mine, want)
