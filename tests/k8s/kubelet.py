"""A kubelet for tests: every pod of the cluster as local processes on loopback addresses of their own.

Binds pods to its one node, does what a kubelet does with volumes, hooks, probes and stops, and patches statuses so that
the real controllers see a real cluster. There are no images: commands are looked up in the folders of `path`.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from .api import Api, ApiError, Object
from .container import Container, Ending
from .volumes import fill, layout, variables

NODE = "n0"


def now() -> str:
    """The time as API objects write it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def path_of(pod: Object) -> str:
    """The pod's resource path."""
    meta = pod["metadata"]
    return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"


class Pod:
    """One pod from its binding to its removal; runs in a thread of its own."""

    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        self.kubelet, self.pod = kubelet, pod
        self.name: str = pod["metadata"]["name"]
        self.root = kubelet.root / f"{self.name}-{pod['metadata']['uid'][:8]}"
        self.address = kubelet.next_address()
        self.containers: list[Container] = []
        self.deleted = threading.Event()
        self.grace = 30.0
        self._since: dict[str, tuple[bool, str]] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        return bool(self.containers) and all(one.ready for one in self.containers) and not self.deleted.is_set()

    def see(self, pod: Object) -> None:
        """A newer version of the object."""
        if "deletionTimestamp" in pod["metadata"] and not self.deleted.is_set():
            self.grace = float(pod["metadata"].get("deletionGracePeriodSeconds") or 1)
            self.deleted.set()

    def join(self, limit: float) -> None:
        self._thread.join(limit)

    def _live(self) -> None:
        try:
            self._run()
        except ApiError as error:
            self.kubelet.say(f"{self.name}: {error}")
        finally:
            self._end()

    def _run(self) -> None:
        self.root.mkdir(parents=True)
        self.report("Pending")
        while not self.deleted.is_set():
            try:
                fill(
                    self.kubelet.api,
                    self.pod["metadata"]["namespace"],
                    self.pod["spec"],
                    self.root,
                    self.kubelet.claims,
                )
                made = [self._container(spec) for spec in self.pod["spec"]["containers"]]
                first = [self._container(spec) for spec in self.pod["spec"].get("initContainers", [])]
                break
            except LookupError as error:
                self.kubelet.say(f"{self.name}: {error}")
                self.deleted.wait(0.2)
        else:
            return
        for one in first:
            if one.execute(one.spec.get("command", []) + one.spec.get("args", []), 600) != 0:
                self.kubelet.say(f"{self.name}: init container {one.spec['name']} failed, see {one.log}")
                self.report("Failed")
                self.deleted.wait()
                return
        self.containers = made
        for one in made:
            one.start()
        self.report("Running")
        self._watch()

    def _watch(self) -> None:
        forever = self.pod["spec"].get("restartPolicy", "Always") == "Always"
        while not self.deleted.wait(0.05):
            ended = [one for one in self.containers if not one.alive()]
            for one in ended:
                one.ended()
            if not forever and len(ended) == len(self.containers):
                codes = [one.process.returncode for one in ended if one.process is not None]
                self.report("Failed" if any(codes) else "Succeeded")
                self.deleted.wait()
                return
            for one in ended if forever else []:
                one.restarts += 1
                self.kubelet.say(f"{self.name}: {one.spec['name']} ended, start {one.restarts + 1}")
                self.report("Running")
                # A kubelet backs off up to five minutes; tests would only wait.
                if not self.deleted.wait(min(0.2 * 2**one.restarts, 5)):
                    one.start()

    def _end(self) -> None:
        begun = time.monotonic()
        for one in self.containers:
            ending = one.stop(max(self.grace - (time.monotonic() - begun), 0.1))
            self.kubelet.endings.append((self.name, ending))
            self.kubelet.say(f"{self.name}: {one.spec['name']} ended {ending}")
        if self.deleted.is_set():
            self.kubelet.api.delete(path_of(self.pod), uid=self.pod["metadata"]["uid"], grace=0)

    def _container(self, spec: Object) -> Container:
        made = layout(self.pod["spec"], spec, self.root)
        environment = {
            "PATH": os.pathsep.join([*map(str, self.kubelet.path), os.environ["PATH"]]),
            "PYTHONDONTWRITEBYTECODE": "1",
            **self.kubelet.environment,
            **variables(self.kubelet.api, self.pod, spec, self.address, made),
        }
        if self._mounts_account():
            environment["KUBECONFIG"] = str(self.kubelet.kubeconfig(self.pod, self.root))
        return Container(spec, self.address, environment, made, self.root / f"{spec['name']}.log", self._changed)

    def _mounts_account(self) -> bool:
        """Whether the pod would find a token: its own word counts, then its account's."""
        told = self.pod["spec"].get("automountServiceAccountToken")
        return bool(told) if told is not None else False

    def _changed(self) -> None:
        self.report("Running")

    def report(self, phase: str) -> None:
        """Patches the status; a pod that is gone is no error."""
        with self._lock:
            ready = self.ready
            conditions = [
                self._condition(kind, value)
                for kind, value in (
                    ("PodScheduled", True),
                    ("Initialized", phase != "Pending"),
                    ("ContainersReady", ready),
                    ("Ready", ready),
                )
            ]
            status: dict[str, Any] = {
                "phase": phase,
                "hostIP": "127.0.0.1",
                "conditions": conditions,
                "containerStatuses": [self._told(one) for one in self.containers],
            }
            if phase == "Running":
                status |= {
                    "podIP": self.address,
                    "podIPs": [{"ip": self.address}],
                    "startTime": self._since["Initialized"][1],
                }
            try:
                self.kubelet.api.patch_status(path_of(self.pod), status)
            except ApiError as error:
                if error.code != 404:
                    raise

    def _condition(self, kind: str, value: bool) -> Object:
        if self._since.get(kind, (not value, ""))[0] != value:
            self._since[kind] = (value, now())
        return {"type": kind, "status": str(value), "lastTransitionTime": self._since[kind][1]}

    def _told(self, one: Container) -> Object:
        state = {"running": {"startedAt": now()}} if one.alive() else {"waiting": {"reason": "CrashLoopBackOff"}}
        return {
            "name": one.spec["name"],
            "image": one.spec["image"],
            "imageID": one.spec["image"],
            "ready": one.ready,
            "started": one.started,
            "restartCount": one.restarts,
            "state": state,
        }


class Kubelet:
    """The node. `path` are folders with the commands of all images; `environment` is added to every container."""

    def __init__(self, api: Api, root: Path, network: int, path: list[Path], environment: dict[str, str]) -> None:
        self.api, self.root, self.path, self.environment = api, root, path, environment
        self.claims = root / "claims"
        self.endings: list[tuple[str, Ending]] = []
        self.pods: dict[str, Pod] = {}
        self.lines: list[str] = []
        self._network, self._last = network, itertools.count(1)
        self._stop = threading.Event()
        api.create("/api/v1/nodes", {"metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}}})
        api.patch_status(
            f"/api/v1/nodes/{NODE}",
            {
                "capacity": {"cpu": "64", "memory": "256Gi", "pods": "500"},
                "allocatable": {"cpu": "64", "memory": "256Gi", "pods": "500"},
                "conditions": [
                    {"type": "Ready", "status": "True", "lastTransitionTime": now(), "lastHeartbeatTime": now()}
                ],
            },
        )
        self._thread = threading.Thread(target=api.follow, args=("/api/v1/pods", self._see, self._stop), daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        """One line of the log, without repeats."""
        if line not in self.lines[-3:]:
            self.lines.append(line)

    def next_address(self) -> str:
        """An address that no pod has had."""
        return f"127.77.{self._network}.{next(self._last)}"

    def ready(self, **labels: str) -> list[str]:
        """Addresses of the pods with these labels that are Ready and not about to go."""
        return [
            one.address
            for one in list(self.pods.values())
            if one.ready and labels.items() <= one.pod["metadata"].get("labels", {}).items()
        ]

    def kubeconfig(self, pod: Object, root: Path) -> Path:
        """A file with a real token of the pod's service account."""
        namespace, account = pod["metadata"]["namespace"], pod["spec"].get("serviceAccountName", "default")
        asked = {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": {"expirationSeconds": 7200}}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        token = self.api.create(path, asked)["status"]["token"]
        cluster = {"server": self.api.url, "insecure-skip-tls-verify": True}
        file = root / "kubeconfig"
        file.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "pod",
                    "clusters": [{"name": "c", "cluster": cluster}],
                    "users": [{"name": "u", "user": {"token": token}}],
                    "contexts": [{"name": "pod", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
                }
            )
        )
        return file

    def close(self) -> None:
        """Ends every process that is left."""
        self._stop.set()
        for one in list(self.pods.values()):
            one.grace = 0.1
            one.deleted.set()
        for one in list(self.pods.values()):
            one.join(20)
            for container in one.containers:
                if container.alive():
                    container.terminate(0.1)

    def _see(self, kind: str, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        known = self.pods.get(uid)
        if kind == "DELETED":
            if known is not None:
                known.see({"metadata": {"deletionTimestamp": now(), "deletionGracePeriodSeconds": 1}})
                del self.pods[uid]
            return
        if known is not None:
            known.see(pod)
        elif "nodeName" not in pod["spec"]:
            self._bind(pod)
        elif pod["status"].get("phase") in (None, "Pending") and "deletionTimestamp" not in pod["metadata"]:
            self.pods[uid] = Pod(self, pod)

    def _bind(self, pod: Object) -> None:
        binding = {"metadata": {"name": pod["metadata"]["name"]}, "target": {"kind": "Node", "name": NODE}}
        try:
            self.api.create(f"{path_of(pod)}/binding", binding)
        except ApiError as error:
            self.say(f"{pod['metadata']['name']}: {error}")
