"""Which kernels of products a start will try, from a model's widths alone: no GPU, no weights."""

from collections.abc import Iterable
from typing import NamedTuple

from minisgl.attention.mini_backend import FUSED_TOKENS
from minisgl.models.config import ModelConfig
from minisgl.models.products import GROUPS, NAMES, Kernels
from minisgl_kernels import wide_linear
from minisgl_kernels.cuda_build import Variant


class Widths(NamedTuple):
    """What decides the shapes of a layer's products on one rank."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


COMMON = {
    "Qwen3-0.6B": Widths(1024, 3072, 16, 8, 128),
    "Qwen3-1.7B": Widths(2048, 6144, 16, 8, 128),
    "Qwen3-4B": Widths(2560, 9728, 32, 8, 128),
    "Qwen3-8B": Widths(4096, 12288, 32, 8, 128),
    "Qwen3-14B": Widths(5120, 17408, 40, 8, 128),
    "Qwen3-32B": Widths(5120, 25600, 64, 8, 128),
    "Llama-3.2-1B": Widths(2048, 8192, 32, 8, 64),
    "Llama-3.2-3B": Widths(3072, 8192, 24, 8, 128),
    "Llama-3.1-8B": Widths(4096, 14336, 32, 8, 128),
    "Qwen2.5-0.5B": Widths(896, 4864, 14, 2, 64),
    "Qwen2.5-1.5B": Widths(1536, 8960, 12, 2, 128),
    "Qwen2.5-3B": Widths(2048, 11008, 16, 2, 128),
    "Qwen2.5-7B": Widths(3584, 18944, 28, 4, 128),
}
"""Models whose kernels an image has; others share most of them."""


def widths_of(config: ModelConfig) -> Widths:
    """Those of a model."""
    return Widths(
        config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads,
        config.head_dim,
    )  # fmt: skip


def product_variants(models: Iterable[Widths]) -> list[Variant]:
    """The kernels of products that trials of such models time, and those that they may choose for
    numbers of tokens between the timed ones, on Hopper and in bfloat16."""
    found: dict[Variant, None] = {}
    kernels = Kernels(wide=wide_linear.wide_linear, wide_tokens=wide_linear.MAX_TOKENS)
    for one in models:
        dim, heads = one.head_dim, one.heads * one.head_dim
        sizes = (
            (heads + 2 * one.kv_heads * dim, one.hidden), (one.hidden, heads),
            (2 * one.intermediate, one.hidden), (one.hidden, one.intermediate),
        )  # fmt: skip
        shapes = {
            name: (*size, mode)
            for name, size, mode in zip(NAMES, sizes, wide_linear.MODES, strict=True)
        }
        before = 0
        for tokens in GROUPS:
            turned = dim if tokens > FUSED_TOKENS else 0
            for name, options in kernels.options(tokens, shapes, turned).items():
                rows, k, mode = shapes[name]
                for cut in (option.cut for option in options if option.cut is not None):
                    for some in range(before + 1, tokens + 1):
                        turns = name == "qkv" and wide_linear.turns(some, rows, k, turned, cut)
                        found[wide_linear.variant(some, cut, mode, turned=turns)] = None
            before = tokens
    return list(found)
