"""Products by cuBLASLt's fastest algorithm of a shape."""

import pytest
import torch

from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.tuned_linear import measuring, tuned_linear, tuned_linear_function

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(5)
    torch.zeros(8, 8, device=DEVICE, dtype=torch.bfloat16) @ torch.zeros(
        8, 8, device=DEVICE, dtype=torch.bfloat16
    )  # torch loads cuBLAS at its first product
    with measuring():
        yield


def made(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def distance(out, exact):
    assert torch.isfinite(out).all()
    return float((out.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "k"), [(4096, 1024), (1024, 3072), (1000, 128), (5120, 5120)])
@pytest.mark.parametrize("tokens", [1, 7, 32, 170, 256])
def test_it_is_the_product_and_adds_a_residual_in_place(tokens, rows, k, dtype):
    assert tuned_linear_function() is tuned_linear
    x, weight = made(tokens, k, dtype=dtype), made(rows, k, dtype=dtype, scale=k**-0.5)
    exact = x.double() @ weight.double().T
    assert distance(tuned_linear(x, weight), exact) < 4e-3
    residual = made(tokens, rows, dtype=dtype)
    exact += residual.double()
    assert tuned_linear(x, weight, residual=residual) is residual
    assert distance(residual, exact) < 4e-3


def test_a_graph_of_it_computes_new_inputs():
    x, weight = made(33, 512), made(96, 512, scale=0.05)
    tuned_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tuned_linear(x, weight)
    x.copy_(made(33, 512))
    graph.replay()
    assert distance(out, x.double() @ weight.double().T) < 4e-3


def test_a_shape_that_was_not_measured_runs_in_torch():
    x, weight, residual = made(5, 256), made(40, 256, scale=0.06), made(5, 40)
    exact = x.double() @ weight.double().T + residual.double()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tuned_linear(x, weight, residual=residual)
    graph.replay()
    assert distance(residual, exact) < 6e-3


def test_other_types_have_no_product():
    with pytest.raises(KernelUnavailable, match="float32"):
        tuned_linear(made(1, 8, dtype=torch.float32), made(8, 8, dtype=torch.float32))
