"""An operator on a cluster that lacks what it needs says so in one sentence, and ends."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.apiserver import ApiServer
from tests.operator.running import (
    ACCOUNT,
    RELEASE_NAMESPACE,
    Operator,
    install_chart,
    requests_of_operator,
)
from tests.support import wait_until

USER = f"system:serviceaccount:{RELEASE_NAMESPACE}:{ACCOUNT}"


@pytest.fixture(scope="module")
def api_server(own_api_server: ApiServer) -> ApiServer:
    """In place of the one that tests share, whose CRD and rights must stay."""
    return own_api_server


@pytest.fixture
def api(api_server: ApiServer) -> ApiServer:
    """With the chart as it should be."""
    install_chart(api_server)
    return api_server


def last_words(api: ApiServer, folder: Path) -> str:
    """What an operator says last that ends with exit code 3, and shows no traceback before."""
    operator = Operator(api, folder)
    operator.start(acts=False)
    try:
        wait_until(lambda: operator.ended() is not None, 90, operator.log)
    finally:
        operator.kill()
    log = operator.log()
    assert operator.ended() == 3, log
    assert "Traceback" not in log
    return log.splitlines()[-1].partition(" msg=")[2].strip('"').replace('\\"', '"')


def change_rules(
    api: ApiServer, kind: str, name: str, *where: str, without: str, verbs: Sequence[str] = ()
) -> None:
    """Give the rule of a resource other verbs, or (without any) take it away."""
    rules: list[dict[str, Any]] = []
    role = api.kubectl.get(kind, name, *where)
    for rule in role["rules"]:
        rest = [one for one in rule["resources"] if one != without]
        if rest:
            rules.append({**rule, "resources": rest})
        if without in rule["resources"] and verbs:
            rules.append({**rule, "resources": [without], "verbs": list(verbs)})
    api.kubectl(
        # As helm, or its next upgrade would be a conflict.
        "apply", "--server-side", "--force-conflicts", "--field-manager=helm", "--filename=-",
        stdin=json.dumps({
            "apiVersion": role["apiVersion"], "kind": role["kind"],
            "metadata": {k: role["metadata"].get(k) for k in ("name", "namespace", "labels")},
            "rules": rules,
        }),
    )  # fmt: skip


def test_without_the_crd_it_says_how_to_install_it(api: ApiServer, tmp_path: Path) -> None:
    api.kubectl("delete", "crd", "minisglangs.minisglang.io")
    assert last_words(api, tmp_path).endswith(
        "the CustomResourceDefinition minisglangs.minisglang.io is not installed: "
        "`helm upgrade --install` of the chart applies it"
    )


def test_without_rights_it_names_every_rule_that_its_role_lacks(
    api: ApiServer, tmp_path: Path
) -> None:
    change_rules(api, "clusterrole", ACCOUNT, without="pods")
    change_rules(api, "clusterrole", ACCOUNT, without="statefulsets", verbs=["get"])
    said = last_words(api, tmp_path)
    assert said.endswith(
        f"{USER} lacks rights: bind it to a ClusterRole with "
        '{apiGroups: [""], resources: [pods], verbs: [list, watch]}, '
        '{apiGroups: ["apps"], resources: [statefulsets], verbs: [list, watch]} '
        "(`helm upgrade` with rbac.create=true does so)"
    )


def test_without_a_right_to_watch_objects_it_names_that(api: ApiServer, tmp_path: Path) -> None:
    change_rules(api, "clusterrole", ACCOUNT, without="minisglangs", verbs=["list"])
    rule = '{apiGroups: ["minisglang.io"], resources: [minisglangs], verbs: [watch]}'
    assert rule in last_words(api, tmp_path)


def test_without_a_right_to_its_lease_it_names_the_role_of_its_namespace(
    api: ApiServer, tmp_path: Path
) -> None:
    role, where = f"{ACCOUNT}-lease", ("-n", RELEASE_NAMESPACE)
    change_rules(api, "role", role, *where, without="leases")
    rule = '{apiGroups: ["coordination.k8s.io"], resources: [leases], verbs: [get]}'
    said = last_words(api, tmp_path)
    assert f"a Role in namespace {RELEASE_NAMESPACE} with {rule}" in said


def test_rights_that_come_a_moment_late_are_waited_for(api: ApiServer, tmp_path: Path) -> None:
    """As of an install, where no right is known at once to all of the API server."""
    change_rules(api, "clusterrole", ACCOUNT, without="pods")
    operator = Operator(api, tmp_path)
    operator.start(acts=False)
    try:
        refused = len([one for one in requests_of_operator(api) if one.code == 403])
        wait_until(
            lambda: len([one for one in requests_of_operator(api) if one.code == 403]) > refused,
            60, operator.log,
        )  # fmt: skip
        install_chart(api)
        wait_until(operator.acts, 60, operator.log)
    finally:
        operator.stop()
