"""`millrace cache stat|ls|evict|verify`: what the nodes of a KV pool hold, shown, dropped, or checked.

It asks the nodes themselves, not a router, and prints; what the answers mean is decided there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from bench.report import aligned
from deploy.runtime.discovery import addresses
from kvcache.pool.block import KEY_BYTES
from kvcache.pool.client import PoolClient
from kvcache.pool.links import BlockSelection
from kvcache.pool.models import push
from kvcache.pool.remote import RemoteNode
from serving.errors import MillraceError, Unauthorized, WorkerLost
from serving.grpc_tls import grpc_tls
from serving.messages import PoolReport, TierStat
from serving.options import ENV_PREFIX, add_flags, build
from serving.security_config import SecurityConfig

NODES = ENV_PREFIX + "KVCACHE_NODES"
KEY = ENV_PREFIX + "CLUSTER_KEY"
ANSWER_SECONDS = 10.0
NodeLink = Callable[..., RemoteNode]
CORRUPT, FAILED = 1, 2  # exit codes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `millrace cache`."""
    parser.add_argument(
        "action",
        choices=("stat", "ls", "evict", "verify", "push"),
        help="figures of every node and namespace; the blocks there are; drop blocks; read every block and drop those"
        " that are corrupt (exit code 1 if there were any); store a model's weights for --load-format pool",
    )
    parser.add_argument("model", nargs="?", help="push: a folder, a .gguf file or a hub name (default: the demo model)")
    parser.add_argument("--replication", type=int, default=1, metavar="N", help="push: nodes that keep each block (1)")
    parser.add_argument("--nodes", metavar="LIST", help=f"nodes to ask: host:port, comma-separated (default: {NODES})")
    parser.add_argument("--cluster-key", metavar="KEY", help=f"the key services show each other; better set {KEY}")
    add_flags(parser, SecurityConfig)
    parser.add_argument("--namespace", metavar="NS", help="ls and evict: only blocks of this namespace")
    parser.add_argument(
        "--key", action="append", default=[], metavar="HEX", help="ls and evict: only this block; may be given again"
    )
    parser.add_argument("--all", action="store_true", help="evict: every block that is not pinned")


def run(arguments: argparse.Namespace) -> int:
    """Ask the nodes; the process's exit code. Raises ValueError for arguments that cannot be meant."""
    if arguments.replication < 1:
        raise ValueError(f"--replication {arguments.replication}: each block needs at least one node")
    named = addresses(arguments.nodes or os.environ.get(NODES))
    if not named:
        raise ValueError(f"name the pool's nodes: --nodes host:port,... or {NODES}")
    key = arguments.cluster_key or os.environ.get(KEY)
    link = partial(RemoteNode, cluster_key=key, tls=grpc_tls(build(SecurityConfig, {}, os.environ, vars(arguments))))
    if arguments.action == "push":
        return asyncio.run(push_model(arguments.model, named, link, arguments.replication))
    nodes = [node.rpartition("@")[2] for node in named]
    what = selection(arguments.namespace, arguments.key)
    if arguments.action == "evict" and what == BlockSelection() and not arguments.all:
        raise ValueError("evict which blocks? Give --namespace, --key, or --all")
    return asyncio.run(ask(arguments.action, nodes, link, what))


def selection(namespace: str | None, keys: Sequence[str]) -> BlockSelection:
    """Raises ValueError for what is not a block's key."""
    found = []
    for text in keys:
        try:
            key = bytes.fromhex(text)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise ValueError(
                f"--key {text}: a key has {2 * KEY_BYTES} hexadecimal digits, as `millrace cache ls` shows"
            )
        found.append(key)
    return BlockSelection(namespace=namespace, keys=tuple(found))


async def ask(action: str, nodes: Sequence[str], link: NodeLink, what: BlockSelection) -> int:
    """Do it with one node after another. 1 if any had a corrupt block, otherwise 2 if one did not answer."""
    code, reports = 0, []
    for address in nodes:
        node = link(address, seconds=ANSWER_SECONDS)
        try:
            if action == "stat":
                reports.append(await node.report())
            elif action == "ls":
                await ls(address, node, what)
            elif action == "evict":
                print(f"{address}: {await node.evict(what):,} blocks dropped")
            elif await verify(address, node):
                code = CORRUPT
        except MillraceError as error:
            code = code or FAILED
            print(f"millrace: {advice(address, error)}", file=sys.stderr)
        finally:
            await node.close()
    if reports:
        for rows in (tier_rows(reports), node_rows(reports), namespace_rows(reports)):
            print(aligned(rows, texts=2) + "\n")
    return code


async def ls(address: str, node: RemoteNode, what: BlockSelection) -> None:
    """One line a block: its key, namespace, tiers, size, age, and whether it is pinned."""
    async for entry in node.entries(what):
        tiers = "+".join(entry.tiers) or "-"
        pinned = " pinned" if entry.pinned else ""
        size, age = human_bytes(entry.bytes), human_seconds(entry.age_seconds)
        print(f"{entry.key.hex()}  {entry.namespace:16}  {tiers:8}  {size:>9}  {age:>6}  {address}{pinned}")


async def verify(address: str, node: RemoteNode) -> int:
    """Blocks found corrupt."""
    read, corrupt = await node.verify()
    print(f"{address}: {read:,} blocks read, {corrupt:,} corrupt" + (" and dropped" if corrupt else ""))
    return corrupt


def advice(address: str, error: MillraceError) -> str:
    """What went wrong, and what to do about it."""
    if isinstance(error, Unauthorized):
        return f"{address} refuses this key; set {KEY} to what the pool was started with"
    if isinstance(error, WorkerLost):
        return f"no pool node answers at {address}; is `millrace kvcache` running there? ({error.message})"
    return f"{address}: {error.message}"


async def push_model(model: str | None, nodes: Sequence[str], link: NodeLink, replication: int) -> int:
    """Store a model's files under its name."""
    from deploy.worker.model_cache import model_name
    from serving.checkpoint.hub import resolve

    path, name = resolve(model), model_name(model)
    found = PoolClient(link, replication=replication, timeout=ANSWER_SECONDS)
    found.set_nodes(await named_nodes(nodes, link))
    began = time.monotonic()

    def progress(done: int, total: int) -> None:
        end = "\n" if done == total else ""
        print(f"\r{name}: {human_bytes(done)} of {human_bytes(total)}", end=end, flush=True)

    try:
        size = await push(found, name, path, progress)
    finally:
        await found.close()
    print(f"stored in {time.monotonic() - began:.1f} s, {human_bytes(size)}; start workers with --load-format pool")
    return 0


async def named_nodes(nodes: Sequence[str], link: NodeLink) -> list[str]:
    """The nodes as `name@host:port`, as routers tell them to workers: blocks are placed by the names."""
    found = []
    for node in nodes:
        address = node.rpartition("@")[2]
        found_node = link(address, seconds=ANSWER_SECONDS)
        try:
            found.append(f"{(await found_node.report()).stat.name}@{address}")
        except MillraceError as error:
            raise ValueError(advice(address, error)) from None
        finally:
            await found_node.close()
    return found


# ---- how it looks --------------------------------------------------------------------------------------------------


def tier_rows(reports: Sequence[PoolReport]) -> list[list[str]]:
    rows = [["node", "tier", "used", "capacity", "blocks", "hits", "read", "written", "evicted", "mean age", "corrupt"]]
    for report in reports:
        for tier, held in report.stat.tiers.items():
            sizes = [human_bytes(size) for size in (held.bytes, held.capacity)]
            traffic = [human_bytes(held.bytes_read), human_bytes(held.bytes_written)]
            ends = [f"{held.evictions:,}", mean_age(held), f"{held.corrupt:,}"]
            rows.append([report.stat.name, tier.value, *sizes, f"{held.blocks:,}", f"{held.hits:,}", *traffic, *ends])
    return rows


def node_rows(reports: Sequence[PoolReport]) -> list[list[str]]:
    rows = [["node", "address", "looked up", "found", "hit rate", "stored", "refused", "pinned", "backlog", "state"]]
    for report in reports:
        stat = report.stat
        rate = f"{100 * stat.found / stat.lookups:.1f} %" if stat.lookups else "-"
        counts = [f"{count:,}" for count in (stat.stored, stat.refused, stat.pinned, stat.backlog)]
        state = "draining" if report.draining else "serving"
        rows.append([stat.name, report.address, f"{stat.lookups:,}", f"{stat.found:,}", rate, *counts, state])
    return rows


def namespace_rows(reports: Sequence[PoolReport]) -> list[list[str]]:
    rows = [["node", "namespace", "used", "blocks", "quota"]]
    for report in reports:
        for name, held in sorted(report.stat.namespaces.items()):
            quota = human_bytes(held.quota) if held.quota else "-"
            rows.append([report.stat.name, name, human_bytes(held.bytes), f"{held.blocks:,}", quota])
    return rows


def mean_age(held: TierStat) -> str:
    """Of blocks when they were evicted."""
    return human_seconds(held.eviction_age_seconds / held.evictions) if held.evictions else "-"


def human_bytes(count: int) -> str:
    """1536 → `1.5 KiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """90 → `1.5 m`."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"
