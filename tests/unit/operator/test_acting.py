"""What a task does with the API server's answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from minisgl_operator import api, names
from minisgl_operator.cache import Cache
from minisgl_operator.kube import Api, ApiError
from minisgl_operator.metrics import Metrics
from minisgl_operator.observed import Apply, Delete, Key, Manifest, Plan, Refusal
from minisgl_operator.reconcile import Task
from minisgl_operator.refusals import Refusals
from tests.unit.operator.cases import SETTINGS, UID, observe

SPEC = {"model": {"uri": "file:///m"}, "suspend": True}
METADATA: dict[str, Any] = {"name": "qwen", "namespace": "models", "uid": UID, "generation": 1}


class Server(Api):
    """Takes every write but deletions."""

    def __init__(self) -> None:
        self.statuses: list[Manifest] = []
        self.applied: list[Key] = []
        self.denied: list[str] = []
        self.posted: list[Manifest] = []

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return None

    async def create(self, manifest: Manifest) -> Manifest:
        self.posted.append(manifest)
        return manifest

    async def apply(self, manifest: Manifest, *, subresource: str = "") -> Manifest:
        if subresource:
            self.statuses.append(manifest["status"])
            manifest = {**manifest, "metadata": METADATA, "spec": SPEC}
        else:
            self.applied.append(Key.of(manifest))
        return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": "9"}}

    async def delete(
        self, kind: str, namespace: str, name: str, uid: str, *, foreground: bool = False
    ) -> None:
        self.denied.append(name)
        raise ApiError(403, "Forbidden", "an admission webhook denied the request")


@asynccontextmanager
async def acting(
    server: Server, *strays: str, spec: dict[str, Any] = SPEC, metrics: Metrics | None = None
) -> AsyncIterator[Task]:
    """A task that looks when it is told to, with children that nothing wants."""
    cache = Cache(server, [None], lambda kind, found: None)
    cache.put({"kind": api.KIND, "metadata": METADATA, "spec": spec})
    for name in strays:
        labels = names.common(observe(SPEC).obj)
        stray = {"name": name, "namespace": "models", "uid": name, "labels": labels}
        cache.put({"kind": "Service", "metadata": stray})
    metrics = metrics or Metrics()
    task = Task("models", "qwen", server, cache, None, SETTINGS, metrics)
    try:
        yield task
    finally:
        await task.stop()


async def test_a_child_that_may_not_be_deleted_holds_up_no_other_and_no_status() -> None:
    server = Server()
    async with acting(server, "one", "two") as task:
        await task.look()
    assert sorted(server.denied) == ["one", "two"]
    (told,) = server.statuses
    (degraded,) = (c for c in told["conditions"] if c["type"] == "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "Forbidden")
    assert degraded["message"] == (
        "Service one cannot be deleted: an admission webhook denied the request (and 1 more)"
    )


async def test_a_deletion_that_is_refused_is_not_tried_again_at_the_next_look() -> None:
    server, metrics = Server(), Metrics()
    async with acting(server, "one", metrics=metrics) as task:
        assert await task.look() <= 1.0
        await task.look()
    assert server.denied == ["one"]
    # The look went on, and Degraded tells: an alert of failed looks would last as long as this.
    assert b"reconcile_failures_total 0.0" in metrics.text()


def test_what_is_refused_is_tried_again_less_and_less_often() -> None:
    refused, key, now = Refusals(), Key("Service", "one"), 0.0
    waits = []
    for _ in range(12):
        refused.note(key, "uid", Refusal("Forbidden", "no", since=now), now)
        (next_try,) = refused.tries()
        assert refused.waits(key, "uid", next_try - 0.1)
        assert not refused.waits(key, "uid", next_try) and not refused.waits(key, "other", now)
        waits.append(next_try - now)
        now = next_try
    assert waits == [1, 2, 4, 8, 16, *[30] * 7]
    assert refused.seen()[key].since == 0.0


def test_once_one_child_is_taken_the_others_that_were_refused_are_tried_at_once() -> None:
    refused, one, other = Refusals(), Key("Service", "one"), Key("Ingress", "other")
    for key in (one, other):
        refused.note(key, "same", Refusal("Forbidden", "webhook", since=0.0), 0.0)
    refused.drop(Key("Job", "never refused"))
    assert refused.waits(other, "same", 0.5)
    refused.drop(one)
    assert not refused.waits(other, "same", 0.5)


def test_room_in_a_quota_is_used_at_once_by_what_it_had_refused() -> None:
    refused, full, denied = Refusals(), Key("Service", "one"), Key("Service", "two")
    refused.note(full, "same", Refusal("QuotaExceeded", "full", since=0.0), 0.0)
    refused.note(denied, "same", Refusal("Forbidden", "webhook", since=0.0), 0.0)
    assert not refused.freed("Job")
    assert refused.waits(full, "same", 0.5)
    assert refused.freed("Service")
    assert not refused.waits(full, "same", 0.5) and refused.waits(denied, "same", 0.5)


def test_a_refusal_is_forgotten_once_nothing_asks_for_it() -> None:
    refused, key = Refusals(), Key("Service", "one")
    refused.note(key, "uid", Refusal("Forbidden", "no", since=0.0, deletion=True), 0.0)
    refused.keep(Plan((Delete(key, "uid"),)))
    assert refused.seen()
    refused.keep(Plan((Apply({"kind": "Service", "metadata": {"name": "one"}}),)))
    assert not refused.seen()


async def test_the_sets_of_a_revision_are_made_in_the_look_that_makes_the_revision() -> None:
    server = Server()
    redis = {"external": {"address": "127.0.0.1:1"}}  # no name to look up
    async with acting(server, spec=SPEC | {"suspend": False, "redis": redis}) as task:
        await task.look()
    assert Key("StatefulSet", "qwen-g0-1") in server.applied
    assert Key("Deployment", "qwen-gateway") in server.applied
    assert len(server.applied) == len(set(server.applied))
    assert len(server.statuses) == 1


async def test_an_object_that_cannot_be_reconciled_says_so_once() -> None:
    server = Server()
    async with acting(server, spec={"model": {"uri": 1}}):
        for _ in range(100):
            await asyncio.sleep(0.01)
            if server.posted:
                break
    (event,) = server.posted
    assert (event["type"], event["reason"]) == ("Warning", "ReconcileFailed")
    assert event["involvedObject"]["uid"] == UID
    assert "Expected `str`, got `int`" in event["message"]


async def test_a_rank_pod_that_lost_its_label_or_its_set_is_still_the_objects() -> None:
    async with acting(Server()) as task:
        labels = {
            "app.kubernetes.io/managed-by": names.MANAGER, "app.kubernetes.io/instance": "qwen",
        }  # fmt: skip
        for name, more in (
            ("lost", {names.COMPONENT: "rank"}),
            ("other", {names.COMPONENT: "rank", names.OBJECT_UID: "another"}),
            ("gateway", {names.COMPONENT: "gateway"}),
            ("held", {names.COMPONENT: "rank"}),
            ("strange", {names.COMPONENT: "rank"}),
            ("own", {names.OBJECT_UID: UID}),
        ):
            metadata: dict[str, Any] = {
                "name": name, "namespace": "models", "labels": labels | more,
            }  # fmt: skip
            if name in ("held", "strange"):
                uid = "set" if name == "held" else "another"
                metadata["ownerReferences"] = [{"uid": uid, "controller": True}]
            task._cache.put({"kind": "Pod", "metadata": metadata}, tell=False)
        owned = {"uid": UID, "controller": True}
        metadata = {
            "name": "qwen-g0-1", "namespace": "models", "labels": labels, "uid": "set",
            "ownerReferences": [owned],
        }  # fmt: skip
        task._cache.put({"kind": "StatefulSet", "metadata": metadata}, tell=False)
        found = await task._observe(observe(SPEC).obj)
    assert [pod["metadata"]["name"] for pod in found.pods] == ["held", "lost", "own"]
