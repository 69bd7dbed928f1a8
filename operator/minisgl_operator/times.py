"""Times as Kubernetes writes them: RFC 3339 in UTC, whole seconds."""

from datetime import UTC, datetime


def rfc3339(wall: float) -> str:
    """Unix time as `2026-01-31T10:20:30Z`; what is below a second is cut off."""
    return datetime.fromtimestamp(int(wall), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: object) -> float | None:
    """Unix time of an RFC 3339 text; None for anything else, such as an edited annotation."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None
