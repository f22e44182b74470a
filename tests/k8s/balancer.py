"""A TCP balancer in place of a Service: each connection goes to one of the pods that are Ready and stay.

Like kube-proxy it never tries a second pod: what a connection meets there, its client meets.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable

Backends = Callable[[], list[tuple[str, int]]]


class Balancer:
    """Listens on a free loopback port; `backends()` is asked at each connection."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self._turn = itertools.count()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self.refused = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        ready = self._backends()
        try:
            if not ready:
                raise OSError("no pod is ready")
            server = socket.create_connection(ready[next(self._turn) % len(ready)], 10)
        except OSError:
            self.refused += 1
            client.close()
            return
        server.settimeout(None)
        back = threading.Thread(target=pump, args=(server, client), daemon=True)
        back.start()
        pump(client, server)
        back.join()
        client.close()
        server.close()


def pump(source: socket.socket, target: socket.socket) -> None:
    """Copies bytes until the source ends, then says so to the target."""
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    try:
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass
