"""Short names for content."""

import hashlib
from typing import Any

import msgspec

LENGTH = 10


def digest_of(value: Any) -> str:
    """Ten hex digits that stand for a value made of JSON's types."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:LENGTH]
