"""Every example is taken by a real API server, and makes children that it takes as well."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.apiserver import ApiServer
from tests.operator.running import install_chart

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*/minisglang.yaml"))
FOREIGN = {"ScaledObject"}
"""Kinds of other projects, whose types come from their modules."""


def objects(file: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(file.read_text()) if one]


@pytest.mark.parametrize("file", FILES, ids=[f.parent.name for f in FILES])
def test_the_api_server_takes_an_example_and_drops_no_field_of_it(
    api_server: ApiServer, namespace: str, file: Path, request: pytest.FixtureRequest
) -> None:
    found = objects(file)
    if FOREIGN & {one["kind"] for one in found}:
        request.getfixturevalue("foreign_types")
    install_chart(api_server)
    for one in found:
        # Strict: a field that the schema does not know is an error, not dropped.
        api_server.kubectl(
            "create", "--validate=strict", "--dry-run=server", "-f", "-",
            "-n", one["metadata"].get("namespace", namespace),
            stdin=json.dumps(one),
        )  # fmt: skip


def test_every_example_says_what_it_is_for() -> None:
    folders = [folder for folder in EXAMPLES.iterdir() if folder.is_dir()]
    assert len(folders) >= 8
    for folder in folders:
        assert (folder / "README.md").read_text().startswith("# ")
        assert list(folder.glob("*.yaml"))
