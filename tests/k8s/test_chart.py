"""The chart as helm renders it: lint, examples, refusals, strict schemas, what every pod must have, upgrades."""

from __future__ import annotations

import base64
import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from branchline.engine.config import EngineConfig
from branchline.engine.options import resolve

from .helm import CHART, EXAMPLES, ROOT, VALUES, Helm, pick, pods

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
ALL = [*EXAMPLES, *sorted(VALUES.glob("*.yaml"))]
BIN = ROOT / ".venv" / "bin"


def test_helm_lint_finds_nothing(helm: Helm) -> None:
    for words in [[], *(["-f", str(file)] for file in ALL)]:
        done = helm.run("lint", "--strict", CHART, "--kube-version", "1.37.0", *words)
        assert "0 chart(s) failed" in done.stdout and "[WARNING]" not in done.stdout, done.stdout


def test_the_rendered_manifests_are_current(helm: Helm) -> None:
    done = subprocess.run([ROOT / "scripts/k8s/render.sh", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {one.name for one in (ROOT / "deploy/k8s/manifests").glob("*.yaml")} == {one.name for one in EXAMPLES}


REFUSED = yaml.safe_load((VALUES / "refused.yml").read_text())


@pytest.mark.parametrize("row", REFUSED, ids=[row["words"][:40] for row in REFUSED])
def test_what_cannot_work_is_refused_in_words(helm: Helm, tmp_path: Path, row: dict[str, Any]) -> None:
    assert row["words"] in helm.refusal(row["values"], tmp_path)


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.stem)
def test_every_object_keeps_to_the_strict_schema_of_its_kind(helm: Helm, file: Path) -> None:
    known = 0
    for one in helm.objects("-f", file):
        if "." in one["apiVersion"].split("/")[0] and not one["apiVersion"].split("/")[0].endswith(".k8s.io"):
            continue  # kinds of operators; their own definitions are held to in test_dry_run.py
        if one["kind"] == "HTTPRoute":
            continue
        kubernetes_validate.validate(one, "1.37", strict=True)
        known += 1
    assert known >= 10


def test_the_strict_schema_would_notice(helm: Helm) -> None:
    gateway = pick(helm.objects(), "Deployment", "-gateway")
    gateway["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(gateway, "1.37", strict=True)


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.stem)
def test_every_pod_keeps_to_the_restricted_level_with_a_read_only_root(helm: Helm, file: Path) -> None:
    found = pods(helm.objects("-f", file))
    assert len(found) >= 2
    for name, spec in found.items():
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not any(key in spec for key in ("hostNetwork", "hostPID", "hostIPC")), name
        for one in spec["containers"] + spec.get("initContainers", []):
            context = one["securityContext"]
            assert context["readOnlyRootFilesystem"] is True and context["allowPrivilegeEscalation"] is False, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            assert "memory" in one["resources"]["limits"] and "memory" in one["resources"]["requests"], name
            assert ":" in one["image"].rsplit("/", 1)[-1] or "@" in one["image"], one["image"]
        for volume in spec["volumes"] if "volumes" in spec else []:
            kinds = {"configMap", "secret", "emptyDir", "persistentVolumeClaim", "image"}
            assert set(volume) - {"name"} <= kinds, f"{name}: {volume}"


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.stem)
def test_a_stop_has_time_for_pre_stop_drain_and_margin(helm: Helm, file: Path) -> None:
    objects = helm.objects("-f", file)
    configs = {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "ConfigMap"}
    for one in objects:
        if one["kind"] not in ("Deployment", "StatefulSet"):
            continue
        spec = one["spec"]["template"]["spec"]
        container = spec["containers"][0]
        texts = configs[next(v["configMap"]["name"] for v in spec["volumes"] if v["name"] == "config")]
        options = tomllib.loads(next(text for name, text in texts.items() if name.endswith(".toml")))
        drain = options.get("drain-timeout", options.get("drain_timeout"))
        seconds = float(str(drain).removesuffix("s"))
        sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert spec["terminationGracePeriodSeconds"] >= sleep + seconds + 5, one["metadata"]["name"]
        ready, live = container["readinessProbe"], container["livenessProbe"]
        assert ready["periodSeconds"] * ready["failureThreshold"] < live["periodSeconds"] * live["failureThreshold"]
        if "httpGet" in ready:
            assert (ready["httpGet"]["path"], live["httpGet"]["path"]) == ("/readiness", "/liveness")


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.stem)
def test_the_router_takes_the_file_that_is_rendered_for_it(helm: Helm, file: Path, tmp_path: Path) -> None:
    text = pick(helm.objects("-f", file), "ConfigMap", "-gateway")["data"]["router.toml"]
    keys = tmp_path / "keys"
    keys.write_text("admin secret\n")
    options = tomllib.loads(text.replace("/etc/branchline/keys/keys", str(keys)))
    config = tmp_path / "router.toml"
    # Files of the pod are not here. One fault of ours shows that all the rest was read: faults are told all at once.
    options = {name: value for name, value in options.items() if not name.startswith("tls-")}
    options["queue-timeout"] = "soon"
    config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items()))
    done = subprocess.run([BIN / "branchline-router", "--config", config], capture_output=True, text=True, timeout=60)
    faults = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 2 and len(faults) <= 2 and "'soon' is not a duration" in done.stderr, done.stderr


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.stem)
def test_engines_take_the_files_that_are_rendered_for_them(helm: Helm, file: Path, tmp_path: Path) -> None:
    objects = helm.objects("-f", file)
    texts = [
        one["data"]["engine.toml"] for one in objects if one["kind"] == "ConfigMap" and "engine.toml" in one["data"]
    ]
    assert texts
    for text in texts:
        config = tmp_path / "engine.toml"
        config.write_text(text)
        made = resolve(EngineConfig, flags={"model": "m", "token": "t"}, file=str(config))
        assert isinstance(made, EngineConfig) and (made.port, made.metrics_port) == (9000, 9090)


def test_gateways_may_see_pods_of_their_namespace_and_nothing_else(helm: Helm) -> None:
    if "kubernetes" not in SCHEMA["properties"]["discovery"]["properties"]["kind"]["enum"]:
        pytest.skip("this router can't ask Kubernetes")
    objects = helm.objects("--set", "discovery.kind=kubernetes")
    rules = pick(objects, "Role")["rules"]
    assert rules == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    assert not [one for one in objects if one["kind"].startswith("ClusterRole")]
    mounts = {name: spec.get("automountServiceAccountToken") for name, spec in pods(objects).items()}
    assert [name for name, mounted in mounts.items() if mounted is not False] == ["Deployment/rel-branchline-gateway"]
    options = tomllib.loads(pick(objects, "ConfigMap", "-gateway")["data"]["router.toml"])
    labels = pick(objects, "Deployment", "-default")["spec"]["template"]["metadata"]["labels"]
    assert options["service-discovery"] is True and options["service-discovery-namespace"] == "gw"
    assert all(labels[pair.split("=")[0]] == pair.split("=")[1] for pair in options["selector"])


def test_gateways_without_discovery_have_no_token_and_no_role(helm: Helm) -> None:
    objects = helm.objects()
    assert not [one for one in objects if one["kind"] in ("Role", "RoleBinding")]
    assert all(spec["automountServiceAccountToken"] is False for spec in pods(objects).values())


def test_no_secret_is_in_arguments_or_config(helm: Helm) -> None:
    objects = helm.objects()
    drawn = [value for one in objects if one["kind"] == "Secret" for value in one["data"].values()]
    assert len(drawn) == 2
    text = json.dumps([one for one in objects if one["kind"] != "Secret"])
    for value in drawn:
        word = base64.b64decode(value).decode().split()[-1]
        assert len(word) == 40 and word not in text


def test_pools_of_prefill_and_decode_get_their_roles(helm: Helm) -> None:
    objects = helm.objects("-f", ROOT / "deploy/k8s/examples/prefill-decode.yaml")
    for role in ("prefill", "decode"):
        options = tomllib.loads(pick(objects, "ConfigMap", f"-{role}")["data"]["engine.toml"])
        made = pick(objects, "Deployment", f"-{role}")
        assert options["role"] == made["spec"]["template"]["metadata"]["labels"]["branchline.dev/role"] == role
        assert made["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
        policy = pick(objects, "NetworkPolicy", "-engine")["spec"]["ingress"][0]
        assert len(policy["from"]) == 2, "decode engines must reach prefill engines"


def test_a_new_option_rolls_the_pods_and_the_same_ones_do_not(helm: Helm) -> None:
    def annotation(*words: str) -> str:
        made = pick(helm.objects(*words), "Deployment", "-gateway")
        found: str = made["spec"]["template"]["metadata"]["annotations"]["branchline.dev/options"]
        return found

    again = ("--set", "gateway.replicas=3")
    assert annotation() == annotation(*again)
    assert annotation() != annotation("--set", "gateway.options.policy=random")


def test_everything_holds_each_optional_part(helm: Helm) -> None:
    objects = helm.objects("-f", VALUES / "everything.yaml")
    kinds = {one["kind"] for one in objects}
    assert kinds >= {
        "HorizontalPodAutoscaler", "PodDisruptionBudget", "Ingress", "HTTPRoute", "ServiceMonitor", "PrometheusRule",
        "StatefulSet", "PersistentVolumeClaim", "NetworkPolicy", "Job", "ConfigMap", "ServiceAccount",
    }  # fmt: skip
    board = json.loads(pick(objects, "ConfigMap", "-dashboard")["data"]["branchline.json"])
    assert board["panels"]
    deployment = pick(objects, "Deployment", "-gateway")
    assert "replicas" not in deployment["spec"], "the autoscaler has the word"
    start = deployment["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["postStart"]["exec"]["command"]
    assert "/etc/branchline/wasm/load.sh" in start[-1]
    script = pick(objects, "ConfigMap", "-wasm")["data"]["load.sh"]
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0
    assert "push \"$host\" '/modules/gate.wasm' 'gate' '{\"order\":5}'" in script


def test_the_values_of_the_first_release_still_render_the_same_names(helm: Helm) -> None:
    file = VALUES / "released-0.1.0.yaml"
    objects = helm.objects("-f", file)
    named = sorted(f"{one['kind']}/{one['metadata']['name']}" for one in objects)
    # What a later chart renamed would be deleted and made anew by an upgrade, with its claims and addresses.
    frozen = yaml.safe_load((VALUES / "released-0.1.0.names.json").read_text())
    assert set(frozen) <= set(named), set(frozen) - set(named)
    workloads = [one for one in objects if one["kind"] in ("Deployment", "StatefulSet")]
    chart = {"app.kubernetes.io/name": "branchline", "app.kubernetes.io/instance": "rel"}
    assert {one["metadata"]["name"]: one["spec"]["selector"]["matchLabels"] for one in workloads} == {
        "llm-gateway": {**chart, "app.kubernetes.io/component": "gateway"},
        "llm-main": {**chart, "app.kubernetes.io/component": "engine", "branchline.dev/pool": "main"},
    }, "selectors of workloads can't be changed by an upgrade"
