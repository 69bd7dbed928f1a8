"""One small call of each kernel of the project's own, for tools that watch the device's memory.

    compute-sanitizer --tool memcheck python -m tests.gpu.kernel_calls [NAME ...]

Sizes are odd, so that an access past an end is one past an allocation: run it with
PYTORCH_NO_CUDA_MEMORY_CACHING=1, which gives each tensor one of its own.
"""

import itertools
import sys
from collections.abc import Callable

import torch

from minisgl_kernels import activation, decode_inputs, embedding, kv_store, norm, qk_rope_store
from minisgl_kernels.block_table import block_table
from minisgl_kernels.decode_attention import DecodeAttention
from minisgl_kernels.filter_bounds import filter_bounds
from minisgl_kernels.sample import sample
from minisgl_kernels.skinny_linear import skinny_linear
from minisgl_kernels.wide_linear import (
    Blocks,
    Normed,
    Turned,
    wide_add,
    wide_linear,
    wide_turn,
)

DEVICE = "cuda"


def _randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def _integers(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(below, shape, device=DEVICE, dtype=torch.int32)


def call_embedding() -> None:
    """Rows of 2,048 and of 14 bytes."""
    for hidden in (1024, 7):
        embedding.embedding(_integers(200, 37), _randn(100, hidden), 50, 100)


def call_store_kv() -> None:
    """Views of a QKV product."""
    for heads, dim in ((8, 128), (1, 7)):
        qkv = _randn(5, 4 * heads, dim)
        slots = _randn(2, 9, heads, dim)
        out_loc = torch.randperm(9, device=DEVICE)[:5].int()
        kv_store.store_kv(qkv[:, 2 * heads : 3 * heads], qkv[:, 3 * heads :], *slots, out_loc)


def call_norms() -> None:
    """Rows of one warp, of several, and of several accesses a thread."""
    for hidden in (128, 1024, 16384, 33):
        norm.rms_norm(_randn(3, hidden), _randn(hidden), 1e-6)
        norm.add_rms_norm(*_randn(2, 3, hidden), _randn(hidden), 1e-6)


def call_qk_rope_store() -> None:
    """Groups of 8 and 16 lanes, one of them not full."""
    for dim in (64, 80, 128):
        slots = _randn(2, 7, 2, dim)
        qkv, table = _randn(5, 7 * dim), _randn(11, dim, dtype=torch.float32)
        out_loc = torch.randperm(7, device=DEVICE)[:5].int()
        weight = _randn(dim)
        qk_rope_store.qk_rope_store(
            qkv, weight, weight, 1e-6, table, _integers(11, 5), out_loc, *slots, 3, 2
        )


def call_silu_and_mul() -> None:
    """Accesses of 16 and of 2 bytes."""
    for width in (3072, 33):
        activation.silu_and_mul(_randn(3, 2 * width))


def call_decode_inputs() -> None:
    """Fewer requests than a block has threads."""
    tables = _integers(99, 2, 7, 13)
    found = torch.empty(3, 5, dtype=torch.int32, device=DEVICE)
    decode_inputs.decode_inputs(_integers(7, 5), _integers(12, 5) + 1, *tables, *found)


def call_sample() -> None:
    """Full accesses and single ones, greedy rows and draws, into a token pool."""
    for vocab_size, dtype in ((4099, torch.bfloat16), (8192, torch.float32), (3, torch.float32)):
        seeds = torch.arange(4, device=DEVICE)
        greedy = torch.tensor([0, 1, 0, 0], dtype=torch.uint8, device=DEVICE)
        sample(
            _randn(4, vocab_size, dtype=dtype), torch.ones(4, device=DEVICE), seeds, seeds, greedy,
            token_pool=_integers(9, 4), output_index=seeds,
        )  # fmt: skip


def call_moe() -> None:
    """Experts with many, few and no rows, in blocks of each size."""
    from minisgl_kernels import moe_experts, moe_route

    experts, hidden, width = 6, 96, 40
    weights = _randn(experts, 2 * width, hidden), _randn(experts, hidden, width)
    for tokens, blocks in zip((1, 7, 70, 300), moe_experts.SIZES, strict=True):
        x, scores = _randn(tokens, hidden), _randn(tokens, experts)
        moe_experts.run_experts(x, *weights, *moe_route.route(scores, 3, True), blocks)


def call_block_table() -> None:
    """In rows and one after the other."""
    table = 16 * torch.randperm(36, device=DEVICE).view(3, 12).int().repeat_interleave(16, 1)
    rows, lens = _integers(3, 2), torch.tensor([33, 190], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 3, 15], dtype=torch.int32, device=DEVICE)
    block_table(torch.empty_like(table[:2, :12]), table, rows, lens, 16)
    block_table(torch.empty(15, dtype=torch.int32, device=DEVICE), table, rows, lens, 16, starts)


def call_decode_attention() -> None:
    """Whole requests, halves and more parts of requests, twice each, and with what comes before."""
    cases = ((4, 2, 128, [1, 17, 500]), (3, 1, 64, [3000, 40]), (4, 2, 128, [200] * 6))
    for (heads, kv_heads, dim, lens), page in itertools.product(cases, (1, 16)):
        width, batch = -(-max(lens) // 16) * 16, len(lens)
        slots = _randn(2, batch * width, kv_heads, dim)
        pages = page * torch.randperm(batch * width // page, device=DEVICE).view(batch, -1, 1)
        table = (pages + torch.arange(page, device=DEVICE)).view(batch, width).int()
        kernel = DecodeAttention(
            max_batch=batch, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
            dtype=torch.bfloat16, device=torch.device(DEVICE), page_size=page, sm_count=1,
        )  # fmt: skip
        rows = torch.randperm(batch, device=DEVICE).int()
        kernel.plan(torch.tensor(lens, dtype=torch.int32, device=DEVICE), rows)
        for _ in range(2):
            kernel.attention(_randn(batch, heads, dim), *slots, table)
        turn = _randn(dim), _randn(dim), 1e-6, _randn(width, dim, dtype=torch.float32)
        qkv = _randn(batch, (heads + 2 * kv_heads) * dim)
        for weights in (turn[:2], (None, None)):
            kernel.attention_of_qkv(qkv, *weights, *turn[2:], *slots, table)


def call_filter_bounds() -> None:
    """All filters, with ties and without."""
    for logits in (_randn(4, 4099), _integers(3, 4, 4099).bfloat16()):
        top_k = torch.tensor([2, 50, 1 << 31, 1 << 31], device=DEVICE)
        top_p = torch.tensor([0.5, 1.0, 0.9, 1.0], device=DEVICE, dtype=torch.float64)
        filter_bounds(logits, torch.ones(4, device=DEVICE), top_k, top_p, 1 - top_p)


def call_skinny_linear() -> None:
    """Each thing that may stand before or behind the product."""
    for tokens in (1, 9):
        x, weight = _randn(tokens, 1056), _randn(42, 1056)
        skinny_linear(x, weight, bias=_randn(42))
        skinny_linear(x, weight, norm=_randn(1056), eps=1e-6, silu=True)
        skinny_linear(x, weight, residual=_randn(tokens, 42))


def call_wide_linear() -> None:
    """Clusters that share the K dimension, ways, and tiles that are not full."""
    for tokens, cut in ((9, Blocks(1, 2, ways=2)), (50, Blocks(2, 1, 2)), (33, Blocks(1, 4))):
        x, weight, h = _randn(tokens, 1088), _randn(432, 1088), _randn(tokens, 432)
        ready = wide_add(h, x, weight, _randn(432), blocks=cut)
        wide_linear(x, weight, bias=_randn(432), blocks=cut)
        ready = Normed(ready.x[:, :384].contiguous(), ready.squares)
        wide_linear(ready, _randn(144, 384), eps=1e-6, silu=True, blocks=cut)
    for dim, cut in ((64, Blocks(1, 2)), (128, Blocks(2, 1, 2))):
        table, slots = _randn(11, dim, dtype=torch.float32), _randn(2, 29, 2, dim)
        out_loc = torch.randperm(29, device=DEVICE)[:21].int()
        turned = Turned(
            _randn(dim), _randn(dim), 1e-6, table, _integers(11, 21), out_loc, *slots, 3, 2
        )
        wide_turn(_randn(21, 192), _randn(7 * dim, 192), turned, blocks=cut)


CALLS: dict[str, Callable[[], None]] = {
    name.removeprefix("call_"): call
    for name, call in list(globals().items())
    if name.startswith("call_")
}


def main(names: list[str]) -> None:
    """Call the kernels of these names, or all."""
    torch.manual_seed(0)
    for name in names or CALLS:
        CALLS[name]()
        torch.cuda.synchronize()
        print(f"called {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
