"""`millrace profile` and `millrace simulate` of this checkout: what a server has learned, and what it would do.

It writes what they read, runs the commands and reads what they write. What is simulated, and why, is not its affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from bench.deployments import ServedWorkers, noise_of, slower
from bench.endpoint import ServerError
from bench.own_server import ROOT
from bench.served_runs import HEARTBEAT_SECONDS
from kvcache.memory.device import token_bytes
from serving.checkpoint.hub import resolve
from serving.loader.loading import open_checkpoint


async def command(*arguments: str) -> None:
    """Raises ServerError with the last line of what it said when it fails. Cancelled, it ends with all below it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.cli", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for who measures
    )
    try:
        _, told = await process.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    if process.returncode:
        last = told.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise ServerError(f"millrace {arguments[0]} failed: {last[0]}")


def model_sizes(model: Path | None = None) -> tuple[int, int]:
    """Layers of the model in this folder, or of the default one, and bytes of a token's KV."""
    spec, _, dtype = open_checkpoint(model or resolve(None))
    return spec.layers, token_bytes(spec.kv_layers(dtype))


async def write_profile(out: Path, url: str, worker: str, sizes: tuple[int, int]) -> Mapping[str, Any]:
    """What the worker has learned, as written. Raises ServerError."""
    layers, kv_bytes = map(str, sizes)
    given = ("--worker", worker, "--layers", layers, "--kv-bytes", kv_bytes)
    await command("profile", str(out), "--url", url, *given)
    return _read(out)


async def simulate(rows: Sequence[Mapping[str, object]], flags: Sequence[str]) -> Mapping[str, Any]:
    """The figures of these requests, at their own times. Raises ServerError."""
    with TemporaryDirectory() as folder:
        trace, out = Path(folder) / "requests.jsonl", Path(folder) / "figures.json"
        trace.write_bytes(b"\n".join(map(orjson.dumps, rows)))
        await command("simulate", *flags, "--trace", str(trace), "--json", str(out))
        (rate,) = _read(out)["policies"][0]["rates"]
    return dict(rate)


def simulator_flags(
    deployment: ServedWorkers,
    learned: Mapping[str, Any],
    profiles: Mapping[str, Any],
    out: Path,
    steps: Mapping[str, Path] | None = None,
) -> list[str]:
    """Of `millrace simulate`, for workers of these profiles; beside `out` their files are written anew.

    What is around the steps was learned before, and is taken to be as much slower as the steps are. `steps` are traces
    by role: steps vary as there.
    """
    factor = slower(profiles, learned["profiles"])
    around = {name: factor * learned[name] for name in ("front_ms", "commit_ms")}
    varied = ",".join(f"{role}={file}" for role, file in (steps or {}).items())
    noise = ("--role-noise", noise_of(profiles), "--role-steps", varied)
    return [*worker_flags(deployment, profiles, around, out), *noise]


def worker_flags(
    deployment: ServedWorkers, profiles: Mapping[str, Any], around: Mapping[str, float], out: Path
) -> list[str]:
    """The same without the noise of steps, and with what is around them as given."""
    files = {role: out.absolute().with_name(f"{out.name}-{deployment.name}-{role}.json") for role in deployment.roles}
    for role, file in files.items():
        file.write_text(json.dumps(profiles[role]))
    messages = "0" if deployment.embedded else "0.2"
    return [
        *("--workers", deployment.workers, "--profile", str(files[deployment.roles[-1]])),
        *("--role-profiles", ",".join(f"{role}={file}" for role, file in files.items())),
        *("--front-ms", f"{around['front_ms']:.3f}", "--commit-ms", f"{around['commit_ms']:.3f}"),
        *("--message-ms", messages, "--heartbeat-interval", f"{HEARTBEAT_SECONDS:g}", "--learned"),
    ]


def _read(path: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = orjson.loads(path.read_bytes())
    return found
