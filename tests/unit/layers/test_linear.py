"""Which way a product takes."""

import pytest
import torch

from minisgl.layers import linear
from minisgl.layers.linear import product
from minisgl_kernels.build import KernelUnavailable


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


def operands(tokens=3, rows=5, dtype=torch.bfloat16):
    x, weight = torch.ones(tokens, 4, dtype=dtype), torch.ones(rows, 4, dtype=dtype)
    return x.as_subclass(OnGpu), weight


@pytest.fixture
def measured(monkeypatch):
    """A kernel for measured products that notes its calls; every weight is large."""
    calls = []

    def kernel(x, weight, *, out):
        calls.append((len(x), out is not None))
        return "measured"

    monkeypatch.setattr(linear, "LARGE", 0)
    monkeypatch.setattr(linear, "tuned_linear_function", lambda: kernel)
    return calls


def test_on_a_cpu_it_is_torchs():
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    out = torch.empty(3, 5)
    assert torch.equal(product(x, weight), x @ weight.T)
    assert product(x, weight, out) is out
    assert torch.equal(out, x @ weight.T)


def test_a_large_one_of_few_tokens_on_a_gpu_is_the_measured_one(measured):
    x, weight = operands()
    assert product(x, weight) == "measured"
    assert product(x, weight, torch.empty(3, 5)) == "measured"
    assert measured == [(3, False), (3, True)]


def test_one_of_a_full_chunk_of_prompts_is_measured_too(measured, monkeypatch):
    monkeypatch.setattr(linear, "MANY", 20 * (linear.MEASURED + 1))
    assert product(*operands(linear.MEASURED + 1)) == "measured"
    monkeypatch.setattr(linear, "MANY", 20 * (linear.MEASURED + 1) + 1)
    assert product(*operands(linear.MEASURED + 1)).shape == (linear.MEASURED + 1, 5)


def test_others_are_torchs(measured, monkeypatch):
    assert product(*operands(linear.MEASURED + 1)).shape == (linear.MEASURED + 1, 5)
    assert product(*operands(dtype=torch.float32)).shape == (3, 5)
    strided = torch.empty(3, 10, dtype=torch.bfloat16)[:, :5]
    product(*operands(), strided)
    assert strided.tolist() == [[4.0] * 5] * 3
    monkeypatch.setattr(linear, "LARGE", 1 << 25)
    assert product(*operands()).shape == (3, 5)
    assert measured == []


def test_without_a_measured_one_it_is_torchs(monkeypatch):
    def refuses(x, weight, *, out):
        raise KernelUnavailable("no")

    monkeypatch.setattr(linear, "LARGE", 0)
    for found in (None, refuses):
        monkeypatch.setattr(linear, "tuned_linear_function", lambda found=found: found)
        assert product(*operands()).tolist() == [[4.0] * 5] * 3
