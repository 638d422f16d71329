"""Asks a running server's HTTP API for plain data, for the commands that show it: `millrace explain` and `top`.

It knows no router: what it shows is what GET answers, behind the API key where one is required.
"""

from __future__ import annotations

import argparse
import os
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlsplit

import orjson

from serving.errors import InvalidRequest, NotFound, Unauthorized, Unavailable
from serving.options import ENV_PREFIX

URL = "http://localhost:8000"
KEY = ENV_PREFIX + "API_KEY"
ANSWER_SECONDS = 10.0


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=URL, metavar="URL", help=f"the server's address (default: {URL})")
    parser.add_argument("--api-key", metavar="KEY", help=f"the server's API key; better set {KEY}")


class Server:
    """One server. `url` may end in /v1 or not. Raises ValueError for what is no http address."""

    def __init__(self, url: str, key: str | None):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url {url}: give an address such as {URL}")
        self.address = f"{parts.scheme}://{parts.netloc}"
        self._host, self._port, self._tls = parts.hostname, parts.port, parts.scheme == "https"
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    @staticmethod
    def of(arguments: argparse.Namespace) -> Server:
        """The server that the arguments name. Of several keys, the first is shown."""
        key = arguments.api_key or os.environ.get(KEY) or ""
        return Server(arguments.url, key.split(",")[0])

    def _connect(self) -> HTTPConnection:
        kind = HTTPSConnection if self._tls else HTTPConnection
        return kind(self._host, self._port, timeout=ANSWER_SECONDS)

    def get(self, *steps: str, headers: dict[str, str] | None = None) -> Any:
        """The JSON at a path, of these steps. Raises Unavailable, Unauthorized, NotFound or InvalidRequest."""
        path = self._root + "".join(f"/{quote(step, safe='')}" for step in steps)
        connection = self._connect()
        try:
            connection.request("GET", path, headers={**self._headers, **(headers or {})})
            answer = connection.getresponse()
            body = orjson.loads(answer.read() or b"null")
        except (OSError, HTTPException) as error:
            raise Unavailable(f"no answer from {self.address}: {error}") from error
        except orjson.JSONDecodeError as error:
            raise Unavailable(f"{self.address}{path} does not answer as millrace does") from error
        finally:
            connection.close()
        if answer.status == 200:
            return body
        kind = {401: Unauthorized, 404: NotFound}.get(answer.status, InvalidRequest)
        told = body.get("error") if isinstance(body, dict) else None
        said = told.get("message") if isinstance(told, dict) else None
        raise kind(str(said or f"{self.address}{path} answered {answer.status}"))
