"""Weights through the KV pool: a worker that starts takes its model from other hosts' memory, or puts it there.

What is stored is the model's files, so that what is loaded is what a disk would have given, fingerprint included.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from deploy.runtime.devices import asked_index, visible_devices
from deploy.runtime.discovery import RouterDirectory, addresses
from deploy.worker.rank_hosts import RankHosts
from kvcache.pool.client import PoolClient
from kvcache.pool.models import pull, push
from kvcache.pool.remote import RemoteNode
from kvcache.transfer.choice import WITHIN_HOST, lenders_on_demand
from serving.config import ClusterConfig, ModelConfig, PoolConfig
from serving.eplb_config import EplbConfig
from serving.errors import CorruptChunk, MillraceError, NotFound
from serving.expert_parallel.replanning import BalancePolicy
from serving.grpc_tls import GrpcTls
from serving.loader.loading import LoadedModel, load, resolve
from serving.parallel.layout import ParallelLayout
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rank_group.device_leader import ModelOnDevices, check_on_devices, load_on_devices
from serving.rank_group.layout_leader import DividedModel, check_layout, flags_of, load_layout
from serving.rank_group.leader import SpreadModel, check_spread, load_spread
from serving.rank_group.messages import Balancing
from serving.rpc import Caller, asking
from serving.temporary import temporary_folder

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")  # noqa: S108 - a file system in memory, where the host has one
ROUTER_SECONDS = 2.0
WAIT_SECONDS = 5.0  # for the pool to appear: it may be starting just now, as we are
LOOK_SECONDS = 0.2


def check_device(name: str) -> None:
    """Raises ValueError for a torch device that this host or this build of torch does not have. Claims no device."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: torch knows no such device; cpu, cuda or cuda:0 are ones") from error
    if device.type != "cuda":
        return
    if torch.version.cuda is None and torch.version.hip is None:
        raise ValueError(f"--device {name}: this build of torch has no CUDA; install one that has, or use --device cpu")
    if (there := torch.cuda.device_count()) <= (device.index or 0):
        seen = f"torch sees {there} GPUs" if there else "torch sees no GPU"
        raise ValueError(
            f"--device {name}: {seen}; see nvidia-smi and CUDA_VISIBLE_DEVICES (a container needs its GPUs passed in,"
            " docker run --gpus all), or use --device cpu"
        )


def check_model(path: Path, config: ModelConfig) -> None:
    """Raises ValueError for a model at `path` that cannot be served on the device or over the ranks asked for."""
    layout, ranks = layout_of(config), config.data_parallel_size
    check_device(config.device)
    if (shared := shares_of(config)).ranks > 1 and (ranks > 1 or config.enable_expert_parallel):
        raise ValueError(
            f"{flags_of(shared)}: ranks share either a model's layers, or with --data-parallel-size and"
            " --enable-expert-parallel its experts: leave out one of the two"
        )
    if ranks > 1 and not config.enable_expert_parallel:
        raise ValueError(
            f"--data-parallel-size {ranks}: the ranks of a worker share out a mixture of experts, which"
            f" --enable-expert-parallel asks for; for more copies of a model start more workers, --mixed {ranks}"
        )
    eplb = config.eplb()
    if eplb is not None and config.device != "cpu":
        raise ValueError(
            f"--enable-eplb with --device {config.device}: experts move through memory that ranks of a CPU share:"
            " leave out one of the two"
        )
    if layout.ranks > 1 and config.device == "cpu":
        check_layout(path, config.dtype, config.quantization, layout)
    elif layout.ranks > 1:
        check_gpus(config, layout)
        check_on_devices(path, config.dtype, config.quantization, layout, config.device)
    elif ranks > 1:
        redundant = 0 if eplb is None else eplb.num_redundant_experts
        check_spread(path, config.dtype, config.quantization, ranks, redundant)


def check_gpus(config: ModelConfig, layout: ParallelLayout) -> None:
    """Raises ValueError unless this process sees a GPU for each rank."""
    there = torch.cuda.device_count()
    if config.device.partition(":")[0] != "cuda":
        raise ValueError(f"{flags_of(layout)}: ranks have a CUDA device each, or share a CPU, and no {config.device}")
    if there < layout.ranks or asked_index(config.device) is not None:
        raise ValueError(
            f"{flags_of(layout)} with --device {config.device}: each rank has a GPU of its own, and this worker sees"
            f" {there}; see CUDA_VISIBLE_DEVICES, and name no single one"
        )


def load_from(path: Path, config: ModelConfig, hosts: RankHosts | None = None) -> LoadedModel:
    """Load the model at `path` as configured (serving.loader.loading), over several ranks where that is asked for.

    Some of them come from other `hosts`.
    """
    check_model(path, config)
    if (layout := layout_of(config)).ranks > 1 and config.device != "cpu":
        gpus = visible_devices(os.environ)
        return load_on_devices(path, config.dtype, layout, config.rank_timeout, config.device, gpus)
    if layout.ranks > 1:
        return load_layout(path, config.dtype, config.quantization, layout, config.rank_timeout)
    if config.data_parallel_size > 1:
        ranks, eplb = config.data_parallel_size, config.eplb()
        return load_spread(
            path,
            config.dtype,
            config.quantization,
            ranks,
            config.rank_timeout,
            redundant=0 if eplb is None else eplb.num_redundant_experts,
            balancing=None if eplb is None else _balancing(eplb),
            lobby=None if hosts is None else hosts.lobby(path, config),
        )
    return load(path, config.dtype, config.device, config.quantization)


def layout_of(config: ModelConfig) -> ParallelLayout:
    """How the ranks of a worker share its model. Of a CPU, ranks that hold experts have no layout (SpreadModel)."""
    if config.data_parallel_size > 1 and config.device != "cpu":
        return ParallelLayout(sequence=config.data_parallel_size, spread_experts=True)
    return shares_of(config)


def shares_of(config: ModelConfig) -> ParallelLayout:
    """How they share its layers."""
    return ParallelLayout(
        tensor=config.tensor_parallel_size,
        pipeline=config.pipeline_parallel_size,
        sequence=config.prefill_context_parallel_size,
    )


def _balancing(eplb: EplbConfig) -> Balancing:
    return Balancing(
        policy=BalancePolicy(kept=eplb.kept), interval=eplb.step_interval, bytes_per_second=eplb.bytes_per_second
    )


def release(model: LoadedModel) -> None:
    """End what holds a part of the model beside this process. Call when no step runs any more."""
    if isinstance(model, SpreadModel | DividedModel | ModelOnDevices):
        model.ranks.close()


class ModelCache:
    """A worker's model: `load` it, and once the worker serves, `store` it for the next one if the pool lacked it."""

    def __init__(
        self,
        model: str | None,
        config: ModelConfig,
        pool: PoolConfig,
        cluster: ClusterConfig,
        kv_transport: str = WITHIN_HOST,
        tls: GrpcTls | None = None,
        hosts: RankHosts | None = None,
    ):
        self.model = model
        self.config = config
        self.pool = pool
        self.cluster = cluster
        self.kv_transport = kv_transport
        self.tls, self.hosts = tls, hosts
        self.lacking: Path | None = None  # what the pool should be given

    async def load(self) -> LoadedModel:
        """From the pool where that was asked for and it has the model, else from disk or hub. Raises ValueError."""
        if self.config.load_format == "pool":
            async with client(self.pool, self.cluster, self.kv_transport, self.tls) as found:
                if found.nodes:
                    loaded = await self._pooled(found)
                    if loaded is not None:
                        return loaded
                else:
                    log.warning("no node of the KV pool is known: the model is loaded from disk")
        began = time.monotonic()
        path = await asyncio.to_thread(resolve, self.model)  # which may fetch it from the hub
        loaded = await asyncio.to_thread(load_from, path, self.config, self.hosts)
        log.info("%s loaded from disk in %.2f s", path.name, time.monotonic() - began)
        return loaded

    async def _pooled(self, found: PoolClient) -> LoadedModel | None:
        """None, with a word in the log, where it cannot be had from there."""
        for where in folders():
            try:
                return await self._pulled(found, where)
            except (NotFound, CorruptChunk) as error:
                log.info("%s: loading from disk, then storing it there", error.message)
                self.lacking = resolve(self.model)
                return None
            except OSError as error:  # containers often have little of such memory
                log.warning("%s cannot take the model in from the KV pool: %s", where, error.strerror or error)
        return None

    async def _pulled(self, found: PoolClient, where: Path) -> LoadedModel:
        """By way of a folder that is gone at the end; files mapped from it live on."""
        name, began = model_name(self.model), time.monotonic()
        with temporary_folder(where) as folder:
            path = await pull(found, name, folder)
            fetched = time.monotonic()
            loaded = await asyncio.to_thread(load_from, path, self.config, self.hosts)
        took = time.monotonic() - began
        log.info("%s loaded from the KV pool in %.2f s, %.2f s of it on the way", name, took, fetched - began)
        return replace(loaded, path=Path(name))

    async def store(self) -> None:
        """Put into the pool what it lacked."""
        if self.lacking is None:
            return
        async with client(self.pool, self.cluster, self.kv_transport, self.tls) as found:
            try:
                size = await push(found, model_name(self.model), self.lacking)
                log.info("%s is in the KV pool now: %.0f MB", model_name(self.model), size / 1e6)
            except MillraceError as error:
                log.warning("the model is not stored in the KV pool: %s", error.message)


def folders() -> list[Path]:
    """Where a model's files may lie on their way in, best first: in memory where the host has such, else on disk."""
    return [*([MEMORY] if MEMORY.is_dir() else []), Path(tempfile.gettempdir())]


def model_name(model: str | None) -> str:
    """What a model is called in the pool: as it was named, a local path in full."""
    path = Path(model).expanduser() if model is not None else resolve(None)
    return str(path.resolve()) if model is None or path.exists() else model


@asynccontextmanager
async def client(
    pool: PoolConfig, cluster: ClusterConfig, kv_transport: str = WITHIN_HOST, tls: GrpcTls | None = None
) -> AsyncIterator[PoolClient]:
    """A client of the pool whose nodes the configuration names and the routers know."""
    lenders = lenders_on_demand(kv_transport)
    made = PoolClient(
        partial(RemoteNode, cluster_key=cluster.cluster_key, lenders=lenders, tls=tls),
        replication=pool.replication,
        timeout=pool.kvcache_timeout,
    )
    try:
        made.set_nodes(await nodes(pool, cluster, tls))
        yield made
    finally:
        await made.close()
        lenders.close()


async def nodes(pool: PoolConfig, cluster: ClusterConfig, tls: GrpcTls | None = None) -> list[str]:
    """The pool's nodes; waits a little for the first."""
    fixed = addresses(pool.kvcache_nodes)
    found = await RouterDirectory(cluster.routers).now()
    callers = [Caller(address, cluster.cluster_key, tls) for address in found]
    try:
        end = time.monotonic() + WAIT_SECONDS
        while True:
            heard = await asyncio.gather(*(_ask(caller) for caller in callers))
            found = sorted({*fixed, *(node for told in heard for node in told)})
            if found or time.monotonic() > end:
                return found
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        for caller in callers:
            await caller.close()


async def _ask(caller: Caller) -> list[str]:
    try:
        with asking(caller.address):
            stub = stubs.RegistryStub(caller.channel)
            reply = await stub.PoolNodes(pb.PoolNodesRequest(), metadata=caller.metadata, timeout=ROUTER_SECONDS)
            return list(reply.pool_nodes)
    except MillraceError as error:
        log.debug("router %s does not answer: %s", caller.address, error.message)
        return []
