"""Compiles the CUDA sources of `csrc/` when a kernel is first used, through TVM FFI.

    norm = cuda_module("norm", {"T": "__nv_bfloat16", "HIDDEN": "1024"})
    norm.rms_norm(out, x, weight, 1e-6)

Each set of macros (type and shape) has a key of its own in the cache of `build`, by the same rules:
a hash of sources, headers, macros, target and compiler; all ranks of a host wait for the one that
compiles. Headers and the host's part take most of the time, so variants that are wanted at the same
time become one source and one library, as far as `joined` allows.

A library exports functions of TVM FFI's C ABI; they launch on torch's current stream, never wait
for the device and allocate nothing, so they may be captured in a CUDA graph. The current device
must be the one of the tensors.
"""

import logging
import platform
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minisgl.host import usable_cpus
from minisgl_kernels.build import (
    CSRC,
    KernelUnavailable,
    Make,
    Result,
    build_results,
    compile_file,
    is_kept,
    load_result,
    refuse_if_disabled,
    source_key,
    version,
)
from minisgl_kernels.nvcc import find_nvcc, joined_text, nvcc_command, variant_text

MIN_CAPABILITY = (8, 0)
MAX_COMPILERS = 16
"""Each takes up to 0.5 GB of memory."""
MAX_JOINED = 32
"""Most variants that are compiled as one source."""
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
    variant = _variant(name, macros, flags, csrc)
    module = load_result(variant.result, _maker([variant]), _loaded)
    return _Exports(module, variant.result.key)


def _loaded(path: Path) -> Any:
    tvm_ffi = _tvm_ffi()
    try:
        return tvm_ffi.load_module(str(path))
    except RuntimeError as error:  # what TVM FFI says of a file that is cut short or foreign
        raise OSError(str(error)) from error


class _Exports:
    """The functions of one variant in a library that may have others."""

    def __init__(self, module: Any, key: str) -> None:
        self._module, self._key = module, key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, f"{name}_{self._key}")


@dataclass(frozen=True, slots=True)
class _Variant:
    """A source with macros, and where what it compiles to is kept."""

    source: Path
    macros: Mapping[str, str | int]
    command: tuple[str, ...]
    """Without source, macros and output."""
    result: Result


def _variant(
    name: str, macros: Mapping[str, str | int], flags: Sequence[str], csrc: Path,
    capability: tuple[int, int] | None = None,
) -> _Variant:  # fmt: skip
    refuse_if_disabled()
    if capability is None:
        _check_device()
        capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        raise KernelUnavailable(
            f"compute capability {capability[0]}.{capability[1]} is below "
            f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
        )
    tvm_ffi = _tvm_ffi()
    command = nvcc_command(capability, flags)
    source = csrc / f"{name}.cu"
    text = variant_text(source, macros, "")
    # Nothing of the host's CPU: code for it is compiled for all of its architecture.
    parts = (version(command[:1]), tvm_ffi.__version__, platform.machine(), *command, text)
    return _Variant(source, macros, command, Result(source_key(source, parts), f"{name}.so"))


def _maker(variants: Sequence[_Variant]) -> Make:
    """Compiles those of these variants that are wanted, which have one command, to one library."""

    def make(wanted: Sequence[Result], made: Path) -> None:
        some = [variant for variant in variants if variant.result in wanted]
        written = made.with_suffix(".cu")
        folders = dict.fromkeys(f"-I{variant.source.parent}" for variant in some)
        try:
            written.write_text(joined_text([(v.source, v.macros, v.result.key) for v in some]))
            compile_file(
                (*some[0].command, *folders, "-o", str(made), str(written)),
                ", ".join(dict.fromkeys(variant.source.name for variant in some)),
            )
        finally:
            written.unlink(missing_ok=True)

    return make


class Family:
    """The compiled variants of one kernel, by signature: a compile at the first call of each."""

    def __init__(
        self, source: str, function: str, macros: Callable[..., Mapping[str, str | int]],
        flags: Sequence[str] = (), *, joined: bool = False,
    ) -> None:  # fmt: skip
        """`macros` makes those of a signature's parts, or raises `KernelUnavailable`.

        `joined`: compiled with others as one source, which takes a fifth of the time for each. No
        header of its source may depend on the macros.
        """
        self._source, self._function = source, function
        self._macros, self._flags = macros, flags
        self.joined = joined
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

    def variant(
        self, signature: tuple[Any, ...], capability: tuple[int, int] | None = None
    ) -> _Variant | None:
        """What is to be compiled for a signature; None if nothing is. Raises
        `KernelUnavailable`. `capability`: of a GPU that need not be here."""
        if signature in self._made:
            return None
        return _variant(self._source, self._macros(*signature), self._flags, CSRC, capability)


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

    wanted = list(dict.fromkeys(wanted))
    workers = min(usable_cpus(), MAX_COMPILERS)
    missing = []
    for family, signature in wanted:
        with suppress(KernelUnavailable):
            if family.joined and (one := family.variant(signature)) and not is_kept(one.result):
                missing.append(one)

    def compile_part(part: list[_Variant]) -> None:
        with suppress(KernelUnavailable):  # perhaps because of one of them
            build_results([variant.result for variant in part], _maker(part))

    def load(variant: Variant) -> None:
        family, signature = variant
        with suppress(KernelUnavailable):
            family[signature]

    with ThreadPoolExecutor(workers) as pool:
        alone = pool.map(load, [variant for variant in wanted if not variant[0].joined])
        list(pool.map(compile_part, _parts(missing, workers)))
        list(alone)
        list(pool.map(load, [variant for variant in wanted if variant[0].joined]))


def compile_ahead(
    wanted: Iterable[Variant], capability: tuple[int, int], root: Path | None = None
) -> int:
    """Compile variants of joined families into `root`, or the cache, for a GPU that need not be
    here: how many there are. Raises `KernelUnavailable` and `OSError`."""
    workers = min(usable_cpus(), MAX_COMPILERS)
    found = [family.variant(signature, capability) for family, signature in dict.fromkeys(wanted)]
    variants = [variant for variant in found if variant is not None]

    def compile_part(part: list[_Variant]) -> None:
        build_results([variant.result for variant in part], _maker(part), root)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(compile_part, _parts(variants, workers)))
    return len(variants)


def _parts(variants: Iterable[_Variant], workers: int) -> list[list[_Variant]]:
    """What is to be compiled as one source each, by so many workers."""
    joined: dict[tuple[str, ...], dict[str, _Variant]] = {}
    for one in variants:
        joined.setdefault(one.command, {})[one.result.key] = one
    parts: list[list[_Variant]] = []
    for some in map(list, map(dict.values, joined.values())):
        # Each part has a bit of everything, so that all take about equally long.
        count = max(workers, -(-len(some) // MAX_JOINED))
        parts += [some[i::count] for i in range(min(count, len(some)))]
    return parts


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
