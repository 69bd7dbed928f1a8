"""Revisions of an object: what shapes rank pods has a hash, and its template is kept.

The template of a revision is made once, with the image and the commit that were right then, and
kept in an immutable ControllerRevision. Every group of the revision is made from that, so another
version of the operator or another default image restarts no model.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from minisgl_operator import api, names
from minisgl_operator.api import MiniSGLang
from minisgl_operator.desired import group, model, parts, ranks
from minisgl_operator.desired.digest import digest_of
from minisgl_operator.observed import Key, Manifest, Observed, Settings


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision of one object."""

    digest: str
    image: str
    commit: str | None
    """Of an hf:// repository."""
    pods: int
    """In one group."""
    template: Manifest
    """Of rank pods, with empty labels of group and epoch."""
    number: int
    """Counts up."""

    @property
    def annotations(self) -> dict[str, str]:
        """What a ControllerRevision, and each set that is made of it, says of the revision."""
        commit = {names.COMMIT: self.commit} if self.commit else {}
        return {names.IMAGE: self.image, names.PODS: str(self.pods), **commit}


def digest(obj: MiniSGLang) -> str:
    """The name of the revision that the spec asks for."""
    return digest_of(_shaping(obj))


def _shaping(obj: MiniSGLang) -> Manifest:
    """What of the spec shapes rank pods, without the fields that have their default values.

    Equal for two specs if and only if their rank pods may be the same; never a function of what
    the operator makes of it.
    """
    spec = api.changed(obj.spec)
    result: Manifest = {
        key: spec[key]
        for key in (
            "image", "imagePullPolicy", "imagePullSecrets", "restartedAt", "parallelism", "engine",
            "network", "ranks",
        )
        if key in spec
    }  # fmt: skip
    other = {"servedName"}  # the gateway's alone
    if model.by_job(obj):
        other |= {"tokenSecretRef", "download"}  # and the Job's
    result["model"] = {k: v for k, v in spec["model"].items() if k not in other}
    policy = spec.get("failurePolicy", {})
    kept = ("heartbeatTimeoutSeconds", "startupTimeoutSeconds")
    result["failurePolicy"] = {k: v for k, v in policy.items() if k in kept}
    redis = spec.get("redis", {})
    tls = (redis.get("managed") or {}).get("tlsSecretName")
    result["redis"] = redis.get("external") or ({"tlsSecretName": tls} if tls else None)
    return parts.without_empty(result)


def default_image(obj: MiniSGLang, settings: Settings) -> str:
    """What a new revision runs."""
    return obj.spec.image or settings.image.replace("{device}", obj.spec.engine.device)


def known(observed: Observed) -> dict[str, Revision]:
    """The revisions that live ControllerRevisions hold, by digest."""
    found = {}
    for key, live in observed.live.items():
        if key.kind == "ControllerRevision":
            revision = _kept(observed.obj, key, live)
            if revision is not None:
                found[revision.digest] = revision
    return found


def _kept(obj: MiniSGLang, key: Key, live: Manifest) -> Revision | None:
    if "data" not in live:
        return None
    revision = _read(live, live["data"]["spec"]["template"], int(live["revision"]))
    # A StatefulSet keeps such objects too, with its own names.
    if revision and key.name == names.controller_revision(obj, revision.digest):
        return revision
    return None


def wanted(observed: Observed) -> list[Revision]:
    """All that must be kept: those that groups have, and (last) the one that the spec asks for, as
    soon as its commit is known."""
    held = known(observed)
    used = {live["metadata"]["labels"].get(names.REVISION, "") for live in _sets(observed)}
    for name in used - held.keys():
        lost = _recovered(observed, name, 1 + len(held))
        if lost is not None:
            held[name] = lost
    newest = digest(observed.obj)
    if newest not in held:
        made = _made(observed, newest, 1 + max((r.number for r in held.values()), default=0))
        if made is not None:
            held[newest] = made
    kept = [r for name, r in held.items() if name in used and name != newest]
    kept.sort(key=lambda r: r.number)
    return [*kept, held[newest]] if newest in held else kept


def manifest(obj: MiniSGLang, revision: Revision) -> Manifest:
    """The ControllerRevision."""
    name = names.controller_revision(obj, revision.digest)
    child = parts.child(obj, "apps/v1", "ControllerRevision", name, "rank")
    child["metadata"]["labels"][names.REVISION] = revision.digest
    child["metadata"]["annotations"] = revision.annotations
    return {
        **child,
        "revision": revision.number,
        "data": {"spec": {"template": revision.template}},
    }


def resolving_job(observed: Observed) -> Manifest | None:
    """The Job that finds out the commit of a revision that is to be made; None: none is needed."""
    obj = observed.obj
    newest = digest(obj)
    if not model.needs_commit(obj) or model.pinned_commit(obj) or newest in known(observed):
        return None
    job = model.resolving_job(obj, default_image(obj, observed.settings), newest)
    # One whose answer is lost is left out, so that it goes, and the next look makes it anew.
    answered = _commit_of(observed, newest) is not None or model.is_lost(observed, job)
    return None if answered else job


def _made(observed: Observed, name: str, number: int) -> Revision | None:
    obj = observed.obj
    commit = _commit_of(observed, name)
    if commit is None and model.needs_commit(obj):
        return None
    image = default_image(obj, observed.settings)
    template = ranks.template(obj, observed.settings, name, image, commit)
    return Revision(name, image, commit, obj.spec.parallelism.pods, template, number)


def _commit_of(observed: Observed, name: str) -> str | None:
    obj = observed.obj
    if not model.needs_commit(obj) or model.pinned_commit(obj):
        return model.pinned_commit(obj)
    job = model.resolving_job(obj, default_image(obj, observed.settings), name)
    return model.resolved_commit(observed, job)


def _sets(observed: Observed) -> Iterator[Manifest]:
    for key, live in observed.live.items():
        if key.kind == "StatefulSet" and names.parse_set(observed.obj, key.name):
            yield live


def _recovered(observed: Observed, name: str, number: int) -> Revision | None:
    """A revision whose ControllerRevision was deleted, from a set that was made of it."""
    for live in _sets(observed):
        if live["metadata"]["labels"].get(names.REVISION) == name:
            return _read(live, group.blanked(live["spec"]["template"]), number)
    return None


def _read(held: Manifest, template: Manifest, number: int) -> Revision | None:
    labels = held["metadata"].get("labels") or {}
    notes = held["metadata"].get("annotations") or {}
    pods = names.pods_of(notes)
    if pods is None or not notes.get(names.IMAGE) or names.REVISION not in labels:
        return None
    return Revision(
        digest=labels[names.REVISION],
        image=notes[names.IMAGE],
        commit=notes.get(names.COMMIT),
        pods=pods,
        template=template,
        number=number,
    )


def of(observed: Observed, name: str) -> Revision:
    """A revision that is live. `KeyError`, which names it, if it is not."""
    key = Key("ControllerRevision", names.controller_revision(observed.obj, name))
    live = observed.live.get(key)
    revision = _kept(observed.obj, key, live) if live is not None else None
    if revision is None:
        raise KeyError(f"there is no {key.kind} {key.name}")
    return revision
