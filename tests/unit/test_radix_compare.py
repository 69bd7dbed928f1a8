"""The radix key compare against its reference, and the helper that compiles it."""

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_kernels import build, radix
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.radix import common_prefix_len_reference, compare_function
from tests.unit.sanitizer import needs_compiler, run_sanitized


@pytest.fixture(scope="module", params=["compiled", "reference"])
def compare(request):
    if request.param == "reference":
        return common_prefix_len_reference
    try:
        return build.extension("radix_compare").common_prefix_len
    except KernelUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache of its own and no memory of earlier builds."""
    monkeypatch.setenv(build.CACHE_ENV, str(tmp_path / "cache"))
    for cached in (compare_function, build._temporary_root, build.version):
        cached.cache_clear()
    yield tmp_path / "cache"
    compare_function.cache_clear()
    build._temporary_root.cache_clear()


@pytest.fixture
def answer(tmp_path):
    """A folder of sources with one library, whose function `answer` returns 42."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.cpp").write_text('extern "C" int answer() { return 42; }')
    return folder


@given(
    shared=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=300),
    rest=st.tuples(st.lists(st.integers(-3, 3), max_size=40), st.lists(st.integers(), max_size=0)),
    other=st.lists(st.integers(-3, 3), max_size=40),
    offsets=st.tuples(st.integers(0, 7), st.integers(0, 7)),
)
def test_it_agrees_with_the_reference_for_any_content_and_alignment(
    compare, shared, rest, other, offsets
):
    a = np.array([0] * offsets[0] + shared + rest[0], np.int32)[offsets[0] :]
    b = np.array([0] * offsets[1] + shared + other, np.int32)[offsets[1] :]
    expected = next(
        (i for i, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=False)) if x != y),
        min(len(a), len(b)),
    )
    assert compare(a, b) == compare(b, a) == common_prefix_len_reference(a, b) == expected


def test_it_finds_the_first_difference_at_every_place_of_every_length_up_to_4096(compare):
    base = np.arange(4096, dtype=np.int32)
    for n in [*range(70), 127, 128, 129, 1000, 4095, 4096]:
        a = base[:n].copy()
        assert compare(a, base) == n
        for at in {0, 1, 31, 32, 33, n // 2, n - 2, n - 1} & set(range(n)):
            a[at] ^= -(2**31)
            a[n - 1] ^= 1
            assert compare(a, base) == at
            a[at] ^= -(2**31)
            a[n - 1] ^= 1


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(4, np.int64),
        np.zeros(4, np.uint32),
        np.zeros(4, np.float32),
        np.zeros(4, ">i4"),
        np.zeros((2, 2), np.int32),
        np.zeros(8, np.int32)[::2],
        np.int32(7),
        [1, 2],
        None,
    ],
    ids=repr,
)
def test_anything_but_contiguous_one_dimensional_int32_is_a_type_error(compare, wrong):
    right = np.zeros(4, np.int32)
    for pair in ((wrong, right), (right, wrong)):
        with pytest.raises(TypeError, match="int32"):
            compare(*pair)


def test_read_only_ids_as_they_come_from_a_message_are_accepted(compare):
    ids = np.frombuffer(np.arange(100, dtype="<i4").tobytes(), "<i4")
    assert compare(ids, ids[:60]) == 60


def test_a_refused_argument_does_not_keep_the_other_one_locked(compare):
    held = bytearray(np.arange(4, dtype=np.int32).tobytes())
    ids = np.frombuffer(held, np.int32)
    with pytest.raises(TypeError):
        compare(ids, None)
    del ids
    held.extend(b"more")  # BufferError while somebody still holds the buffer


@needs_compiler
def test_it_reads_nothing_outside_of_its_arrays(tmp_path):
    program = """
        #include <vector>
        #include "radix_compare.h"
        int main() {
          for (int n = 0; n < 200; ++n) {
            std::vector<std::int32_t> a(n, 7), b(n, 7);  // on the heap, without slack
            if (minisgl::common_prefix_len(a.data(), b.data(), n) != n) return 1;
          }
        }"""
    run_sanitized(program, tmp_path)


def test_without_a_kernel_the_reference_is_used_with_one_warning(fresh, monkeypatch, caplog):
    monkeypatch.setenv(build.DISABLE_ENV, "1")
    ids = np.arange(10, dtype=np.int32)
    with caplog.at_level(logging.WARNING):
        assert [radix.common_prefix_len(ids, ids[:n]) for n in (3, 10, 0)] == [3, 10, 0]
    assert compare_function() is common_prefix_len_reference
    assert [r.message for r in caplog.records if "switched off" in r.message] == [
        "radix key compare runs in numpy, because the C++ one is missing: "
        "kernels are switched off by MINISGL_DISABLE_KERNELS=1"
    ]


@needs_compiler
def test_a_source_is_compiled_once_and_again_when_it_its_headers_or_the_flags_change(fresh, answer):
    def files():
        return {path: path.stat().st_mtime_ns for path in fresh.rglob("*.so")}

    assert build.library("answer", csrc=answer).answer() == 42
    first = files()
    assert len(first) == 1
    build.library("answer", csrc=answer)
    assert files() == first
    (answer / "number.h").write_text("#define NUMBER 7\n")
    build.library("answer", csrc=answer)
    assert len(files()) == 2
    build.library("answer", ["-O0"], csrc=answer)
    assert len(files()) == 3
    (answer / "answer.cpp").write_text(
        '#include "number.h"\nextern "C" int answer() { return NUMBER; }'
    )
    assert build.library("answer", csrc=answer).answer() == 7
    assert not [path for path in fresh.rglob("*") if path.suffix == ".tmp"]


@needs_compiler
def test_processes_that_build_at_the_same_time_compile_once(fresh, answer, tmp_path):
    log = tmp_path / "compiled"
    wrapper = tmp_path / "cxx"
    real = build.compiler()[0]
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *-shared*) echo x >> {log};; esac\nexec {real} "$@"\n'
    )
    wrapper.chmod(0o755)
    code = (
        "import sys, pathlib; from minisgl_kernels import build;"
        "print(build.library('answer', csrc=pathlib.Path(sys.argv[1])).answer())"
    )
    env = {**os.environ, "CXX": str(wrapper), "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(answer)], env=env, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    assert [process.communicate(timeout=60)[0].strip() for process in running] == ["42"] * 3
    assert log.read_text().splitlines() == ["x"]


@needs_compiler
def test_a_compiler_error_is_told_by_its_first_line(fresh, answer):
    (answer / "answer.cpp").write_text("int f() {\n  return nothing_of_that_name;\n}")
    with pytest.raises(KernelUnavailable, match=r"answer\.cpp:2.*nothing_of_that_name") as caught:
        build.library("answer", csrc=answer)
    assert "\n" not in str(caught.value)


def test_a_machine_without_a_compiler_is_told_what_to_install(fresh, answer, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(KernelUnavailable, match="install g"):
        build.library("answer", csrc=answer)
    monkeypatch.setenv("CXX", "my-compiler -x")
    with pytest.raises(KernelUnavailable, match="CXX=my-compiler -x is not on the path"):
        build.library("answer", csrc=answer)


def test_a_source_that_is_missing_is_named(fresh, tmp_path):
    with pytest.raises(KernelUnavailable, match=r"nosuch\.cpp: No such file"):
        build.library("nosuch", csrc=tmp_path)


@needs_compiler
@pytest.mark.parametrize("blocked", ["a file in its place", "read-only"])
def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_one(
    fresh, answer, monkeypatch, blocked
):
    if blocked == "read-only":
        fresh.mkdir()
        fresh.chmod(stat.S_IRUSR | stat.S_IXUSR)
        monkeypatch.setenv(build.CACHE_ENV, "/proc/minisgl" if _root(fresh) else str(fresh))
    else:
        fresh.write_text("not a directory")
    assert build.library("answer", csrc=answer).answer() == 42
    assert list(build._temporary_root().rglob("answer.so"))


def _root(folder: Path) -> bool:
    """Whether permissions do not bind this user."""
    try:
        (folder / "probe").touch()
    except OSError:
        return False
    return True


@needs_compiler
def test_a_kept_file_that_is_broken_is_compiled_again(fresh, answer):
    source, key = answer / "answer.cpp", []
    build._load(source, (), lambda path: key.append(path.parent.name))
    kept = fresh / key[0] / "answer.so"
    kept.write_bytes(b"\x7fELF cut short")
    assert build.library("answer", [], csrc=answer).answer() == 42
    assert not kept.exists()
    assert build.library("answer", [], csrc=answer).answer() == 42
    assert kept.read_bytes()[:14] != b"\x7fELF cut short"[:14]


def test_the_cache_lies_in_the_users_cache_directory_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv(build.CACHE_ENV, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_root() == tmp_path / "minisglang" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.cache_root() == tmp_path / ".cache" / "minisglang" / "kernels"
