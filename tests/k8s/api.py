"""A small client of a Kubernetes API server: get, list, create, patch, delete, and a watch that survives its own end.

Owns HTTP and resource paths. Must not know what a kubelet or a chart is.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx

Object = dict[str, Any]


class ApiError(Exception):
    """The server's refusal; `code` is its HTTP status."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Api:
    """Calls of one bearer token. Safe to share between threads."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.token = token
        self._http = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {token}"}, verify=False, timeout=30, trust_env=False
        )

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, body: Any = None, *, kind: str = "application/json", **query: Any) -> Object:
        """One call. Raises ApiError for a refusal, httpx errors if the server can't be reached."""
        content = None if body is None else json.dumps(body)
        answer = self._http.request(method, path, content=content, headers={"content-type": kind}, params=query)
        if answer.status_code >= 400:
            raise ApiError(answer.status_code, answer.text)
        told: Object = answer.json()
        return told

    def get(self, path: str, **query: Any) -> Object:
        return self.call("GET", path, **query)

    def find(self, path: str) -> Object | None:
        """The object, or None if it is not there."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    def items(self, path: str, **query: Any) -> list[Object]:
        found: list[Object] = self.get(path, **query)["items"]
        return found

    def create(self, path: str, body: Object) -> Object:
        return self.call("POST", path, body)

    def patch_status(self, path: str, status: Object) -> Object:
        """A strategic merge of the object's status; conditions are merged by type."""
        kind = "application/strategic-merge-patch+json"
        return self.call("PATCH", f"{path}/status", {"status": status}, kind=kind)

    def delete(self, path: str, uid: str | None = None, grace: int | None = None) -> None:
        """Deletes; an object that is gone, or is another one by now, is no error."""
        body: Object = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            self.call("DELETE", path, body)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    def follow(self, path: str, see: Callable[[str, Object], None], stop: threading.Event) -> None:
        """Lists, then watches, until `stop`: `see(type, object)`, with SYNC for what a list had."""
        while not stop.is_set():
            try:
                listed = self.get(path)
                for item in listed["items"]:
                    see("SYNC", item)
                self._watch(path, listed["metadata"]["resourceVersion"], see, stop)
            except (httpx.TransportError, ApiError):
                stop.wait(0.2)

    def _watch(self, path: str, version: str, see: Callable[[str, Object], None], stop: threading.Event) -> None:
        query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": "10"}
        with self._http.stream("GET", path, params=query) as answer:
            if answer.status_code >= 400:
                raise ApiError(answer.status_code, answer.read().decode())
            for line in answer.iter_lines():
                event = json.loads(line)
                if stop.is_set() or event["type"] == "ERROR":
                    return
                see(event["type"], event["object"])
