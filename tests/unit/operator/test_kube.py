"""What is sent to the API server."""

import json

import pytest
import yaml

from minisgl_operator.kube import yaml_of

ODD = [
    "plain", "\U0001f917 Transformers", "\x00\x07\x1b[31m\x7f", "\x85\u2028\u2029",
    "\ufeff\ufffe\uffff", "a\r\n\tb", "\\ud83d\\ude80", '"quoted" \\', "模型", "\U0010ffff",
    "${x} #: - {}",
]  # fmt: skip


@pytest.mark.parametrize("text", ODD)
def test_any_text_is_the_same_as_json_and_as_yaml(text: str) -> None:
    sent = yaml_of({"a": text, text: ["b", 1, None, True]})
    assert json.loads(sent) == yaml.safe_load(sent) == {"a": text, text: ["b", 1, None, True]}
    # The server's reader knows no pairs of surrogates.
    assert b"\\ud" not in sent.replace(b"\\\\", b"")


def test_what_is_no_text_at_all_is_replaced() -> None:
    assert json.loads(yaml_of({"a": "x\ud83dy"})) == {"a": "x\ufffdy"}
