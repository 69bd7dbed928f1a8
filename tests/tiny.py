"""Random tiny checkpoints of every supported family, with a byte-level tokenizer.

They are awkward on purpose: a vocabulary that no rank count divides, heads wider than their share
of the hidden size, few KV heads, scaled rope, tied tables, biases. Weights are spread far enough
that greedy choices are clear.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 269
EOS = (2, 41)
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_QWEN2 = {"hidden_size": 128, "head_dim": None}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN}),
    "llama-linear": ("Llama", {"rope_parameters": _LINEAR}),
    "llama-9-3": (
        "Llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 108}
    ),
    "mistral": ("Mistral", {"num_key_value_heads": 1, "sliding_window": None}),
    "qwen2": ("Qwen2", _QWEN2),
    "qwen2-6-2-tied": (
        "Qwen2",
        {"hidden_size": 192, "num_attention_heads": 6, "head_dim": None,
         "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3", {"rms_norm_eps": 1e-2}),
    "qwen3-tied": ("Qwen3", {"num_attention_heads": 8, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3-moe-step": ("Qwen3Moe", {**_EXPERTS, "decoder_sparse_step": 2,
                                    "num_experts_per_tok": 3, "norm_topk_prob": False}),
}  # fmt: skip
"""By name: the prefix of the transformers classes, and what differs from the common sizes."""


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a byte, after four special ones; ids beyond it in the vocabulary mean nothing."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], unk_token=SPECIAL[0])
    )
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    unk, bos, eos, pad = SPECIAL
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytewise, unk_token=unk, bos_token=bos, eos_token=eos, pad_token=pad
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_tiny(folder: Path, family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """Write the checkpoint of one family into `folder`; `overrides` replace config fields."""
    prefix, special = FAMILIES[family]
    fields = {**_COMMON, **special, **overrides}
    if fields["head_dim"] is None:
        del fields["head_dim"]
    config = getattr(transformers, prefix + "Config")(**fields)
    config.dtype = "float32"
    model = getattr(transformers, prefix + "ForCausalLM")(config).float()
    _spread(model, seed)
    model.tie_weights()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(EOS)}))
    return folder


def _spread(model: torch.nn.Module, seed: int) -> None:
    """Weights of about unit gain, norms around one, biases that count."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.6, 1.6, generator=random)
            elif weight.ndim == 1:
                weight.normal_(std=0.25, generator=random)
            else:
                weight.normal_(std=1.5 / weight.shape[-1] ** 0.5, generator=random)


def reference_logits(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """What transformers computes in float32 for each prompt alone: [tokens, vocab]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
