"""Times fetching a prompt's KV from a pool node of its own process, over each transport: `python -m bench.fetch`.

The blocks are as SmolLM2's prompt leaves them in RAM; a round fetches all of them, checks their digests and writes them
into a worker's KV blocks. Rounds take the transports in turn; medians are shown beside a plain memcpy.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

import uvloop

from bench.far import FarProcess, answer_cpu, memcpy_seconds
from bench.report import aligned
from bench.sink import BLOCK, smollm2_layers
from kvcache.connector.block_io import part_bytes, read_blocks, write_part
from kvcache.memory.device import DeviceKV, token_bytes
from kvcache.pool.client import PoolClient
from kvcache.pool.node import PoolNode
from kvcache.pool.remote import RemoteNode
from kvcache.pool.service import PoolService
from kvcache.pool.store import BlockStore
from kvcache.pool.storeconfig import StoreConfig
from kvcache.transfer.choice import chosen, lenders_on_demand
from kvcache.transfer.lent_memory import GRPC
from serving.malloc import keep_freed_memory
from serving.rpc import listen, server


async def serve() -> None:
    """A node: prints its port, then after each line of input the CPU seconds it has used; ends with the input."""
    keep_freed_memory()
    grpc_server = server()
    port = listen(grpc_server, "127.0.0.1", 0)
    node = PoolNode("node", BlockStore(StoreConfig(ram_bytes=4 << 30)), address=f"127.0.0.1:{port}")
    PoolService(node).add_to(grpc_server)
    await grpc_server.start()
    await answer_cpu(port)
    await grpc_server.stop(0)
    await node.stop()


@asynccontextmanager
async def client(kind: str, address: str) -> AsyncGenerator[PoolClient, None]:
    lenders = lenders_on_demand(kind)
    made = PoolClient(lambda node: RemoteNode(node, lenders=lenders), timeout=30.0)
    made.set_nodes([address])
    yield made
    await made.close()
    lenders.close()


async def fetch(device_kv: DeviceKV, keys: list[bytes], of: PoolClient) -> float:
    """Seconds until the last layer is written. Raises RuntimeError when something is missing."""
    began, size = time.perf_counter(), 0
    async with aclosing(of.get(keys, parts=len(device_kv.specs))) as slabs:
        async for slab in slabs:
            write_part(device_kv, slab.part, list(slab.indices), slab.payload)
            size += len(slab.payload)
    if size != len(keys) * sum(part_bytes(device_kv)):
        raise RuntimeError(f"{size} bytes came: {dict(of.stats.failures)}")
    return time.perf_counter() - began


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fetch", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1840, help="tokens of the prefix (default: 1840)")
    parser.add_argument("--layers", type=int, default=30, help="layers of SmolLM2's KV (default: 30)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds over all transports (default: 9)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        await serve()
        return
    keep_freed_memory()
    specs, blocks = smollm2_layers(asked.layers), asked.tokens // BLOCK
    device_kv = DeviceKV(specs, blocks, BLOCK)
    for planes in device_kv.planes:
        for plane in planes:
            plane.copy_(plane.random_(0, 255))
    keys = [number.to_bytes(32, "little") for number in range(blocks)]
    size = blocks * BLOCK * token_bytes(specs)
    far = FarProcess("bench.fetch", "--serve")
    address = f"127.0.0.1:{int(far.told)}"
    try:
        async with client(GRPC, address) as storing:
            await storing.put(read_blocks(device_kv, range(blocks), keys, "default"))
        found = {
            kind: await measured(kind, address, far, device_kv, keys, asked.rounds) for kind in (GRPC, *chosen("auto"))
        }
    finally:
        far.close()
    memcpy = memcpy_seconds(size)
    print(f"{blocks * BLOCK} tokens x {asked.layers} layers, {size / 1e6:.1f} MB, {asked.rounds} rounds, medians")
    rows = [["transport", "ms", "GB/s", "of memcpy", "CPU ms here", "CPU ms there"]]
    rows.append(["memcpy", f"{memcpy * 1e3:.1f}", f"{size / memcpy / 1e9:.2f}", "1.00", "", ""])
    for kind, rounds in found.items():
        took, here, there = map(statistics.median, zip(*rounds, strict=True))
        figures = [f"{took * 1e3:.1f}", f"{size / took / 1e9:.2f}", f"{memcpy / took:.2f}"]
        rows.append([kind, *figures, f"{here * 1e3:.1f}", f"{there * 1e3:.1f}"])
    print(aligned(rows))


async def measured(
    kind: str, address: str, far: FarProcess, device_kv: DeviceKV, keys: list[bytes], rounds: int
) -> list[tuple[float, float, float]]:
    """(seconds, CPU seconds here, CPU seconds there) of each round, after two that warm up."""
    found = []
    async with client(kind, address) as asking:
        for _ in range(rounds + 2):
            here, there = time.process_time(), far.cpu()
            took = await fetch(device_kv, keys, asking)
            found.append((took, time.process_time() - here, far.cpu() - there))
    return found[2:]


if __name__ == "__main__":
    uvloop.run(main())
