"""Memory that is brought into the L2 cache before it is read."""

from collections.abc import Callable

import torch

from minisgl_kernels.cuda_build import Family

_family = Family("prefetch", "prefetch", dict)


def prefetch(tensor: torch.Tensor, most: int) -> None:
    """Ask for the first `most` bytes of a contiguous tensor, on the current stream. A hint.

    Raises `KernelUnavailable`.
    """
    _family[()](tensor, min(most, tensor.nbytes))


def prefetch_function() -> Callable[[torch.Tensor, int], None] | None:
    """`prefetch`, or None, with one warning, where CUDA kernels cannot be compiled."""
    return prefetch if _family.usable() else None
