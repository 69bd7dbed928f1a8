"""The angles of every rope variant are those of transformers."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from minisgl.layers.rotary import RopeConfig, RotaryEmbedding, inverse_frequencies

CPU = torch.device("cpu")
VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn-mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3,
                    "original_max_position_embeddings": 4096, "beta_fast": 24.0,
                    "beta_slow": 2.0},
    "yarn-given": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8,
                   "original_max_position_embeddings": 4096, "truncate": False},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scaled_frequencies(name: str, head_dim: int) -> None:
    variant = VARIANTS[name]
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=16384,
        rope_parameters={"rope_theta": 500000.0, **variant},
    )  # fmt: skip
    want, scale = ROPE_INIT_FUNCTIONS[variant["rope_type"]](config, CPU)
    fields = dict(variant)
    rope = RopeConfig(
        type=fields.pop("rope_type"), theta=500000.0,
        original_max_position=fields.pop("original_max_position_embeddings", 16384), **fields,
    )  # fmt: skip
    got, factor = inverse_frequencies(rope, head_dim)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0.0)
    assert factor == pytest.approx(scale)


def test_rotation_in_place() -> None:
    random = torch.Generator().manual_seed(0)
    q = torch.randn(7, 5, 64, generator=random)
    positions = torch.randint(0, 9000, (7,), generator=random)
    config = LlamaConfig(hidden_size=256, num_attention_heads=4)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions.unsqueeze(0))
    want, _ = apply_rotary_pos_emb(q, q, cos[0], sin[0])
    rotary = RotaryEmbedding(RopeConfig(), 64, CPU)
    rotary.rotate(q, rotary.angles(positions, torch.float32))
    torch.testing.assert_close(q, want)
