"""Who writes to the API server."""

import ast
from pathlib import Path

import minisgl_operator

SOURCES = Path(minisgl_operator.__file__).parent


def test_h53_one_module_writes_children_and_statuses() -> None:
    writers = set()
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of_the_api = ast.unparse(node.func.value).endswith("kube")
            if of_the_api and node.func.attr in ("apply", "create", "delete"):
                writers.add(file.name)
    assert writers == {"reconcile.py"}
