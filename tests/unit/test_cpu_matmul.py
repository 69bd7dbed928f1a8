"""Products with packed weights on a CPU, against torch."""

import random

import pytest
import torch

from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.cpu_matmul import (
    ISAS,
    THEN,
    best_isa,
    matmul,
    matmul_reference,
    pack,
)  # fmt: skip


def available() -> range:
    try:
        return range(best_isa() + 1)
    except KernelUnavailable:
        return range(0)


pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler")
every_isa = pytest.mark.parametrize("isa", available(), ids=lambda i: ISAS[i])
both_types = pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_product(
    actual: torch.Tensor, expected: torch.Tensor, inputs: int, then: str
) -> None:  # fmt: skip
    """Within what the order of sums may change, and one unit of bfloat16 for what is rounded."""
    few = 1e-5 * inputs**0.5 + 1e-6
    step = 2**-22 if then == "logits" else 2**-7
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=step, atol=few * (1 if then == "logits" else 2),
        equal_nan=True,
    )  # fmt: skip


@every_isa
@both_types
@pytest.mark.parametrize("then", THEN)
def test_products_of_random_shapes_are_those_of_torch(isa: int, int8: bool, then: str) -> None:
    draw = random.Random(THEN.index(then) * 2 + int8)
    for _ in range(12):
        m = draw.choice([1, 2, 3, 5, 16, draw.randint(1, 64)])
        n = 2 * draw.randint(1, 60) if then == "silu" else draw.randint(1, 120)
        k = draw.choice([1, 31, 32, 64, 65, draw.randint(1, 300)])
        seed, threads = draw.getrandbits(30), draw.randint(1, 3)
        x, weight = numbers(seed, m, k), numbers(seed + 1, n, k)
        bias = numbers(seed + 2, n) if draw.random() < 0.5 else None
        packed = pack(weight, bias=bias, int8=int8, gated=then == "silu")
        out = numbers(seed + 3, m, n) if then == "add" else None
        expected = matmul_reference(
            x, weight, bias=bias, int8=int8, then=then, out=None if out is None else out.clone()
        )
        actual = matmul(x, packed, then=then, out=out, isa=isa, threads=threads)
        assert_product(actual, expected, k, then)
