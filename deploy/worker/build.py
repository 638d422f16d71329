"""Builds a worker: a model on a device, its KV cache, and the engine, connector and doors of its role.

`build_worker` makes the parts that need a model; `assemble` puts the rest together around any runner, and needs none.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

from decode.scheduler import DecodeScheduler
from decode.speculation import Speculation
from decode.tpot_bound import DECODE_SHARE, MIXED_SHARE, LeaseBound, TpotBound
from decode.worker import DecodeWorker
from deploy.worker.computing import (
    device_memory,
    forward_of,
    lead_ranks,
    most_kept,
    other_devices,
    ranks_of,
    sampler_of,
)
from deploy.worker.kv_sizing import Rehearsal, kv_cache_bytes, telling_what_takes_less
from deploy.worker.proposers import DraftParts, load_draft_parts, make_drafts
from deploy.worker.step_costs import StepCostFile, StepCostKeeper, step_cost_file
from deploy.worker.worker import Worker
from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.events import LOG_EVENTS, KVEventLog
from kvcache.blocks.manager import KVCacheManager
from kvcache.blocks.offload import OffloadManager, plan_host
from kvcache.connector.connector import PoolConnector, pool_client, write_back_to
from kvcache.connector.fetch_cost import FetchCost
from kvcache.memory.device import DeviceKV, blocks_in, token_bytes
from kvcache.memory.early_pages import EarlyPages
from kvcache.memory.host import HostKV
from kvcache.memory.locations import KVLocations
from kvcache.pool.links import PoolLink
from kvcache.transfer.lent_memory import MemoryLenders
from kvcache.worker_context import WorkerContext
from prefill.chunking import FLOOR, Chunking, FixedChunks, SlackChunks
from prefill.ordering import Cost, FirstComeFirstServed, PromptOrder, SlackOrder
from prefill.pauses import DecodePauses
from prefill.scheduler import PrefillScheduler
from prefill.worker import Layout, PrefillWorker
from serving.config import EngineConfig, ModelConfig, PoolConfig
from serving.engine.engine import Engine, StepLimits
from serving.engine.loop import EngineLoop
from serving.engine.overlap import engine_for
from serving.engine.plan import Scheduler, StepRecord
from serving.engine.proposer import Proposer
from serving.engine.run import Runner
from serving.engine.runner import ModelRunner
from serving.engine.step_fit import StepFit
from serving.engine.step_meter import StepMeter
from serving.engine.step_prior import UNKNOWN, guessed_cost
from serving.engine.tracing import TraceWriter
from serving.forward.forward import Forward
from serving.grammar.grammars import GRAMMAR_VERSION, GrammarCompiler, Grammars
from serving.kernels.cpu.build import sources_digest
from serving.kvspec import LayerKV
from serving.links import HandoffDialer
from serving.loader.loading import LoadedModel
from serving.messages import Role, WorkerIdentity
from serving.step_cost import StepCost
from serving.text.tokenizer import load_tokenizer

MANY = 1 << 40  # tokens: more than any context

Measured = Callable[[StepRecord], None]
MakeForward = Callable[[LoadedModel, DeviceKV, EngineConfig, int], Forward]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLinks:
    """What a worker is given of the process it runs in.

    `address` is where others reach it, `lenders` the memory its leases are granted with. `pool_link` reaches a node of
    the KV pool; without it the worker takes no part in one.
    """

    address: str
    dialer: HandoffDialer
    lenders: MemoryLenders | None = None
    pool: PoolConfig = field(default_factory=PoolConfig)
    pool_link: Callable[[str], PoolLink] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParts:
    """What a worker needs of its model: `layout` as PrefillWorker takes it, and what is known of its steps' cost."""

    runner: Runner
    eos_token_ids: frozenset[int]
    layout: Layout
    guess: StepCost = UNKNOWN  # what its steps take, from its size
    learned: StepCostFile | None = None  # and what earlier workers of its kind have learned
    grammars: Grammars | None = None
    proposer: Proposer | None = None  # where a model drafts


@telling_what_takes_less()
def build_worker(
    role: Role,
    model: LoadedModel,
    model_config: ModelConfig,
    config: EngineConfig,
    links: WorkerLinks,
    *,
    name: str | None = None,
    drafts: DraftParts | None = None,
    make_forward: MakeForward = forward_of,
) -> Worker:
    """A worker of a model, not started yet; what its drafts are made with is loaded, unless it is given.

    Call on a running event loop. Raises ValueError for settings that clash, and where memory lacks.
    """
    if config.deterministic and config.kv_wire != "auto":
        raise ValueError("--kv-wire int8 changes bits, which --deterministic promises not to happen")
    spec, kv_dtype = model.spec, model.dtype if model_config.kv_cache_dtype == "auto" else "int8"
    specs, drafts = spec.kv_layers(kv_dtype), drafts or load_draft_parts(role, model, model_config, config)
    rehearsal = Rehearsal(model, specs, context_limit(model, model_config, MANY), make_forward)
    locations, tokens = kv_memory(rehearsal, drafts.specs, config, model_config.device)
    device_kv, limit = locations.device, context_limit(model, model_config, tokens)
    drafting = make_drafts(drafts, model, make_forward(model, device_kv, config, limit), device_kv, config, limit)
    forward, form = drafting.forward, promised_form(drafting.forward) if config.deterministic else "any"

    def layout(dtype: str) -> tuple[str, tuple[LayerKV, ...]]:
        layers = spec.kv_layers(dtype)
        return layout_fingerprint(model.fingerprint, layers, form), layers

    identity = WorkerIdentity(
        instance=uuid.uuid4().hex,
        name=name or f"{role}-{socket.gethostname()}-{os.getpid()}",
        role=role,
        model=str(model.path),
        fingerprint=layout(kv_dtype)[0],
        pairing=layout_fingerprint(model.fingerprint, specs if config.deterministic else (), form + GRAMMAR_VERSION),
        kv_dtype=kv_dtype,
        max_model_len=limit,
        long_rope_after=spec.long_rope_after,
        ranks=ranks_of(model),
    )
    others: dict[str, Forward] = {}  # for prompts of decode workers that keep KV in another dtype (prefill.worker)
    if role is not Role.DECODE and device_kv.can_keep("int8"):
        others["int8"] = forward.over(device_kv.kept_as("int8").planes)
    sampler, where = sampler_of(forward), (config.block_size, model_config.device, locations.host)
    runner = ModelRunner(forward, spec, *where, sampler, others, drafting.computed)
    eos = frozenset(spec.eos_token_ids)
    grammars = Grammars(GrammarCompiler(lambda: load_tokenizer(model.path), sorted(eos)))
    parts = ModelParts(
        runner=runner,
        eos_token_ids=eos,
        layout=layout,
        guess=_guessed(model, specs, model_config.device),
        learned=step_cost_file(identity.fingerprint, drafting.kind, role, config.threads, model_config.device),
        grammars=grammars,
        proposer=drafting.proposer,
    )
    worker = assemble(identity, config, locations, parts, links)
    lead_ranks(worker, model)
    return _with_early_pages(worker)


def _with_early_pages(worker: Worker) -> Worker:
    """The worker, which has some for its KV where that lies in host memory."""
    planes = [plane for layer in worker.context.locations.device.planes for plane in layer]
    if planes[0].device.type == "cpu":
        worker.early_pages = EarlyPages(planes, lambda: worker.idle)
    return worker


def _guessed(model: LoadedModel, specs: Sequence[LayerKV], device: str) -> StepCost:
    weights = sum(weight.nbytes for weight in model.model.parameters())
    return guessed_cost(model.spec, weight_bytes=weights, kv_bytes=token_bytes(specs), device=device)


def kv_memory(
    rehearsal: Rehearsal, drafts: Sequence[LayerKV], config: EngineConfig, device: str
) -> tuple[KVLocations, int]:
    """The memories of a worker's KV, of which its drafts take a share; and the tokens of the longest text in them."""
    model, specs, size = rehearsal.model, rehearsal.specs, config.block_size
    memory = kv_cache_bytes(
        config, device, partial(rehearsal.over_one_block, config, device), other_devices(rehearsal.model)
    )
    blocks = config.num_kv_blocks or blocks_in(memory, [*most_kept(model, specs), *drafts], size)
    plan = plan_host(specs, blocks, size, config.host_kv_memory) if config.host_kv_memory else None
    device_kv = device_memory(model, specs, plan.device_blocks if plan else blocks, config, device)
    windows = [model.spec.window(layer) for layer in range(model.spec.layers)]
    host_kv = HostKV(plan, device_kv, windows) if plan is not None else None
    tokens = plan.tokens if plan is not None else blocks * size
    return KVLocations(device_kv, host_kv, threading.RLock()), tokens


def assemble(
    identity: WorkerIdentity,
    config: EngineConfig,
    locations: KVLocations,
    parts: ModelParts,
    links: WorkerLinks,
    *,
    clock: Callable[[], float] = time.monotonic,
    engine_loop: Callable[[Engine], EngineLoop] = EngineLoop,
    kv_events: int = LOG_EVENTS,  # that it remembers; 0 where nobody asks for them
    tell_every: int = 1,  # tokens of a text (serving.engine.engine.Engine)
) -> Worker:
    """A worker around a runner and the memories its KV lies in, whose lock the engine takes; a loop runs its steps."""
    device_kv, host, role = locations.device, locations.host, identity.role
    events, cost = KVEventLog(kv_events), FetchCost()
    meter = StepMeter(StepFit(parts.guess, parts.learned.read() if parts.learned is not None else None))
    sizes, caching = (device_kv.num_blocks, device_kv.block_size), config.enable_prefix_caching
    allocator = BlockAllocator(*sizes, caching=caching, events=events if kv_events else None)
    offload = OffloadManager(host.plan) if host is not None else None
    client = pool_client(links.pool_link, links.pool) if links.pool_link and caching else None
    storing = write_back_to(client, links.pool, allocator, offload, locations) if client is not None else None
    kv = KVCacheManager(allocator, identity.fingerprint, offload, storing)
    slo = objectives_parts(role, config, meter.cost)
    decoding = decode_scheduler(kv, identity, config, parts.proposer)
    then, measured = None if role is Role.PREFILL else decoding.add, both(cost.stepped, meter.stepped)
    prefilling = PrefillScheduler(kv, then, measured, order=slo.order, chunks=slo.chunks)
    decoding.pauses = decode_pauses(role, config, meter.cost, prefilling)
    # The role is this list: decode goes first, prompts get the rest of the step.
    schedulers: list[Scheduler] = [prefilling] if role is Role.PREFILL else [decoding, prefilling]
    engine = engine_of(identity, device_kv)(
        *(parts.runner, kv, schedulers, step_limits(config, identity.max_model_len, parts.eos_token_ids)),
        lock=locations.lock,
        clock=clock,
        trace=trace_writer(config.profile, identity.name),
        proposer=parts.proposer,
        tell_every=tell_every,
    )
    loop = engine_loop(engine)
    loop.shares_cores = device_kv.planes[0][0].device.type == "cpu"
    context = WorkerContext(identity=identity, loop=loop, kv=kv, locations=locations, grammars=parts.grammars)
    connector: PoolConnector | None = None
    if client is not None and storing is not None:
        busy, freed = lambda: bool(prefilling.queue), partial(loop.wake, hurry=False)
        connector = PoolConnector(client, storing, links.pool, kv, locations, cost, busy=busy, freed=freed)
    decode: DecodeWorker | None = None
    if role is not Role.PREFILL:
        direct = connector.direct if connector is not None else None
        wanted = prefilling.wanted_blocks
        decode = DecodeWorker(
            *(context, decoding, links.address), lenders=links.lenders, direct=direct, wanted=wanted, bound=slo.bound
        )
    prefill = PrefillWorker(
        *(context, prefilling, links.dialer),
        layout=parts.layout,
        kv_wire=config.kv_wire,
        leases=decode,
        prefixes=connector,
    )
    costs = StepCostKeeper(meter, parts.learned)
    return Worker(context, prefill, decode, address=links.address, events=events, costs=costs, connector=connector)


def engine_of(identity: WorkerIdentity, device_kv: DeviceKV) -> type[Engine]:
    """Of several ranks none begins a step ahead: they are given the tokens that it feeds, which nobody has read yet."""
    return Engine if identity.ranks > 1 else engine_for(str(device_kv.planes[0][0].device))


def decode_scheduler(
    kv: KVCacheManager, identity: WorkerIdentity, config: EngineConfig, proposer: Proposer | None = None
) -> DecodeScheduler:
    """It drafts where the configuration says so, and on a mixed worker leaves prompts what a step owes them."""
    limit = config.speculation().num_speculative_tokens or 0
    return DecodeScheduler(
        kv,
        max_model_len=identity.max_model_len,
        speculation=Speculation(limit, proposer) if limit > 0 else None,
        for_prompts=FLOOR if identity.role is Role.MIXED else 0,
    )


def decode_pauses(role: Role, config: EngineConfig, cost: Cost, prefilling: PrefillScheduler) -> DecodePauses | None:
    """Whose decodes pause for prompts, where both share steps, and order and chunks of prompts are by slack."""
    if role is not Role.MIXED or (config.chunking, config.prefill_order) != ("slack", "slack"):
        return None
    return DecodePauses(cost, prefilling.pressing, config.max_num_batched_tokens)


def step_limits(config: EngineConfig, max_model_len: int, eos_token_ids: frozenset[int]) -> StepLimits:
    return StepLimits(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
    )


def both(first: Measured, second: Measured) -> Measured:
    """Tells two of each step."""

    def measured(record: StepRecord) -> None:
        first(record)
        second(record)

    return measured


@dataclass(frozen=True, slots=True)
class ObjectivesParts:
    """What decides by requests' objectives in a worker; each may be switched off."""

    order: PromptOrder
    chunks: Chunking
    bound: LeaseBound | None


def objectives_parts(role: Role, config: EngineConfig, step_cost: Cost) -> ObjectivesParts:
    """The parts a worker of this role and configuration decides with, by its own step cost."""
    mixed = role is Role.MIXED
    bound = TpotBound(step_cost, MIXED_SHARE if mixed else DECODE_SHARE, prompts=mixed)
    return ObjectivesParts(
        order=SlackOrder(step_cost) if config.prefill_order == "slack" else FirstComeFirstServed(),
        chunks=SlackChunks(step_cost) if config.chunking == "slack" else FixedChunks(),
        bound=bound if config.tpot_admission else None,
    )


def context_limit(model: LoadedModel, config: ModelConfig, kv_tokens: int) -> int:
    """Tokens a sequence may have: what the model, the configuration and the KV cache allow. Raises ValueError."""
    allowed = model.spec.max_position
    if config.max_model_len is not None:
        if config.max_model_len > allowed:
            raise ValueError(f"--max-model-len {config.max_model_len} is more than the model's {allowed} tokens")
        allowed = config.max_model_len
    return min(allowed, kv_tokens)


def trace_writer(path: str | None, worker: str) -> TraceWriter | None:
    """Traces to steps.decode-0.json where steps.json is asked for, so that workers do not share a file."""
    if path is None:
        return None
    asked = Path(path)
    return TraceWriter(asked.with_name(f"{asked.stem}.{worker}{asked.suffix or '.json'}"), worker)


def promised_form(forward: Forward) -> str:
    """The form of computing, and its kernels' sources: a release may compute the same form with other bits."""
    return f"{forward.form} {sources_digest()}"


@lru_cache(maxsize=64)
def layout_fingerprint(model: str, specs: tuple[LayerKV, ...], form: str) -> str:
    """Hex; equal only for the same weights, KV layout and, where bits are promised, form of computing."""
    return hashlib.sha256(f"{model}|{specs!r}|{form}".encode()).hexdigest()[:32]
