"""The architectures that the decoder covers, one line an entry."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minisgl.config import StartError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the code of an architecture fixes, where its config file says nothing."""

    qkv_bias: bool | None = None
    """None: as `attention_bias` says."""
    o_bias: bool | None = None
    qk_norm: bool = False
    moe: bool = False
    window_switch: bool = False
    """`sliding_window` counts only where `use_sliding_window` is true."""
    window_layers: bool = False
    """The window is that of the layers from `max_window_layers` on, unless `layer_types` says."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of fields that config.json leaves out, as transformers has them (a test compares): asking
    it would cost each rank two seconds of imports at its start. Sizes are not among them: one that
    is missing is an error, not another model's."""


_QWEN: dict[str, Any] = {"max_position_embeddings": 32768, "sliding_window": 4096}
_QWEN_WINDOW = {**_QWEN, "max_window_layers": 28}
_EXPERTS = {
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "num_key_value_heads": 4,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(defaults={"max_position_embeddings": 2048}),
    "MistralForCausalLM": Family(
        qkv_bias=False,
        o_bias=False,
        defaults={
            "max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8,
        },
    ),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True,
        o_bias=False,
        window_switch=True,
        window_layers=True,
        defaults={**_QWEN_WINDOW, "num_key_value_heads": 32},
    ),
    "Qwen3ForCausalLM": Family(
        qk_norm=True,
        window_switch=True,
        window_layers=True,
        defaults={**_QWEN_WINDOW, "num_key_value_heads": 32, "head_dim": 128},
    ),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=True, moe=True, window_switch=True, defaults={**_QWEN, **_EXPERTS}
    ),
}  # fmt: skip
"""By the first entry of `architectures` in config.json."""


def family_of(architecture: str, path: Path) -> Family:
    """The family of an architecture. `StartError` names `path` and lists what is supported."""
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise StartError(
            f"{path}: architecture {architecture!r} is not supported; supported: "
            + ", ".join(FAMILIES)
        )
    return family
