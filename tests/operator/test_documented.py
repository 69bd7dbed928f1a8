"""Every object of the documentation is taken by a real API server, with its rules of several
fields."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.apiserver import ApiServer
from tests.operator.running import install_chart
from tests.unit.test_docs import KUBERNETES, split


def documented(page: Path) -> list[dict[str, Any]]:
    """The objects of a page; of one that shows a part of `spec`, with what is missing."""
    found = []
    _, blocks = split(page.read_text())
    for block in blocks:
        for one in yaml.safe_load_all(block.text) if block.kind == "yaml" else ():
            if set(one) == {"spec"}:
                spec = {"model": {"uri": "hf://Qwen/Qwen3-8B"}, **one["spec"]}
                head = {"apiVersion": "minisglang.io/v1alpha1", "kind": "MiniSGLang"}
                found.append({**head, "metadata": {"name": "part"}, "spec": spec})
            elif one.get("kind") == "MiniSGLang":
                found.append(one)
    return found


@pytest.mark.parametrize("page", [p for p in KUBERNETES if documented(p)], ids=lambda p: p.stem)
def test_the_api_server_takes_every_object_of_a_page(
    api_server: ApiServer, namespace: str, page: Path
) -> None:
    install_chart(api_server)
    api_server.kubectl("wait", "--for=condition=Established", "crd/minisglangs.minisglang.io")
    for one in documented(page):
        api_server.kubectl(
            "create", "--validate=strict", "--dry-run=server", "-n", namespace, "-f", "-",
            stdin=json.dumps(one),
        )  # fmt: skip
