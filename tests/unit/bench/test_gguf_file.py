"""The GGUF file of a rival holds the model of the folder, as transformers reads it."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from minisgl.bench.compare.gguf_file import check_gguf, permuted, write_gguf
from minisgl.config import StartError, UsageError
from minisgl.convert import _Gguf
from minisgl.models.config import load_model_config
from tests import tiny

PROMPT = list(range(4, 60))


def written(folder: Path, weights: str = "float32") -> Path:
    model = load_model_config(folder)
    check_gguf(model)
    path = folder / "model.gguf"
    write_gguf(folder, model, path, weights)
    return path


@pytest.mark.parametrize(
    "family", ["llama", "llama-tied", "llama-9-3", "mistral", "qwen2", "qwen3"]
)
def test_transformers_reads_the_same_model_from_it(tmp_path: Path, family: str) -> None:
    # Of Qwen3's heads transformers takes the size for granted.
    heads = {"head_dim": 128} if family == "qwen3" else {}
    folder = tiny.build_tiny(tmp_path / "model", family, **heads)
    path = written(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=path.name, dtype=torch.float32
    )
    with torch.inference_mode():
        logits = model.eval()(torch.tensor([PROMPT])).logits[0]
    (expected,) = tiny.reference_logits(folder, [PROMPT])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_biases_and_scaled_frequencies_are_in_it(tmp_path: Path) -> None:
    import gguf

    biased = written(tiny.build_tiny(tmp_path / "bias", "llama-bias"))
    names = {t.name for t in gguf.GGUFReader(biased).tensors}
    assert {"blk.0.attn_q.bias", "blk.2.ffn_down.bias"} <= names
    # The converter back refuses frequencies that are not those of Llama 3.
    scaled = tiny._LLAMA3 | {"original_max_position_embeddings": 8192}
    folder = tiny.build_tiny(tmp_path / "llama3", rope_parameters=scaled)
    assert _Gguf(written(folder))._rope(10000.0) == {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip


@pytest.mark.parametrize(("weights", "kind"), [("bfloat16", "BF16"), ("Q8_0", "Q8_0")])
def test_matrices_have_the_type_and_norms_stay_exact(
    tmp_path: Path, weights: str, kind: str
) -> None:
    import gguf

    tensors = gguf.GGUFReader(written(tiny.build_tiny(tmp_path / "m"), weights)).tensors
    kinds = {t.name: t.tensor_type.name for t in tensors}
    assert {k for name, k in kinds.items() if "norm" not in name} == {kind}
    assert {k for name, k in kinds.items() if "norm" in name} == {"F32"}


def test_rows_that_rope_turns_together_come_side_by_side() -> None:
    rows = np.arange(8).reshape(8, 1)
    assert permuted(rows, heads=2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("family", "named"),
    [("qwen3-moe", "a Qwen3MoeForCausalLM: give --gguf"), ("llama-yarn", "with yarn rope: give")],
)
def test_a_model_that_it_cannot_hold_is_refused(tmp_path: Path, family: str, named: str) -> None:
    folder = tiny.build_tiny(tmp_path / "model", family)
    with pytest.raises(UsageError, match=named):
        check_gguf(load_model_config(folder))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = tiny.build_tiny(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(StartError, match="no tensor model.embed_tokens.weight"):
        written(folder)


def test_a_missing_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model_config(tiny.build_tiny(tmp_path / "model"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match=r"pip install 'minisglang\[convert\]'"):
        check_gguf(model)
