"""How nvcc is called, and the sources that join several variants of kernels."""

import itertools
import os
import re
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from minisgl.config import env_switch
from minisgl_kernels.build import KernelUnavailable

DISABLE_PDL_ENV = "MINISGL_DISABLE_PDL"
"""Set to 1, kernels start after the one before has ended, not while it ends."""


def joined_text(variants: Sequence[tuple[Path, Mapping[str, str | int], str]]) -> str:
    """One source of several variants, each with its macros and what its functions' names end in.

    Headers are read once, and so must not depend on the macros.
    """
    texts = [variant_text(*variant) for variant in variants]
    if len(texts) == 1:
        return texts[0]
    sources = dict.fromkeys(source for source, _, _ in variants)
    found = (re.findall(r"^#include.*", one.read_text("utf-8"), re.MULTILINE) for one in sources)
    includes = dict.fromkeys(itertools.chain.from_iterable(found))
    spaces = [f"namespace v{i} {{\n{text}}}\n" for i, text in enumerate(texts)]
    return "".join([*(f"{line}\n" for line in includes), *spaces])


def variant_text(source: Path, macros: Mapping[str, str | int], key: str) -> str:
    """A source with its macros, which are gone behind it."""
    return "".join((
        f"#undef EXPORT_SUFFIX\n#define EXPORT_SUFFIX _{key}\n",
        *(f"#define {name} {value}\n" for name, value in macros.items()),
        f'#include "{source.name}"\n',
        *(f"#undef {name}\n" for name in macros),
    ))  # fmt: skip


def nvcc_command(capability: tuple[int, int], flags: Sequence[str] = ()) -> tuple[str, ...]:
    """The command that makes a library for one GPU; a source and an output are to follow."""
    from tvm_ffi.libinfo import find_include_path, find_libtvm_ffi

    nvcc = find_nvcc()
    # Instructions of Hopper alone (9.0a) are asked for there; elsewhere there are none like it.
    arch = f"{capability[0]}{capability[1]}" + ("a" if capability[0] >= 9 else "")
    library = Path(find_libtvm_ffi())
    return (
        # Without a device link: each kernel is whole, and five processes fewer start.
        str(nvcc), "-shared", "-nodlink", "-std=c++17", "-O3",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        *flags,
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
