"""MoE layers of Qwen3-30B-A3B's shape on a GPU: right for any batch, and in CUDA graphs."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from minisgl.distributed import SingleRank
from minisgl.layers.sharding import even_shard
from minisgl.moe.experts import route, run_experts
from minisgl.moe.layer import MoeMLP
from minisgl_kernels.moe import moe_kernels
from minisgl_kernels.moe_experts import SIZES, sizes_for

HIDDEN, EXPERTS, TOP_K, WIDTH = 2048, 128, 8, 768
DEVICE = torch.device("cuda")


def make_layer(ranks: int = 1) -> MoeMLP:
    """One layer with random weights of about unit gain."""
    layer = MoeMLP(
        experts=EXPERTS, top_k=TOP_K, normalise=True, hidden=HIDDEN, width=WIDTH,
        shard=even_shard("moe_intermediate_size", WIDTH, 0, ranks), dtype=torch.bfloat16,
        comm=SingleRank(),
    )  # fmt: skip
    random = torch.Generator(DEVICE).manual_seed(3)
    layer.load_state_dict({
        name: torch.randn(meta.shape, generator=random, device=DEVICE, dtype=meta.dtype)
        / meta.shape[-1] ** 0.5
        for name, meta in layer.state_dict().items()
    })  # fmt: skip
    return layer


@pytest.fixture(scope="module")
def layer() -> MoeMLP:
    return make_layer()


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(count, HIDDEN, generator=random, device=DEVICE, dtype=torch.bfloat16)


def exact(layer: MoeMLP, x: torch.Tensor) -> torch.Tensor:
    """The layer in float32, with the experts that its own router chose."""
    weights, ids = route(layer.gate.forward(x), TOP_K, True)
    experts = layer.experts
    return run_experts(
        x.float(), experts.gate_up_proj.float(), experts.down_proj.float(), weights, ids
    )


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want).norm() / want.norm()).item()


def test_the_kernels_run_here() -> None:
    assert moe_kernels() is not None


@pytest.mark.parametrize("count", [1, 2, 7, 64, 300, 4096])
def test_a_layer_is_as_exact_as_its_type(layer: MoeMLP, count: int) -> None:
    x = tokens(count)
    assert error(layer.forward(x), exact(layer, x)) < 6e-3


def test_a_ranks_share_of_the_width_is_as_exact() -> None:
    half = make_layer(ranks=2)
    x = tokens(65)
    assert error(half.forward(x), exact(half, x)) < 6e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", range(len(SIZES)))
def test_blocks_of_every_size_give_the_same(size: int, dtype: torch.dtype, layer: MoeMLP) -> None:
    if SIZES[size] not in sizes_for(dtype):
        pytest.skip("needs more shared memory than there is")
    kernels = moe_kernels()
    assert kernels is not None
    x = tokens(50).to(dtype)
    experts = layer.experts
    gate_up, down = experts.gate_up_proj[:16].to(dtype), experts.down_proj[:16].to(dtype)
    scores = torch.randn(50, 16, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    weights, ids = kernels.route(scores, 4, True)
    got = kernels.run_experts(x, gate_up, down, weights, ids, SIZES[size])
    want = run_experts(x.float(), gate_up.float(), down.float(), weights, ids.long())
    assert error(got, want) < (1e-5 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("count", [1, 16, 256])
def test_a_graph_follows_the_router_of_each_replay(layer: MoeMLP, count: int) -> None:
    static = tokens(count)
    layer.forward(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = layer.forward(static)
    for seed in (1, 2):
        static.copy_(tokens(count, seed))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, layer.forward(static))


def test_rows_do_not_depend_on_the_batch_beyond_rounding(layer: MoeMLP) -> None:
    x = tokens(300)
    assert error(layer.forward(x[:3].contiguous()), layer.forward(x)[:3].float()) < 6e-3
