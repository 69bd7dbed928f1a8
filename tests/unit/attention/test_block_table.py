"""The references of the attention kernels, which hold on any device."""

import torch

from minisgl.attention.torch_backend import TorchBackend
from minisgl_kernels.block_table import block_table_reference
from minisgl_kernels.decode_attention import decode_attention_reference
from tests.unit.models.stepper import make_batch


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_pages_stand_in_rows_or_one_after_the_other() -> None:
    table = torch.stack([ints(8, 9, 10, 11, 4, 5, 6), ints(0, 1, 2, 3, 20, 21, 22)])
    rows, lens = ints(1, 0, 1), ints(5, 3, 4)
    square = torch.full((3, 2), -1, dtype=torch.int32)
    block_table_reference(square, table, rows, lens, 4)
    assert square[0].tolist() == [0, 5]
    assert square[1:, 0].tolist() == [2, 0]
    flat = torch.full((7,), -1, dtype=torch.int32)
    block_table_reference(flat, table, rows, lens, 4, starts=ints(0, 2, 3, 4))
    assert flat[:4].tolist() == [0, 5, 2, 0]
    assert flat[4:6].tolist() == [-1, -1], "what is beyond the last page is left alone"


def test_decode_attention_is_what_the_torch_backend_computes() -> None:
    random = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 40, 2, 8, generator=random)
    table = torch.randperm(40, generator=random).view(2, 20).int()
    batch = make_batch([(1, [0], 16), (0, [0], 4)], table)
    q = torch.randn(2, 6, 8, generator=random)
    backend = TorchBackend()
    backend.prepare_metadata(batch)

    class Pool:
        def k(self, layer: int) -> torch.Tensor:
            return k

        def v(self, layer: int) -> torch.Tensor:
            return v

    want = backend.forward(q, 0, Pool(), batch)  # type: ignore[arg-type]
    got = decode_attention_reference(q, k, v, table, [17, 5], [1, 0])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
