"""Which replica of the operator acts: the holder of one Lease, renewed every two seconds.

A holder that cannot renew for `LOST_SECONDS` ends its process before the others may take the Lease
after `HOLD_SECONDS`, so two never act at once. Times are each process's own clock: another's
renewal is noticed as a change, never compared with a time that it wrote.
"""

import asyncio
import contextlib
import logging
import time
from datetime import UTC, datetime
from typing import Any

from minisgl_operator.kube import Api, ApiError, path_of
from minisgl_operator.missing import TRIES, is_lack, missing
from minisgl_operator.observed import Manifest

log = logging.getLogger(__name__)

HOLD_SECONDS = 15.0
LOST_SECONDS = 10.0
RENEW_SECONDS = 2.0


class Lost(Exception):
    """The Lease could not be renewed: this process must not act any more."""


class LeaderLease:
    """One candidate for the Lease `namespace`/`name`."""

    def __init__(self, kube: Api, namespace: str, name: str, identity: str) -> None:
        self._kube = kube
        self._namespace, self._name, self._identity = namespace, name, identity
        self._seen: tuple[object, float] | None = None
        """The holder's last renewal, and when it was seen here."""

    async def acquire(self) -> None:
        """Return as the holder. Raises `Missing`: it may not read or write the Lease."""
        lacks = 0
        while True:
            try:
                if await self._try():
                    log.info("this replica acts from now on: %s", self._identity)
                    return
                lacks = 0
            except ApiError as error:
                log.warning("the Lease cannot be taken: %s", error)
                lacks = lacks + 1 if is_lack(error) else 0
                if lacks >= TRIES:
                    raise missing([("Lease", error)]) from error
            await asyncio.sleep(RENEW_SECONDS)

    async def keep(self) -> None:
        """Renew until that fails for too long: raises `Lost`."""
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            asked = time.monotonic()
            try:
                async with asyncio.timeout(min(LOST_SECONDS / 2, renewed + LOST_SECONDS - asked)):
                    if not await self._try():
                        raise Lost(f"the Lease {self._name} is held by another replica")
                renewed = asked  # the others may have seen it from then on
            except (ApiError, TimeoutError) as error:
                log.warning("the Lease could not be renewed: %s", str(error) or "no answer")
            if time.monotonic() - renewed >= LOST_SECONDS:
                raise Lost(f"the Lease {self._name} could not be renewed for {LOST_SECONDS:.0f} s")

    async def release(self) -> None:
        """Let another replica take it at once, if this one holds it.

        Reads it anew: a renewal that was given up may have been done all the same.
        """
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(RENEW_SECONDS):
                held = await self._kube.get("Lease", self._namespace, self._name)
                if held and held.get("spec", {}).get("holderIdentity") == self._identity:
                    await self._write(held, holder="")

    async def _try(self) -> bool:
        """Take or renew the Lease; whether this process holds it now. Raises `ApiError`."""
        held = await self._kube.get("Lease", self._namespace, self._name)
        if held is None:
            manifest = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": self._spec({}, self._identity),
            }
            await self._kube.request("POST", path_of("Lease", self._namespace), body=manifest)
            return True
        spec = held.get("spec", {})
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._identity) and not self._is_over(held):
            return False
        try:
            await self._write(held, holder=self._identity)
        except ApiError as error:
            if error.status == 409:  # somebody was faster
                return False
            raise
        return True

    def _is_over(self, held: Manifest) -> bool:
        """Whether another's Lease stood still for its time, as seen from here."""
        now = time.monotonic()
        version = held["metadata"].get("resourceVersion")
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, now)
        return now - self._seen[1] > HOLD_SECONDS

    async def _write(self, held: Manifest, *, holder: str) -> None:
        """Replace what was read: a conflict if it changed since."""
        body = {**held, "spec": self._spec(held.get("spec", {}), holder)}
        path = path_of("Lease", self._namespace, self._name)
        await self._kube.request("PUT", path, body=body)

    def _spec(self, old: dict[str, Any], holder: str) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        same = old.get("holderIdentity") == holder
        return {
            **old,
            "holderIdentity": holder,
            "leaseDurationSeconds": int(HOLD_SECONDS),
            "renewTime": now,
            "acquireTime": old.get("acquireTime", now) if same else now,
            "leaseTransitions": int(old.get("leaseTransitions", 0)) + (0 if same else 1),
        }
