"""Container images for the nodes, built here with buildah: no registry is needed.

The project's own image comes from the repository's Dockerfile. Each base image is pulled; where no
registry can be reached, a stand-in with the same name is made of Debian packages (debootstrap), so
that the same Dockerfile builds. Redis's image is always had that way or by a pull.

Everything is kept in `~/.cache/minisgl/images` (XDG_CACHE_HOME): buildah's store, and one archive
for each content. pip inside a build is given the host's configuration, find-links folders and
certificates as read-only mounts, and proxies come through the environment; no layer keeps them.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.programs import Unavailable

ROOT = Path(__file__).resolve().parent.parent.parent
RELEASE = "bookworm"
STORE_GIB = 20
"""How large buildah's store may grow."""
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_FROM = re.compile(r"^FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?", re.IGNORECASE)
_USES = re.compile(r"(?:--from=|\bfrom=)([^\s,]+)")

STAND_INS: Mapping[str, Sequence[str]] = {
    "python": (
        "python3", "python3-pip", "python3-venv", "libpython3-dev", "ca-certificates", "netbase",
    ),
    "debian": (),
    "redis": ("redis-server", "redis-tools"),
    "valkey": ("redis-server", "redis-tools"),
}  # fmt: skip
"""By the last part of an image's name: the Debian packages that make something like it.

python's has the headers, as the real one has: the engine compiles kernels with them.
"""


@dataclass(frozen=True, slots=True)
class Image:
    """An image in a file that `ctr images import` reads."""

    name: str
    archive: Path


class Images:
    """Builds images, or takes them from the cache; raises `Unavailable` or `BuildError`."""

    def __init__(self, cache: Path | None = None) -> None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        self.cache = cache or base / "minisgl" / "images"
        self.cache.mkdir(parents=True, exist_ok=True)

    def base(self, name: str) -> Image:
        """An image as it is, such as Redis's: pulled, or its stand-in."""
        full = qualified(name)
        archive = self._archive(full, _recipe(full))
        with self._locked():
            if not archive.exists():
                self._provide(full)
                self._export(full, archive)
        return Image(full, archive)

    def from_files(self, name: str, dockerfile: str, files: Mapping[str, Path]) -> Image:
        """An image of a few files; `dockerfile` copies them by the keys of `files`."""
        digest = hashlib.sha256(dockerfile.encode())
        for key, path in sorted(files.items()):
            digest.update(key.encode())
            digest.update(path.read_bytes())
        archive = self._archive(name, digest.hexdigest())
        with self._locked():
            if not archive.exists():
                with tempfile.TemporaryDirectory(dir=self.cache) as context:
                    for key, path in files.items():
                        shutil.copy2(path, Path(context) / key)
                    (Path(context) / "Dockerfile").write_text(dockerfile)
                    self._build(Path(context), Path(context) / "Dockerfile", name)
                self._export(name, archive)
        return Image(name, archive)

    def of_project(self, target: str, name: str) -> Image:
        """The image of one role, a target of the repository's Dockerfile."""
        dockerfile = ROOT / "Dockerfile"
        if not dockerfile.exists():
            raise Unavailable("there is no Dockerfile to build the image from")
        listed = _run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT).splitlines()
        digest = hashlib.sha256(target.encode())
        # It leaves out everything and then names what a build gets.
        ignore = (ROOT / ".dockerignore").read_text().splitlines()
        wanted = ["Dockerfile", *(line[1:] for line in ignore if line.startswith("!"))]
        for path in sorted(set(listed)):
            file = ROOT / path
            if path.startswith(tuple(wanted)) and file.is_file():
                digest.update(path.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
        archive = self._archive(name, digest.hexdigest())
        with self._locked():
            if not archive.exists():
                for base in bases(dockerfile.read_text(), target):
                    self._provide(qualified(base))
                self._build(ROOT, dockerfile, name, target)
                # A new commit makes a new image of some hundred MB: only the last is kept.
                for old in self.cache.glob(f"{_slug(name)}-*.tar"):
                    old.unlink()
                self._export(name, archive)
                self._forget_old_layers()
        return Image(name, archive)

    def _archive(self, name: str, key: str) -> Path:
        return self.cache / f"{_slug(name)}-{key[:16]}.tar"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.cache / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _buildah(self, *args: str) -> str:
        if shutil.which("buildah") is None:
            raise Unavailable("needs buildah to build images: apt-get install buildah runc")
        store = ["--root", str(self.cache / "store"), "--runroot", str(self.cache / "run")]
        settings = self.cache / "containers.conf"
        settings.write_text(f'[network]\nnetwork_config_dir = "{self.cache / "network"}"\n')
        # The one place that buildah writes to and cannot be told otherwise.
        blobs = Path("/var/lib/containers")
        known = blobs.exists()
        try:
            # Mounts of a build that is broken off end with their namespace.
            alone = ["unshare", "--mount", "--propagation", "private"]
            driver = {"overlayfs": "overlay", "native": "vfs"}[snapshotter(self.cache)]
            return _run(
                [*alone, "buildah", *store, f"--storage-driver={driver}", *args],
                CONTAINERS_CONF=str(settings),
            )
        finally:
            if not known:
                shutil.rmtree(blobs, ignore_errors=True)

    def _build(self, context: Path, dockerfile: Path, name: str, target: str = "") -> None:
        with tempfile.TemporaryDirectory(dir=self.cache) as folder:
            mounts = [f"--volume={mount}" for mount in _host_mounts(Path(folder))]
            aim = [f"--target={target}"] if target else []
            proxies = [
                f"--build-arg={name}"
                for name in ("http_proxy", "https_proxy", "no_proxy")
                if os.environ.get(name)
            ]
            self._buildah(
                "bud", "--isolation=chroot", "--network=host", "--pull=false", "--layers",
                "--format=docker", *mounts, *aim, *proxies, f"--file={dockerfile}",
                f"--tag={name}", str(context),
            )  # fmt: skip

    def _export(self, name: str, archive: Path) -> None:
        # Of the formats this is the one whose layers are not compressed: 4 times as fast.
        partial = archive.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        self._buildah("push", "--quiet", name, f"docker-archive:{partial}:{name}")
        partial.replace(archive)

    def _forget_old_layers(self) -> None:
        """Drop what no named image uses, when it is much: it makes the next build fast."""
        used = _run(["du", "--summarize", "--block-size=1G", str(self.cache / "store")])
        if int(used.split()[0]) > STORE_GIB:
            self._buildah("rmi", "--prune", "--force")

    def _provide(self, name: str) -> None:
        """See that buildah's store has a base image."""
        # Written beside a stand-in; what was pulled has none.
        made = self.cache / f"{_slug(name)}.stand-in"
        if self._has(name) and (not made.exists() or made.read_text() == _recipe(name)):
            return
        if not made.exists():
            try:
                self._buildah("pull", "--quiet", "--retry=0", name)
                return
            except BuildError as error:
                if _kind(name) not in STAND_INS:
                    raise
                if shutil.which("debootstrap") is None:
                    raise Unavailable(
                        f"{name} cannot be pulled ({error}), and there is no debootstrap to make "
                        "a stand-in: apt-get install debootstrap"
                    ) from None
        self._make_stand_in(name)
        made.write_text(_recipe(name))

    def _has(self, name: str) -> bool:
        try:
            self._buildah("inspect", "--type=image", name)
        except BuildError:
            return False
        return True

    def _make_stand_in(self, name: str) -> None:
        kind = _kind(name)
        with tempfile.TemporaryDirectory(dir=self.cache) as folder:
            context, root = Path(folder), Path(folder) / "root"
            packages = ",".join(STAND_INS[kind])
            include = [f"--include={packages}"] if packages else []
            kept = self.cache / "packages"
            kept.mkdir(exist_ok=True)
            _run(
                [
                    "unshare", "--mount", "--propagation", "private", "debootstrap",
                    "--variant=minbase", f"--cache-dir={kept}", *include,
                    RELEASE, str(root), _mirror(),
                ]
            )  # fmt: skip
            for unneeded in ("var/lib/apt/lists", "var/cache/apt", "usr/share/doc"):
                shutil.rmtree(root / unneeded, ignore_errors=True)
            if kind == "python":
                for marker in (root / "usr/lib").glob("python3*/EXTERNALLY-MANAGED"):
                    marker.unlink()
                for link, program in {
                    "python": "python3",
                    "python3": "python3",
                    "pip": "pip3",
                }.items():
                    (root / "usr/local/bin" / link).symlink_to(f"/usr/bin/{program}")
            _run(
                [
                    "tar",
                    "--create",
                    "--file",
                    str(context / "root.tar"),
                    "--directory",
                    str(root),
                    ".",
                ]
            )
            shutil.rmtree(root)
            path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            (context / "Dockerfile").write_text(
                f'FROM scratch\nADD root.tar /\nENV PATH={path} LANG=C.UTF-8\nCMD ["sh"]\n'
            )
            self._build(context, context / "Dockerfile", name)


class BuildError(Exception):
    """A program that makes images failed; the text is the end of what it said."""


def qualified(name: str) -> str:
    """The full name of an image: what `redis:7` is to a kubelet is docker.io/library/redis:7."""
    first, slash, _ = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return name
    return f"docker.io/{name}" if slash else f"docker.io/library/{name}"


def bases(dockerfile: str, target: str) -> list[str]:
    """The images from elsewhere that a target of a Dockerfile is made of.

    Raises `Unavailable` if there is no such target.
    """
    text = dockerfile.replace("\\\n", " ")
    defaults = dict(re.findall(r"^ARG\s+(\w+)=(\S+)", text, re.MULTILINE))
    text = re.sub(r"\$\{?(\w+)\}?", lambda found: defaults.get(found[1], found[0]), text)
    stages: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        start = _FROM.match(line.strip())
        if start:
            current = [start[1]]
            stages[start[2] or str(len(stages))] = current
        elif not line.lstrip().startswith("#"):
            current += _USES.findall(line)
    if target not in stages:
        raise Unavailable(f"the Dockerfile has no target {target}: it has {', '.join(stages)}")
    found, todo, seen = [], [target], set()
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if one in stages:
            todo += stages[one]
        elif one != "scratch":
            found.append(one)
    return sorted(found)


def snapshotter(folder: Path) -> str:
    """The way of containerd to stack layers that works in a folder."""
    stat = ["stat", "--file-system", "--format=%T", str(folder)]
    kind = subprocess.run(stat, capture_output=True, text=True, check=True).stdout.strip()
    # An overlay cannot lie on another one, as when all of this runs in a container.
    return "native" if kind == "overlayfs" else "overlayfs"


def _host_mounts(folder: Path) -> list[str]:
    """What makes pip work in a build as it does here, as HOST:CONTAINER:ro."""
    lines: dict[str, str] = {}
    mounts = []
    listed = _run(["python3", "-m", "pip", "config", "list"]).splitlines()
    for line in listed:
        key, _, value = line.partition("=")
        value = value.strip("'\"")
        option = key.rpartition(".")[2]
        if option in ("index-url", "extra-index-url", "trusted-host", "find-links", "timeout"):
            lines[option] = value.replace("\\n", " ")
    # Wheels beside the clone, such as a CPU build of torch, come first, as in CI.
    links = [str(ROOT.parent / "shared" / "wheels"), *lines.get("find-links", "").split()]
    links = list(dict.fromkeys(str(Path(link).resolve()) for link in links if Path(link).is_dir()))
    mounts += [f"{link}:{link}:ro" for link in links]
    lines |= {"find-links": " ".join(links)} if links else {}
    if CERTIFICATES.exists():
        lines["cert"] = str(CERTIFICATES)
        mounts.append(f"{CERTIFICATES}:{CERTIFICATES}:ro")
    config = folder / "pip.conf"
    config.write_text("[global]\n" + "".join(f"{k} = {v}\n" for k, v in lines.items()))
    return [*mounts, f"{config}:/etc/pip.conf:ro"]


def _mirror() -> str:
    """The Debian mirror that this machine's apt uses; Debian's own if it uses none."""
    if shutil.which("apt-get"):
        listed = _run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(SUITE)"])
        for line in listed.splitlines():
            address, _, suite = line.partition(" ")
            if suite == RELEASE and "debian" in address:
                return address
    return "http://deb.debian.org/debian"


def _kind(name: str) -> str:
    return name.rpartition("/")[2].partition(":")[0]


def _recipe(name: str) -> str:
    """What a stand-in is made of, as a short text."""
    return hashlib.sha256(repr((RELEASE, STAND_INS.get(_kind(name)))).encode()).hexdigest()


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)


def _run(argv: Sequence[str], cwd: Path | None = None, **env: str) -> str:
    done = subprocess.run(
        argv,
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise BuildError(f"{' '.join(argv)}: {(done.stderr or done.stdout)[-3000:].strip()}")
    return done.stdout
