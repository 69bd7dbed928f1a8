"""Compiles the CUDA sources of `csrc/` when a kernel is first used, through TVM FFI.

    norm = cuda_module("norm", {"T": "__nv_bfloat16", "HIDDEN": "1024"})
    norm.rms_norm(out, x, weight, 1e-6)

Each set of macros (type and shape) is a library of its own, in the cache of `build` and by the
same rules: the key is a hash of sources, headers, macros, target and compiler, and all ranks of a
host wait for the one that compiles. A library exports functions of TVM FFI's C ABI; they launch on
torch's current stream, never wait for the device and allocate nothing, so they may be captured in
a CUDA graph. The current device must be the one of the tensors.
"""

import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from minisgl.config import env_switch
from minisgl_kernels.build import (
    CSRC,
    KernelUnavailable,
    load_built,
    refuse_if_disabled,
    version,
)

DISABLE_PDL_ENV = "MINISGL_DISABLE_PDL"
"""Set to 1, kernels start after the one before has ended, not while it ends."""
MIN_CAPABILITY = (8, 0)
MAX_COMPILERS = 16
"""Each takes up to 0.5 GB of memory."""
CUDA_TYPES = {
    torch.bfloat16: "__nv_bfloat16",
    torch.float16: "__half",
    torch.float32: "float",
}

_log = logging.getLogger(__name__)


def cuda_type(dtype: torch.dtype) -> str:
    """The C++ name of an element type. Raises `KernelUnavailable` for one that no kernel has."""
    if dtype not in CUDA_TYPES:
        raise KernelUnavailable(f"there is no kernel for {dtype}")
    return CUDA_TYPES[dtype]


def cuda_module(
    name: str, macros: Mapping[str, str | int], flags: Sequence[str] = (), *, csrc: Path = CSRC
) -> Any:
    """`csrc/<name>.cu`, compiled with `macros` and `flags` for this GPU and loaded by TVM FFI.

    Raises `KernelUnavailable`: no GPU, no nvcc, no TVM FFI, or a source that does not compile.
    """
    _check_device()
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        raise KernelUnavailable(
            f"compute capability {capability[0]}.{capability[1]} is below "
            f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
        )
    tvm_ffi = _tvm_ffi()
    command = nvcc_command(capability, macros, flags)
    versions = f"{version(command[:1])}\ntvm_ffi {tvm_ffi.__version__}"
    return load_built(
        csrc / f"{name}.cu", command, versions, lambda path: tvm_ffi.load_module(str(path))
    )


def nvcc_command(
    capability: tuple[int, int], macros: Mapping[str, str | int], flags: Sequence[str] = ()
) -> tuple[str, ...]:
    """The command that makes a library for one GPU; a source and an output are to follow."""
    from tvm_ffi.libinfo import find_include_path, find_libtvm_ffi

    nvcc = find_nvcc()
    # Instructions of Hopper alone (9.0a) are asked for there; elsewhere there are none like it.
    arch = f"{capability[0]}{capability[1]}" + ("a" if capability[0] >= 9 else "")
    library = Path(find_libtvm_ffi())
    return (
        str(nvcc), "-shared", "-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden",
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        *flags,
        *(f"-D{key}={value}" for key, value in macros.items()),
        f"-DPDL={0 if env_switch(DISABLE_PDL_ENV) or capability[0] < 9 else 1}",
        f"-I{find_include_path()}", f"-L{nvcc.parent.parent / 'lib'}",
        "-Xlinker=--no-as-needed", f"-L{library.parent}", "-ltvm_ffi",
    )  # fmt: skip


def find_nvcc() -> Path:
    """nvcc of `$CUDA_HOME`, on the path, of /usr/local/cuda, or of NVIDIA's Python packages."""
    candidates = [Path("/usr/local/cuda/bin/nvcc")]
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.insert(0, Path(on_path))
    if os.environ.get("CUDA_HOME"):
        candidates.insert(0, Path(os.environ["CUDA_HOME"], "bin", "nvcc"))
    packages = Path(sysconfig.get_paths()["purelib"], "nvidia")
    candidates += sorted(packages.glob("cu*/bin/nvcc"), reverse=True)
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    raise KernelUnavailable(
        "there is no nvcc (CUDA_HOME, the path, /usr/local/cuda): install CUDA's compiler, or "
        "pip install nvidia-cuda-nvcc"
    )


class Family:
    """The compiled variants of one kernel, by signature: a compile at the first call of each."""

    def __init__(
        self, source: str, function: str, macros: Callable[..., Mapping[str, str | int]],
        flags: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`macros` makes those of a signature's parts, or raises `KernelUnavailable`."""
        self._source, self._function = source, function
        self._macros, self._flags = macros, flags
        self._made: dict[Hashable, Any] = {}
        self._usable: bool | None = None

    def usable(self) -> bool:
        """Whether kernels can be compiled here; if not, one warning says why."""
        if self._usable is None:
            try:
                check_tools()
                self._usable = True
            except KernelUnavailable as error:
                self._usable = False
                _log.warning(
                    "%s runs in torch, because its CUDA kernel is missing: %s",
                    self._function, error,
                )  # fmt: skip
        return self._usable

    def __getitem__(self, signature: tuple[Any, ...]) -> Any:
        """The function for one signature. Raises `KernelUnavailable`, then each time."""
        made = self._made.get(signature)
        if made is None:
            wanted = _COLLECTED.get()
            if wanted is not None:
                wanted.append((self, signature))
                return lambda *_: None
            try:
                module = cuda_module(self._source, self._macros(*signature), self._flags)
                made = getattr(module, self._function)
            except KernelUnavailable as error:
                made = error
            self._made[signature] = made
        if isinstance(made, KernelUnavailable):
            raise made
        return made


Variant = tuple[Family, tuple[Any, ...]]
_COLLECTED: ContextVar[list[Variant] | None] = ContextVar("collected", default=None)


@contextmanager
def collected() -> Iterator[list[Variant]]:
    """Within it kernels that are not compiled yet compute nothing; the list says which were called.

    What a model will need is known when it has run once, on no matter which numbers.
    """
    wanted: list[Variant] = []
    token = _COLLECTED.set(wanted)
    try:
        yield wanted
    finally:
        _COLLECTED.reset(token)


def prepare(wanted: Iterable[Variant]) -> None:
    """Compile variants at the same time that are about to be called, instead of one by one.

    Signatures that have no kernel are left out: their calls say so.
    """

    def compile_one(variant: Variant) -> None:
        family, signature = variant
        with suppress(KernelUnavailable):
            family[signature]

    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILERS)) as pool:
        list(pool.map(compile_one, wanted))


def check_tools() -> None:
    """Raise `KernelUnavailable` unless there are a GPU, nvcc, TVM FFI, and leave to use them."""
    _check_device()
    find_nvcc()
    _log.debug("CUDA kernels through TVM FFI %s", _tvm_ffi().__version__)


def _check_device() -> None:
    refuse_if_disabled()
    if not torch.cuda.is_available():
        raise KernelUnavailable("there is no CUDA device")


def _tvm_ffi() -> Any:
    try:
        import tvm_ffi
    except ImportError as error:
        raise KernelUnavailable(f"TVM FFI is missing ({error}): install apache-tvm-ffi") from error
    return tvm_ffi
