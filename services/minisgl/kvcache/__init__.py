"""Paged storage of keys and values, and the prefix caches that index it."""

from minisgl.kvcache.base import Handle, Inserted, PrefixCache
from minisgl.kvcache.naive import NaiveCache
from minisgl.kvcache.radix import RadixCache

__all__ = ["PREFIX_CACHES", "Handle", "Inserted", "NaiveCache", "PrefixCache", "RadixCache"]

PREFIX_CACHES: dict[str, type[NaiveCache] | type[RadixCache]] = {
    "radix": RadixCache,
    "naive": NaiveCache,
}
"""By the value of `--cache-type`."""
