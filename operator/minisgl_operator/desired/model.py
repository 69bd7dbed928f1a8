"""Where a model's files come from: volumes, init containers, and the Jobs that fetch them.

`minisgl download` gives each commit of each repository a folder of its own, with a lock and a
marker: whoever comes first downloads, the others wait, and one that is killed is continued.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from minisgl_operator import names
from minisgl_operator.api import HostPathCache, MiniSGLang
from minisgl_operator.desired import parts
from minisgl_operator.desired.bus import secret_volume
from minisgl_operator.desired.digest import digest_of
from minisgl_operator.desired.overlay import lay_over
from minisgl_operator.observed import Key, Manifest, Observed

MOUNT = "/models"
CONTAINER = "download"
"""Name of the container that fetches, in a Job and in a pod."""
RESULT = "/dev/termination-log"
RESOLVE_SECONDS = 120
"""For the question which commit a branch names."""
_TOKEN = "/etc/minisgl/hub"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MANY = 2**31 - 1
"""A download is tried until it succeeds: the kubelet waits longer each time, up to 5 minutes."""

_FIND = """\
root={root}
model=
for folder in "$root" "$root"/{repo}/*; do
  case "$folder" in
    "$root") [ -e "$folder/config.json" ] || continue ;;
    *-tokenizer) continue ;;
    *) [ -e "$folder/.minisgl-complete" ] || continue ;;
  esac
  if [ "$model" ]; then
    echo "minisgl: the claim holds $model and $folder: pin spec.model.revision to a commit" >&2
    exit 2
  fi
  model=$folder
done
if [ -z "$model" ]; then
  echo "minisgl: the claim holds neither $root/config.json nor a complete $root/{repo}/COMMIT" >&2
  exit 2
fi"""


@dataclass(frozen=True, slots=True)
class Files:
    """What one pod needs to have the model's files."""

    path: str | None
    """The folder; None: `find` looks for it when the container starts."""
    find: str | None = None
    volumes: list[Manifest] = field(default_factory=list)
    mounts: list[Manifest] = field(default_factory=list)
    """Of the container that reads the model; read-only."""
    init: list[Manifest] = field(default_factory=list)
    """Init containers."""


def repository(obj: MiniSGLang) -> str | None:
    """ORG/NAME of a model of the hub; None for every other kind."""
    uri = obj.spec.model.uri
    return uri.removeprefix("hf://") if uri.startswith("hf://") else None


def served_name(obj: MiniSGLang) -> str:
    """The model's id in the API."""
    return obj.spec.model.served_name or repository(obj) or obj.name


def pinned_commit(obj: MiniSGLang) -> str | None:
    """The commit that the spec itself names."""
    revision = obj.spec.model.revision or ""
    return revision if repository(obj) and _COMMIT.fullmatch(revision) else None


def needs_commit(obj: MiniSGLang) -> bool:
    """Whether pods must be told a commit. A claim that is filled already says it itself."""
    cache = obj.spec.model.cache
    claim = cache.persistent_volume_claim if cache else None
    return repository(obj) is not None and not (claim and claim.read_only)


def by_job(obj: MiniSGLang) -> bool:
    """Whether one Job downloads for all pods, rather than each pod for itself."""
    cache = obj.spec.model.cache
    return needs_commit(obj) and cache is not None and cache.persistent_volume_claim is not None


def files(obj: MiniSGLang, image: str, commit: str | None, *, weights: bool) -> Files:
    """For pods of ranks, or (without weights) of the other roles."""
    uri = obj.spec.model.uri
    if uri.startswith("file://"):
        return Files(uri.removeprefix("file://"))
    if uri.startswith("pvc://"):
        claim, _, path = uri.removeprefix("pvc://").partition("/")
        source: Manifest = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        return _mounted(source, path)
    if uri.startswith("oci://"):
        reference = {"reference": uri.removeprefix("oci://")}
        policy = obj.spec.image_pull_policy
        source = {"image": reference | ({"pullPolicy": policy} if policy else {})}
        return _mounted(source, obj.spec.model.sub_path or "")
    return _of_hub(obj, image, commit, weights)


def _folder(path: str) -> str:
    """Of a path inside the volume."""
    return "/".join([MOUNT, *filter(None, path.split("/"))])


def _mounted(source: Manifest, path: str) -> Files:
    return Files(
        _folder(path),
        volumes=[{"name": "model", **source}],
        mounts=[{"name": "model", "mountPath": MOUNT, "readOnly": True}],
    )


def _of_hub(obj: MiniSGLang, image: str, commit: str | None, weights: bool) -> Files:
    cache = obj.spec.model.cache
    folder = (repository(obj) or "").replace("/", "--")
    if cache and cache.persistent_volume_claim:
        claim = cache.persistent_volume_claim
        root = _mounted(_claim(obj), claim.sub_path)
        if claim.read_only and commit is None:
            find = _FIND.format(root=parts.quoted(root.path or ""), repo=folder)
            return Files(None, find, root.volumes, root.mounts)
        return Files(f"{root.path}/{folder}/{commit}", None, root.volumes, root.mounts)
    if cache and cache.host_path and weights:
        volume = _host_path(cache.host_path)
    elif cache and cache.empty_dir and cache.empty_dir.size_limit is not None and weights:
        volume = {"name": "model", "emptyDir": {"sizeLimit": cache.empty_dir.size_limit}}
    else:
        volume = {"name": "model", "emptyDir": {}}
    arguments = [*([] if weights else ["--only-tokenizer"]), f"--revision={commit}"]
    fetch, token = _fetcher(
        obj, image, MOUNT, arguments, obj.spec.model.download.timeout_seconds,
        [{"name": "model", "mountPath": MOUNT}],
    )  # fmt: skip
    return Files(
        f"{MOUNT}/{folder}/{commit}" + ("" if weights else "-tokenizer"),
        volumes=[volume, *token],
        mounts=[{"name": "model", "mountPath": MOUNT, "readOnly": True}],
        init=[fetch],
    )


def _claim(obj: MiniSGLang) -> Manifest:
    cache = obj.spec.model.cache
    claim = cache.persistent_volume_claim if cache else None
    if claim is None:
        raise ValueError(f"{obj.name}: its cache is no claim")
    source: dict[str, Any] = {"claimName": claim.claim_name}
    # Only where nobody writes: some drivers cannot have a volume mounted both ways on a node.
    return {"persistentVolumeClaim": source | ({"readOnly": True} if claim.read_only else {})}


def _host_path(cache: HostPathCache) -> Manifest:
    return {"name": "model", "hostPath": {"path": cache.path, "type": "Directory"}}


def _fetcher(
    obj: MiniSGLang,
    image: str,
    folder: str,
    arguments: list[str],
    seconds: int,
    mounts: list[Manifest],
) -> tuple[Manifest, list[Manifest]]:
    """A container that runs `minisgl download`, and the volume of its token."""
    secret = obj.spec.model.token_secret_ref
    args = [str(seconds), "minisgl", "download", obj.spec.model.uri, folder, *arguments]
    args.append(f"--result-file={RESULT}")
    volumes = []
    mounts = [*mounts, *parts.scratch(health=False)[1]]
    if secret is not None:
        args.append(f"--token-file={_TOKEN}/token")
        volumes.append(secret_volume("hub-token", secret.name, {secret.key: "token"}))
        mounts.append({"name": "hub-token", "mountPath": _TOKEN, "readOnly": True})
    fetch = parts.container(
        obj, CONTAINER, image, obj.spec.model.download.resources,
        {
            # One attempt may take so long; the next one goes on where it stopped.
            "command": ["timeout"],
            "args": args,
            "env": parts.env(parts.CACHE_ENV),
            "volumeMounts": mounts,
        },
    )  # fmt: skip
    return fetch, volumes


# --- Jobs ---------------------------------------------------------------------------------------


def resolving_job(obj: MiniSGLang, image: str, revision: str) -> Manifest:
    """Asks the hub which commit the spec's revision is now, for one revision of the object."""
    asked = obj.spec.model.revision
    arguments = ["--only-commit", *([f"--revision={asked}"] if asked else [])]
    return _job(obj, image, parts.CACHE, arguments, RESOLVE_SECONDS, [], revision)


def download_job(obj: MiniSGLang, image: str, commit: str) -> Manifest:
    """Fills the claim with one commit. Done at once if it is there."""
    cache = obj.spec.model.cache
    claim = cache.persistent_volume_claim if cache else None
    folder = _folder(claim.sub_path if claim else "")
    volume = {"name": "model", **_claim(obj)}
    seconds = obj.spec.model.download.timeout_seconds
    return _job(obj, image, folder, [f"--revision={commit}"], seconds, [volume], commit)


def _job(
    obj: MiniSGLang,
    image: str,
    folder: str,
    arguments: list[str],
    seconds: int,
    volumes: list[Manifest],
    salt: str,
) -> Manifest:
    fetch, token = _fetcher(
        obj, image, folder, arguments, seconds,
        [{"name": volume["name"], "mountPath": MOUNT} for volume in volumes],
    )  # fmt: skip
    spec = {
        "restartPolicy": "OnFailure",
        "containers": [fetch],
        "volumes": [*parts.scratch(health=False)[0], *volumes, *token],
    }
    template = lay_over(
        parts.pod_template(obj, "model", spec), obj.spec.model.download.pod_template
    )
    # A Job's pod cannot be changed: another one has another name.
    name = names.model_job(obj, digest_of([salt, template["spec"]]))
    return {
        **parts.child(obj, "batch/v1", "Job", name, "model"),
        "spec": {"backoffLimit": _MANY, "template": template},
    }


def is_done(observed: Observed, job: Manifest) -> bool:
    """Whether this Job has succeeded."""
    live = observed.live.get(Key.of(job), {})
    conditions = (live.get("status") or {}).get("conditions") or ()
    return any(c.get("type") == "Complete" and c.get("status") == "True" for c in conditions)


def resolved_commit(observed: Observed, job: Manifest) -> str | None:
    """What a resolving Job has found out: the termination message of its pod."""
    for pod in _pods_of(observed, job):
        for status in (pod.get("status") or {}).get("containerStatuses") or ():
            ended = (status.get("state") or {}).get("terminated") or {}
            message = str(ended.get("message", "")).strip()
            if status.get("name") != CONTAINER or ended.get("exitCode") != 0:
                continue
            if _COMMIT.fullmatch(message):
                return message
    return None


def is_lost(observed: Observed, job: Manifest) -> bool:
    """Whether a Job has succeeded and its pod is gone, with what it had to say."""
    return is_done(observed, job) and not _pods_of(observed, job)


def _pods_of(observed: Observed, job: Manifest) -> list[Manifest]:
    label = "batch.kubernetes.io/job-name"
    name = job["metadata"]["name"]
    return [p for p in observed.pods if (p["metadata"].get("labels") or {}).get(label) == name]
