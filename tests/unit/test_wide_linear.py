"""How products of some tokens are cut among blocks, and what a caller is told."""

import pytest
import torch

from minisgl.config import UsageError
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.wide_linear import (
    MAX_TOKENS,
    SHARED_BYTES,
    TOKENS_ENV,
    Normed,
    computes,
    likely_blocks,
    max_tokens,
    possible_blocks,
    shape_of_blocks,
    turning_blocks,
    turns,
    wide_add_reference,
    wide_linear,
    wide_linear_reference,
    width_of,
)

SHAPES = [(4096, 1024, 0), (1024, 2048, 1), (6144, 1024, 2), (72, 64, 0), (34816, 5120, 2),
          (5120, 17408, 1)]  # fmt: skip


@pytest.mark.parametrize(("rows", "k", "mode"), SHAPES)
@pytest.mark.parametrize("tokens", [16, 48, 176, 256])
def test_every_cut_covers_the_tokens_and_fits_a_block(
    rows: int, k: int, mode: int, tokens: int
) -> None:
    cuts = possible_blocks(rows, k, tokens, mode)
    for likely in likely_blocks(tokens, rows, k, mode):
        assert likely._replace(shared=SHARED_BYTES) in cuts
    assert shape_of_blocks(rows, k, tokens, mode) == likely_blocks(tokens, rows, k, mode)[0]
    for cut in cuts:
        width = width_of(tokens, cut)
        assert width * cut.tiles >= tokens > width * (cut.tiles - 1)
        assert width % 8 == 0
        assert cut.split <= 8
        assert cut.split * cut.ways <= k // 64
        assert 64 * cut.groups * width * 4 < SHARED_BYTES
        assert not (cut.groups == 3 and mode == 1)


def test_fewer_tokens_than_a_group_has_take_its_cut() -> None:
    cut = shape_of_blocks(1024, 2048, 176, 1)
    assert width_of(161, cut) == width_of(176, cut)


@pytest.mark.parametrize("tokens", range(48, 257, 16))
def test_tokens_that_round_up_to_one_number_turn_alike(tokens: int) -> None:
    """Else a captured step may need a kernel that nothing has compiled before."""
    shape = (4096, 1024, 128)
    for cut in turning_blocks(tokens, *shape):
        assert {turns(some, *shape, cut) for some in range(tokens - 15, tokens + 1)} == {True}


def test_what_the_kernel_cannot_compute_is_said() -> None:
    assert computes(1024, 2048)
    assert not computes(1024, 2080)
    assert not computes(1020, 2048)
    assert computes(1016, 2048)
    assert not computes(1016, 2048, 2)
    for tokens, dtype in ((MAX_TOKENS + 1, torch.bfloat16), (1, torch.float16)):
        with pytest.raises(KernelUnavailable, match=f"no kernel for {tokens} rows of 64"):
            wide_linear(torch.zeros(tokens, 64, dtype=dtype), torch.zeros(8, 64, dtype=dtype))


def test_the_most_tokens_are_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKENS_ENV, raising=False)
    assert max_tokens() == 256
    for text, most in (("0", 0), ("32", 32), ("1000", 256)):
        monkeypatch.setenv(TOKENS_ENV, text)
        assert max_tokens() == most
    for text in ("", "-1", "many", "٣"):
        monkeypatch.setenv(TOKENS_ENV, text)
        with pytest.raises(UsageError, match="MINISGL_WIDE_TOKENS must be a whole number"):
            max_tokens()


def test_what_a_product_leaves_behind_is_what_the_norm_would_give() -> None:
    torch.manual_seed(0)
    h, x = torch.randn(5, 64), torch.randn(5, 32)
    weight, norm, following = torch.randn(64, 32), torch.randn(64), torch.randn(16, 64)
    ready = wide_add_reference(h, x, weight, norm)
    assert isinstance(ready, Normed)
    torch.testing.assert_close(
        wide_linear_reference(ready, following, eps=1e-3),
        wide_linear_reference(h, following, norm=norm, eps=1e-3),
    )
