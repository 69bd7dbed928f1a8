"""Which part of each dimension a tensor-parallel rank holds. Pure arithmetic."""

from dataclasses import dataclass

from minisgl.config import UsageError


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of one dimension: `count` entries from `start`, zeros up to `local`."""

    start: int
    count: int
    local: int

    @property
    def take(self) -> slice:
        """Of the whole dimension."""
        return slice(self.start, self.start + self.count)

    def scaled(self, width: int) -> "Shard":
        """The same part where each entry is `width` wide, as heads are."""
        return Shard(self.start * width, self.count * width, self.local * width)


@dataclass(frozen=True, slots=True)
class HeadShard:
    """A rank's attention heads. Local query heads share local KV heads evenly."""

    q: Shard
    kv: Shard


def padded_shard(size: int, rank: int, ranks: int) -> Shard:
    """Equal parts of a dimension that is padded at its end, as the vocabulary is."""
    local = -(-size // ranks)
    start = min(rank * local, size)
    return Shard(start, min(local, size - start), local)


def even_shard(name: str, size: int, rank: int, ranks: int) -> Shard:
    """Equal parts without padding. `UsageError` names the config field that does not divide."""
    if size % ranks:
        raise UsageError(
            f"{name} {size} does not divide among {ranks} ranks; choose a "
            "--tensor-parallel-size that divides it"
        )
    local = size // ranks
    return Shard(rank * local, local, local)


def head_shard(heads: int, kv_heads: int, rank: int, ranks: int) -> HeadShard:
    """The heads of one rank, where `heads` is a multiple of `kv_heads`.

    KV heads fewer than the ranks and dividing them are replicated: the ranks of one KV head share
    its query heads, of which the last rank may lack some. Else whole groups (a KV head and its
    query heads) are dealt out in order, and the last ranks may lack some or all.

        query, KV heads   ranks   local query, KV heads
        32, 8             4       8, 2
        9, 3              2       6, 2   (12, 4 in all)
        14, 2             4       4, 1   (each KV head on two ranks)
    """
    group = heads // kv_heads
    if kv_heads < ranks and ranks % kv_heads == 0:
        replicas = ranks // kv_heads
        kv_head, part = divmod(rank, replicas)
        inside = padded_shard(group, part, replicas)
        return HeadShard(
            q=Shard(kv_head * group + inside.start, inside.count, inside.local),
            kv=Shard(kv_head, 1, 1),
        )
    kv = padded_shard(kv_heads, rank, ranks)
    return HeadShard(q=kv.scaled(group), kv=kv)
