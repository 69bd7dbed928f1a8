"""New keys and values to their slots of the cache, by one warp a token."""

from collections.abc import Callable

import torch

from minisgl_kernels.cuda_build import Family

StoreKV = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

_family = Family("kv_store", "store_kv", lambda row_bytes: {"ROW_BYTES": row_bytes}, joined=True)


def store_kv_reference(
    k: torch.Tensor, v: torch.Tensor, k_slots: torch.Tensor, v_slots: torch.Tensor,
    out_loc: torch.Tensor,
) -> None:  # fmt: skip
    """The same as `store_kv`, in torch operations for any device; no slot may be negative."""
    k_slots.index_copy_(0, out_loc.long(), k)
    v_slots.index_copy_(0, out_loc.long(), v)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_slots: torch.Tensor, v_slots: torch.Tensor,
    out_loc: torch.Tensor,
) -> None:  # fmt: skip
    """Write k and v [T, heads, dim] to slots out_loc [T] of k_slots and v_slots [n, heads, dim].

    Heads lie close together; tokens may be apart, as in views of one QKV product. A negative slot
    is left out. out_loc is int32 or int64. Raises `KernelUnavailable`.
    """
    _family[k.shape[1] * k.shape[2] * k.itemsize,](k, v, k_slots, v_slots, out_loc)


def store_kv_function() -> StoreKV | None:
    """`store_kv`, or None, with one warning, where CUDA kernels cannot be compiled."""
    return store_kv if _family.usable() else None
