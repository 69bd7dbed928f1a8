"""What children an object should have, as plain dicts for server-side apply.

Pure: all that is read is in `Observed`. `desired` gives everything but the StatefulSets of groups,
which are the plan's to place in time; it makes them with `group_set`.
"""

from collections.abc import Mapping, Sequence

from minisgl_operator import names
from minisgl_operator.desired import (
    disruption,
    group,
    model,
    network,
    redis,
    revision,
    routes,
    services,
)
from minisgl_operator.desired.digest import digest_of
from minisgl_operator.desired.model import served_name
from minisgl_operator.observed import Desired, Manifest, Observed

__all__ = ["desired", "group_set", "served_name"]


def desired(observed: Observed) -> Desired:
    """All children but the groups' sets, in the order of their creation."""
    obj = observed.obj
    newest = revision.digest(obj)
    kept = revision.wanted(observed)
    current = kept[-1] if kept and kept[-1].digest == newest else None
    jobs = _jobs(observed, current)
    ready = current is not None and all(model.is_done(observed, job) for job in jobs)
    # Until the model is there, services run on with what they have.
    runs = current if ready else None
    deployments = (
        services.gateway(observed, runs),
        services.tokenizer(observed, runs),
        services.detokenizer(observed, runs),
    )
    children = [
        *redis.children(observed),
        *(revision.manifest(obj, one) for one in kept),
        services.service(obj),
        group.service(obj),
        *network.children(obj, observed.settings),
        *([] if obj.spec.suspend else jobs),
        *(one for one in deployments if one is not None),
        *disruption.children(observed),
        *routes.children(obj, observed.settings),
    ]
    return Desired(
        children=tuple(_signed(one) for one in children),
        revision=newest,
        sizes={name: one.pods for name, one in revision.known(observed).items()},
        model_ready=ready,
    )


def _jobs(observed: Observed, current: revision.Revision | None) -> list[Manifest]:
    obj = observed.obj
    if current is None:
        job = revision.resolving_job(observed)
        return [job] if job else []
    if current.commit is not None and model.by_job(obj):
        return [model.download_job(obj, current.image, current.commit)]
    return []


def group_set(
    observed: Observed,
    revision_: str,
    index: int,
    epoch: int,
    replicas: int,
    avoided: Sequence[str],
    annotations: Mapping[str, str],
) -> Manifest:
    """The StatefulSet of one group in one of its lives. `KeyError`: the revision is not live."""
    held = revision.of(observed, revision_)
    template = group.filled(held.template, index, epoch, avoided)
    notes = {**annotations, **held.annotations}
    notes.pop(names.APPLIED, None)  # of the group's earlier life
    made = group.group_set(observed.obj, held.digest, template, index, epoch, replicas, notes)
    return _signed(made)


def _signed(manifest: Manifest) -> Manifest:
    """With a digest of itself, unless it is one that was signed before."""
    metadata = manifest["metadata"]
    notes = metadata.get("annotations", {})
    if names.APPLIED in notes:
        return manifest
    notes = {**notes, names.APPLIED: digest_of(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": notes}}
