"""Sequences for tests of the KV cache and the schedulers: small prompts of a small vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcache.blocks.manager import KVCacheManager
from serving.engine.sequence import SequenceState
from serving.messages import LeaseId, LeaseOrder, Request, SamplingParams

OWN = (
    "tenant",
    "client",
    "prompt_logprobs",
    "deadline",
    "slo",
    "priority",
    "service_class",
    "pooling",
)  # of Request, not its sampling


def lease_id(lease: str = "r/1", epoch: int = 0, instance: str = "decode") -> LeaseId:
    return LeaseId(lease=lease, epoch=epoch, instance=instance)


def make_request(prompt: Sequence[int], *, request_id: str = "r", max_tokens: int = 8, **fields: Any) -> Request:
    """A greedy request; `fields` are of Request or of SamplingParams."""
    own = {name: fields.pop(name) for name in OWN if name in fields}
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields)
    return Request(request_id=request_id, prompt=tuple(prompt), sampling=sampling, **own)


def make_order(
    prompt: Sequence[int], *, lease: LeaseId | None = None, generated: Sequence[int] = (), **fields: Any
) -> LeaseOrder:
    """`fields` as make_request's, and of LeaseOrder."""
    times = {name: fields.pop(name) for name in ("first_token_in", "ends_in", "prefill", "sheddable") if name in fields}
    request = make_request(prompt, **fields)
    return LeaseOrder(lease=lease or lease_id(), request=request, generated=tuple(generated), **times)


def make_sequence(
    kv: KVCacheManager | None,
    prompt: Sequence[int],
    *,
    generated: Sequence[int] = (),
    stays: bool = False,
    long_rope: bool = False,
    now: float = 0.0,
    **fields: Any,
) -> SequenceState:
    """A sequence as a worker makes one. Without `kv` its keys are rooted in nothing."""
    order = make_order(prompt, generated=generated, **fields)
    root = kv.root(order.request.tenant, long_rope) if kv is not None else b""
    return SequenceState(order, root=root, stays=stays, long_rope=long_rope, now=now)
