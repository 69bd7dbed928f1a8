"""The reference of the object says what the CRD says."""

import subprocess
import sys
from pathlib import Path

import yaml
from scripts.reference import CRD, page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "reference.py"), "--check"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_field_of_the_spec_is_in_it() -> None:
    crd = yaml.safe_load(CRD.read_text())
    text = page(crd)
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]

    def fields(part: dict[str, object]) -> list[str]:
        found = []
        properties = part.get("properties") or {}
        assert isinstance(properties, dict)
        for name, one in properties.items():
            found += [name, *fields(one), *fields(one.get("items") or {})]
        return found

    missing = [name for name in fields(spec) if f"{name}`" not in text and f".{name}\n" not in text]
    assert not missing
