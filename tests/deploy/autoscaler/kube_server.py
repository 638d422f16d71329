"""The part of a Kubernetes API server that an autoscaler asks, over HTTPS: scales, pods and Leases with versions.

It says 409 to a change of what has changed since, 401 to a wrong token, and what `refuses` says to anything else.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from deploy.autoscaler.kube_api import KubeApi
from tests.certificates import Authority

NAMESPACE, TOKEN = "serving", "token-of-the-account"
SCALE = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{{}}/scale"
POD = f"/api/v1/namespaces/{NAMESPACE}/pods/{{}}"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
Refuses = Callable[[str, str], int | None]


class KubeServer:
    """Use as a context manager. `objects` are by path; `before_change` runs before each change is looked at."""

    def __init__(self, folder: Path):
        self.objects: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str, str]] = []  # method, path, content type
        self.refuses: Refuses = lambda method, path: None
        self.before_change: Callable[[], None] = lambda: None
        self.silence = threading.Event()
        self.silence.set()
        self.one_at_a_time = threading.Lock()
        self.folder = folder
        files = Authority().files(folder)
        (folder / "token").write_text(f"{TOKEN}\n")
        (folder / "namespace").write_text(NAMESPACE)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def api(self, **more: Any) -> KubeApi:
        return KubeApi("127.0.0.1", self._server.server_port, self.folder, **more)

    def put(self, path: str, **content: Any) -> None:
        """An object appears, or changes behind everybody's back."""
        version = int(self.objects.get(path, {}).get("metadata", {}).get("resourceVersion", 0)) + 1
        self.objects[path] = {**content, "metadata": {**content.get("metadata", {}), "resourceVersion": str(version)}}

    def scale(self, name: str, replicas: int) -> None:
        """So many are wanted, and so many there are."""
        wanted = {"replicas": replicas} if replicas else {}
        self.put(SCALE.format(name), kind="Scale", spec=wanted, status={"replicas": replicas})

    def replicas(self, name: str) -> int:
        return int(self.objects[SCALE.format(name)]["spec"].get("replicas", 0))

    def __enter__(self) -> KubeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.silence.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        if (status := self.refuses(method, path)) is not None:
            return status, {"kind": "Status", "message": f"{path} is not for you"}
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return 409, {"message": "already exists"}
            self.put(path, **body)
            return 201, self.objects[path]
        if method != "GET":
            self.before_change()
        found = self.objects.get(path)
        if found is None:
            return 404, {"message": "not found"}
        if method == "GET":
            return 200, found
        given = body.get("metadata", {}).get("resourceVersion")
        if given is not None and given != found["metadata"]["resourceVersion"]:
            return 409, {"message": "the object has been modified"}
        self.put(path, **(_merged(found, body) if method == "PATCH" else body))
        return 200, self.objects[path]


def _merged(below: Any, given: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(given, dict):
        return given
    return below | {key: _merged(below.get(key), value) for key, value in given.items()}


def _handler(server: KubeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            server.silence.wait(30)
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            server.asked.append((self.command, self.path, self.headers["content-type"]))
            status, found = 401, {"message": "Unauthorized"}
            if self.headers["authorization"] == f"Bearer {TOKEN}":
                with server.one_at_a_time:
                    status, found = server.answer(self.command, self.path, body)
            text = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            self._serve()

        def do_PATCH(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            self._serve()

        def do_PUT(self) -> None:
            self._serve()

        def log_message(self, *_: object) -> None: ...

    return Handler
