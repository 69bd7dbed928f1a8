"""The config of a model is read in any spelling, and what is wrong with it is named."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl.config import StartError, UsageError
from minisgl.layers.rotary import RopeConfig
from minisgl.models.config import ModelConfig, load_model_config
from minisgl.models.registry import FAMILIES

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
MOE = {
    **QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [1],
    "num_hidden_layers": 4,
}  # fmt: skip

Load = Callable[..., ModelConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write a config.json (a value of None takes the field out) and read it."""

    def write_and_load(base: dict[str, Any], **changes: Any) -> ModelConfig:
        fields = {k: v for k, v in {**base, **changes}.items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return load_model_config(tmp_path)

    return write_and_load


def test_the_fields_of_a_plain_model(load: Load) -> None:
    config = load(LLAMA)
    assert config == ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=320, hidden_size=64, intermediate_size=128,
        num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5,
        max_model_len=1024, rope=RopeConfig(theta=500000.0, original_max_position=1024),
        qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False, tie_word_embeddings=False,
        dtype="bfloat16", sliding_window=None, eos_token_ids=(2,), moe=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    "new",
    [
        {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        {"rope_scaling": {"type": "default"}},
        {"torch_dtype": None, "dtype": "bfloat16"},
        {"head_dim": 16},
        {"sliding_window": None},
    ],
)
def test_old_and_new_spellings_mean_the_same(load: Load, new: dict[str, Any]) -> None:
    assert load(LLAMA, **new) == load(LLAMA)


LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "rope", "limit"),
    [
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(type="llama3", theta=500000.0, factor=8.0, original_max_position=128),
            1024,
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0,
                              "original_max_position_embeddings": 1024}},
            RopeConfig(type="yarn", theta=500000.0, factor=4.0, original_max_position=1024),
            4096,
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 9.0, "factor": 4.0,
                                 "original_max_position_embeddings": 256}},
            RopeConfig(type="yarn", theta=9.0, factor=4.0, original_max_position=256),
            1024,
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeConfig(type="linear", theta=500000.0, factor=2.0, original_max_position=1024),
            2048,
        ),
    ],
)  # fmt: skip
def test_scaled_rope_sets_the_angles_and_the_longest_sequence(
    load: Load, changes: dict[str, Any], rope: RopeConfig, limit: int
) -> None:
    config = load(LLAMA, **changes)
    assert (config.rope, config.max_model_len) == (rope, limit)


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (LLAMA, (False, False, False)),
        ({**LLAMA, "attention_bias": True}, (True, True, False)),
        (MISTRAL, (False, False, False)),
        (QWEN2, (True, False, False)),
        (QWEN3, (False, False, True)),
        ({**QWEN3, "attention_bias": True}, (True, True, True)),
    ],
)
def test_families_differ_in_biases_and_norms(
    load: Load, base: dict[str, Any], expected: tuple[bool, bool, bool]
) -> None:
    config = load(base)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == expected


@pytest.mark.parametrize(
    ("base", "changes", "window"),
    [
        (MISTRAL, {"sliding_window": 256}, 256),
        (QWEN2, {"sliding_window": 256}, None),
        (QWEN2, {"sliding_window": 256, "use_sliding_window": False}, None),
        (QWEN2, {"sliding_window": 256, "use_sliding_window": True, "max_window_layers": 1}, 256),
        (QWEN2, {"sliding_window": 256, "use_sliding_window": True, "max_window_layers": 2}, None),
        (QWEN3, {"sliding_window": 256, "use_sliding_window": True,
                 "layer_types": ["full_attention"] * 2}, None),
        (QWEN3, {"sliding_window": 256, "use_sliding_window": True,
                 "layer_types": ["full_attention", "sliding_attention"]}, 256),
        (MOE, {"sliding_window": 256, "use_sliding_window": True}, 256),
    ],
)  # fmt: skip
def test_only_an_active_sliding_window_counts(
    load: Load, base: dict[str, Any], changes: dict[str, Any], window: int | None
) -> None:
    assert load(base, **changes).sliding_window == window


@pytest.mark.parametrize(("text", "window"), [("null", None), ("", 4096)])
def test_a_null_window_of_mistral_is_none_and_a_missing_one_its_default(
    tmp_path: Path, text: str, window: int | None
) -> None:
    body = json.dumps(MISTRAL)
    if text:
        body = body[:-1] + f', "sliding_window": {text}}}'
    (tmp_path / "config.json").write_text(body)
    assert load_model_config(tmp_path).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, {0, 2, 3}),
        ({"mlp_only_layers": []}, {0, 1, 2, 3}),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, {1, 3}),
        ({"num_experts": None, "num_local_experts": 8}, {0, 2, 3}),
    ],
)
def test_which_layers_have_experts(load: Load, changes: dict[str, Any], layers: set[int]) -> None:
    moe = load(MOE, **changes).moe
    assert moe is not None
    assert moe.layers == layers
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size) == (8, 2, 32)
    assert moe.norm_topk_prob


def test_end_tokens_come_from_the_generation_config_first(load: Load, tmp_path: Path) -> None:
    assert load(LLAMA, eos_token_id=[5, 6]).eos_token_ids == (5, 6)
    assert load(LLAMA, eos_token_id=None).eos_token_ids == ()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8, 7]}')
    assert load(LLAMA).eos_token_ids == (7, 8)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load(LLAMA).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (LLAMA, {"architectures": None}, "architectures is missing"),
        (LLAMA, {"architectures": []}, "architectures is missing"),
        (LLAMA, {"architectures": ["GPT2LMHeadModel"]},
         "'GPT2LMHeadModel' is not supported; supported: LlamaForCausalLM, Mistral"),
        (LLAMA, {"architectures": [["x"]]}, "is not supported"),
        (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA, {"vocab_size": None}, "vocab_size is missing"),
        (LLAMA, {"num_hidden_layers": None}, "num_hidden_layers is missing"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1"),
        (LLAMA, {"hidden_size": "64"}, "hidden_size must be an integer"),
        (LLAMA, {"hidden_size": True}, "hidden_size must be an integer"),
        (LLAMA, {"hidden_size": 66}, "hidden"),
        (LLAMA, {"num_key_value_heads": 3},
         r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        (LLAMA, {"head_dim": 15}, "head_dim"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act must be silu"),
        (LLAMA, {"torch_dtype": "float64"}, "torch_dtype must be float32, bfloat16 or float16"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
         "rope_type 'dynamic' is not supported; supported: default, linear, llama3, yarn"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        (LLAMA, {"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        (LLAMA, {"intermediate_size": None}, "intermediate_size is missing"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"quantization_config": {"quant_method": "fp8"}},
         "quantization_config is not supported"),
        (LLAMA, {"eos_token_id": "x"}, "eos_token_id"),
        (MOE, {"num_experts_per_tok": 9}, r"num_experts_per_tok must be at most num_experts \(8\)"),
        (MOE, {"mlp_only_layers": "1"}, "mlp_only_layers"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_used_is_refused_in_one_line(
    load: Load, tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartError, match=message) as caught:
        load(base, **changes)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "cannot be read"),
        (b"[1]", "must hold a JSON object, not list"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(StartError, match=message) as caught:
        load_model_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no model folder .*/absent"):
        load_model_config(tmp_path / "absent")


def test_code_of_the_folder_is_never_run(load: Load, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    load(LLAMA, auto_map={"AutoConfig": "evil.C"})
    assert not (tmp_path / "ran").exists()


def test_a_config_cannot_be_changed(load: Load) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load(LLAMA).vocab_size = 1  # type: ignore[misc]


def test_null_rope_parameters_mean_those_of_the_family(tmp_path: Path) -> None:
    fields = {k: v for k, v in QWEN3.items() if k != "rope_theta"} | {"rope_parameters": None}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    given = load_model_config(tmp_path).rope
    del fields["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert given == load_model_config(tmp_path).rope


@pytest.mark.parametrize("architecture", FAMILIES)
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    import transformers

    family = FAMILIES[architecture]
    kind = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    switch = {"use_sliding_window": True} if family.window_switch else {}
    known = kind(**switch).to_dict()
    known["num_experts"] = known.get("num_local_experts")
    assert {name: known.get(name) for name in family.defaults} == family.defaults
    # Of what is the same in all families, and stands where the field is read.
    common = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
    assert {name: known[name] for name in common} == common
    assert known["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert not any(known.get(name) for name in ("attention_bias", "mlp_bias", "norm_topk_prob"))
    assert known.get("decoder_sparse_step", 1) == 1 and not known.get("mlp_only_layers")
