"""The inputs of a decode step from the tables on the device, in one launch."""

from collections.abc import Callable

import torch

from minisgl_kernels.cuda_build import Family

DecodeInputs = Callable[..., None]

_family = Family("decode_inputs", "decode_inputs", dict, joined=True)


def decode_inputs_reference(
    rows: torch.Tensor, lens: torch.Tensor, page_table: torch.Tensor, token_pool: torch.Tensor,
    input_ids: torch.Tensor, positions: torch.Tensor, out_loc: torch.Tensor,
) -> None:  # fmt: skip
    """The same as `decode_inputs`, in torch operations for any device."""
    at = (lens - 1).long()
    input_ids.copy_(token_pool.view(page_table.shape)[rows.long(), at])
    positions.copy_(at)
    out_loc.copy_(page_table[rows.long(), at])


def decode_inputs(
    rows: torch.Tensor, lens: torch.Tensor, page_table: torch.Tensor, token_pool: torch.Tensor,
    input_ids: torch.Tensor, positions: torch.Tensor, out_loc: torch.Tensor,
) -> None:  # fmt: skip
    """Fill input_ids, positions and out_loc [B] for requests in `rows` [B] with `lens` [B] tokens.

    position = lens - 1, with the id and the slot that token_pool and page_table [rows, W] int32
    hold there. `lens` is int32, `rows` of the type of the results, int32 or int64. Raises
    `KernelUnavailable`.
    """
    _family[()](input_ids, positions, out_loc, rows, lens, page_table, token_pool)


def decode_inputs_function() -> DecodeInputs | None:
    """`decode_inputs`, or None, with one warning, where CUDA kernels cannot be compiled."""
    return decode_inputs if _family.usable() else None
