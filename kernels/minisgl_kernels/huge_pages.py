"""Memory of zeros in huge pages, where the system has them: a CPU then looks up fewer addresses."""

import contextlib
import mmap

import torch

HUGE_PAGE = 2 << 20


def huge_pages(count: int) -> torch.Tensor:
    """At least `count` bytes of zeros that begin with a huge page; untouched ones take no memory.

    Raises `OSError`, `OverflowError` or `ValueError` where there is too little.
    """
    area = mmap.mmap(-1, count + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE :]
