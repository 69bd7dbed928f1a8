"""A child that is to go, and that something in the cluster keeps."""

import json
from collections.abc import Iterator

import pytest

from tests.cluster.apiserver import ApiServer
from tests.cluster.kubectl import KubectlError
from tests.operator.objects import Object
from tests.operator.running import Operator

WORDS = "budgets are the business of team sre"
BUDGET = "PodDisruptionBudget/qwen-gateway"


@pytest.fixture
def qwen(installed: ApiServer, operator: Operator, namespace: str) -> Object:
    """An object with a budget for its gateways, which it is then asked to do without."""
    one = Object(installed.kubectl, namespace)
    one.apply(gateway={"replicas": 2})
    one.wait_children(BUDGET)
    one.wait_observed()
    return one


@pytest.fixture
def policy(installed: ApiServer, namespace: str) -> Iterator[None]:
    """Forbids to delete a budget of the test's namespace."""
    kind = {"apiVersion": "admissionregistration.k8s.io/v1"}
    rule = {"apiGroups": ["policy"], "apiVersions": ["v1"], "operations": ["DELETE"],
            "resources": ["poddisruptionbudgets"]}  # fmt: skip
    where = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    name = f"keep-{namespace}"
    installed.kubectl.apply(
        kind | {
            "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name},
            "spec": {
                "matchConstraints": {"resourceRules": [rule]},
                "validations": [{"expression": "false", "message": WORDS}],
            },
        },
        kind | {
            "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": name},
            "spec": {
                "policyName": name, "validationActions": ["Deny"],
                "matchResources": {"namespaceSelector": where},
            },
        },
    )  # fmt: skip
    yield
    installed.kubectl("delete", f"validatingadmissionpolicybinding/{name}", "--ignore-not-found")
    installed.kubectl("delete", f"validatingadmissionpolicy/{name}")


@pytest.fixture
def enforced(installed: ApiServer, policy: None, qwen: Object) -> None:
    """Returns when the API server has taken the policy up."""

    def refuses() -> bool:
        try:
            qwen.kubectl("delete", BUDGET, "-n", qwen.namespace, "--dry-run=server")
        except KubectlError as error:
            return WORDS in str(error)
        return False

    qwen.wait(refuses)


def told(qwen: Object, words: str) -> bool:
    found = qwen.condition("Degraded")
    return found.get("reason") == "Forbidden" and words in found["message"]


def test_a_deletion_that_is_refused_is_told_in_the_words_of_who_refuses(
    installed: ApiServer, qwen: Object, enforced: None, namespace: str
) -> None:
    qwen.apply(gateway={"replicas": 1})
    qwen.wait(lambda: told(qwen, WORDS))
    message = qwen.condition("Degraded")["message"]
    assert message.startswith("PodDisruptionBudget qwen-gateway cannot be deleted: ")
    installed.kubectl("delete", f"validatingadmissionpolicybinding/keep-{namespace}")
    qwen.wait(lambda: BUDGET not in qwen.children(), 60)
    qwen.wait(lambda: not told(qwen, "cannot be deleted"))


def test_a_finalizer_that_nobody_removes_is_named(installed: ApiServer, qwen: Object) -> None:
    def finalizers(value: list[str] | None) -> None:
        patch = json.dumps({"metadata": {"finalizers": value}})
        qwen.kubectl("patch", BUDGET, "-n", qwen.namespace, "--type=merge", f"--patch={patch}")

    finalizers(["example.com/audit"])
    qwen.apply(gateway={"replicas": 1})
    text = "PodDisruptionBudget qwen-gateway was deleted and stays: nobody removes its finalizer"
    qwen.wait(lambda: told(qwen, f"{text} example.com/audit"), 90)
    finalizers(None)
    qwen.wait(lambda: BUDGET not in qwen.children())
    qwen.wait(lambda: not told(qwen, "was deleted and stays"))
