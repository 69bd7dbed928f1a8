#!/usr/bin/env python3
"""Print the lines of the source by part, without tests.

Code is what is left without blank lines and lines that are only a comment; docstrings count.
"""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMENTS = {
    ".py": "#", ".sh": "#", ".yaml": "#", ".tpl": "#", ".cu": "//", ".cuh": "//", ".cpp": "//",
    ".h": "//", ".hpp": "//",
}  # fmt: skip
PARTS = ("services/minisgl", "kernels/minisgl_kernels", "operator/minisgl_operator")
FLAT = ("helm", "scripts", "examples")


def lines(path: Path) -> tuple[int, int]:
    """Lines in all, and lines of code."""
    mark = COMMENTS[path.suffix]
    stripped = [line.strip() for line in path.read_text().splitlines()]
    return len(stripped), sum(1 for line in stripped if line and not line.startswith(mark))


def main() -> int:
    total: Counter[str] = Counter()
    code: Counter[str] = Counter()
    for top in (*PARTS, *FLAT):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix not in COMMENTS or not path.is_file():
                continue
            inside = path.relative_to(ROOT / top).parts
            name = Path(top).name if top in PARTS else top
            part = f"{name}/{inside[0]}" if top in PARTS and len(inside) > 1 else name
            all_lines, code_lines = lines(path)
            total[part] += all_lines
            code[part] += code_lines
    print(f"{'part':<36}{'lines':>8}{'code':>8}")
    for part in sorted(total):
        print(f"{part:<36}{total[part]:>8}{code[part]:>8}")
    print(f"{'all':<36}{total.total():>8}{code.total():>8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
