"""A row-parallel product goes where the ranks add it up fastest."""

import pytest
import torch

from minisgl.distributed import SingleRank
from minisgl.layers.linear import RowParallelLinear
from minisgl.layers.sharding import even_shard


class WithBuffer(SingleRank):
    """A group that has memory of its own for sums of up to `rows` rows."""

    def __init__(self, rows: int) -> None:
        self.buffer = torch.full((rows, 6), float("nan"))
        self.summed: list[int] = []

    def sum_buffer(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor | None:
        return self.buffer[:rows] if rows <= len(self.buffer) else None

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.summed.append(tensor.data_ptr())


@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_are_computed_into_the_memory_of_the_group(bias: bool) -> None:
    comm = WithBuffer(rows=3)
    layer = RowParallelLinear(4, even_shard("width", 4, 0, 1), 6, bias, torch.float32, comm)
    random = torch.Generator().manual_seed(0)
    layer.load_state_dict(
        {
            name: torch.randn(meta.shape, generator=random)
            for name, meta in layer.state_dict().items()
        }
    )
    for rows in (2, 5):
        x = torch.randn(rows, 4, generator=random)
        out = layer.forward(x)
        torch.testing.assert_close(out, torch.nn.functional.linear(x, layer.weight, layer.bias))
        assert comm.summed.pop() == out.data_ptr()
        assert (out.data_ptr() == comm.buffer.data_ptr()) == (rows == 2)
