"""Multiprocessors' speeds, from the times that a kernel leaves."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minisgl_kernels import decode_shares
from minisgl_kernels.decode_shares import WARPS_PER_SM, multiprocessor_speeds
from minisgl_kernels.measured import Measured

PLACES = 8


class Kernel:
    """Stands for `DecodeAttention`: each place takes its share divided by its true speed."""

    places, max_batch = PLACES, 64

    def __init__(self, true: np.ndarray) -> None:
        self._true, self.shares, self.launches = true, np.ones(PLACES), 0

    def share_out(self, speeds: np.ndarray | None) -> None:
        self.shares = np.ones(PLACES) if speeds is None else speeds

    def plan(self, lens: torch.Tensor, rows: torch.Tensor) -> None:
        assert len(lens) == len(rows) == decode_shares.REQUESTS

    def attention(self, *arguments: torch.Tensor) -> None:
        self.launches += 1
        took = 1e5 * self.shares / self.shares.mean() / self._true
        times = arguments[-1].view(PLACES, WARPS_PER_SM, 2)
        times[:, :, 0] = 1000
        times[:, :, 1] = 1000 + torch.from_numpy(took).long()[:, None]


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Measured:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(decode_shares, "BYTES", 2**21)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1")
    )
    found = Measured(tmp_path / "measured.json")
    monkeypatch.setattr(decode_shares, "measured", lambda: found)
    return found


def speeds_of(kernel: Kernel) -> np.ndarray | None:
    return multiprocessor_speeds(
        kernel, num_qo_heads=4, num_kv_heads=2, head_dim=64,  # type: ignore[arg-type]
        dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip


def test_speeds_are_what_evens_out_the_ends_and_are_kept_for_the_next_start() -> None:
    true = np.array([1.0, 1.25, 1.0, 1.0, 1.25, 0.9, 1.0, 1.0])
    kernel = Kernel(true)
    found = speeds_of(kernel)
    assert found is not None
    np.testing.assert_allclose(found / found.mean(), true / true.mean(), rtol=2e-3)
    np.testing.assert_array_equal(kernel.shares, np.ones(PLACES))  # until they are asked for
    again = Kernel(true)
    np.testing.assert_array_equal(speeds_of(again), found)  # type: ignore[arg-type]
    assert again.launches == 0


def test_even_shares_stay_where_no_others_are_clearly_better() -> None:
    assert speeds_of(Kernel(np.array([1, 1, 1, 1, 1, 1, 1.003, 1]))) is None
    again = Kernel(np.ones(PLACES))
    assert speeds_of(again) is None
    assert again.launches == 0, "that even shares are as good is kept, too"


@pytest.mark.parametrize(
    "kept_value",
    ["odd", [1.0] * (PLACES - 1), 3, [None] * PLACES, [0.0] * PLACES, ["1"] * PLACES],
)
def test_what_was_kept_for_something_else_is_measured_again(
    kept: Measured, kept_value: object
) -> None:
    kernel = Kernel(np.ones(PLACES))
    speeds_of(kernel)
    (name,) = kept._values
    kept.put(name, kept_value)
    again = Kernel(np.ones(PLACES))
    assert speeds_of(again) is None
    assert again.launches > 0


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("no memory"), None])
def test_shares_are_even_where_nothing_can_be_measured(
    kept: Measured, error: Exception | None, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    kernel = Kernel(np.ones(PLACES))

    def attention(*arguments: torch.Tensor) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(kernel, "attention", attention)  # without one, all times are zero
    assert speeds_of(kernel) is None
    assert not kept._values, "it is measured at the next start"
    assert "not measured" in caplog.text


def test_small_batches_and_kernels_without_places_are_not_measured() -> None:
    for name, value in (("places", 0), ("max_batch", 63)):
        kernel = Kernel(np.ones(PLACES))
        setattr(kernel, name, value)
        assert speeds_of(kernel) is None
        assert kernel.launches == 0
