"""The radix tree: prefixes of earlier requests, shared by those that come later.

Each node holds a run of tokens and the KV slots of these tokens; a path from the root spells a
prefix. Two children of a node differ in their first page. A lookup that ends inside a node splits
it there, so that a handle always names a whole path. The idea is SGLang's RadixAttention (Zheng
et al., 2023).

Eviction takes leaves that nobody locks, least recently used first, in O(log n) each: a heap holds
every such leaf once. A leaf that was used again since it was pushed is pushed back with its new
time when it is met. Times are a counter and not a clock, so all ranks evict alike. A leaf gives up
only as much of its end as is needed.
"""

import heapq
import itertools
from collections.abc import Iterator

import numpy as np

from minisgl.kvcache.base import Handle, Ids, Inserted, PrefixCache
from minisgl_kernels.radix import compare_function

_NONE = np.empty(0, np.int32)


class _Node:
    __slots__ = ("children", "in_heap", "key", "locks", "parent", "serial", "slots", "used")

    def __init__(self, parent: "_Node | None", key: Ids, slots: Ids, serial: int, used: int):
        self.parent = parent
        self.key = key
        self.slots = slots
        self.children: dict[bytes, _Node] = {}
        self.locks = 0  # requests whose path goes through or ends here
        self.used = used
        self.serial = serial  # breaks ties in the heap, alike on all ranks
        self.in_heap = False


class RadixCache(PrefixCache):
    """Keeps what was computed until its slots are needed for something else."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._common_prefix_len = compare_function()
        self._serial = itertools.count()
        self._clock = 0
        self._root = _Node(None, _NONE, _NONE, next(self._serial), 0)
        self._heap: list[tuple[int, int, _Node]] = []
        self._evictable = 0
        self._protected = 0

    def match(self, ids: Ids) -> tuple[Handle, Ids]:
        node, length = self._walk(ids)
        handle = Handle(length, node)
        return handle, self.slots(handle)

    def insert(self, ids: Ids, slots: Ids) -> Inserted:
        if len(ids) != len(slots) or len(ids) % self.page_size:
            raise ValueError(
                f"{len(ids)} ids and {len(slots)} slots: both must be the same multiple of the "
                f"page size {self.page_size}"
            )
        node, present = self._walk(ids)
        if present < len(ids):
            # Copies: the caller's arrays are views of tables that change.
            key, value = ids[present:].copy(), slots[present:].copy()
            leaf = _Node(node, key, value, next(self._serial), self._clock)
            node.children[self._edge(key)] = leaf
            self._evictable += len(key)
            self._offer(leaf)
            node = leaf
        return Inserted(Handle(len(ids), node), present)

    def slots(self, handle: Handle) -> Ids:
        parts = []
        node: _Node | None = handle.node
        while node is not None and node.parent is not None:
            parts.append(node.slots)
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else _NONE

    def lock(self, handle: Handle) -> None:
        for node in self._path(handle):
            if node.locks == 0:
                self._evictable -= len(node.key)
                self._protected += len(node.key)
            node.locks += 1

    def unlock(self, handle: Handle) -> None:
        for node in self._path(handle):
            node.locks -= 1
            if node.locks == 0:
                self._evictable += len(node.key)
                self._protected -= len(node.key)
                self._offer(node)

    def evict(self, tokens: int) -> Ids:
        if tokens > self._evictable:
            raise ValueError(f"cannot evict {tokens} tokens: {self._evictable} are evictable")
        freed: list[Ids] = []
        while tokens > 0:
            used, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if node.locks or node.children or node.parent is None:
                continue  # comes back when it is unlocked, or when its last child goes
            if node.used != used:
                self._offer(node)
                continue
            # From the end, in whole pages: the start of a prefix is what others may share.
            pages = -(-tokens // self.page_size)
            keep = max(0, len(node.key) - pages * self.page_size)
            freed.append(node.slots[keep:])
            self._evictable -= len(node.key) - keep
            tokens -= len(node.key) - keep
            if keep:
                node.key, node.slots = _head(node.key, keep), _head(node.slots, keep)
                self._offer(node)
            else:
                parent = node.parent
                del parent.children[self._edge(node.key)]
                node.parent = None
                self._offer(parent)
        return np.concatenate(freed) if freed else _NONE

    @property
    def evictable(self) -> int:
        return self._evictable

    @property
    def protected(self) -> int:
        return self._protected

    def held(self) -> Ids:
        return np.concatenate([_NONE, *(node.slots for node in self._nodes())])

    def check(self) -> None:
        evictable = protected = 0
        offered = {id(node) for _, _, node in self._heap}
        for node in self._nodes():
            size = len(node.key)
            parent = node.parent
            if parent is None or parent.children.get(self._edge(node.key)) is not node:
                raise RuntimeError("a node of the radix tree is not its parent's child")
            if size == 0 or size % self.page_size or size != len(node.slots):
                raise RuntimeError(f"a node holds {size} tokens and {len(node.slots)} slots")
            if node.locks < 0 or node.locks < sum(c.locks for c in node.children.values()):
                raise RuntimeError(f"a node has {node.locks} locks, fewer than its children")
            if node.locks == 0 and not node.children and id(node) not in offered:
                raise RuntimeError("an evictable leaf cannot be found by eviction")
            if node.locks:
                protected += size
            else:
                evictable += size
        if (evictable, protected) != (self._evictable, self._protected):
            raise RuntimeError(
                f"the tree holds {evictable} evictable and {protected} protected tokens, the "
                f"counters say {self._evictable} and {self._protected}"
            )

    def _edge(self, key: Ids) -> bytes:
        return key[: self.page_size].tobytes()

    def _walk(self, ids: Ids) -> tuple[_Node, int]:
        """Follow `ids` down as far as whole pages match; marks the path as used now."""
        self._clock += 1
        node, done, size = self._root, 0, self.page_size
        while done + size <= len(ids):
            child = node.children.get(ids[done : done + size].tobytes())
            if child is None:
                break
            same = self._common_prefix_len(child.key, ids[done:])
            same -= same % size
            if same < len(child.key):
                child = self._split(child, same)
            child.used = self._clock
            node = child
            done += same
        return node, done

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut `node` before its token `at`; returns the new upper part.

        The lower part stays the same object: handles that end there, and locks, stay right.
        """
        parent = node.parent
        if parent is None:
            raise RuntimeError("the root of the radix tree cannot be split")
        key, slots = _head(node.key, at), _head(node.slots, at)
        upper = _Node(parent, key, slots, next(self._serial), node.used)
        upper.locks = node.locks
        parent.children[self._edge(upper.key)] = upper
        node.key, node.slots, node.parent = node.key[at:], node.slots[at:], upper
        upper.children[self._edge(node.key)] = node
        return upper

    def _offer(self, node: _Node) -> None:
        """Let eviction find this node, if it is a leaf that nobody locks."""
        if node.in_heap or node.locks or node.children or node.parent is None:
            return
        node.in_heap = True
        heapq.heappush(self._heap, (node.used, node.serial, node))

    def _path(self, handle: Handle) -> Iterator[_Node]:
        node: _Node | None = handle.node
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


def _head(array: Ids, size: int) -> Ids:
    """The first `size` entries: a copy where a view would keep more than twice their memory.

    The short prefix that many long prompts share outlives each of them by days.
    """
    owner = array.base if isinstance(array.base, np.ndarray) else array
    return array[:size].copy() if 2 * size < owner.size else array[:size]
