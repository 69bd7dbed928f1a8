"""Where keys and values are stored."""

import contextlib
import math

import numpy as np
import torch

from minisgl.config import StartError
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.huge_pages import HUGE_PAGE, huge_pages
from minisgl_kernels.kv_store import store_kv_function


def page_bytes(
    *, layers: int, kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes of one page over all layers, keys and values, with this rank's KV heads."""
    return 2 * layers * kv_heads * page_size * head_dim * dtype.itemsize


class KVPool:
    """Keys and values of all layers in pages of `page_size` tokens.

    The buffer is [2, layers, pages + 1, page_size, kv_heads, head_dim]. A slot is a token's place
    in it, counted over all pages: page * page_size + offset. The last page is the dummy page, for
    rows that only fill a batch up. It starts with zeros, so that no slot ever holds a NaN.
    """

    def __init__(
        self, *, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self.pages = pages
        self.page_size = page_size
        self.dummy_page = pages
        shape = (2, layers, pages + 1, page_size, kv_heads, head_dim)
        self.buffer = zeros(shape, dtype, device, "KV cache; use a lower --num-pages")
        slots = self.buffer.view(2, layers, (pages + 1) * page_size, kv_heads, head_dim)
        # views are made once: a store and two reads a layer would else make them in each step
        self._k, self._v = list(slots[0].unbind()), list(slots[1].unbind())
        self._k_pages, self._v_pages = list(self.buffer[0].unbind()), list(self.buffer[1].unbind())

    @property
    def nbytes(self) -> int:
        """Size of the buffer, the dummy page included."""
        return self.buffer.numel() * self.buffer.element_size()

    def k(self, layer: int) -> torch.Tensor:
        """Keys of one layer by slot: [slots, kv_heads, head_dim]."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """Values of one layer by slot: [slots, kv_heads, head_dim]."""
        return self._v[layer]

    def k_pages(self, layer: int) -> torch.Tensor:
        """Keys of one layer by page: [pages + 1, page_size, kv_heads, head_dim]."""
        return self._k_pages[layer]

    def v_pages(self, layer: int) -> torch.Tensor:
        """Values of one layer by page: [pages + 1, page_size, kv_heads, head_dim]."""
        return self._v_pages[layer]

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor) -> None:
        """Write k and v [T, kv_heads, head_dim] to the slots out_loc [T] of one layer."""
        if k.is_cuda and (kernel := store_kv_function()) is not None:
            with contextlib.suppress(KernelUnavailable):  # of this width
                kernel(k, v, self._k[layer], self._v[layer], out_loc)
                return
        out_loc = out_loc.long()
        self._k[layer].index_copy_(0, out_loc, k)
        self._v[layer].index_copy_(0, out_loc, v)


def zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, purpose: str
) -> torch.Tensor:
    """Zeros; on a CPU without touching them, so that pages take memory when they are first used.

    There they are in huge pages, where that pays: attention reads all over the cache. `torch.zeros`
    writes every byte there: many gigabytes at each start, for a cache that a laptop
    may never fill. `StartError` says for what `purpose` there is too little memory.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        if size >= 2 * HUGE_PAGE:
            return huge_pages(size)[:size].view(dtype).view(shape)
        untouched = np.zeros(size, np.uint8)
    except (MemoryError, OSError, OverflowError, RuntimeError, ValueError):
        raise StartError(
            f"not enough memory on {device} for the {size / 2**30:.1f} GiB of the {purpose}"
        ) from None
    return torch.from_numpy(untouched).view(dtype).view(shape)
