"""How long a worker of SmolLM2 takes to change its role while it holds nothing, and how long a new one takes to serve.

    python -m tests.flow.flip_seconds --flips 6

Beside one prefill and two decode workers on this host; a line for each, in seconds. A minute at most.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from deploy.autoscaler.actuator import FleetWorker
from deploy.autoscaler.by_router import RouterActuator
from serving.messages import Role
from tests.flow.ports import free_port
from tests.flow.server import MillraceServer

KEY = "cluster-key-of-the-tests"
LOOK_SECONDS = 0.05


async def measure(actuator: RouterActuator, flips: int) -> None:
    for number in range(flips):
        role, began = (Role.PREFILL, Role.DECODE)[number % 2], time.monotonic()
        await actuator.flip("decode-1", role)
        print(f"decode-1 serves as {role:7}  {time.monotonic() - began:.2f} s", flush=True)
    began = time.monotonic()
    await actuator.add(Role.DECODE)
    while FleetWorker("decode-2", Role.DECODE, "ready") not in await actuator.workers():
        await asyncio.sleep(LOOK_SECONDS)
    print(f"a new decode worker serves  {time.monotonic() - began:.2f} s")
    await actuator.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=6, help="of one worker, there and back (default: 6)")
    flips, port = parser.parse_args().flips, free_port()
    flags = ("--prefill", "1", "--decode", "2", "--grpc-port", str(port))
    workers = ("prefill-0", "decode-0", "decode-1")
    with MillraceServer(*flags, workers=workers, environ={"MILLRACE_CLUSTER_KEY": KEY}):
        asyncio.run(measure(RouterActuator(f"127.0.0.1:{port}", KEY, "flip_seconds", patience=120.0), flips))


if __name__ == "__main__":
    main()
