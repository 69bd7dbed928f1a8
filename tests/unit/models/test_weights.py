"""Weights go to their places, and a broken checkpoint is named."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.config import StartError
from minisgl.distributed import SingleRank
from minisgl.models.config import load_model_config
from minisgl.models.decoder import CausalLM
from minisgl.models.weights import dummy_weights, load_weights
from tests.unit.models.stepper import CPU, Stepper
from tests.unit.models.test_logits import close
from tests.unit.models.test_tensor_parallel import _Rank

Tiny = Callable[[str], Path]
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to break."""
    return Path(shutil.copytree(tiny("llama"), tmp_path / "model"))


def load(folder: Path, rank: int = 0, ranks: int = 1) -> dict[str, torch.Tensor]:
    config = load_model_config(folder)
    model = CausalLM(config, torch.float32, _Rank(rank, ranks), CPU)
    load_weights(model, folder, CPU)
    return model.state_dict()


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def split(folder: Path) -> None:
    """Into two files and an index."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    placed = {name: f"part-{int(i > 5)}.safetensors" for i, name in enumerate(names)}
    for file in set(placed.values()):
        chosen = {n: t for n, t in tensors.items() if placed[n] == file}
        save_file(chosen, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def test_names_and_shapes_of_the_merged_parameters(folder: Path) -> None:
    state = load(folder)
    assert state["model.layers.0.self_attn.qkv_proj.weight"].shape == (8 * 32, 96)
    assert state["model.layers.0.mlp.gate_up_proj.weight"].shape == (2 * 160, 96)
    stored = load_file(folder / "model.safetensors")
    want = [stored[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"]
    assert torch.equal(state["model.layers.1.self_attn.qkv_proj.weight"], torch.cat(want))
    assert torch.equal(state["lm_head.weight"], stored["lm_head.weight"])


def test_the_parts_of_two_ranks_are_the_whole(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    halves = [load(folder, rank, 2) for rank in range(2)]
    down = "model.layers.2.mlp.down_proj.weight"
    assert torch.equal(torch.cat([h[down] for h in halves], dim=1), stored[down])
    table = torch.cat([h["model.embed_tokens.weight"] for h in halves])
    assert table.shape == (270, 96)
    assert torch.equal(table[:269], stored["model.embed_tokens.weight"])
    assert not table[269].any()


def test_padded_heads_are_zero(tiny: Tiny) -> None:
    state = load(tiny("llama-9-3"), rank=1, ranks=2)
    qkv = state["model.layers.0.self_attn.qkv_proj.weight"].view(10, 32, 108)
    empty = [not head.any() for head in qkv]
    assert empty == [False] * 3 + [True] * 3 + [False, True] + [False, True]
    assert not state["model.layers.0.self_attn.o_proj.weight"][:, 3 * 32 :].any()


def test_a_tied_table_is_one_tensor(tiny: Tiny) -> None:
    assert "lm_head.weight" not in load(tiny("llama-tied"))


def test_a_checkpoint_of_several_files_with_an_index(folder: Path) -> None:
    whole = load(folder)
    split(folder)
    parts = load(folder)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_single_file_goes_before_an_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert load(folder)


def test_weights_that_do_not_fit_into_memory_are_named(tiny: Tiny) -> None:
    config = dataclasses.replace(load_model_config(tiny("llama")), vocab_size=2**44)
    model = CausalLM(config, torch.float32, SingleRank(), CPU)
    with pytest.raises(StartError, match=r"not enough memory on cpu for 12\d+.\d GiB of weights"):
        dummy_weights(model, CPU, 0)


def test_several_files_without_an_index(folder: Path) -> None:
    whole = load(folder)
    split(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert all(torch.equal(whole[name], value) for name, value in load(folder).items())


def test_stored_bfloat16_becomes_the_type_of_the_model(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({Q: t[Q].bfloat16()}))
    state = load(folder)["model.layers.1.self_attn.qkv_proj.weight"]
    assert state.dtype == torch.float32
    stored = load_file(folder / "model.safetensors")[Q]
    assert torch.equal(state[:128], stored.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), f"tensor {Q} is missing"),
        (lambda t: t.update({Q: t[Q][:-1].contiguous()}),
         rf"tensor {Q} has shape \[127, 96\], but config.json makes it \[128, 96\]"),
        (lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}), f"tensor {Q} is of type F8"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}),
         "q_proj.bias has no place in the model"),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(StartError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_inverse_frequencies_of_old_checkpoints_are_passed_over(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda t: t.update({name: torch.ones(16)}))
    assert name not in load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StartError, match=f"{path}: not a whole safetensors file"):
        load(folder)


def test_a_garbled_header_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:40] = b"\xff" * 32
    path.write_bytes(content)
    with pytest.raises(StartError, match=f"{path}: not a whole safetensors file"):
        load(folder)


def test_a_missing_file_of_the_index_is_named(folder: Path) -> None:
    split(folder)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(StartError, match=r"part-1.safetensors: missing, but .*index.json names it"):
        load(folder)


def test_a_tensor_that_the_index_seeks_in_the_wrong_file_is_named(folder: Path) -> None:
    split(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("part-1", "part-0"))
    with pytest.raises(StartError, match=r"part-0.safetensors: tensor .* is missing from this"):
        load(folder)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}']
)
def test_a_broken_index_is_named(folder: Path, content: str) -> None:
    split(folder)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(StartError, match=r"index\.json"):
        load(folder)


def test_a_folder_without_safetensors_says_what_it_needs(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(StartError, match=r"no \*.safetensors file; convert the \*.bin files"):
        load(folder)


@pytest.mark.parametrize("family", ["llama-9-3", "qwen3-moe", "qwen2"])
def test_dummy_weights_are_the_same_model_for_any_number_of_ranks(family: str, tiny: Tiny) -> None:
    config = load_model_config(tiny(family))

    def down(rank: int, ranks: int) -> torch.Tensor:
        model = CausalLM(config, torch.float32, _Rank(rank, ranks), CPU)
        dummy_weights(model, CPU, seed=4)
        name = "model.layers.0.mlp." + ("experts.down_proj" if config.moe else "down_proj.weight")
        return model.state_dict()[name]

    assert torch.equal(torch.cat([down(0, 2), down(1, 2)], dim=-1), down(0, 1))


def test_dummy_weights_depend_on_the_seed_and_give_finite_logits(tiny: Tiny) -> None:
    stepper = Stepper(tiny("qwen3-moe"))
    stepper.comm = SingleRank()
    logits = []
    for seed in (1, 1, 2):
        dummy_weights(stepper.model, CPU, seed)
        logits.append(stepper.step((0, [5, 6, 7], 0)))
    close(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])
    assert logits[0].isfinite().all()
    assert logits[0].std() > 0.1
