"""The life of a request: `PendingReq` while it waits, `Req` while it has a row of the tables.

Three lengths describe a `Req`, all in tokens of prompt and output together:

    0 ......... cached_len ............ device_len ............ max_device_len
      has keys     computed by the         room that is left for output
      and values   next forward

`Batch.complete_one` is the only place that moves them. They live in the arrays of `TableManager`,
by row, so that a step moves all of its requests at once; `Req` shows them by name.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from minisgl.messages import FinishReason, Route, SamplingParams

if TYPE_CHECKING:
    from minisgl.kvcache.base import Handle
    from minisgl.scheduler.table import TableManager

Ids = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class PendingReq:
    """A request that waits: for its first step, for its next chunk, or to be computed again."""

    uid: bytes
    attempt: int
    run: int
    """Counts what this rank accepted. A lower run is older."""
    route: Route | None
    """None: an offline request."""
    sampling: SamplingParams
    input_ids: Ids
    """Prompt, and the output so far of an earlier attempt or of a time before retraction."""
    prompt_len: int
    max_device_len: int
    sent_chars: int = 0
    received: int = 0
    """Output tokens that an earlier attempt delivered."""
    opened: bool = False
    """The opening of this run was sent."""
    cached_tokens: int | None = None
    """What the prefix cache gave at the first admission."""
    req: "Req | None" = None
    """While it has a row. A request that still waits in the queue has one between its chunks."""

    @property
    def order(self) -> tuple[int, int]:
        """Sorts the queue: begun chunks aside, by priority, then first come, first served."""
        return (-self.sampling.priority, self.run)


@dataclass(slots=True, eq=False)
class Req:
    """A request with a row of the page table and the token pool."""

    pending: PendingReq
    row: int
    table: "TableManager" = field(repr=False)
    handle: "Handle"
    """The locked prefix of the cache that its row refers to."""
    finish: FinishReason | None = None

    @property
    def uid(self) -> bytes:
        return self.pending.uid

    @property
    def run(self) -> int:
        return self.pending.run

    @property
    def cached_len(self) -> int:
        """Tokens whose keys and values are computed, or queued to be."""
        return int(self.table.cached_len[self.row])

    @property
    def device_len(self) -> int:
        """Tokens that the device knows, or will before the next forward."""
        return int(self.table.device_len[self.row])

    @property
    def max_device_len(self) -> int:
        """Prompt and all output that is allowed."""
        return self.pending.max_device_len

    @property
    def extend_len(self) -> int:
        """Tokens that the next forward computes."""
        return self.device_len - self.cached_len

    is_chunk = False

    @property
    def can_decode(self) -> bool:
        """Output is still allowed after what is computed or queued."""
        return self.device_len < self.max_device_len


class ChunkedReq(Req):
    """A `Req` whose prompt is computed in part. It never decodes, and its sample is dropped."""

    __slots__ = ()

    is_chunk = True

    @property
    def can_decode(self) -> bool:
        return False
