"""Products with packed weights on a CPU, against torch, with each instruction set that it has."""

import random
from pathlib import Path

import pytest
import torch

from minisgl.config import UsageError
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.cpu_matmul import (
    AMX,
    ISA_ENV,
    ISAS,
    THEN,
    PackedMemory,
    PackedWeight,
    best_isa,
    chosen_isa,
    dequantised,
    matmul,
    matmul_reference,
    pack,
    unpack_rows,
)  # fmt: skip
from minisgl_kernels.huge_pages import HUGE_PAGE
from tests.unit.sanitizer import needs_compiler, run_sanitized

EMULATED = "amx-emulated"


def paths() -> list[str]:
    try:
        return [*ISAS[: best_isa() + 1], EMULATED]
    except KernelUnavailable:
        return []


pytestmark = needs_compiler
every_path = pytest.mark.parametrize("path", paths())
both_types = pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])


def product(
    path: str, x: torch.Tensor, weight: PackedWeight, then: str = "logits",
    out: torch.Tensor | None = None, threads: int = 1,
) -> torch.Tensor:  # fmt: skip
    isa = AMX if path == EMULATED else ISAS.index(path)
    return matmul(
        x, weight, then=then, out=out, isa=isa, threads=threads, emulate_tiles=path == EMULATED
    )


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_product(actual: torch.Tensor, expected: torch.Tensor, inputs: int) -> None:
    """Equal but for the order of float32 sums, and for the last bit of bfloat16."""
    step = 1e-6 if actual.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=step, atol=3e-6 * inputs**0.5, equal_nan=True
    )


@every_path
@both_types
@pytest.mark.parametrize("then", THEN)
def test_products_of_random_shapes_are_those_of_torch(path: str, int8: bool, then: str) -> None:
    draw = random.Random(THEN.index(then) * 2 + int8)
    for _ in range(12):
        m = draw.choice([1, 2, 12, 13, 16, 17, 32, 33, draw.randint(1, 64)])
        n = 2 * draw.randint(1, 60) if then == "silu" else draw.randint(1, 120)
        k = draw.choice([1, 31, 32, 64, 65, draw.randint(1, 300)])
        seed, threads = draw.getrandbits(30), draw.randint(1, 3)
        x, weight = numbers(seed, m, k), numbers(seed + 1, n, k)
        bias = numbers(seed + 2, n) if draw.random() < 0.5 else None
        out = numbers(seed + 3, m, n) if then == "add" else None
        expected = matmul_reference(
            x, weight, bias=bias, int8=int8, then=then, out=None if out is None else out.clone()
        )
        packed = pack(weight, bias=bias, int8=int8, gated=then == "silu")
        assert_product(product(path, x, packed, then, out, threads), expected, k)


@every_path
@both_types
def test_a_long_prompt_is_computed_in_several_parts(path: str, int8: bool) -> None:
    x, weight = numbers(1, 300, 72), numbers(2, 50, 72)
    expected = matmul_reference(x, weight, int8=int8, then="logits")
    assert_product(product(path, x, pack(weight, int8=int8)), expected, 72)


@every_path
@both_types
def test_a_row_has_the_same_bits_alone_and_among_others_and_by_any_number_of_threads(
    path: str, int8: bool
) -> None:
    x, packed = numbers(3, 67, 130), pack(numbers(4, 100, 130), int8=int8)
    whole = product(path, x, packed)
    for begin, end in ((0, 1), (5, 7), (20, 33), (30, 61)):
        part = product(path, x[begin:end], packed, threads=3)
        assert torch.equal(part, whole[begin:end])


@every_path
@both_types
@pytest.mark.parametrize("then", THEN)
def test_what_lies_around_the_operands_is_neither_read_nor_written(
    path: str, int8: bool, then: str
) -> None:
    for m, n, k, offset in ((1, 24, 33, 1), (7, 40, 65, 3), (18, 18, 31, 5), (33, 70, 96, 1)):
        around = torch.full((m * (k + 7) + offset,), torch.nan, dtype=torch.bfloat16)
        x = around[offset:].view(m, k + 7)[:, :k]
        x.copy_(numbers(8, m, k))
        outputs = n // 2 if then == "silu" else n
        dtype = torch.float32 if then == "logits" else torch.bfloat16
        canvas = torch.full((m * (outputs + 5) + offset,), 7.0, dtype=dtype)
        out = canvas[offset:].view(m, outputs + 5)[:, :outputs]
        weight = numbers(9, n, k)
        expected = matmul_reference(x, weight, int8=int8, then=then, out=out.clone())
        product(path, x, pack(weight, int8=int8, gated=then == "silu"), then, out, threads=2)
        assert_product(out, expected, k)
        assert bool((canvas[offset:].view(m, -1)[:, outputs:] == 7).all())
        assert bool((canvas[:offset] == 7).all())


@every_path
def test_infinities_and_nans_stay_in_their_row_and_output(path: str) -> None:
    x, weight = numbers(10, 6, 64), numbers(11, 40, 64)
    x[1, 5], x[2, 63], x[4, 0] = torch.inf, torch.nan, -torch.inf
    weight[7, 3], weight[20, 9] = torch.nan, torch.inf
    for then in ("store", "logits"):
        expected = matmul_reference(x, weight, then=then)
        assert_product(product(path, x, pack(weight), then), expected, 64)


@every_path
def test_silu_of_infinities_and_large_numbers_is_that_of_torch(path: str) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, 20, -20, 88, -88, 105, -105, 1e30, -1e30, torch.inf])
    weight = torch.cat([gate[:, None], torch.ones(len(gate), 1)]).bfloat16()
    x = torch.ones(1, 1).bfloat16()
    expected = matmul_reference(x, weight, then="silu")
    assert_product(product(path, x, pack(weight, gated=True), "silu"), expected, 1)


@every_path
def test_an_activation_that_is_no_number_makes_its_row_of_int8_products_nan(path: str) -> None:
    x, weight = numbers(12, 5, 64), numbers(13, 40, 64)
    clean = product(path, x, packed := pack(weight, int8=True))
    x[1, 5], x[3, 63] = torch.inf, torch.nan
    spoilt = product(path, x, packed)
    assert bool(spoilt[[1, 3]].isnan().all())
    assert torch.equal(spoilt[[0, 2, 4]], clean[[0, 2, 4]])


@every_path
def test_an_int8_weight_that_is_no_number_makes_its_output_nan(path: str) -> None:
    x, weight = numbers(14, 3, 40), numbers(15, 20, 40)
    weight[4, 7], weight[9, 0] = torch.nan, -torch.inf
    result = product(path, x, pack(weight, int8=True))
    assert result.isnan().any(dim=0).nonzero().flatten().tolist() == [4, 9]


@every_path
@both_types
def test_rows_of_zeros_and_of_the_smallest_numbers_give_zero(path: str, int8: bool) -> None:
    weight = numbers(16, 33, 70)
    weight[5] = 0
    weight[6] = 1e-38
    x = numbers(17, 4, 70)
    x[1], x[2] = 0, 1e-40  # the last is subnormal
    result = product(path, x, pack(weight, int8=int8))
    expected = matmul_reference(x, weight, int8=int8, then="logits")
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert bool((result[1] == 0).all())
    assert bool((result[2].abs() < 1e-36).all())


@both_types
@pytest.mark.parametrize("gated", [False, True])
def test_rows_of_a_packed_table_can_be_read_back(int8: bool, gated: bool) -> None:
    weight = numbers(18, 38, 45)
    rows = torch.tensor([37, 0, 18, 19, 20, 0])
    expected = dequantised(weight).bfloat16() if int8 else weight
    read = unpack_rows(pack(weight, int8=int8, gated=gated), rows)
    assert torch.equal(read, expected[rows])


def test_int8_weights_are_off_by_half_a_step_at_most() -> None:
    weight = numbers(19, 50, 200)
    step = weight.float().abs().amax(dim=1, keepdim=True) / 127
    assert bool(((dequantised(weight) - weight.float()).abs() <= step * 0.50001).all())


def test_packed_weights_of_a_model_lie_together_from_the_start_of_a_huge_page() -> None:
    memory = PackedMemory()
    first, second = (pack(numbers(20, 48, 64), memory=memory) for _ in range(2))
    assert first.data.data_ptr() % HUGE_PAGE == 0
    assert second.data.data_ptr() == first.data.data_ptr() + 48 * 64 * 2
    large = memory.take(100 << 20)
    large[-1] = 1
    assert large.data_ptr() % 64 == 0


@pytest.mark.parametrize(
    ("weight", "options", "why"),
    [
        (torch.ones(4, 4), {}, "bfloat16 matrix"),
        (torch.ones(4, dtype=torch.bfloat16), {}, "bfloat16 matrix"),
        (torch.ones(3, 4, dtype=torch.bfloat16), {"gated": True}, "3 is odd"),
    ],
)
def test_a_weight_that_cannot_be_packed_is_refused(
    weight: torch.Tensor, options: dict[str, bool], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        pack(weight, **options)  # type: ignore[arg-type]


def test_operands_that_do_not_fit_are_refused() -> None:
    packed = pack(numbers(21, 8, 16))
    with pytest.raises(ValueError, match=r"x must be bfloat16 \[M, 16\]"):
        matmul(numbers(22, 3, 15), packed)
    with pytest.raises(ValueError, match="a plain weight cannot silu"):
        matmul(numbers(22, 3, 16), packed, then="silu")
    with pytest.raises(ValueError, match="out must be"):
        matmul(numbers(22, 3, 16), packed, out=numbers(23, 3, 9))


def test_the_environment_chooses_a_lower_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_ENV, raising=False)
    assert chosen_isa() == best_isa()
    monkeypatch.setenv(ISA_ENV, "portable")
    assert chosen_isa() == 0
    monkeypatch.setenv(ISA_ENV, "sse9")
    with pytest.raises(UsageError, match="must be portable, avx2, avx512 or amx, not 'sse9'"):
        chosen_isa()


@pytest.mark.skipif(not paths() or best_isa() == AMX, reason="this CPU has them all")
def test_an_instruction_set_that_the_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_ENV, "amx")
    with pytest.raises(UsageError, match=f"this CPU has {ISAS[best_isa()]} at most"):
        chosen_isa()


PROGRAM = r"""
#define MINISGL_EMULATE_TILES
#include "cpu_matmul.h"

#include <stdio.h>

#include <vector>

using namespace minisgl::cpu;

// Arrays of exactly the size that is used, so that the sanitizer sees any step beyond them.
static int check(Isa isa, Stored stored, bool gated, Then then, int64_t m, int64_t n, int64_t k) {
  std::vector<bf16> weight(n * k), x(m * k + 1);
  for (int64_t i = 0; i < n * k; ++i) weight[i] = to_bf16((i * 37 % 101 - 50) / 50.0f);
  for (int64_t i = 0; i < m * k + 1; ++i) x[i] = to_bf16((i * 53 % 97 - 48) / 48.0f);
  const int64_t rows = blocks_of(n, gated) * kBlock;
  std::vector<float> scale(rows), bias(rows, 0.5f);
  Scratch memory;
  char* const data = memory.get(rows / kBlock * block_bytes(k, stored));
  if (stored == Stored::bf16) {
    pack_bf16(weight.data(), n, k, gated, reinterpret_cast<bf16*>(data));
  } else {
    pack_int8(weight.data(), n, k, gated, reinterpret_cast<uint8_t*>(data), scale.data());
  }
  const Packed packed{data, scale.data(), bias.data(), n, k, stored, gated};
  std::vector<bf16> row(k);
  for (int64_t i = 0; i < n; ++i) unpack_row(packed, i, row.data());
  const int64_t outputs = gated ? n / 2 : n, element = then == Then::logits ? 4 : 2;
  std::vector<char> out(m * outputs * element), expected(m * outputs * element);
  for (int thread = 0; thread < 2; ++thread) {
    Lane lane, plain;
    lane.thread = plain.thread = thread;
    lane.threads = plain.threads = 2;
    lane.isa = isa;
    matmul(packed, x.data() + 1, k, m, {then, out.data(), outputs}, lane, &packed);
    matmul(packed, x.data() + 1, k, m, {then, expected.data(), outputs}, plain);
  }
  for (int64_t i = 0; i < m * outputs; ++i) {
    float a, b;
    if (then == Then::logits) {
      memcpy(&a, &out[i * 4], 4), memcpy(&b, &expected[i * 4], 4);
    } else {
      bf16 c, d;
      memcpy(&c, &out[i * 2], 2), memcpy(&d, &expected[i * 2], 2);
      a = to_float(c), b = to_float(d);
    }
    if (fabsf(a - b) > 0.01f * fabsf(b) + 1e-3f) {
      fprintf(stderr, "isa %d stored %d then %d m %ld n %ld k %ld: %g is not %g\n", int(isa),
              int(stored), int(then), long(m), long(n), long(k), a, b);
      return 1;
    }
  }
  return 0;
}

int main() {
  int failed = 0;
  for (int isa = 0; isa <= 3; ++isa) {
    if (isa < 3 && isa > int(best_isa())) continue;  // 3: with emulated tiles
    for (int stored = 0; stored < 2; ++stored) {
      for (int64_t m : {1, 5, 13, 33, 250}) {
        for (int64_t k : {1, 64, 95}) {
          const auto of = static_cast<Stored>(stored);
          failed += check(Isa(isa), of, false, Then::store, m, 39, k);
          failed += check(Isa(isa), of, false, Then::add, m, 16, k);
          failed += check(Isa(isa), of, true, Then::silu, m, 70, k);
          failed += check(Isa(isa), of, false, Then::logits, m, 101, k);
        }
      }
    }
  }
  return failed != 0;
}
"""


def test_products_stay_within_their_memory(tmp_path: Path) -> None:
    run_sanitized(PROGRAM, tmp_path)
