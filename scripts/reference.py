#!/usr/bin/env python3
"""Write docs/reference.md, the reference of the MiniSGLang object, from the CRD's own words.

    python scripts/reference.py            # writes it
    python scripts/reference.py --check    # exit code 1 if it is not up to date

What stands there is what `kubectl explain` prints.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CRD = ROOT / "helm" / "minisglang" / "templates" / "crd.yaml"
PAGE = ROOT / "docs" / "reference.md"

HEAD = """# Reference of the MiniSGLang object

Made from the CRD by `python scripts/reference.py`; `kubectl explain minisglang.spec` prints the
same. `minisglang.io/v1alpha1`, kind `MiniSGLang`, short name `msgl`, namespaced. Subresources:
`status`, and `scale` over `spec.replicas`.
"""
SHARED = {"resources": "Resources", "podTemplate": "Pod template"}
"""Parts that several fields have: told once, in a section of their own."""


def page(crd: dict[str, Any]) -> str:
    """The whole page in Markdown."""
    (version,) = crd["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    shared: dict[str, dict[str, Any]] = {}
    parts = [HEAD, schema["description"], ""]
    for top in ("spec", "status"):
        part = schema["properties"][top]
        parts += [f"## {top}", "", part["description"], "", *_rules(part)]
        parts += _table(part, shared, top=True)
        parts += [line for name, one in _objects(part) for line in _section(top, name, one, shared)]
    for name, title in SHARED.items():
        if name in shared:
            parts += [f"## {title}", "", shared[name]["description"], "", *_rules(shared[name])]
            parts += _table(shared[name], {})
    return "\n".join(parts).rstrip() + "\n"


def _objects(part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, one in part.get("properties", {}).items():
        if name not in SHARED and (_fields(one) or _fields(one.get("items", {}))):
            yield name, one if _fields(one) else {**one["items"], **_words(one)}


def _words(one: dict[str, Any]) -> dict[str, Any]:
    return {"description": one["description"]} if "description" in one else {}


def _fields(one: dict[str, Any]) -> bool:
    return bool(one.get("properties"))


def _section(
    path: str, name: str, one: dict[str, Any], shared: dict[str, dict[str, Any]]
) -> list[str]:
    lines = [f"### {path}.{name}", "", one.get("description", ""), "", *_rules(one)]
    return lines + _table(one, shared)


def _rules(one: dict[str, Any]) -> list[str]:
    rules = [rule["message"] for rule in one.get("x-kubernetes-validations", [])]
    return [*(f"- Refused unless: {rule}." for rule in rules), ""] if rules else []


def _table(
    part: dict[str, Any], shared: dict[str, dict[str, Any]], *, top: bool = False
) -> list[str]:
    rows = list(_rows(part, "", shared, part.get("required", []), top=top))
    if not rows:
        return []
    return ["| field | type | meaning |", "|---|---|---|", *rows, ""]


def _rows(
    part: dict[str, Any],
    prefix: str,
    shared: dict[str, dict[str, Any]],
    required: list[str],
    *,
    top: bool = False,
) -> Iterator[str]:
    """One row a field, those of inner objects too; at the `top` they have sections instead."""
    for name, one in part.get("properties", {}).items():
        if name in SHARED:
            shared.setdefault(name, one)
            link = SHARED[name].lower().replace(" ", "-")
            yield f"| `{prefix}{name}` | object | See [{SHARED[name]}](#{link}). |"
            continue
        words = " ".join(str(one.get("description", "")).split()).replace("|", "\\|")
        needed = " Required." if name in required else ""
        yield f"| `{prefix}{name}` | {_type(one)} | {words}{needed} |"
        inner = one if _fields(one) else one.get("items", {})
        if _fields(inner) and not top:
            yield from _rows(inner, f"{prefix}{name}.", shared, inner.get("required", []))


def _type(one: dict[str, Any]) -> str:
    if one.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "enum" in one:
        return ", ".join(f"`{value}`" for value in one["enum"])
    kind = str(one.get("type", "any"))
    if kind == "array":
        return f"list of {one.get('items', {}).get('type', 'any')}"
    bounds = [str(one[key]) for key in ("minimum", "maximum") if key in one]
    if len(bounds) == 2:
        return f"{kind}, {bounds[0]} to {bounds[1]}"
    return f"{kind}, from {bounds[0]}" if "minimum" in one else kind


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/reference.md from the CRD.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    args = parser.parse_args()
    text = page(yaml.safe_load(CRD.read_text("utf-8")))
    if args.check:
        if PAGE.exists() and PAGE.read_text("utf-8") == text:
            return 0
        print(f"{PAGE} is not up to date: run python scripts/reference.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
