"""One task for each object: look, decide, act, report. The only writer of children and of status.

Whatever wakes a task (its object, a child, a pod, a node, the bus, the clock) makes it look at
everything again; what happened is never passed along, so an event that was missed or came twice
changes nothing. A step that fails is tried again with the next look.
"""

import asyncio
import base64
import logging
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from minisgl_operator import api, bus, drift, names
from minisgl_operator.api import MiniSGLang
from minisgl_operator.cache import Cache
from minisgl_operator.desired import desired
from minisgl_operator.desired.bus import PASSWORD_KEY, endpoint
from minisgl_operator.desired.digest import digest_of
from minisgl_operator.kube import Api, ApiError
from minisgl_operator.metrics import Metrics
from minisgl_operator.observed import (
    Apply,
    Bus,
    Delete,
    DeletePod,
    Key,
    Manifest,
    Node,
    Observed,
    Plan,
    Post,
    Refusal,
    Settings,
    Warning,
)
from minisgl_operator.plan import plan
from minisgl_operator.plan.pods import controller
from minisgl_operator.refusals import Refusals
from minisgl_operator.status import status
from minisgl_operator.status.conditions import TYPES
from minisgl_operator.times import rfc3339

log = logging.getLogger(__name__)

RESYNC_SECONDS = 10.0
TICK_SECONDS = 2.0
"""How often an object is looked at while workers, or nodes, may be silent."""
NODES_SECONDS = 0.5
"""Every object wants to know of every node: what one task has worked out serves the others."""
SETTLE_SECONDS = 0.05
"""Events of one change come in a bunch: one look serves them all."""
LOOKS = 2
"""At most so many in a row, without waiting for events, where the first one made a revision that
the second one makes sets of."""
STATUS_SECONDS = 1.0
"""Least time between two writes of one status."""
_NO_ANSWER = (0, 401, 429, 503, 504)
"""The server is away or overloaded: no verdict on a child."""
_NOT_UNDERSTOOD = (400, 413, 422)
"""It will never take this, such as a status."""


class Nodes:
    """The nodes, and for how long each one's Lease has stood still on this process's clock."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._leases: dict[str, tuple[str, float]] = {}
        self._found: dict[str, Node] = {}
        self._found_at = -NODES_SECONDS

    def look(self, now: float) -> Mapping[str, Node]:
        """By name; the same for all tasks that look within `NODES_SECONDS`."""
        if now - self._found_at >= NODES_SECONDS:
            self._found, self._found_at = self._look(now), now
        return self._found

    def _look(self, now: float) -> dict[str, Node]:
        leases = {}
        for lease in self._cache.all("Lease"):
            name = lease["metadata"]["name"]
            renewed = str(lease.get("spec", {}).get("renewTime"))
            held = self._leases.get(name)
            leases[name] = held if held and held[0] == renewed else (renewed, now)
        self._leases = leases
        return {
            node["metadata"]["name"]: _node(node, leases, now) for node in self._cache.all("Node")
        }


def _node(node: Manifest, leases: Mapping[str, tuple[str, float]], now: float) -> Node:
    name = node["metadata"]["name"]
    conditions = node.get("status", {}).get("conditions", [])
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
    lease = leases.get(name)
    return Node(
        name=name,
        ready=ready,
        lease_age=now - lease[1] if lease else None,
        unschedulable=bool(node.get("spec", {}).get("unschedulable")),
    )


class Task:
    """Keeps one object right until it is stopped."""

    def __init__(
        self,
        namespace: str,
        name: str,
        kube: Api,
        cache: Cache,
        nodes: Nodes | None,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self._namespace, self._name = namespace, name
        self._kube, self._cache, self._nodes = kube, cache, nodes
        self._settings, self._metrics = settings, metrics
        self._log = logging.LoggerAdapter(log, {"namespace": namespace, "object": name})
        self._woken = asyncio.Event()
        self._woken_at: float | None = None
        self._uid = ""
        self._generation = 0
        self._refused = Refusals()
        self._foreign: dict[Key, float] = {}
        """Names that another's object held, and when that was seen."""
        self._settled: dict[Key, tuple[str, str]] = {}
        """By child: what was applied, and what the server made of it."""
        self._same: dict[Key, tuple[str, str]] = {}
        """By child: the manifest, and the resource version that was found to have all of it."""
        self._reader: bus.Reader | None = None
        self._built = False
        """Whether this look made a child that others are made of."""
        self._password: str | None = None
        self._named: dict[Key, tuple[float, Manifest | None]] = {}
        """Objects that are not watched, and when they were read."""
        self._status_at = -STATUS_SECONDS
        self._posted: dict[tuple[str, str], float] = {}
        self.last_look = time.monotonic()
        """When the last look ended, well or not: /livez."""
        self._task = asyncio.create_task(self._run(), name=f"object {namespace}/{name}")

    def wake(self) -> None:
        """Look again soon."""
        if self._woken_at is None:
            self._woken_at = time.monotonic()
        self._woken.set()

    def freed(self, kind: str) -> None:
        """A child of this kind is gone from the namespace, of whichever object."""
        if self._refused.freed(kind):
            self.wake()

    def know(self, settings: Settings) -> None:
        """From now on these hold."""
        self._settings = settings
        self.wake()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._close_reader()

    async def _run(self) -> None:
        wait = 0.0
        while True:
            try:
                async with asyncio.timeout(wait):
                    await self._woken.wait()
                await asyncio.sleep(SETTLE_SECONDS)
            except TimeoutError:
                pass
            self._woken.clear()
            woken_at, self._woken_at = self._woken_at, None
            wait = await self._guarded_look()
            self.last_look = time.monotonic()
            if woken_at is not None:
                self._metrics.reconcile_seconds.observe(self.last_look - woken_at)

    async def _guarded_look(self) -> float:
        """Look, and outlive what goes wrong; seconds until the next look."""
        try:
            return await self.look()
        except ApiError as error:
            self._metrics.failures.inc()
            self._log.warning("the API server failed: %s", error.message)
            if error.status not in _NOT_UNDERSTOOD:
                return TICK_SECONDS
            await self._post_failure(error)
            return RESYNC_SECONDS
        except Exception as error:
            self._metrics.failures.inc()
            self._log.exception("this object could not be reconciled")
            await self._post_failure(error)
            return RESYNC_SECONDS

    # --- one look ------------------------------------------------------------------------------

    async def look(self) -> float:
        """Look once and act; seconds until the next look. Raises `ApiError`."""
        found = self._cache.get(api.KIND, self._namespace, self._name)
        if found is None or found["metadata"].get("deletionTimestamp"):
            await self._close_reader()
            return RESYNC_SECONDS
        obj = api.parse(found)
        if obj.uid != self._uid:
            self._forget(obj.uid)
        if obj.metadata.generation != self._generation:
            self._generation = obj.metadata.generation
            self._refused.clear()  # another spec is worth another try
        for _ in range(LOOKS):
            self._built = False
            observed = await self._observe(obj)
            wanted = desired(observed)
            decided = plan(observed, wanted)
            observed = await self._act(observed, decided)
            if not self._built:
                break
        wake = await self._report(found, status(observed, wanted))
        return min(RESYNC_SECONDS, wake, *self._wakes(decided, observed))

    def _wakes(self, decided: Plan, observed: Observed) -> list[float]:
        wakes = [max(0.1, decided.wake)] if decided.wake is not None else []
        if observed.bus.workers or observed.pods:
            wakes.append(TICK_SECONDS)
        wakes += [max(0.1, next_try - observed.now) for next_try in self._refused.tries()]
        return wakes

    def _forget(self, uid: str) -> None:
        """Another object of the same name: nothing that is remembered is about it."""
        self._uid = uid
        self._refused.clear()
        self._foreign.clear()
        self._settled.clear()
        self._same.clear()
        self._named.clear()
        self._posted.clear()
        self._password = None

    async def _observe(self, obj: MiniSGLang) -> Observed:
        now = time.monotonic()
        live: dict[Key, Manifest] = {}
        found = self._cache.of_instance(self._namespace, self._name)
        for one in found:
            if one["kind"] != "Pod" and belongs(one, obj):
                live[Key.of(one)] = one
        owners = {one["metadata"].get("uid") for one in live.values()}
        pods = [one for one in found if one["kind"] == "Pod" and _is_pod_of(one, obj, owners)]
        password = await self._redis_password(obj, now)
        secret_key = Key("Secret", names.redis(obj))
        secret = (self._named.get(secret_key) or (0.0, None))[1]
        self._foreign = {k: at for k, at in self._foreign.items() if now - at < RESYNC_SECONDS}
        foreign = set(self._foreign)
        if secret is not None:
            if belongs(secret, obj):
                live[secret_key] = secret
            else:
                foreign.add(secret_key)
        await self._follow_bus(obj, password, now)
        return Observed(
            obj=obj,
            settings=self._settings,
            now=now,
            wall=time.time(),
            live=live,
            foreign=frozenset(foreign),
            pods=tuple(sorted(pods, key=lambda p: str(p["metadata"]["name"]))),
            refused=self._refused.seen(),
            warnings=self._warnings([*live, *(Key.of(p) for p in pods)]),
            nodes=self._nodes.look(now) if self._nodes else None,
            bus=self._reader.bus if self._reader else Bus("starting"),
            redis_password=password,
            claims=await self._claims(obj, now),
        )

    def _warnings(self, keys: list[Key]) -> dict[Key, Warning]:
        found = ((key, self._cache.warning(self._namespace, key)) for key in keys)
        return {key: warning for key, warning in found if warning is not None}

    async def _claims(self, obj: MiniSGLang, now: float) -> dict[str, Manifest]:
        """The claims that the model or its cache names."""
        wanted = set()
        uri, cache = obj.spec.model.uri, obj.spec.model.cache
        if uri.startswith("pvc://"):
            wanted.add(uri.removeprefix("pvc://").partition("/")[0])
        if cache and cache.persistent_volume_claim:
            wanted.add(cache.persistent_volume_claim.claim_name)
        found = {n: await self._by_name(Key("PersistentVolumeClaim", n), now) for n in wanted}
        return {name: claim for name, claim in found.items() if claim is not None}

    # --- Redis ---------------------------------------------------------------------------------

    async def _by_name(self, key: Key, now: float) -> Manifest | None:
        """An object that is not watched, at most as old as a resync."""
        held = self._named.get(key)
        if held is None or now - held[0] >= RESYNC_SECONDS:
            held = (now, await self._kube.get(key.kind, self._namespace, key.name))
            self._named[key] = held
        return held[1]

    async def _secret_value(self, place: tuple[str, str] | None, now: float) -> str | None:
        """What stands in a Secret, by its name and the key in it; None if there is nothing."""
        if place is None:
            return None
        return _secret_value(await self._by_name(Key("Secret", place[0]), now), place[1])

    async def _redis_password(self, obj: MiniSGLang, now: float) -> str | None:
        """The password of a managed Redis: from its Secret, from memory, or a new one."""
        if obj.spec.redis.managed is None:
            return None
        stored = await self._secret_value((names.redis(obj), PASSWORD_KEY), now)
        if stored:
            self._password = stored
        elif self._password is None:
            self._password = secrets.token_urlsafe(32)
        return self._password

    async def _follow_bus(self, obj: MiniSGLang, password: str | None, now: float) -> None:
        """Keep a reader on the address that the spec names now; none while there is no Redis."""
        address = None if obj.spec.suspend else await self._address(obj, password, now)
        before = self._reader
        if before is not None and before.address != address:
            await self._close_reader()
            if address is None or not address.same_place(before.address):
                before = None
        if self._reader is None and address is not None:
            self._reader = bus.Reader(address, self.wake, before=before)

    async def _address(
        self, obj: MiniSGLang, password: str | None, now: float
    ) -> bus.Address | None:
        at = endpoint(obj)
        managed = obj.spec.redis.external is None
        host, _, port = at.address.rpartition(":")
        return bus.Address(
            host.strip("[]"), int(port), names.service(obj),
            database=at.database,
            username=at.username,
            password=password if managed else await self._secret_value(at.password, now),
            tls=at.tls,
            ca=await self._secret_value(at.ca, now),
            managed=managed,
        )  # fmt: skip

    async def _close_reader(self) -> None:
        if self._reader is not None:
            await self._reader.close()
            self._reader = None

    # --- acting --------------------------------------------------------------------------------

    async def _act(self, observed: Observed, decided: Plan) -> Observed:
        """Do what was decided; what was seen, with the refusals of now."""
        foreign = set(observed.foreign)
        for action in decided.actions:
            if isinstance(action, Apply):
                key = Key.of(action.manifest)
                if key not in foreign and not await self._apply(observed, action.manifest):
                    foreign.add(key)
            elif isinstance(action, Delete):
                key, why = action.key, "nothing wants it"
                await self._delete(observed, key, action.uid, why, foreground=action.foreground)
            elif isinstance(action, DeletePod):
                await self._delete(observed, Key("Pod", action.name), action.uid, action.why)
            else:
                await self._post(observed.obj.uid, action)
        applied = {Key.of(a.manifest) for a in decided.actions if isinstance(a, Apply)}
        self._refused.keep(decided)
        self._same = {k: one for k, one in self._same.items() if k in applied}
        self._settled = {k: one for k, one in self._settled.items() if k in applied}
        return replace(
            observed,
            foreign=frozenset(foreign),
            refused=self._refused.seen(),
        )

    async def _apply(self, observed: Observed, manifest: Manifest) -> bool:
        """Apply a child if its live state differs; False if its name is somebody else's."""
        key, digest, now = Key.of(manifest), digest_of(manifest), observed.now
        if self._refused.waits(key, digest, now):
            return True
        live = observed.live.get(key)
        if live is not None:
            compared = (digest, str(live["metadata"].get("resourceVersion")))
            if self._same.get(key) == compared or not drift.differs(manifest, live):
                self._same[key] = compared
                self._refused.drop(key)
                return True
            if self._settled.get(key) == (digest, _projection(manifest, live)):
                return True  # the server reads it otherwise, and will again
        else:
            there = await self._kube.get(key.kind, self._namespace, key.name)
            if there is not None and not belongs(there, observed.obj):
                self._foreign[key] = now
                return False
        try:
            answer = await self._kube.apply(manifest)
        except ApiError as error:
            if error.status in _NO_ANSWER:
                raise
            if error.status != 409:  # changed in between: the next look sees how
                reason = drift.reason_of(error.status, error.message, key.kind)
                refusal = Refusal(reason, error.message, since=observed.wall)
                self._refused.note(key, digest, refusal, now)
                self._log.warning("%s %s was refused: %s", key.kind, key.name, error.message)
            return True
        self._refused.drop(key)
        self._settled[key] = (digest, _projection(manifest, answer))
        self._metrics.applied.labels(kind=key.kind).inc()
        if key.kind == "Secret":
            self._named[key] = (now, answer)
        else:
            self._cache.put(answer)
            self._built |= live is None and key.kind == "ControllerRevision"
        return True

    async def _delete(
        self, observed: Observed, key: Key, uid: str, why: str, *, foreground: bool = False
    ) -> None:
        """Delete a child or pod. A refusal, as of an admission webhook, holds up nothing else."""
        if self._refused.waits(key, uid, observed.now):
            return
        self._log.info("deleting %s %s: %s", key.kind, key.name, why)
        try:
            await self._kube.delete(key.kind, self._namespace, key.name, uid, foreground=foreground)
        except ApiError as error:
            if error.status in _NO_ANSWER:
                raise
            refusal = Refusal("Forbidden", error.message, since=observed.wall, deletion=True)
            self._refused.note(key, uid, refusal, observed.now)
            self._log.warning("%s %s cannot be deleted: %s", key.kind, key.name, error.message)
        else:
            self._refused.drop(key)

    async def _post_failure(self, error: Exception) -> None:
        """The conditions may be old from now on: only an Event can say so."""
        found = self._cache.get(api.KIND, self._namespace, self._name)
        if found is None:
            return
        text = f"this object cannot be reconciled: {type(error).__name__}: {error}"
        text += " (the operator's log has more)"
        await self._post(found["metadata"]["uid"], Post("Warning", "ReconcileFailed", text))

    async def _post(self, uid: str, event: Post) -> None:
        """An Event; the same one at most once in ten minutes. None is worth a failed look."""
        now, said = time.monotonic(), (event.reason, event.message)
        self._posted = {k: at for k, at in self._posted.items() if now - at < 600}
        if said in self._posted:
            return
        self._posted[said] = now
        stamp = rfc3339(time.time())
        manifest = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{self._name}.", "namespace": self._namespace},
            "involvedObject": {
                "apiVersion": api.API_VERSION, "kind": api.KIND, "name": self._name,
                "namespace": self._namespace, "uid": uid,
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:1024],
            "source": {"component": names.MANAGER},
            "reportingComponent": names.MANAGER,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }  # fmt: skip
        try:
            await self._kube.create(manifest)
        except ApiError as error:
            self._log.warning("an Event could not be posted: %s", error.message)

    async def _report(self, found: Manifest, wanted: dict[str, Any]) -> float:
        """Write the status if it changed, at most once a second; seconds to the next look."""
        if _by_type(wanted) == _by_type(found.get("status", {})):
            return RESYNC_SECONDS
        wait = self._status_at + STATUS_SECONDS - time.monotonic()
        if wait > 0:
            return wait
        self._status_at = time.monotonic()
        # Conditions of others are theirs: what was read of them may be old by now.
        ours = [one for one in wanted["conditions"] if one["type"] in TYPES]
        try:
            answer = await self._kube.apply({
                "apiVersion": api.API_VERSION,
                "kind": api.KIND,
                "metadata": {"name": self._name, "namespace": self._namespace},
                "status": {**wanted, "conditions": ours},
            }, subresource="status")  # fmt: skip
        except ApiError as error:
            if error.status == 404:  # it has just been deleted
                return RESYNC_SECONDS
            raise
        # Our own status is worth another look only if it came upon another spec or object.
        self._cache.put(answer, tell=_specified(answer) != _specified(found))
        return RESYNC_SECONDS


def belongs(child: Manifest, obj: MiniSGLang) -> bool:
    """Whether a child is this object's. An orphan with our labels is: applying it adopts it."""
    owner = controller(child)
    if owner is not None:
        return owner == obj.uid
    labels = child["metadata"].get("labels") or {}
    ours = names.common(obj)
    del ours[names.OBJECT_UID]  # an orphan carries that of its former object
    return all(labels.get(k) == v for k, v in ours.items())


def _is_pod_of(pod: Manifest, obj: MiniSGLang, owners: Collection[object]) -> bool:
    """Whether a pod is this object's. One of ranks whose label somebody has taken off still serves
    for its set, one of `owners`; or that let go of it, and it holds the name that the set needs."""
    labels = pod["metadata"].get("labels") or {}
    uid = labels.get(names.OBJECT_UID)
    if uid is None and labels.get(names.COMPONENT) == "rank":
        return controller(pod) in (None, *owners)
    return uid == obj.uid


def _specified(found: Manifest) -> object:
    return found["metadata"].get("uid"), found["metadata"].get("generation")


def _by_type(status: Mapping[str, Any]) -> dict[str, Any]:
    """A status whose conditions have no order, as the server merges those of several writers."""
    return {**status, "conditions": {c.get("type"): c for c in status.get("conditions") or ()}}


def _secret_value(secret: Manifest | None, key: str) -> str | None:
    data = ((secret or {}).get("data") or {}).get(key)
    if data is None:
        return None
    try:
        return base64.b64decode(data).decode().strip()
    except ValueError:
        return None


def _projection(manifest: Manifest, live: Manifest) -> str:
    """A digest of the parts of `live` that `manifest` speaks of."""
    metadata = live.get("metadata", {})
    parts = {key: live.get(key) for key in manifest if key not in ("metadata", "status")}
    parts["labels"] = metadata.get("labels")
    parts["annotations"] = metadata.get("annotations")
    return digest_of(parts)
