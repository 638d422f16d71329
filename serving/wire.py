"""Messages to protobuf and back, field by field. The only file that knows both forms; it decides nothing."""

from __future__ import annotations

from typing import Any

from serving.errors import InternalError, MillraceError, leaves
from serving.links import LeaseEvent
from serving.messages import (
    Audit,
    Delta,
    FinishReason,
    KVEvents,
    LeaseGrant,
    LeaseId,
    LeaseOrder,
    NamespaceStat,
    PoolReport,
    PoolStat,
    Prefilled,
    PrefillOrder,
    Request,
    Role,
    SamplingParams,
    Slo,
    Tier,
    TierStat,
    TokenLogprob,
    TransportOffer,
    WorkerStatus,
)
from serving.proto import millrace_pb2 as pb
from serving.proto import pool_pb2 as pool

KEY_BYTES = 8  # of a block key in KV events

_PLAIN_SAMPLING = (
    "max_tokens",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
)


def sampling_to_pb(params: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(
        bias_tokens=[token for token, _ in params.logit_bias],
        bias_values=[bias for _, bias in params.logit_bias],
        stop_token_ids=params.stop_token_ids,
        **{name: getattr(params, name) for name in _PLAIN_SAMPLING},
    )
    if params.logprobs is not None:
        message.logprobs = params.logprobs
    return message


def sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    plain: dict[str, Any] = {name: getattr(message, name) for name in _PLAIN_SAMPLING}
    return SamplingParams(
        logit_bias=tuple(zip(message.bias_tokens, message.bias_values, strict=True)),
        stop_token_ids=tuple(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        **plain,
    )


def request_to_pb(request: Request) -> pb.Request:
    return pb.Request(
        request_id=request.request_id,
        prompt=request.prompt,
        sampling=sampling_to_pb(request.sampling),
        ttft_slo_ms=request.slo.ttft_ms,
        tpot_slo_ms=request.slo.tpot_ms,
        tenant=request.tenant,
        prompt_logprobs=request.prompt_logprobs,
    )


def request_from_pb(message: pb.Request) -> Request:
    return Request(
        request_id=message.request_id,
        prompt=tuple(message.prompt),
        sampling=sampling_from_pb(message.sampling),
        slo=Slo(
            ttft_ms=message.ttft_slo_ms if message.HasField("ttft_slo_ms") else None,
            tpot_ms=message.tpot_slo_ms if message.HasField("tpot_slo_ms") else None,
        ),
        tenant=message.tenant,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def logprob_to_pb(logprob: TokenLogprob | None) -> pb.TokenLogprob:
    if logprob is None:
        return pb.TokenLogprob(absent=True)
    return pb.TokenLogprob(
        logprob=logprob.logprob,
        top_tokens=[token for token, _ in logprob.top],
        top_logprobs=[value for _, value in logprob.top],
    )


def logprob_from_pb(message: pb.TokenLogprob) -> TokenLogprob | None:
    if message.absent:
        return None
    return TokenLogprob(message.logprob, tuple(zip(message.top_tokens, message.top_logprobs, strict=True)))


def delta_to_pb(delta: Delta) -> pb.Delta:
    return pb.Delta(
        index=delta.index,
        tokens=delta.tokens,
        logprobs=[logprob_to_pb(item) for item in delta.logprobs],
        finish=delta.finish or "",
        cached_tokens=delta.cached_tokens,
        prompt_logprobs=[logprob_to_pb(item) for item in delta.prompt_logprobs],
    )


def delta_from_pb(message: pb.Delta) -> Delta:
    return Delta(
        index=message.index,
        tokens=tuple(message.tokens),
        logprobs=tuple(item for item in map(logprob_from_pb, message.logprobs) if item is not None),
        finish=FinishReason(message.finish) if message.finish else None,
        cached_tokens=message.cached_tokens,
        prompt_logprobs=tuple(map(logprob_from_pb, message.prompt_logprobs)),
    )


def error_to_pb(error: MillraceError) -> pb.Error:
    return pb.Error(
        kind=type(error).__name__,
        message=error.message,
        param=error.param,
        code=error.code,
        retry_after=error.retry_after,
    )


def error_from_pb(message: pb.Error) -> MillraceError:
    """An error of the same class as was sent; an unknown class (a newer peer) becomes InternalError."""
    kind = leaves().get(message.kind, InternalError)
    return kind(
        message.message,
        param=message.param if message.HasField("param") else None,
        code=message.code if message.HasField("code") else None,
        retry_after=message.retry_after if message.HasField("retry_after") else None,
    )


def lease_to_pb(lease: LeaseId) -> pb.LeaseId:
    return pb.LeaseId(lease=lease.lease, epoch=lease.epoch, instance=lease.instance)


def lease_from_pb(message: pb.LeaseId) -> LeaseId:
    return LeaseId(lease=message.lease, epoch=message.epoch, instance=message.instance)


def order_to_pb(order: LeaseOrder) -> pb.LeaseOrder:
    return pb.LeaseOrder(
        lease=lease_to_pb(order.lease), request=request_to_pb(order.request), generated=order.generated
    )


def order_from_pb(message: pb.LeaseOrder) -> LeaseOrder:
    return LeaseOrder(
        lease=lease_from_pb(message.lease),
        request=request_from_pb(message.request),
        generated=tuple(message.generated),
    )


def grant_to_pb(grant: LeaseGrant) -> pb.LeaseGrant:
    return pb.LeaseGrant(
        lease=lease_to_pb(grant.lease),
        cached_tokens=grant.cached_tokens,
        address=grant.address,
        kv_dtype=grant.kv_dtype,
        transports=[pb.TransportOffer(kind=offer.kind, details=offer.details) for offer in grant.transports],
    )


def grant_from_pb(message: pb.LeaseGrant) -> LeaseGrant:
    return LeaseGrant(
        lease=lease_from_pb(message.lease),
        cached_tokens=message.cached_tokens,
        address=message.address,
        kv_dtype=message.kv_dtype,
        transports=tuple(TransportOffer(kind=offer.kind, details=offer.details) for offer in message.transports),
    )


def prefill_order_to_pb(order: PrefillOrder) -> pb.PrefillOrder:
    return pb.PrefillOrder(
        order=order_to_pb(order.order), grant=None if order.grant is None else grant_to_pb(order.grant)
    )


def prefill_order_from_pb(message: pb.PrefillOrder) -> PrefillOrder:
    return PrefillOrder(
        order=order_from_pb(message.order),
        grant=grant_from_pb(message.grant) if message.HasField("grant") else None,
    )


def prefilled_to_pb(prefilled: Prefilled) -> pb.Prefilled:
    return pb.Prefilled(
        delta=delta_to_pb(prefilled.delta),
        cached_tokens=prefilled.cached_tokens,
        queue_seconds=prefilled.queue_seconds,
        compute_seconds=prefilled.compute_seconds,
    )


def prefilled_from_pb(message: pb.Prefilled) -> Prefilled:
    return Prefilled(
        delta=delta_from_pb(message.delta),
        cached_tokens=message.cached_tokens,
        queue_seconds=message.queue_seconds,
        compute_seconds=message.compute_seconds,
    )


def event_to_pb(event: LeaseEvent) -> pb.LeaseEvent:
    return pb.LeaseEvent(
        lease=event.lease,
        epoch=event.epoch,
        delta=None if event.delta is None else delta_to_pb(event.delta),
        error=None if event.error is None else error_to_pb(event.error),
    )


def event_from_pb(message: pb.LeaseEvent) -> LeaseEvent:
    return LeaseEvent(
        message.lease,
        message.epoch,
        delta_from_pb(message.delta) if message.HasField("delta") else None,
        error_from_pb(message.error) if message.HasField("error") else None,
    )


_PLAIN_STATUS = (
    "instance",
    "name",
    "address",
    "fingerprint",
    "pairing",
    "model",
    "max_model_len",
    "block_size",
    "total_blocks",
    "free_blocks",
    "max_seqs",
    "running",
    "waiting",
    "waiting_tokens",
    "draining",
    "stalled_seconds",
    "long_rope_after",
)


def status_to_pb(status: WorkerStatus) -> pb.WorkerStatus:
    plain: dict[str, Any] = {name: getattr(status, name) for name in _PLAIN_STATUS}
    return pb.WorkerStatus(role=status.role.value, counters=status.counters, **plain)


def status_from_pb(message: pb.WorkerStatus) -> WorkerStatus:
    plain: dict[str, Any] = {name: getattr(message, name) for name in _PLAIN_STATUS}
    return WorkerStatus(role=Role(message.role), counters=dict(message.counters), **plain)


def kv_events_to_pb(events: KVEvents) -> pb.KVEvents:
    stored, removed = b"".join(events.stored), b"".join(events.removed)
    return pb.KVEvents(first=events.first, next=events.next, reset=events.reset, stored=stored, removed=removed)


def kv_events_from_pb(message: pb.KVEvents) -> KVEvents:
    def keys(packed: bytes) -> tuple[bytes, ...]:
        return tuple(packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))

    return KVEvents(
        first=message.first,
        next=message.next,
        reset=message.reset,
        stored=keys(message.stored),
        removed=keys(message.removed),
    )


def audit_to_pb(audit: Audit) -> pb.Audit:
    return pb.Audit(service=audit.service, counts=audit.counts, leaked=audit.leaked)


def audit_from_pb(message: pb.Audit) -> Audit:
    return Audit(service=message.service, counts=dict(message.counts), leaked=dict(message.leaked))


_PLAIN_POOL = ("name", "instance", "lookups", "found", "stored", "refused", "pinned", "backlog")
_PLAIN_TIER = (
    "capacity",
    "bytes",
    "blocks",
    "hits",
    "bytes_read",
    "bytes_written",
    "evictions",
    "corrupt",
    "read_seconds",
    "eviction_age_seconds",
)


def pool_report_to_pb(report: PoolReport) -> pool.PoolStat:
    stat = report.stat
    plain: dict[str, Any] = {name: getattr(stat, name) for name in _PLAIN_POOL}
    tiers = [
        pool.TierStat(tier=tier.value, **{name: getattr(held, name) for name in _PLAIN_TIER})
        for tier, held in stat.tiers.items()
    ]
    namespaces = [
        pool.NamespaceStat(namespace=name, bytes=held.bytes, blocks=held.blocks, quota=held.quota)
        for name, held in stat.namespaces.items()
    ]
    return pool.PoolStat(address=report.address, draining=report.draining, tiers=tiers, namespaces=namespaces, **plain)


def pool_report_from_pb(message: pool.PoolStat) -> PoolReport:
    """Tiers that this version does not know are left out."""
    plain: dict[str, Any] = {name: getattr(message, name) for name in _PLAIN_POOL}
    tiers = {
        Tier(held.tier): TierStat(**{name: getattr(held, name) for name in _PLAIN_TIER})
        for held in message.tiers
        if held.tier in set(Tier)
    }
    namespaces = {
        held.namespace: NamespaceStat(bytes=held.bytes, blocks=held.blocks, quota=held.quota)
        for held in message.namespaces
    }
    stat = PoolStat(tiers=tiers, namespaces=namespaces, **plain)
    return PoolReport(stat=stat, address=message.address, draining=message.draining)
