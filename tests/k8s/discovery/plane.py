"""A cluster whose API server can be killed, with a door before it that can be shut or made silent; pods by hand.

Owns no controller and no kubelet: what a pod is, its test says.
"""

from __future__ import annotations

import select
import signal
import socket
import threading
from pathlib import Path
from typing import Any

from tests.e2e.stack import Process, wait_until
from tests.k8s.cluster import Cluster

from .fake import kubeconfig

Object = dict[str, Any]


class Plane(Cluster):
    """The control plane of discovery's tests."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._spaces = 0

    def restart(self) -> None:
        """Kills the API server as a crash would, and starts it again."""
        self.processes[1].stop(signal.SIGKILL)
        self.processes[1] = Process(self.processes[1].command)
        wait_until(self._ready, 180, "kube-apiserver is back")

    def space(self) -> Space:
        """A namespace of its own for a test."""
        self._spaces += 1
        name = f"disc-{self._spaces}"
        self.api.create("/api/v1/namespaces", {"metadata": {"name": name}})
        return Space(self, name)


class Space:
    """Pods of one namespace."""

    def __init__(self, plane: Plane, name: str) -> None:
        self.plane, self.name = plane, name
        self.pods = f"/api/v1/namespaces/{name}/pods"

    def create(self, name: str, labels: Object | None = None, annotations: Object | None = None) -> str:
        """A pod that no kubelet has seen yet; its uid."""
        meta = {"name": name, "labels": labels or {"app": "worker"}, "annotations": annotations or {}}
        spec = {"nodeName": "n0", "containers": [{"name": "c", "image": "none"}]}
        created = self.plane.api.create(self.pods, {"metadata": meta, "spec": spec})
        uid: str = created["metadata"]["uid"]
        return uid

    def status(self, name: str, ip: str, ready: bool = True, phase: str = "Running") -> None:
        """What a kubelet would tell of it."""
        # Null takes a field away; an empty list would be merged with what is there.
        ips = [{"ip": ip}] if ip else None
        condition = {"type": "Ready", "status": str(ready)}
        self.plane.api.patch_status(
            f"{self.pods}/{name}", {"phase": phase, "podIP": ip or None, "podIPs": ips, "conditions": [condition]}
        )

    def run(self, name: str, ip: str, labels: Object | None = None, annotations: Object | None = None) -> str:
        """A pod that is ready; its uid."""
        uid = self.create(name, labels, annotations)
        self.status(name, ip)
        return uid

    def delete(self, name: str, grace: int = 0) -> None:
        """Deletes a pod; with a grace it stays, leaving, until it is deleted without one."""
        self.plane.api.delete(f"{self.pods}/{name}", grace=grace)

    def token(self) -> str:
        """A token of a service account that nothing is granted to yet."""
        accounts = f"/api/v1/namespaces/{self.name}/serviceaccounts"
        self.plane.api.create(accounts, {"metadata": {"name": "router"}})
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        told: str = self.plane.api.create(f"{accounts}/router/token", asked)["status"]["token"]
        return told

    def grant(self, *verbs: str) -> None:
        """Lets the service account do this with pods."""
        group = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.name}"
        rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": list(verbs)}]
        self.plane.api.create(f"{group}/roles", {"metadata": {"name": "router"}, "rules": rules})
        ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "router"}
        subject = {"kind": "ServiceAccount", "name": "router", "namespace": self.name}
        binding = {"metadata": {"name": "router"}, "roleRef": ref, "subjects": [subject]}
        self.plane.api.create(f"{group}/rolebindings", binding)

    def kubeconfig(self, folder: Path, token: str, server: str = "") -> Path:
        """A kubeconfig that checks the server's certificate."""
        authority = self.plane.folder / "certs" / "apiserver.crt"
        return kubeconfig(folder / "kubeconfig", server or self.plane.url, token, authority)


class Door:
    """A TCP door before the API server: open, shut (all connections end, new ones are refused) or silent (those that
    are there stay and carry nothing any more)."""

    def __init__(self, target: str) -> None:
        self.target = ("127.0.0.1", int(target.rsplit(":", 1)[1]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._dead: list[socket.socket] = []
        self._open, self._ended = True, False
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._accept, self._carry)]
        for thread in self._threads:
            thread.start()

    def shut(self) -> None:
        with self._lock:
            self._open = False
            self._drop([one for pair in self._pairs for one in pair])
            self._pairs.clear()

    def open(self) -> None:
        with self._lock:
            self._open = True

    def silence(self) -> int:
        """How many connections carry nothing any more."""
        with self._lock:
            self._dead += [one for pair in self._pairs for one in pair]
            count = len(self._pairs)
            self._pairs.clear()
        return count

    def close(self) -> None:
        self._ended = True
        self.shut()
        for thread in self._threads:
            thread.join(10)
        self._drop(self._dead)
        self._listener.close()

    @staticmethod
    def _drop(sockets: list[socket.socket]) -> None:
        for one in sockets:
            one.close()

    def _accept(self) -> None:
        while not self._ended:
            if not select.select([self._listener], [], [], 0.1)[0]:
                continue
            client, _ = self._listener.accept()
            with self._lock:
                if not self._open:
                    client.close()
                    continue
                try:
                    self._pairs.append((client, socket.create_connection(self.target)))
                except OSError:
                    client.close()

    def _carry(self) -> None:
        while not self._ended:
            with self._lock:
                other = {a: b for pair in self._pairs for a, b in (pair, pair[::-1])}
            # Short, so that new connections are seen soon.
            readable = select.select(list(other), [], [], 0.01)[0] if other else []
            if not other:
                threading.Event().wait(0.01)
            with self._lock:
                live = {one for pair in self._pairs for one in pair}
                for one in readable:
                    if one in live:
                        self._move(one, other[one])

    def _move(self, one: socket.socket, other: socket.socket) -> None:
        try:
            data = one.recv(1 << 16)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        self._pairs = [pair for pair in self._pairs if one not in pair]
        self._drop([one, other])
