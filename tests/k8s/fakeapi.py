"""An API server of the few calls that the kubelet makes, in memory: no validation, no controllers, no authorisation.

It lets pods of the chart run where no kube-apiserver has been built. What is about the API itself needs the real one.
"""

from __future__ import annotations

import json
import queue
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

from .api import Object

PODS = "/api/v1/pods"


class FakeApi:
    """Objects by path; `put` and `pod` add some. Serves until `close`."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self._lock = threading.RLock()
        self._watchers: list[queue.Queue[Object]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *words: Any) -> None:
                pass

            def _serve(self) -> None:
                at = urlparse(self.path)
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                if "watch" in parse_qs(at.query):
                    outer._stream(self)
                    return
                status, answer = outer._answer(self.command, at.path, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = _serve

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def put(self, namespace: str, kind: str, body: Object) -> None:
        self.objects[f"/api/v1/namespaces/{namespace}/{kind}/{body['metadata']['name']}"] = body

    def pod(self, namespace: str, name: str, template: Object) -> str:
        """A pod by a workload's template; its path."""
        meta = {**template["metadata"], "name": name, "namespace": namespace, "uid": str(uuid.uuid4())}
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        self._changed("ADDED", path, {"metadata": meta, "spec": {**template["spec"]}, "status": {}})
        return path

    def delete(self, path: str) -> None:
        """Begins a pod's end, as `kubectl delete` does."""
        self._answer("DELETE", path, {})

    def _changed(self, kind: str, path: str, body: Object | None) -> None:
        with self._lock:
            event = {"type": kind, "object": body or self.objects[path]}
            if body is None:
                del self.objects[path]
            else:
                self.objects[path] = body
            for one in self._watchers if "/pods/" in path else []:
                one.put(json.loads(json.dumps(event)))

    def _stream(self, handler: BaseHTTPRequestHandler) -> None:
        mine: queue.Queue[Object] = queue.Queue()
        with self._lock:
            # What was listed just before is told once more: nothing between list and watch is lost.
            for path, body in self.objects.items():
                if "/pods/" in path:
                    mine.put({"type": "MODIFIED", "object": json.loads(json.dumps(body))})
            self._watchers.append(mine)
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(json.dumps(mine.get(timeout=10)).encode() + b"\n")
                handler.wfile.flush()
        except (queue.Empty, OSError):
            pass
        finally:
            self._watchers.remove(mine)

    def _answer(self, method: str, path: str, body: Object) -> tuple[int, Object]:
        with self._lock:
            if path == PODS:
                found = [one for at, one in self.objects.items() if "/pods/" in at]
                return 200, {"items": found, "metadata": {"resourceVersion": "1"}}
            if method == "POST" and path == "/api/v1/nodes":
                self.objects[f"{path}/{body['metadata']['name']}"] = body
                return 201, body
            whole, _, part = path.partition("/status") if path.endswith("/status") else path.partition("/binding")
            del part
            one = self.objects.get(whole)
            if one is None:
                return 404, {"message": f"{whole} is not there"}
            if method == "POST":
                one["spec"]["nodeName"] = body["target"]["name"]
                self._changed("MODIFIED", whole, one)
            elif method == "PATCH":
                one["status"] = {**one.get("status", {}), **body["status"]}
                self._changed("MODIFIED", whole, one)
            elif method == "DELETE" and body.get("gracePeriodSeconds") == 0:
                self._changed("DELETED", whole, None)
            elif method == "DELETE":
                grace = one["spec"].get("terminationGracePeriodSeconds", 30)
                one["metadata"] |= {"deletionTimestamp": "now", "deletionGracePeriodSeconds": grace}
                self._changed("MODIFIED", whole, one)
            return 200, one
