"""The page numbers of each request, as attention libraries want them, from its slots."""

from collections.abc import Callable

import torch

from minisgl_kernels.cuda_build import Family

BlockTable = Callable[..., None]

_family = Family("block_table", "block_table", dict, joined=True)


def block_table_reference(
    pages: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor,
    page_size: int, starts: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """The same as `block_table`, in torch operations for any device; may be captured.

    A flat `pages` needs one more entry behind the last page: its value is lost.
    """
    names = page_table[:, ::page_size].index_select(0, rows) // page_size
    if starts is None:
        pages[: len(names), : names.shape[1]] = names
        return
    column = torch.arange(names.shape[1], device=names.device)
    used = column < ((lens + page_size - 1) // page_size).unsqueeze(1)
    at = torch.where(used, starts[: len(names)].unsqueeze(1) + column, pages.shape[0] - 1)
    pages.index_put_((at.flatten(),), names.flatten())


def block_table(
    pages: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor,
    page_size: int, starts: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write the pages of requests in `rows` [B] with `lens` [B] tokens to `pages`.

    page_table [rows, columns] holds slots; page = slot // page_size. `pages` is [B or more, width],
    a row a request, or, with `starts` [B + 1], flat: request i's stand from starts[i] on. What is
    beyond a request's pages stays as it was. All are int32. Raises `KernelUnavailable`.
    """
    _family[()](pages, page_table, rows, lens, starts, page_size)


def block_table_function() -> BlockTable:
    """`block_table`, or its reference, with one warning, where kernels cannot be compiled."""
    return block_table if _family.usable() else block_table_reference
