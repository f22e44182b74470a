"""EndpointSlices before a real API server, to be run in a network namespace: slices refuse loopback addresses, so the
namespace's own interface gets some of 10.77.0.0/24. Prints that the router followed, last.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.stack import wait_until
from tests.k8s.cluster import TOKEN

from .plane import Plane, Space
from .pool import Pool
from .router import LIMIT_S, Router

Object = dict[str, Any]
IPS = [f"10.77.0.{at}" for at in range(1, 6)]


def endpoint(ip: str, **conditions: bool) -> Object:
    """One endpoint of a pod."""
    ref = {"kind": "Pod", "name": f"pod-{ip}", "uid": f"uid-{ip}", "namespace": "default"}
    return {"addresses": [ip], "conditions": conditions, "targetRef": ref}


def put(space: Space, name: str, service: str, port: int, endpoints: list[Object]) -> None:
    """Makes or replaces a slice."""
    path = f"/apis/discovery.k8s.io/v1/namespaces/{space.name}/endpointslices"
    meta = {"name": name, "labels": {"kubernetes.io/service-name": service}}
    ports = [{"name": "metrics", "port": 9090}, {"name": "http", "port": port}]
    body = {"metadata": meta, "addressType": "IPv4", "endpoints": endpoints, "ports": ports}
    if space.plane.api.find(f"{path}/{name}") is None:
        space.plane.api.create(path, body)
    else:
        space.plane.api.call("PUT", f"{path}/{name}", body)


def follow(space: Space, pool: Pool, folder: Path) -> None:
    """Slices come, change and go; the router follows."""
    config = space.kubeconfig(folder, TOKEN)
    flags = ("--service-discovery-namespace", space.name, "--service-discovery-service", "engines")
    router = Router(config, pool.port, *flags, selector="")
    try:
        up, down, leaving = {"ready": True}, {"ready": False}, {"ready": False, "serving": True, "terminating": True}
        put(space, "s1", "engines", pool.port, [endpoint(IPS[0], **up), endpoint(IPS[1], **down)])
        put(space, "other", "else", pool.port, [endpoint(IPS[4], **up)])
        router.until_routable(IPS[0])
        put(space, "s2", "engines", pool.port, [endpoint(IPS[2], **up)])
        put(space, "s1", "engines", pool.port, [endpoint(IPS[0], **up), endpoint(IPS[1], **up)])
        router.until_routable(*IPS[:3])
        assert [router.ask() for _ in range(6)] == [200] * 6
        assert router.workers()[IPS[0]]["source"]["pod"] == f"pod-{IPS[0]}"
        # An endpoint that moves to another slice is in both for a moment.
        put(space, "s2", "engines", pool.port, [endpoint(IPS[2], **up), endpoint(IPS[1], **up)])
        put(space, "s1", "engines", pool.port, [endpoint(IPS[0], **leaving)])
        router.until_routable(*IPS[1:3])
        wait_until(lambda: router.known() == IPS[1:3], LIMIT_S, "the leaving one is out")
        space.plane.api.delete(f"/apis/discovery.k8s.io/v1/namespaces/{space.name}/endpointslices/s2")
        router.until_routable()
    finally:
        router.stop()


def main(folder: Path) -> None:
    """The whole test."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for ip in IPS:
        subprocess.run(["ip", "address", "add", f"{ip}/24", "dev", "lo"], check=True)
    plane = Plane(folder)
    pool = Pool()
    try:
        follow(plane.space(), pool, folder)
    finally:
        pool.close()
        plane.close()
    print("the router followed all slices")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
