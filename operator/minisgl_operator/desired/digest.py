"""Short names for content."""

import hashlib
import json
from typing import Any

LENGTH = 10


def digest_of(value: Any) -> str:
    """Ten hex digits that stand for a value made of JSON's types."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]
