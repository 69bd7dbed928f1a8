"""What inference needs to know of a model, read from the `config.json` of a Hugging Face folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.config import StartError, UsageError
from minisgl.hub import read_json
from minisgl.layers.rotary import ROPE_TYPES, RopeConfig
from minisgl.models.registry import Family, family_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Mixture-of-experts layers."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool
    layers: frozenset[int]
    """Which decoder layers have experts; the others have a dense MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder model. The families differ in these fields only."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_model_len: int
    """Longest sequence in tokens, with the rope scaling counted in."""
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    dtype: str
    """Type of the stored weights as the config says: float32, bfloat16 or float16."""
    sliding_window: int | None
    """Tokens that an active sliding window sees; None: no layer has one."""
    eos_token_ids: tuple[int, ...]
    """Of `generation_config.json`, else of `config.json`, as transformers does."""
    moe: MoeConfig | None = None


class _Fields:
    """Typed access to the fields of a config, with errors that name file and field."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def fail(self, name: str, allowed: str) -> StartError:
        return StartError(f"{self.path}: {name} must be {allowed}, not {self.values.get(name)!r}")

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise StartError(f"{self.path}: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.fail(name, f"an integer of at least {least}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.fail(name, "a number over 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.number(name, 0.0)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value


def load_model_config(folder: str | Path) -> ModelConfig:
    """Read the config of the model in `folder`, in the old spelling of its fields or the new one.

    `UsageError` if there is no such folder; `StartError` names the file and the field that is
    missing, malformed or not supported. Code from the folder is never run.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"no model folder {folder}")
    path = folder / "config.json"
    raw = read_json(path)
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise StartError(f"{path}: architectures is missing")
    family = family_of(architectures[0], path)
    if raw.get("quantization_config"):
        raise StartError(
            f"{path}: quantization_config is not supported; use a checkpoint of float32, bfloat16 "
            "or float16 weights"
        )
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        _Fields(path, raw).integer(name)
    fields = _Fields(path, _with_defaults(family, raw))
    return _build(architectures[0], family, fields, _eos_ids(folder, raw))


def _with_defaults(family: Family, raw: dict[str, Any]) -> dict[str, Any]:
    """`raw` laid over the family's defaults. What the file gives counts, null included."""
    merged = {**family.defaults, **raw}
    experts = raw.get("num_experts", raw.get("num_local_experts"))
    if experts is not None:
        merged["num_experts"] = experts
    return merged


def _build(
    architecture: str, family: Family, fields: _Fields, eos_token_ids: tuple[int, ...]
) -> ModelConfig:
    values = fields.values
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fails_to_group(fields.path, heads, kv_heads)
    if values.get("head_dim") is None and hidden % heads:
        raise fields.fail("hidden_size", f"a multiple of num_attention_heads ({heads})")
    head_dim = fields.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise fields.fail("head_dim", "even")
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.fail("hidden_act", "silu")
    bias = fields.boolean("attention_bias")
    layers = fields.integer("num_hidden_layers")
    rope = _rope(fields)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_model_len=_max_model_len(fields, rope),
        rope=rope,
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=bias if family.o_bias is None else family.o_bias,
        mlp_bias=fields.boolean("mlp_bias"),
        qk_norm=family.qk_norm,
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        dtype=_dtype(fields),
        sliding_window=_window(fields, family),
        eos_token_ids=eos_token_ids,
        moe=_moe(fields, layers) if family.moe else None,
    )


def fails_to_group(path: Path, heads: int, kv_heads: int) -> StartError:
    """The error for query heads that KV heads cannot share evenly."""
    return StartError(
        f"{path}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads "
        f"({kv_heads})"
    )


def _rope(fields: _Fields) -> RopeConfig:
    """From `rope_parameters`, or from `rope_theta` and `rope_scaling` in older files."""
    raw = fields.values.get("rope_scaling") or fields.values.get("rope_parameters") or {}
    if not isinstance(raw, dict):
        raise fields.fail("rope_scaling", "an object")
    nested = [v for v in raw.values() if isinstance(v, dict)]
    if nested:  # one set of parameters for each kind of layer
        if any(v != nested[0] for v in nested):
            raise StartError(
                f"{fields.path}: rope_parameters that differ between layers are not supported"
            )
        raw = nested[0]
    rope = _Fields(fields.path, raw)
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise StartError(
            f"{fields.path}: rope_type {kind!r} is not supported; supported: "
            + ", ".join(ROPE_TYPES)
        )
    partial = raw.get("partial_rotary_factor", fields.values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise StartError(f"{fields.path}: partial_rotary_factor {partial!r} is not supported")
    if kind != "default" and raw.get("factor") is None:
        raise StartError(f"{fields.path}: factor of the {kind} rope scaling is missing")
    return RopeConfig(
        type=kind,
        theta=rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
        factor=rope.number("factor", 1.0),
        original_max_position=rope.integer(
            "original_max_position_embeddings",
            fields.integer(
                "original_max_position_embeddings", fields.integer("max_position_embeddings")
            ),
        ),
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
    )


def _max_model_len(fields: _Fields, rope: RopeConfig) -> int:
    """Llama 3 files count the scaling in already; yarn and linear ones may or may not."""
    limit = fields.integer("max_position_embeddings")
    if rope.type == "yarn":
        return max(limit, int(rope.original_max_position * rope.factor))
    return int(limit * rope.factor) if rope.type == "linear" else limit


def _dtype(fields: _Fields) -> str:
    name = "torch_dtype" if fields.values.get("torch_dtype") is not None else "dtype"
    value = fields.values.get(name) or "float32"
    if value not in ("float32", "bfloat16", "float16"):
        raise fields.fail(name, "float32, bfloat16 or float16")
    return str(value)


def _window(fields: _Fields, family: Family) -> int | None:
    """The window that some layer really has; files often name one that is switched off."""
    if fields.values.get("sliding_window") is None:
        return None
    if family.window_switch and not fields.boolean("use_sliding_window"):
        return None
    kinds = fields.values.get("layer_types")
    if isinstance(kinds, list) and kinds:
        if "sliding_attention" not in kinds:
            return None
    elif family.window_layers and (
        fields.integer("max_window_layers", least=0) >= fields.integer("num_hidden_layers")
    ):
        return None
    return fields.integer("sliding_window")


def _moe(fields: _Fields, layers: int) -> MoeConfig | None:
    experts = fields.integer("num_experts", 0, least=0)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise fields.fail("mlp_only_layers", "a list of layer numbers")
    step = fields.integer("decoder_sparse_step", 1)
    sparse = frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    if not experts or not sparse:
        return None
    chosen = fields.integer("num_experts_per_tok")
    if chosen > experts:
        raise fields.fail("num_experts_per_tok", f"at most num_experts ({experts})")
    return MoeConfig(
        num_experts=experts,
        experts_per_token=chosen,
        intermediate_size=fields.integer("moe_intermediate_size"),
        norm_topk_prob=fields.boolean("norm_topk_prob"),
        layers=sparse,
    )


def _eos_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    given = read_json(path, missing_ok=True).get("eos_token_id")
    if given is None:
        path, given = folder / "config.json", raw.get("eos_token_id")
    ids = [] if given is None else given if isinstance(given, list) else [given]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise StartError(
            f"{path}: eos_token_id must be a token id or a list of them, not {given!r}"
        )
    return tuple(dict.fromkeys(ids))
