#!/usr/bin/env python3
"""Print what an image of one role installs beside the wheel, which goes in with `--no-deps`.

    python scripts/requirements.py gateway redis | pip install -c constraints/cpu.txt -r /dev/stdin

Each name is an extra of pyproject.toml. Extras that include others are resolved. Exit code 2 for
an extra that does not exist.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
_SELF = re.compile(r"minisglang\[([^\]]+)\]")


def requirements(extras: dict[str, list[str]], names: list[str]) -> list[str]:
    """The requirements of these extras, sorted, each once. `KeyError` for an unknown extra."""
    found: set[str] = set()
    for name in names:
        for requirement in extras[name]:
            nested = _SELF.fullmatch(requirement)
            if nested:
                found.update(requirements(extras, [n.strip() for n in nested[1].split(",")]))
            else:
                found.add(requirement)
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Print the requirements of extras of pyproject.toml, one a line."
    )
    parser.add_argument("extra", nargs="+", help="a role or an addition, such as gateway or redis")
    args = parser.parse_args()
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    unknown = [name for name in args.extra if name not in extras]
    if unknown:
        print(f"no extra {unknown[0]!r}; there are: {', '.join(sorted(extras))}", file=sys.stderr)
        return 2
    print("\n".join(requirements(extras, args.extra)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
