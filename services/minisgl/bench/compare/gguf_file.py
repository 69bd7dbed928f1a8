"""The GGUF file that llama.cpp loads, made of the same checkpoint as the engine's weights.

It holds no tokenizer: a benchmark sends random ids. Source of names and of the order of Q and K
rows: llama.cpp's `convert_hf_to_gguf.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from minisgl.config import StartError, UsageError
from minisgl.convert import LAYER_TENSORS, TOP_TENSORS
from minisgl.layers.rotary import inverse_frequencies
from minisgl.models.config import ModelConfig

Array = npt.NDArray[Any]

TYPES = ("bfloat16", "float16", "float32", "Q8_0")
"""What weights can be written as."""
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def check_gguf(model: ModelConfig) -> None:
    """Raises `UsageError` if no file can be made here of such a model."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UsageError(
            "making a GGUF file needs the package gguf: pip install 'minisglang[convert]', or give "
            "--gguf FILE"
        ) from None
    if model.architecture not in _ARCHITECTURES:
        raise UsageError(f"no GGUF file can be made of a {model.architecture}: give --gguf FILE")
    if model.rope.type not in ("default", "linear", "llama3"):
        raise UsageError(
            f"no GGUF file can be made of a model with {model.rope.type} rope: give --gguf FILE"
        )


def write_gguf(folder: Path, model: ModelConfig, path: Path, weights: str) -> None:
    """Write the model in `folder` to `path`, its matrices as one of `TYPES`.

    Raises `StartError` if the folder lacks a tensor. `check_gguf` has passed.
    """
    import gguf

    architecture = _ARCHITECTURES[model.architecture]
    writer = gguf.GGUFWriter(path, architecture)
    _write_fields(writer, model)
    kind = {
        "bfloat16": gguf.GGMLQuantizationType.BF16,
        "float16": gguf.GGMLQuantizationType.F16,
        "float32": gguf.GGMLQuantizationType.F32,
        "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    }[weights]
    if model.rope.type == "llama3":
        plain = model.rope.theta ** -(np.arange(0, model.head_dim, 2) / model.head_dim)
        factors = plain / inverse_frequencies(model.rope, model.head_dim)[0].numpy()
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    for name, data in _tensors(folder, model, architecture == "llama"):
        # Norms and biases are never anything else. A row that is no whole number of blocks of 32
        # cannot be Q8_0.
        whole = data.ndim > 1 and (weights != "Q8_0" or data.shape[-1] % 32 == 0)
        of = kind if whole else gguf.GGMLQuantizationType.F32
        if of == gguf.GGMLQuantizationType.BF16:  # on all threads
            stored = torch.from_numpy(data).bfloat16().view(torch.uint8).numpy()
        else:
            stored = gguf.quants.quantize(data, of)
        writer.add_tensor(name, stored, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_fields(writer: Any, model: ModelConfig) -> None:
    writer.add_context_length(model.max_model_len)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_layers)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope.theta)
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_vocab_size(model.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    if model.rope.type == "linear":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(model.rope.factor)


def _tensors(folder: Path, model: ModelConfig, permute: bool) -> Iterator[tuple[str, Array]]:
    """(Name in GGUF, float32), in the order of the file."""
    files = sorted(folder.glob("*.safetensors"))
    where: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            where |= dict.fromkeys(opened.keys(), file)

    def read(name: str) -> Array:
        with safe_open(where[name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor.float().numpy()

    for ours, theirs in names(model).items():
        for part in ("weight", "bias"):
            name = f"{theirs}.{part}"
            if name in where:
                data = read(name)
                if permute and ".attn_q." in f"{ours}.":
                    data = permuted(data, model.num_heads)
                elif permute and ".attn_k." in f"{ours}.":
                    data = permuted(data, model.num_kv_heads)
                yield f"{ours}.{part}", data
            elif part == "weight":
                raise StartError(f"{folder} has no tensor {name}")


def names(model: ModelConfig) -> dict[str, str]:
    """Modules by their names in GGUF, with those of Hugging Face."""
    found = dict(TOP_TENSORS)
    if model.tie_word_embeddings:
        del found["output"]
    for i in range(model.num_layers):
        for ours, theirs in (LAYER_TENSORS | (_NORMS if model.qk_norm else {})).items():
            found[f"blk.{i}.{ours}"] = f"model.layers.{i}.{theirs}"
    return found


def permuted(data: Array, heads: int) -> Array:
    """Rows of Q or K with the two that rope turns together side by side, as llama.cpp wants."""
    rows = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(data.shape))
