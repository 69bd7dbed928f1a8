"""The architectures that the decoder covers, one line an entry."""

from dataclasses import dataclass
from pathlib import Path

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


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False, o_bias=False),
    "Qwen2ForCausalLM": Family(qkv_bias=True, o_bias=False, window_switch=True),
    "Qwen3ForCausalLM": Family(qk_norm=True, window_switch=True),
    "Qwen3MoeForCausalLM": Family(qk_norm=True, moe=True, window_switch=True),
}
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
