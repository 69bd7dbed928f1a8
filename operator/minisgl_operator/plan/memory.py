"""What the operator must not forget of a group, as annotations of its StatefulSet.

It goes from one life of the group to the next, and outlives the operator, the status and Redis.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from minisgl_operator import names
from minisgl_operator.times import rfc3339, seconds

MESSAGE_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended a group, or an incarnation of it; as in status.groups[].lastFailure."""

    time: float
    """Unix time in whole seconds."""
    reason: str
    message: str
    rank: int | None = None
    pod: str = ""
    node: str = ""
    exit_code: int | None = None

    def as_status(self) -> dict[str, Any]:
        found = {
            "time": rfc3339(self.time),
            "rank": self.rank,
            "pod": self.pod,
            "node": self.node,
            "exitCode": self.exit_code,
            "reason": self.reason,
            "message": self.message,
        }
        return {key: value for key, value in found.items() if value not in (None, "")}

    @classmethod
    def of(cls, status: object) -> "Failure | None":
        """From what `as_status` gave; None for anything else."""
        if not isinstance(status, dict):
            return None
        time = seconds(status.get("time"))
        if time is None:
            return None
        rank, code = status.get("rank"), status.get("exitCode")
        return cls(
            time=time,
            reason=str(status.get("reason", ""))[:64],
            message=str(status.get("message", ""))[:MESSAGE_CHARACTERS],
            rank=rank if isinstance(rank, int) else None,
            pod=str(status.get("pod", "")),
            node=str(status.get("node", "")),
            exit_code=code if isinstance(code, int) else None,
        )

    def sentence(self) -> str:
        """For an Event or a condition."""
        where = f"rank {self.rank}" if self.rank is not None else ""
        if self.pod:
            where = f"{where} in pod {self.pod}".strip()
        if self.node:
            where += f" on node {self.node}"
        code = f" with code {self.exit_code}" if self.exit_code is not None else ""
        text = f"{self.reason}: {where}{code}" if where else self.reason
        return f"{text}: {self.message}" if self.message else text


@dataclass(frozen=True, slots=True)
class Memory:
    """Times are Unix times in whole seconds."""

    restarts: int = 0
    spent: int = 0
    last_restart: float | None = None
    last_failure: Failure | None = None
    served: float | None = None
    """Since when this life serves without a break."""
    has_served: bool = False
    not_before: float | None = None
    """Of a life that follows a failure: its earliest start."""
    avoided: tuple[str, ...] = ()
    failed: bool = False

    @classmethod
    def of(cls, annotations: Mapping[str, str]) -> "Memory":
        """Annotations that somebody edited beyond understanding count as missing."""
        try:
            failure = Failure.of(json.loads(annotations.get(names.LAST_FAILURE) or "null"))
        except ValueError:
            failure = None
        avoided = annotations.get(names.AVOIDED) or ""
        return cls(
            restarts=_count(annotations.get(names.RESTARTS)),
            spent=_count(annotations.get(names.SPENT)),
            last_restart=seconds(annotations.get(names.LAST_RESTART)),
            last_failure=failure,
            served=seconds(annotations.get(names.SERVED)),
            has_served=annotations.get(names.HAS_SERVED) == "true",
            not_before=seconds(annotations.get(names.NOT_BEFORE)),
            avoided=tuple(node for node in avoided.split(",") if node),
            failed=annotations.get(names.FAILED) == "true",
        )

    def with_status(self, group: Mapping[str, Any]) -> "Memory":
        """With what status.groups[] knows beyond it: for a group whose set somebody deleted."""
        restarts = group.get("restarts")
        return replace(
            self,
            restarts=max(self.restarts, restarts if isinstance(restarts, int) else 0),
            last_restart=seconds(group.get("lastRestartTime")) or self.last_restart,
            last_failure=Failure.of(group.get("lastFailure")) or self.last_failure,
        )

    def annotations(self, held: Mapping[str, str] | None = None) -> dict[str, str]:
        """All of it. What is cleared stays as an empty text if `held`, the live annotations, has
        it: a field that is merely not sent any more is no drift, and would never be sent."""
        failure = self.last_failure
        found = {
            names.RESTARTS: str(self.restarts) if self.restarts else "",
            names.SPENT: str(self.spent) if self.spent else "",
            names.LAST_RESTART: _text(self.last_restart),
            names.LAST_FAILURE: json.dumps(failure.as_status()) if failure else "",
            names.SERVED: _text(self.served),
            names.HAS_SERVED: "true" if self.has_served else "",
            names.NOT_BEFORE: _text(self.not_before),
            names.AVOIDED: ",".join(self.avoided),
            names.FAILED: "true" if self.failed else "",
        }
        return {key: value for key, value in found.items() if value or key in (held or ())}


def _text(time: float | None) -> str:
    return "" if time is None else rfc3339(time)


def _count(text: str | None) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 10 else 0
