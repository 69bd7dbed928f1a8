"""Times of variants of the decode kernel, and of prefill by backend and page size.

python -m tests.gpu.decode_speed [decode] [prefill]
"""

import sys

import numpy as np
import torch

from minisgl.attention.base import AttentionContext, ForwardBatch
from minisgl.attention.registry import device_capability, make_backend
from minisgl.bench.attention import Heads, Slots, _elapsed, best_seconds, captured_step, ragged
from minisgl_kernels import decode_attention

MODELS = (Heads(16, 8, 128), Heads(40, 8, 128))
BATCHES = (
    (1, 200), (1, 1024), (1, 4096), (4, 1024), (16, 1024), (64, 1024), (128, 2048), (256, -600),
)  # fmt: skip
"""Requests, and tokens of each; below 0: uneven lengths about that."""
VARIANTS: tuple[dict[str, int], ...] = (
    {}, {"balance": 14}, {"balance": 56}, {"warps": 1}, {"warps": 2},
)  # fmt: skip
PROMPTS = ((1, 128, 0), (1, 8000, 0), (8, 1000, 0), (4, 2000, 6000))
"""Requests, new tokens, and cached tokens of each."""
PREFILLS = (("fa", 1), ("fa", 64), ("fa", 128), ("fa", 256), ("fi", 16), ("fi", 64))


def decode(buffer: torch.Tensor) -> None:
    """A line a variant: microseconds and TB/s of a layer for each batch."""
    usual = decode_attention._WARPS
    options = decode_attention.DecodeAttention.__init__.__kwdefaults__ or {}
    for heads in MODELS:
        print(heads, BATCHES)
        for variant in VARIANTS:
            decode_attention._WARPS = variant.get("warps", usual)
            options["balance"] = variant.get("balance", decode_attention.BALANCE)
            for family in (decode_attention._plan, decode_attention._attention):
                family._made.clear()
            figures = []
            for batch, tokens in BATCHES:
                lens = ragged(batch, -tokens) if tokens < 0 else np.full(batch, tokens, np.int32)
                read = int(lens.sum()) * 4 * heads.kv * heads.dim
                layers = min(64, max(2, -(-(2**30) // read)))
                step = captured_step("mini", 64, heads, lens, buffer, layers)
                seconds = best_seconds([step.replay], 3)[0] / layers
                figures.append(f"{seconds * 1e6:.1f}us/{read / seconds / 1e12:.2f}")
            print(variant, *figures, flush=True)
    decode_attention._WARPS = usual


def prefill(buffer: torch.Tensor) -> None:
    """A line a batch: microseconds and TFLOP/s of a layer for each backend and page size."""
    for heads in MODELS:
        for requests, new, cached in PROMPTS:
            figures = []
            for name, page_size in PREFILLS:
                seconds = one_prefill(buffer, heads, (requests, new, cached), name, page_size)
                products = sum(range(cached + 1, cached + new + 1))
                rate = 4 * requests * heads.query * heads.dim * products / seconds / 1e12
                figures.append(f"{name}@{page_size} {seconds * 1e6:.0f}us/{rate:.0f}")
            print(heads, (requests, new, cached), *figures, flush=True)


def one_prefill(
    buffer: torch.Tensor, heads: Heads, prompts: tuple[int, int, int], name: str, page_size: int
) -> float:
    """Seconds of a layer."""
    requests, new, cached = prompts
    slots = Slots(buffer, 2, heads, page_size)
    pages = -(-(new + cached) // page_size)
    order = np.random.default_rng(1).permutation(slots.slots // page_size)[: requests * pages]
    table = (order[:, None] * page_size + np.arange(page_size)).reshape(requests, -1)
    lens = np.full(requests, new + cached, np.int32)
    context = AttentionContext(
        device=buffer.device, dtype=buffer.dtype, num_qo_heads=heads.query,
        num_kv_heads=heads.kv, head_dim=heads.dim, page_size=page_size, max_running=requests,
        max_seq_len=table.shape[1], capability=device_capability(buffer.device),
    )  # fmt: skip
    rows, starts = np.arange(requests), np.arange(requests + 1) * new
    on_device = [torch.from_numpy(x.astype(np.int32)).cuda() for x in (rows, table, lens, starts)]
    step = ForwardBatch(
        input_ids=on_device[0], positions=on_device[0], out_loc=on_device[0], rows=on_device[0],
        page_table=on_device[1], cached_lens=lens - new, device_lens=lens,
        last_indices=on_device[0], is_decode=False, device_lens_dev=on_device[2],
        cu_seqlens_q=on_device[3],
    )  # fmt: skip
    q = torch.randn(requests * new, heads.query, heads.dim, device="cuda").to(buffer.dtype)
    backend = make_backend((name,), context)
    backend.prepare_metadata(step)

    def layer() -> None:
        backend.forward(q, 0, slots, step)  # type: ignore[arg-type]

    layer()
    return min(_elapsed(layer, 10) / 10 for _ in range(3))


def main(names: list[str]) -> None:
    """Run these, or both."""
    buffer = torch.empty(20 * 2**29, dtype=torch.bfloat16, device="cuda")
    for start in range(0, buffer.numel(), 2**29):
        buffer[start : start + 2**29].normal_()
    with torch.inference_mode():
        for name in names or ("decode", "prefill"):
            {"decode": decode, "prefill": prefill}[name](buffer)


if __name__ == "__main__":
    main(sys.argv[1:])
