"""What the API server refuses of one object's children, and when that is worth another try."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from minisgl_operator.observed import Apply, Delete, DeletePod, Key, Plan, Refusal

RETRY_FIRST, RETRY_MOST = 1.0, 30.0
"""Waits between the tries of what is refused: each is twice the one before. No watch tells of most
causes (a right, a quota, a webhook), so this is also how late their end is noticed."""


@dataclass(slots=True)
class _Refused:
    refusal: Refusal
    what: str
    wait: float
    next_try: float


@dataclass(slots=True)
class Refusals:
    """All of one object. `what`: a digest of the manifest that was to be applied, or the UID of
    what was to be deleted; another one is tried at once."""

    _held: dict[Key, _Refused] = field(default_factory=dict)

    def seen(self) -> Mapping[Key, Refusal]:
        """Those of now, for the status."""
        return {key: one.refusal for key, one in self._held.items()}

    def tries(self) -> list[float]:
        """When something is worth another try, on the clock of `note`."""
        return [one.next_try for one in self._held.values()]

    def waits(self, key: Key, what: str, now: float) -> bool:
        """Whether the same was refused, and it is too early to try again."""
        held = self._held.get(key)
        return held is not None and held.what == what and now < held.next_try

    def note(self, key: Key, what: str, refusal: Refusal, now: float) -> None:
        """It was refused; `since` of an earlier refusal in a row is kept."""
        held = self._held.get(key)
        wait = RETRY_FIRST
        if held is not None:
            refusal = replace(refusal, since=held.refusal.since)
            if held.what == what:
                wait = min(RETRY_MOST, 2 * held.wait)
        self._held[key] = _Refused(refusal, what, wait, now + wait)

    def drop(self, key: Key) -> None:
        """It was taken: what refused the others may be gone as well."""
        if self._held.pop(key, None) is not None:
            for one in self._held.values():
                one.next_try = 0.0

    def freed(self, kind: str) -> bool:
        """Something of this kind is gone; whether that may let in what a quota has refused."""
        over = [
            one
            for key, one in self._held.items()
            if key.kind == kind and one.refusal.reason == "QuotaExceeded"
        ]
        for one in over:
            one.next_try = 0.0
        return bool(over)

    def keep(self, decided: Plan) -> None:
        """Forget what is not wanted any more."""
        wanted = set()
        for action in decided.actions:
            if isinstance(action, Apply):
                wanted.add((Key.of(action.manifest), False))
            elif isinstance(action, Delete):
                wanted.add((action.key, True))
            elif isinstance(action, DeletePod):
                wanted.add((Key("Pod", action.name), True))
        self._held = {k: v for k, v in self._held.items() if (k, v.refusal.deletion) in wanted}

    def clear(self) -> None:
        """Another spec, or another object: all is worth another try."""
        self._held.clear()
