"""Rotary position embedding and its scaled variants.

Sources: RoFormer (arXiv 2104.09864); linear interpolation (arXiv 2306.15595); YaRN (arXiv
2309.00071); the llama3 scaling as Llama 3.1 defines it.
"""

import math
from dataclasses import dataclass

import torch

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""`dynamic` is not among them: its angles change with the length, and cached keys would not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions rotate queries and keys."""

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    """Positions that the model was first trained with (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines of one step's positions, the same for every layer.

    Both are [T, 1, head_dim]; the first half of `sin` is negative.
    """

    cos: torch.Tensor
    sin: torch.Tensor


class RotaryEmbedding:
    """Rotates dimension i of a head together with dimension i + head_dim / 2."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        frequencies, self._scale = inverse_frequencies(rope, head_dim)
        self._frequencies = frequencies.to(device)
        self._half = head_dim // 2

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> Angles:
        """For positions [T] int64: computed in float32, then rounded to `dtype`, once a step."""
        phases = positions.float().unsqueeze(1) * self._frequencies
        cos, sin = phases.cos().mul_(self._scale), phases.sin().mul_(self._scale)
        return Angles(
            cos=torch.cat((cos, cos), dim=1).unsqueeze(1).to(dtype),
            sin=torch.cat((-sin, sin), dim=1).unsqueeze(1).to(dtype),
        )

    def table(self, positions: int) -> torch.Tensor:
        """[positions, head_dim] float32: the cosines of each position's pairs, then the sines."""
        places = torch.arange(positions, device=self._frequencies.device)
        phases = places.float().unsqueeze(1) * self._frequencies
        return torch.cat((phases.cos(), phases.sin()), dim=1).mul_(self._scale)

    def rotate(self, x: torch.Tensor, angles: Angles) -> None:
        """Rotate x [T, heads, head_dim] in place."""
        swapped = x.roll(self._half, dims=-1)
        x.mul_(angles.cos).addcmul_(swapped, angles.sin)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians a position of head_dim / 2 pairs, float32, and a factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.type == "linear":
        return plain / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.type == "yarn":
        return _yarn(rope, plain, head_dim), _yarn_attention_factor(rope)
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched, short ones are not, those between are blended."""
    turns = rope.original_max_position * plain / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * plain / rope.factor + share * plain


def _yarn(rope: RopeConfig, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Pairs that turn often within the original length keep their speed, the slow are stretched."""

    def pair_of(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    stretched = ((pairs - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * stretched + plain * (1 - stretched)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
