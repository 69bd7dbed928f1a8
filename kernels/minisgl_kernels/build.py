"""Compiles the C++ sources of `csrc/` when a kernel is first used, and keeps the result.

    mod = extension("radix_compare")                            # a Python module: needs Python.h
    lib = library("cpu_gemm", ["-O3", "-march=native"])         # a ctypes library: needs nothing

CUDA sources are compiled by `cuda_build`, which keeps them in the same cache in the same way.

A result is one file, `<cache>/<key>/<name>.so`. The key is a hash of everything that decides what
the compiler makes: the source and every header beside it, the flags, the compiler's version, and
for C++ the CPU and Python's ABI. So nothing is ever stale and nothing needs to be cleaned before an
upgrade. Results that are compiled together are one file under several keys. Processes that need the
same file at the same time (all ranks of a host) wait for one of them.

The cache is `$MINISGL_KERNEL_CACHE`, else `minisglang/kernels` in `$XDG_CACHE_HOME` or `~/.cache`;
where that is not writable, a directory that this process removes when it ends. What a folder has
that `$MINISGL_BUILT_KERNELS` names comes first.
"""

import atexit
import ctypes
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from minisgl.config import env_switch

CSRC = Path(__file__).parent / "csrc"
CACHE_ENV = "MINISGL_KERNEL_CACHE"
AHEAD_ENV = "MINISGL_BUILT_KERNELS"
"""A folder that `minisgl compile` filled, as in an image; it is looked at first, and only read."""
DISABLE_ENV = "MINISGL_DISABLE_KERNELS"
COMPILE_TIMEOUT_SECONDS = 600
OPTIMISED = ("-O3",)

_ONCE = threading.Lock()
_log = logging.getLogger(__name__)
T = TypeVar("T")


class KernelUnavailable(RuntimeError):
    """A kernel cannot be compiled or loaded here; the message says why in one line."""


def library(name: str, flags: Sequence[str] = OPTIMISED, *, csrc: Path = CSRC) -> ctypes.CDLL:
    """`csrc/<name>.cpp`, compiled with `flags` and loaded; its `extern "C"` functions are called.

    A call through ctypes costs about 2 microseconds with two array arguments. Raises
    `KernelUnavailable`.
    """
    return _load(csrc / f"{name}.cpp", tuple(flags), lambda path: ctypes.CDLL(str(path)))


def extension(name: str, flags: Sequence[str] = OPTIMISED, *, csrc: Path = CSRC) -> ModuleType:
    """`csrc/<name>.cpp`, which defines the Python module `name`, compiled and imported.

    For kernels so short that the call counts: 0.1 microseconds. Raises `KernelUnavailable`, also
    where Python's headers are not installed.
    """
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        raise KernelUnavailable(
            f"{name} needs Python's headers, and {include}/Python.h does not exist: "
            "install python3-dev"
        )

    def load(path: Path) -> ModuleType:
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        if spec is None:
            raise ImportError(f"{path} is no extension module")
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module

    return _load(csrc / f"{name}.cpp", (*flags, f"-I{include}"), load)


def compiler() -> tuple[str, ...]:
    """The C++ compiler's command: `$CXX`, else the first of c++, g++ and clang++ on the path."""
    chosen = os.environ.get("CXX", "")
    for candidate in [shlex.split(chosen)] if chosen.strip() else [["c++"], ["g++"], ["clang++"]]:
        found = shutil.which(candidate[0])
        if found:
            return (found, *candidate[1:])
    raise KernelUnavailable(
        f"CXX={chosen} is not on the path"
        if chosen.strip()
        else "there is no C++ compiler on the path (c++, g++, clang++): install g++"
    )


def _load(source: Path, flags: tuple[str, ...], load: Callable[[Path], T]) -> T:
    refuse_if_disabled()
    cxx = compiler()
    command = (*cxx, "-std=c++17", "-fPIC", "-shared", *flags)
    python = str(sysconfig.get_config_var("SOABI"))
    result = Result(source_key(source, (version(cxx), *command, *_cpu(), python)), _file(source))

    def make(_: Sequence[Result], made: Path) -> None:
        compile_file((*command, "-o", str(made), str(source)), source.name)

    return load_result(result, make, load)


def _file(source: Path) -> str:
    return f"{source.stem}.so"


def refuse_if_disabled() -> None:
    """Raise `KernelUnavailable` where kernels are switched off."""
    if env_switch(DISABLE_ENV):
        raise KernelUnavailable(f"kernels are switched off by {DISABLE_ENV}=1")


@dataclass(frozen=True, slots=True)
class Result:
    """What is kept under a key: one file."""

    key: str
    """A hash of everything that decides what the compiler makes."""
    name: str

    def within(self, root: Path) -> Path:
        """Where it is kept."""
        return root / self.key / self.name


Make = Callable[[Sequence[Result], Path], None]
"""Makes one file that holds all of these results. Raises `KernelUnavailable`."""


def load_result(result: Result, make: Make, load: Callable[[Path], T]) -> T:
    """What `load` gives for the file, made if it is not kept; one that does not load is made again.

    Raises `KernelUnavailable`.
    """
    ready = _built_ahead(result)
    if ready is not None:
        with suppress(OSError, ImportError):
            return load(ready)
        _log.warning("kernel %s does not load: one of this host takes its place", ready)
    target = result.within(build_results((result,), make))
    try:
        return load(target)
    except (OSError, ImportError) as first:
        # A file cut short by a power loss, or a cache that is mounted noexec.
        _log.warning("kernel %s does not load (%s), compiling it again", target, first)
        with suppress(OSError):  # of another user, or read-only: it stays as it is
            target.unlink()
        try:
            root = _own_root()
            _build((result,), make, root)
            return load(result.within(root))
        except (OSError, ImportError) as second:
            raise KernelUnavailable(f"{result.name} compiles but does not load: {second}") from None


def build_results(results: Sequence[Result], make: Make, root: Path | None = None) -> Path:
    """The folder under which all results are, made by one call of `make` as far as they were not
    kept: then one file is kept under each of their keys.

    With `root` it is this one, and `OSError` says that it cannot be written.
    """
    if root is not None:
        _build(results, make, root)
        return root
    root = cache_root()
    try:
        _build(results, make, root)
    except OSError as error:  # the disk is full, or a directory of another user's
        with _ONCE:
            _warn_of_cache(root, error.strerror or str(error))
        root = _own_root()
        try:
            _build(results, make, root)
        except OSError as other:
            raise KernelUnavailable(f"cannot write {root}: {other}") from other
    return root


def is_kept(result: Result) -> bool:
    """Whether a result need not be made."""
    return _built_ahead(result) is not None or _exists(result.within(cache_root()))


def _built_ahead(result: Result) -> Path | None:
    folder = os.environ.get(AHEAD_ENV)
    found = result.within(Path(folder).absolute()) if folder else None
    return found if found is not None and _exists(found) else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder of another user
        return False


def _build(results: Sequence[Result], make: Make, root: Path) -> None:
    """Raises `OSError` if the results cannot be kept there."""
    if all(result.within(root).exists() for result in results):
        return
    token = secrets.token_hex(8)
    with ExitStack() as held:
        for key in sorted({result.key for result in results}):  # so nobody waits in a circle
            folder = root / key
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            held.enter_context(_locked(folder / "lock"))
        missing = [one for one in dict.fromkeys(results) if not one.within(root).exists()]
        if not missing:
            return
        # The names are this build's own, and the renames atomic: where locks do nothing (some
        # network file systems) two processes compile twice, and neither loads half a file.
        made = [(result.within(root).with_suffix(f".{token}.tmp"), result) for result in missing]
        try:
            first = made[0][0]
            make(missing, first)
            for other, _ in made[1:]:
                try:
                    os.link(first, other)
                except OSError:  # a file system without links
                    shutil.copyfile(first, other)
            for path, result in made:
                os.replace(path, result.within(root))
        finally:
            for path, _ in made:
                path.unlink(missing_ok=True)


@functools.cache
def _warn_of_cache(root: Path, error: str) -> None:
    _log.warning("kernel cache %s cannot be written (%s)", root, error)


def compile_file(command: tuple[str, ...], name: str) -> None:
    """Run a compiler on what is called `name`. Raises `KernelUnavailable` with its first error."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace",
            timeout=COMPILE_TIMEOUT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise KernelUnavailable(
            f"compiling {name} took over {COMPILE_TIMEOUT_SECONDS} seconds"
        ) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        first = next((line for line in lines if "error:" in line), (lines or ["no word"])[0])
        raise KernelUnavailable(f"{command[0]} cannot compile {name}: {first.strip()}")


def source_key(source: Path, parts: Iterable[str]) -> str:
    """The key of what is made of a source and the headers beside it, and of what else `parts` says:
    the compiler, its flags, and the CPU where these ask for the one at hand."""
    digest = hashlib.sha256()
    headers = ("*.h", "*.cuh") if source.suffix == ".cu" else ("*.h",)
    files = [source, *sorted(file for header in headers for file in source.parent.glob(header))]
    try:
        texts = [text for file in files for text in (file.name, file.read_text("utf-8"))]
    except OSError as error:
        raise KernelUnavailable(f"cannot read {source}: {error.strerror}") from error
    for part in (*parts, *texts):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


@functools.cache
def version(cxx: tuple[str, ...]) -> str:
    """What a compiler says of itself. Raises `KernelUnavailable` if it does not run."""
    try:
        done = subprocess.run((*cxx, "--version"), capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"{cxx[0]} does not run: {error}") from error
    return done.stdout


@functools.cache
def _cpu() -> tuple[str, str]:
    """Machine and CPU features: with -march=native a file of one host may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("flags", "Features", "isa", "model name")
    first = {line.split(":")[0].strip(): line for line in reversed(lines)}
    return platform.machine(), "\n".join(first[name] for name in wanted if name in first)


def cache_root() -> Path:
    override = os.environ.get(CACHE_ENV)
    if override:
        return Path(override).absolute()
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home, as in many containers
        return _own_root()
    return Path(base).absolute() / "minisglang" / "kernels"


def _own_root() -> Path:
    with _ONCE:  # threads that ask for the first time at once get the same one
        return _temporary_root()


@functools.cache
def _temporary_root() -> Path:
    """A directory of this process alone: a fixed name under /tmp could be another user's trap."""
    root = Path(tempfile.mkdtemp(prefix="minisgl-kernels-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock, which the kernel releases if this process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # no locks on this file system; see _build
            _log.debug("no file locks under %s", path.parent)
        yield
