"""The prefix cache that keeps nothing: every prompt is computed whole."""

import numpy as np

from minisgl.kvcache.base import Handle, Ids, Inserted, PrefixCache

_NONE = np.empty(0, np.int32)
_ROOT = Handle(0)


class NaiveCache(PrefixCache):
    """Matches nothing and holds nothing; slots stay with the request that computed them."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def match(self, ids: Ids) -> tuple[Handle, Ids]:
        return _ROOT, _NONE

    def insert(self, ids: Ids, slots: Ids) -> Inserted:
        return Inserted(_ROOT, 0)

    def slots(self, handle: Handle) -> Ids:
        return _NONE

    def lock(self, handle: Handle) -> None:
        pass

    def unlock(self, handle: Handle) -> None:
        pass

    def evict(self, tokens: int) -> Ids:
        if tokens > 0:
            raise ValueError(f"cannot evict {tokens} tokens: the naive cache holds none")
        return _NONE

    @property
    def evictable(self) -> int:
        return 0

    @property
    def protected(self) -> int:
        return 0

    def held(self) -> Ids:
        return _NONE

    def check(self) -> None:
        pass
