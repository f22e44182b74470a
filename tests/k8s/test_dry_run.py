"""Every rendered manifest against a real API server that enforces Pod Security `restricted`: a server-side dry run.

Kinds of operators that are not here (monitoring) are taken by the smallest definitions that hold anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.stack import wait_until

from .cluster import TOKEN, Cluster, missing

Object = dict[str, Any]
MANIFESTS = sorted((Path(__file__).resolve().parents[2] / "deploy" / "k8s" / "manifests").glob("*.yaml"))
pytestmark = pytest.mark.timeout(400)
MONITORING = "monitoring.coreos.com"
PATHS = {
    "Deployment": "apis/apps/v1/{}/deployments",
    "StatefulSet": "apis/apps/v1/{}/statefulsets",
    "NetworkPolicy": "apis/networking.k8s.io/v1/{}/networkpolicies",
    "PodDisruptionBudget": "apis/policy/v1/{}/poddisruptionbudgets",
    "HorizontalPodAutoscaler": "apis/autoscaling/v2/{}/horizontalpodautoscalers",
    "ConfigMap": "api/v1/{}/configmaps",
    "Secret": "api/v1/{}/secrets",
    "Service": "api/v1/{}/services",
    "ServiceAccount": "api/v1/{}/serviceaccounts",
    "PersistentVolumeClaim": "api/v1/{}/persistentvolumeclaims",
    "Role": "apis/rbac.authorization.k8s.io/v1/{}/roles",
    "RoleBinding": "apis/rbac.authorization.k8s.io/v1/{}/rolebindings",
    "Job": "apis/batch/v1/{}/jobs",
    "ServiceMonitor": f"apis/{MONITORING}/v1/{{}}/servicemonitors",
    "PrometheusRule": f"apis/{MONITORING}/v1/{{}}/prometheusrules",
}


def definition(kind: str) -> Object:
    """The smallest definition of a kind of the monitoring operator's."""
    plural = f"{kind.lower()}s"
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    spec = {"group": MONITORING, "scope": "Namespaced", "names": names, "versions": [version]}
    return {"metadata": {"name": f"{plural}.{MONITORING}"}, "spec": spec}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An API server with a restricted namespace `gw`."""
    lacking = missing("kube-apiserver")
    if lacking:
        pytest.skip(lacking)
    cluster = Cluster(tmp_path_factory.mktemp("dry-run"))
    try:
        cluster.namespace("gw")
        for kind in ("ServiceMonitor", "PrometheusRule"):
            cluster.api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition(kind))
            path = f"/{PATHS[kind].format('namespaces/gw')}"
            wait_until(lambda path=path: cluster.api.find(path) is not None, 60, f"{kind} is served")  # type: ignore[misc]
        yield cluster
    finally:
        cluster.close()


def tried(cluster: Cluster, found: Object) -> tuple[int, str, list[str]]:
    """Status, answer and warnings of a creation that only pretends."""
    path = f"{cluster.url}/{PATHS[found['kind']].format('namespaces/gw')}"
    answer = httpx.post(
        path,
        params={"dryRun": "All", "fieldValidation": "Strict"},
        content=json.dumps(found),
        headers={"authorization": f"Bearer {TOKEN}", "content-type": "application/json"},
        verify=False,
        timeout=60,
    )
    return answer.status_code, answer.text, answer.headers.get_list("warning")


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_taken_whole_and_violate_no_policy(cluster: Cluster, path: Path) -> None:
    objects = [one for one in yaml.safe_load_all(path.read_text()) if one]
    assert len(objects) > 5
    for found in objects:
        status, text, warnings = tried(cluster, found)
        name = f"{found['kind']} {found['metadata']['name']}"
        assert status == 201, f"{name}: {text}"
        assert warnings == [], f"{name}: {warnings}"


def test_a_pod_that_is_not_restricted_is_seen(cluster: Cluster) -> None:
    spec: Object = {"containers": [{"name": "c", "image": "i"}]}
    pods = {"metadata": {"labels": {"a": "b"}}, "spec": spec}
    found: Object = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d"},
        "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": pods},
    }
    status, _, warnings = tried(cluster, found)
    assert status == 201 and any("would violate PodSecurity" in warning for warning in warnings)
    status, text, _ = tried(cluster, {**found, "spec": {**found["spec"], "colour": "red"}})
    assert status == 400 and "colour" in text, "an unknown field is refused"
