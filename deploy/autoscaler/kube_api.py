"""The Kubernetes API as a pod reaches it: HTTPS with its service account's token, JSON in and out.

It knows no object by name; what is asked for, and what an answer means, is its caller's.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

import orjson

from deploy.autoscaler.actuator import ActuatorError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CALL_SECONDS = 10.0
MERGE = "application/merge-patch+json"
JSON = "application/json"
NOT_FOUND, CONFLICT = "not_found", "conflict"  # codes of ActuatorError
REFUSED = "forbidden"
SILENT = "silent"
PARTS = ("metadata", "spec", "status")  # of an object; each is an object where it is there


class KubeApi:
    """One API server, one namespace. `account` has `token`, `ca.crt` and `namespace`, as pods find them.

    The token is read at each call: the kubelet renews it. Raises ValueError where there is no such account.
    """

    def __init__(self, host: str, port: int, account: Path = ACCOUNT, *, timeout: float = CALL_SECONDS):
        self.host, self.port, self.timeout = host, port, timeout
        self.token_file = account / "token"
        try:
            self.namespace = (account / "namespace").read_text().strip()
            self._tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except OSError as error:
            raise ValueError(
                f"{account}: {error}: run this in a pod whose service account's token is mounted"
                " (autoscaler.enabled of the chart does so)"
            ) from None

    @staticmethod
    def of_this_pod(environ: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> KubeApi:
        """By what Kubernetes tells each pod. Raises ValueError outside of one."""
        host = environ.get("KUBERNETES_SERVICE_HOST")
        if not host:
            raise ValueError("this is no pod of a Kubernetes cluster: KUBERNETES_SERVICE_HOST is not set")
        return KubeApi(host, int(environ.get("KUBERNETES_SERVICE_PORT", "443")), account)

    async def get(self, path: str) -> dict[str, Any]:
        """The object, with all of PARTS."""
        return await self._ask("GET", path)

    async def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A merge patch; with a resourceVersion in its metadata it is refused (CONFLICT) if another came before."""
        return await self._ask("PATCH", path, body, MERGE)

    async def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._ask("POST", path, body)

    async def replace(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._ask("PUT", path, body)

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, kind: str = JSON
    ) -> dict[str, Any]:
        """Raises ActuatorError with one of the codes above."""
        return await asyncio.to_thread(self._call, method, path, body, kind)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, kind: str) -> dict[str, Any]:
        connection = HTTPSConnection(self.host, self.port, timeout=self.timeout, context=self._tls)
        headers = {"accept": JSON, "content-type": kind}
        try:
            headers["authorization"] = f"Bearer {self.token_file.read_text().strip()}"
            connection.request(method, path, None if body is None else orjson.dumps(body), headers)
            answer = connection.getresponse()
            status, text = answer.status, answer.read()
        except (OSError, HTTPException, UnicodeError) as error:
            told = f"no answer from the Kubernetes API at {self.host}:{self.port} to {method} {path}: {error!r}"
            raise ActuatorError(f"{told}; a network policy may forbid it", code=SILENT, retry_after=5.0) from error
        finally:
            connection.close()
        if status >= 300:
            raise _refusal(method, path, status, text)
        return read_object(text, f"{method} {path}")


def read_object(text: bytes, asked: str) -> dict[str, Any]:
    """With all of PARTS; the API may leave them out, or say null. Raises ActuatorError."""
    found = _read(text)
    if found is not None:
        parts = {part: found.get(part) or {} for part in PARTS}
        if all(isinstance(part, dict) for part in parts.values()):
            return found | parts
    raise ActuatorError(f"{asked}: the Kubernetes API answered with what is no object of its own", code=SILENT)


def _read(text: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def whole_number(part: Mapping[str, Any], name: str) -> int:
    """The API leaves 0 out. Raises ActuatorError for what is no such number."""
    found = part.get(name) or 0
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise ActuatorError(f"the Kubernetes API has {found!r} as {name}, which is no whole number", code=SILENT)
    return found


def _refusal(method: str, path: str, status: int, text: bytes) -> ActuatorError:
    found = _read(text)
    said = str(found.get("message", "")) if found is not None else ""
    told = f"the Kubernetes API answered {status} to {method} {path}{': ' if said else ''}{said}"
    if status == 403:
        hint = "; the Role of the chart's autoscaler (autoscaler.enabled) grants it, or one like it has to"
        return ActuatorError(told + hint, code=REFUSED)
    if status == 401:
        return ActuatorError(f"{told}; the service account's token has expired, or is of another cluster", code=REFUSED)
    return ActuatorError(told, code={404: NOT_FOUND, 409: CONFLICT}.get(status), retry_after=5.0)
