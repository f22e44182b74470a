"""etcd, kube-apiserver and kube-controller-manager as processes on loopback, for one test session.

The binaries are those of `make k8s-tools`. Must not know what is installed into the cluster.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tests.e2e.stack import Process, free_port, wait_until

from .api import Api

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "admin-token"
CONTROLLERS = (
    "deployment-controller,replicaset-controller,statefulset-controller,job-controller,garbage-collector-controller,"
    "disruption-controller,serviceaccount-controller"
)


def binaries() -> Path:
    """Where `make k8s-tools` puts the control plane."""
    out = subprocess.run([ROOT / "scripts/k8s/build.sh", "--where"], capture_output=True, text=True, check=True)
    return Path(out.stdout.strip())


def missing(*commands: str) -> str:
    """What keeps a cluster from starting here, in words; empty if nothing does."""
    lacking = [one for one in commands if not (binaries() / one).is_file()]
    lacking += [one for one in ("etcd", "openssl") if shutil.which(one) is None]
    return f"no {', '.join(lacking)} here: make k8s-tools, apt-get install etcd-server" if lacking else ""


class Cluster:
    """A control plane. `controllers` starts the controller manager, too."""

    def __init__(self, folder: Path, controllers: bool = False) -> None:
        self.folder = folder
        self.processes: list[Process] = []
        try:
            self._start(controllers)
        except BaseException:
            self.close()
            raise

    def _start(self, controllers: bool) -> None:
        key, client, peer, port = self.folder / "sa.key", free_port(), free_port(), free_port()
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        tokens = self.folder / "tokens.csv"
        tokens.write_text(f'{TOKEN},admin,1,"system:masters"\n')
        etcd = self._store(client, peer)
        self.processes.append(
            Process(
                [
                    str(binaries() / "kube-apiserver"),
                    f"--etcd-servers={etcd}",
                    f"--secure-port={port}",
                    "--bind-address=127.0.0.1",
                    "--advertise-address=127.0.0.1",
                    f"--cert-dir={self.folder / 'certs'}",
                    "--service-cluster-ip-range=10.96.0.0/24",
                    "--authorization-mode=Node,RBAC",
                    f"--token-auth-file={tokens}",
                    f"--service-account-key-file={key}",
                    "--service-account-issuer=https://kubernetes.default.svc",
                    f"--service-account-signing-key-file={key}",
                    "--disable-admission-plugins=ServiceAccount",
                    "--endpoint-reconciler-type=none",
                    "--profiling=false",
                ]
            )
        )
        self.url = f"https://127.0.0.1:{port}"
        self.api = Api(self.url, TOKEN)
        wait_until(self._ready, 180, f"kube-apiserver ready\n{self.processes[-1].output[-2000:]}")
        self.kubeconfig = self.folder / "kubeconfig"
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "admin",
                    "clusters": [{"name": "c", "cluster": {"server": self.url, "insecure-skip-tls-verify": True}}],
                    "users": [{"name": "u", "user": {"token": TOKEN}}],
                    "contexts": [{"name": "admin", "context": {"cluster": "c", "user": "u"}}],
                }
            )
        )
        if controllers:
            file = str(self.kubeconfig)
            self.processes.append(
                Process(
                    [
                        str(binaries() / "kube-controller-manager"),
                        "--kubeconfig",
                        file,
                        "--authentication-kubeconfig",
                        file,
                        "--authorization-kubeconfig",
                        file,
                        "--leader-elect=false",
                        "--secure-port=0",
                        f"--controllers={CONTROLLERS}",
                    ]
                )
            )

    def _store(self, client: int, peer: int) -> str:
        """Starts etcd; its address."""
        etcd, peers = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        self.processes.append(
            Process(
                [
                    "etcd",
                    "--data-dir",
                    str(self.folder / "etcd"),
                    "--listen-client-urls",
                    etcd,
                    "--advertise-client-urls",
                    etcd,
                    "--listen-peer-urls",
                    peers,
                    "--initial-advertise-peer-urls",
                    peers,
                    "--initial-cluster",
                    f"default={peers}",
                    "--unsafe-no-fsync",
                ]
            )
        )
        return etcd

    def _ready(self) -> bool:
        for one in self.processes:
            assert one.child.poll() is None, f"{one.command[0]} ended {one.child.returncode}:\n{one.output[-3000:]}"
        try:
            self.api.get("/api/v1/namespaces/default")
        except Exception as error:
            assert not isinstance(error, AssertionError | KeyError), error
            return False
        return True

    def namespace(self, name: str) -> None:
        """A namespace in which Pod Security `restricted` is enforced."""
        level = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
        self.api.create("/api/v1/namespaces", {"metadata": {"name": name, "labels": level}})
        wait_until(lambda: self.api.find(f"/api/v1/namespaces/{name}") is not None, 30, f"namespace {name}")

    def close(self) -> None:
        if hasattr(self, "api"):
            self.api.close()
        for one in reversed(self.processes):
            one.stop()


__all__ = ["CONTROLLERS", "Cluster", "binaries", "missing"]
