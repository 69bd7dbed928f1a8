"""What the scheduler asks of a prefix cache: an index from token prefixes to KV slots.

A slot is the place of one token's keys and values in the KV buffer. Slots come in whole pages of
`page_size`; every length here is a number of tokens and a multiple of it. The index stores no
keys or values itself.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


@dataclass(slots=True, frozen=True)
class Handle:
    """The end of a matched prefix. It keeps nothing alive unless it is locked."""

    cached_len: int
    """Tokens from the root to here."""
    node: Any = None
    """Of the cache that made the handle."""


@dataclass(slots=True, frozen=True)
class Inserted:
    """What became of the slots that were offered to `insert`."""

    handle: Handle
    """The end of what the index now holds of the offered tokens."""
    present: int
    """Tokens that it held before: the offered slots of these are not in it."""


class PrefixCache(ABC):
    """Prefix index of one rank. Two ranks that see the same calls make the same choices."""

    page_size: int

    @abstractmethod
    def match(self, ids: Ids) -> tuple[Handle, Ids]:
        """The longest held prefix of `ids` and its slots."""

    @abstractmethod
    def insert(self, ids: Ids, slots: Ids) -> Inserted:
        """Hold `ids` with these slots; parts that are held already keep the slots they have.

        Both are copied as far as they are kept. Lengths are multiples of the page size.
        """

    @abstractmethod
    def slots(self, handle: Handle) -> Ids:
        """The slots of all tokens from the root to the handle."""

    @abstractmethod
    def lock(self, handle: Handle) -> None:
        """Keep the path to this handle from being evicted. Counts; pairs with `unlock`."""

    @abstractmethod
    def unlock(self, handle: Handle) -> None:
        """Take one `lock` back."""

    @abstractmethod
    def evict(self, tokens: int) -> Ids:
        """Give up at least so many unlocked tokens, least recently used first; their slots.

        Raises `ValueError` if fewer are evictable.
        """

    @property
    @abstractmethod
    def evictable(self) -> int:
        """Tokens that `evict` could give up now."""

    @property
    @abstractmethod
    def protected(self) -> int:
        """Tokens under a lock."""

    @abstractmethod
    def held(self) -> Ids:
        """All slots in the index, each once. For the integrity check: walks the whole index."""

    @abstractmethod
    def check(self) -> None:
        """Recompute every count from the index itself; `RuntimeError` names what differs."""
