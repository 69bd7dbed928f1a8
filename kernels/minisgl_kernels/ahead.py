"""What a kernel may bring into the L2 cache for the one behind it.

Between products of few tokens memory is idle: small kernels stand there, and the start and the end
of each. Weights never change, so their first bytes may come meanwhile. Kernels take the weights as
`ahead`; it is a hint, and changes no result.
"""

import functools
import os

from minisgl.config import UsageError

AHEAD_ENV = "MINISGL_PREFETCH_MIB"
"""MiB of weights that a kernel brings into the cache for the next one; 0: none."""
DEFAULT_MIB = 12
TOKENS = 64
"""Beyond it a step has no idle memory to speak of."""
TOKENS_BEFORE_ATTENTION = 16
"""Attention of more reads so much that it would drive the weights out of the cache again: they are
fetched at its end."""


@functools.cache
def ahead_bytes() -> int:
    """The value of MINISGL_PREFETCH_MIB in bytes, of 12 MiB by default."""
    text = os.environ.get(AHEAD_ENV, str(DEFAULT_MIB))
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{AHEAD_ENV} must be a whole number, 0 or more, not {text!r}")
    return int(text) << 20
