"""A pool node as a process, as `millrace kvcache` starts it, and `millrace cache` asking it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deploy import cache
from deploy.cli import make_parser
from deploy.kvcache_process import KvcacheProcess, parse_quotas, store_config
from deploy.runtime.settings import read_settings
from kvcache.pool.remote import RemoteNode
from router.fleet import Fleet, RouterConfig
from router.service import RegistryService
from serving.config import ClusterConfig, KvCacheConfig
from serving.messages import PoolReport
from serving.options import ConfigError
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import listen, server
from tests.kvcache.pool.nodes import KEY, PARTS, PATIENCE, Served, block, content, patient_client
from tests.router.scripted import ScriptedWorker

REPOSITORY = str(Path(__file__).resolve().parents[2])
BLOCKS = [block(number) for number in range(8)]
KEYS = [one.key for one in BLOCKS]


class Router:
    """A router that pool nodes report to."""

    async def start(self) -> None:
        self.fleet = Fleet(RouterConfig(), lambda status: ScriptedWorker(status, {}))
        self.door = server(KEY)
        stubs.add_RegistryServicer_to_server(RegistryService(self.fleet), self.door)
        self.address = f"127.0.0.1:{listen(self.door, '127.0.0.1', 0)}"
        await self.door.start()

    async def stop(self) -> None:
        await self.door.stop(0)
        await self.fleet.close()

    async def heard(self, *, draining: bool = False) -> PoolReport:
        """The only node's report, once it says that."""
        async with asyncio.timeout(60):
            while not [one for one in self.fleet.pool_nodes.reports() if one.draining == draining]:
                await asyncio.sleep(0.01)
        (report,) = self.fleet.pool_nodes.reports()
        return report


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    made = Router()
    await made.start()
    yield made
    await made.stop()


@asynccontextmanager
async def node(router: Router, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`millrace kvcache` with these flags, told to leave at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "deploy.cli",
        "kvcache",
        *("--routers", router.address, "--worker-name", "kvcache-0", "--heartbeat-interval", "0.05", *flags),
        cwd=REPOSITORY,
        env={**os.environ, "MILLRACE_CLUSTER_KEY": KEY, "MILLRACE_RAM": "8MiB"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.thorough
async def test_a_node_registers_serves_leaves_in_order_and_keeps_its_blocks(router: Router, tmp_path: Path) -> None:
    flags = ("--disk", str(tmp_path / "blocks"), "--disk-size", "64MiB", "--quota", "default=1MiB")
    client = patient_client(partial(RemoteNode, cluster_key=KEY, seconds=PATIENCE))
    async with node(router, *flags) as process:
        report = await router.heard()
        assert router.fleet.pool_nodes.nodes() == [f"kvcache-0@{report.address}"]
        client.set_nodes(router.fleet.pool_nodes.nodes())
        await client.put(BLOCKS)
        assert await client.lookup(KEYS) == len(BLOCKS)
        process.send_signal(signal.SIGTERM)
        last = await router.heard(draining=True)
        assert router.fleet.pool_nodes.nodes() == [] and last.stat.stored == len(BLOCKS)
        assert last.stat.namespaces["default"].quota == 1 << 20
        _, log = await process.communicate()
        assert process.returncode == 0, log.decode()
    router.fleet.pool_nodes.expire(float("inf"))
    async with node(router, *flags) as process:
        await router.heard()
        client.set_nodes(router.fleet.pool_nodes.nodes())
        found = [slab async for slab in client.get(KEYS, parts=PARTS)]
        pieces = {(i, slab.part): bytes(data) for slab in found for i, _, data in slab.parts()}
        assert pieces == {(n, part): content(n, part) for n in range(len(BLOCKS)) for part in range(PARTS)}
        await cache_commands(client.nodes[0])
    await client.close()


async def cache_commands(address: str) -> None:
    """What `millrace cache` prints of the node, and how it ends."""

    async def run(*arguments: str, key: str = KEY) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "deploy.cli", "cache", *arguments),
            cwd=REPOSITORY,
            env={**os.environ, "MILLRACE_CLUSTER_KEY": key, "MILLRACE_KVCACHE_NODES": address},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    strangers, stat, listing, verified = await asyncio.gather(
        run("stat", key="wrong"), run("stat"), run("ls", "--namespace", "default"), run("verify")
    )
    assert strangers[0] == 2 and "MILLRACE_CLUSTER_KEY" in strangers[2] and strangers[1] == ""
    code, out, err = stat
    assert code == 0 and err == "" and re.search(r"^kvcache-0 +disk +\S+ KiB +64\.0 MiB +8 ", out, re.MULTILINE), out
    assert re.search(r"^kvcache-0 +default .* 1\.0 MiB$", out, re.MULTILINE), out
    code, out, err = listing
    assert code == 0 and {line.split()[0] for line in out.splitlines()} == {key.hex() for key in KEYS}
    read = re.fullmatch(rf"{address}: (\d+) blocks read, 0 corrupt\n", verified[1])
    assert verified[0] == 0 and read and int(read[1]) >= len(BLOCKS), "those in both tiers are read in both"
    code, out, err = await run("evict", "--key", KEYS[0].hex())
    assert (code, out) == (0, f"{address}: 1 blocks dropped\n"), err


# ---- the command's own arguments -----------------------------------------------------------------------------------


def test_a_corrupt_block_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Checked:
        async def verify(self) -> tuple[int, int]:
            return 12, 3

        async def close(self) -> None: ...

    monkeypatch.setattr(cache, "RemoteNode", lambda *given, **named: Checked())
    parsed = make_parser().parse_args(["cache", "verify", "--nodes", "a:1"])
    assert cache.run(parsed) == 1
    assert capsys.readouterr().out == "a:1: 12 blocks read, 3 corrupt and dropped\n"


def test_nobody_there_says_what_to_look_at(capsys: pytest.CaptureFixture[str]) -> None:
    parsed = make_parser().parse_args(["cache", "stat", "--nodes", "127.0.0.1:1"])
    assert cache.run(parsed) == 2
    out, err = capsys.readouterr()
    assert out == "" and "no pool node answers at 127.0.0.1:1" in err and "millrace kvcache" in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["stat"], "--nodes"),
        (["evict", "--nodes", "a:1"], "--all"),
        (["ls", "--nodes", "a:1", "--key", "xyz"], "64 hexadecimal"),
        (["ls", "--nodes", "a:1", "--key", "00"], "64 hexadecimal"),
        (["push", "--nodes", "a:1", "--replication", "0"], "--replication 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLRACE_KVCACHE_NODES", raising=False)
    with pytest.raises(ValueError, match=named):
        cache.run(make_parser().parse_args(["cache", *arguments]))


def test_figures_are_read_by_people() -> None:
    assert [cache.human_bytes(size) for size in (0, 1023, 1536, 5 << 20, 3 << 30, 2 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
        "2.0 TiB",
    ]
    assert [cache.human_seconds(age) for age in (0.04, 59, 90, 5400, 172800)] == [
        "0.0 s",
        "59.0 s",
        "1.5 m",
        "1.5 h",
        "2.0 d",
    ]


# ---- settings ------------------------------------------------------------------------------------------------------


def test_the_settings_reach_the_store(tmp_path: Path) -> None:
    made = store_config(KvCacheConfig(ram=5, disk=str(tmp_path), disk_size=7, disk_write="back", quota="a=3,b= 2"))
    assert (made.ram_bytes, made.disk_path, made.disk_bytes, made.write) == (5, tmp_path, 7, "back")
    assert made.quotas == {"a": 3, "b": 2}
    assert store_config(KvCacheConfig()).disk_path is None


@pytest.mark.parametrize("text", ["a", "=1", "a=", "a=many", "a=1,b", "a/b=1", "a=1,a=2"])
def test_a_quota_that_cannot_be_read_names_its_flag(text: str) -> None:
    with pytest.raises(ValueError, match="--quota"):
        parse_quotas(text)


def test_a_node_without_any_room_is_refused() -> None:
    with pytest.raises(ValueError, match="--ram 0 without --disk"):
        store_config(KvCacheConfig(ram=0))


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"ram": 5, "quota": "a=3,b=3"}, "--ram"),
        ({"ram": 9, "disk": "x", "disk_size": 5, "default_quota": 6}, "--disk-size"),
    ],
)
def test_quotas_that_no_node_could_keep_name_their_flags(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError, match=f"--quota and --default-quota .* 5 bytes of {flag}: lower them"):
        store_config(KvCacheConfig(**settings))


def test_an_empty_name_is_no_folder() -> None:
    with pytest.raises(ConfigError, match="--disk: an empty name"):
        KvCacheConfig(disk="")


# ---- a node without a router, or without a place -------------------------------------------------------------------


def host(*, cluster: ClusterConfig, disk: str | None = None) -> KvcacheProcess:
    made = read_settings({"heartbeat_interval": 0.01})
    return KvcacheProcess(replace(made, cluster=cluster, kvcache=KvCacheConfig(ram=1 << 20, disk=disk)))


async def test_a_nodes_own_figures_are_fresh_without_any_router() -> None:
    made = host(cluster=ClusterConfig(routers=""))
    served = await Served("local").start()
    watching = asyncio.create_task(made._watch(served.node))
    await served.link.put(BLOCKS)
    async with asyncio.timeout(60):
        while made._last is None or made._last.stat.stored < len(BLOCKS):
            await asyncio.sleep(0.001)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await served.stop()


@pytest.mark.parametrize(
    ("disk", "settings", "warned"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"worker_name": "pool-1"}, False),
        (True, {"grpc_port": 8300}, False),
        (True, {"advertise": "host:8300"}, False),
    ],
)
def test_a_node_whose_name_will_not_come_back_with_its_disk_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, disk: bool, settings: dict[str, Any], warned: bool
) -> None:
    made = host(cluster=ClusterConfig(**settings), disk=str(tmp_path) if disk else None)
    made._warn_of_names(made.cluster.worker_name or made.cluster.advertise or "127.0.0.1:4711", 4711)
    assert ["--worker-name" in record.getMessage() for record in caplog.records] == [True] * warned


async def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "deploy.cli", "kvcache", "--host", "127.0.0.1", "--metrics-port", str(taken.getsockname()[1])),
            cwd=REPOSITORY,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await process.communicate()
    assert process.returncode == 2
    assert re.fullmatch(
        r"millrace: cannot listen on 127.0.0.1:\d+: .*; choose another --host or --metrics-port\n", said.decode()
    )
