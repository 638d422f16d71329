"""`millrace serve --on ray` as the child process of an actor, which reaches its API on loopback.

Keys and limits are the child's. It may not know what asks there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import Any

from deploy.on_ray.library import the_ray_library
from deploy.placement.given import placed_settings
from deploy.placement.reader import read_placement
from serving.child_process import import_path, module_command, signal_child
from serving.errors import Unavailable

TIED = "deploy.on_ray.tied"
LOOPBACK = "127.0.0.1"
LOOK_SECONDS = 0.1


class RouterProcess:
    """The child: `start()` returns once it serves, `check()` raises once it has ended, `stop()` has it drain.

    `placement` is the text of its placement file.
    """

    def __init__(self, placement: str, *, insecure: bool):
        self.placement = placement
        self.insecure = insecure
        self.url = ""
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Raises Unavailable where it ends before it serves (what it logged says why); ValueError."""
        import aiohttp

        check_http(self.placement, insecure=self.insecure)
        port = _free_port()
        self.url = f"http://{LOOPBACK}:{port}"
        address = the_ray_library().get_runtime_context().gcs_address
        self._process = process = await asyncio.create_subprocess_exec(
            *module_command(TIED),
            str(os.getpid()),
            *("serve", "--on", "ray", "--address", address, "--placement", "-"),
            *("--host", LOOPBACK, "--port", str(port)),
            *("--max-connections-per-address", "0"),  # all are of the relay's
            env={**os.environ, "PYTHONPATH": import_path(os.environ)},
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(self.placement.encode())
        process.stdin.close()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
            while not await _is_healthy(session, self.url):
                self.check()
                await asyncio.sleep(LOOK_SECONDS)

    def check(self) -> None:
        """Raises Unavailable if it does not run."""
        if self._process is None or self._process.returncode is not None:
            code = None if self._process is None else self._process.returncode
            raise Unavailable(f"millrace serve has ended with {code}: its last lines in this log say why")

    async def stop(self) -> None:
        """It drains within its own --shutdown-timeout."""
        if self._process is not None and self._process.returncode is None:
            signal_child(self._process, signal.SIGTERM)
            await self._process.wait()


def check_http(placement: str, *, insecure: bool) -> None:
    """Raises ValueError if the API would answer anyone who reaches Ray Serve's port, wherever that listens, and if its
    own port spoke TLS, by the environment of this node.
    """
    plan = read_placement(placement)
    settings = placed_settings({}, plan, plan.router)
    if settings.http.ssl_certfile is not None:
        raise ValueError(
            "MILLRACE_SSL_CERTFILE: Ray Serve has the port, and certificates of its own (http_options): leave it out"
        )
    keyed = settings.http.api_key is not None or settings.service.api_keys_file is not None
    if not (keyed or insecure or settings.security.insecure):
        raise ValueError(
            "Ray Serve would answer anyone who reaches its port: set MILLRACE_API_KEY on the nodes, or [router]"
            " api_keys_file; the argument insecure=true permits it without"
        )


def _free_port() -> int:
    """One that is free now; where another takes it first, the child ends and is begun anew with its actor."""
    with socket.socket() as found:
        found.bind((LOOPBACK, 0))
        port: int = found.getsockname()[1]
        return port


async def _is_healthy(session: Any, url: str) -> bool:
    import aiohttp

    try:
        async with session.get(f"{url}/health") as answer:
            return bool(answer.status == 200)
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
