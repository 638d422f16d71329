"""The frozen dataclasses that services send each other: requests, orders, tokens, loads.

Plain data without protobuf, torch or a clock. `serving.wire` maps each to the protobuf message of its name, field by
field: a new field is written here and in serving/proto, and nowhere else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256

from serving.step_cost import StepCost
from serving.tracing import TraceContext

PROTOCOL = 6  # of registration and leases: a router takes workers of its own version and of the one before
KV_PROTOCOL = 2  # of handoffs: workers of unequal versions never hand KV to each other; blocks: kvcache.blocks.prefix


class FinishReason(StrEnum):
    """How an accepted request ends; every one ends exactly once."""

    STOP = "stop"  # a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # the client left
    ERROR = "error"


class Pooling(StrEnum):
    """How a prompt's hidden states after the final norm become one embedding."""

    LAST = "last"  # the last token's
    MEAN = "mean"  # of all tokens'
    FIRST = "first"  # the first token's


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is sampled: at position p it depends on the logits, these parameters and p alone."""

    max_tokens: int  # output tokens at most
    seed: int = 0  # unsigned 64 bits; always set, drawn at admission when the client gave none
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0  # stop tokens are masked before this many output tokens
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k >= 0: the chosen token's and the k best
    grammar: str = ""  # that the output follows, as serving.grammar.grammars reads it; empty: none

    @property
    def penalised(self) -> bool:
        """True if each draw changes the scores of the next: counts of the tokens so far are needed."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Objectives of one request in milliseconds, None where it has none. TPOT is the mean after the first token."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


def owned(owner: str, salt: str) -> str:
    """The tenant of a request whose prefixes are an owner's, within them apart by salt. Without an owner, the salt."""
    return f"{owner}\0{salt}" if owner else salt


def owner_of(tenant: str) -> str:
    """The owner that `owned` has put in; empty without one."""
    owner, mark, _ = tenant.partition("\0")
    return owner if mark else ""


def shown_tenant(owner: str) -> str:
    """What an owner, or a salt, is called where others may read it: in logs, and as a namespace of the KV pool."""
    return sha256(b"millrace-namespace\0" + owner.encode()).hexdigest()[:16] if owner else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sequence to generate. `n > 1` is n of these that share a prompt and differ in seed."""

    request_id: str
    prompt: tuple[int, ...]  # token ids, never empty
    sampling: SamplingParams
    slo: Slo = field(default_factory=Slo)
    tenant: str = ""  # salts the KV block keys: tenants never share cached blocks; may have an owner (owner_of)
    deadline: float | None = None  # seconds on the router's clock
    service_class: str = "standard"  # of the configured classes
    priority: int = 0  # smaller goes first, its class's priority included
    session: str = ""  # requests that name the same one belong together; the router's alone
    client: str = ""  # tells API keys apart, for fairness alone; empty where none is required
    prompt_logprobs: int | None = None  # like SamplingParams.logprobs, for the prompt's tokens
    pooling: Pooling | None = None  # an embedding is wanted and no token; `max_tokens` is 1 then
    trace: TraceContext | None = None  # of its span, where it is traced
    alone: bool = True  # its response has no other sequence; known to the router only

    @property
    def owner(self) -> str:
        """Whose cached prefixes it shares: a digest of its tenant or group; empty where there are none."""
        return owner_of(self.tenant)

    @property
    def longest(self) -> int:
        """Tokens of prompt and output that it may come to."""
        return len(self.prompt) + (self.sampling.max_tokens if self.pooling is None else 0)

    @property
    def reuses_kv(self) -> bool:
        """True if cached KV may stand in for computing a token: nothing else of that token is wanted."""
        return self.prompt_logprobs is None and self.pooling in (None, Pooling.LAST)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The chosen token's log-probability (of the raw logits) and the best alternatives, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob)


@dataclass(kw_only=True, slots=True)  # not frozen: one for every token, as LeaseEvent
class Delta:
    """Consecutive new output tokens of one request, as `generate()` yields them.

    The token that stopped a request is the last of `tokens`, with `finish` STOP; it is counted but not shown.
    """

    index: int  # output index of tokens[0], counted from 0 over the whole request
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # same length as tokens when asked for, else empty
    finish: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens whose KV was reused; meaningful on the first delta
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # on the first delta, when asked for
    embedding: bytes = b""  # float32, little-endian, neither shortened nor normalized; there are no tokens then

    @property
    def steps(self) -> int:
        """Of the worker's that have brought the tokens."""
        return 1


Generate = Callable[[Request], AsyncIterator[Delta]]
"""The router's `generate`. Leaving the iterator early (`aclose`) cancels the request everywhere."""


# ---- placement: what the router orders from workers ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseId:
    """Identifies one attempt to place a request, and fences it: messages of an older epoch or instance are refused."""

    lease: str
    epoch: int  # grows with each prefill attempt on the same lease
    instance: str  # the decode worker's instance id, new at every start


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseOrder:
    """What the router asks of a decode worker: reserve KV blocks, then continue from prompt + generated.

    Times are relative, since clocks are not shared: `first_token_in` seconds the next token is due to meet the
    objectives, less than 0 once it is late; `ends_in` seconds the request's deadline passes.
    `prefill`: the worker is to compute the prompt too, for this lease, as soon as that is granted. `PrefillLink.run`
    is called all the same; a link that sends messages then sends no second one.
    `sheddable`: late, it is refused by its class, or goes on without objectives (serving.engine.ageing.ends_late).
    """

    lease: LeaseId
    request: Request
    generated: tuple[int, ...] = ()  # output tokens the client already has
    first_token_in: float | None = None
    ends_in: float | None = None
    prefill: bool = False
    sheddable: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportOffer:
    """A transport by which KV can reach a decode worker; only the sender of that transport reads `details`."""

    kind: str
    details: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseGrant:
    """The decode worker's answer: blocks are held; `cached_tokens` of the sequence are already in its KV cache."""

    lease: LeaseId
    cached_tokens: int
    address: str  # where the prefill worker pushes KV to, over gRPC
    kv_dtype: str  # of the decode worker's KV: what pushed chunks must be laid out for
    transports: tuple[TransportOffer, ...] = ()  # ways beside gRPC, best first


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillOrder:
    """What the router asks of a prefill worker: compute, sample one token, hand the KV to the lease."""

    order: LeaseOrder
    grant: LeaseGrant | None  # None: no decode follows (one token asked for)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefilled:
    """The prefill worker's answer when the first token is sampled.

    Of the `cached_tokens`, which were not computed, the `fetched_tokens` came from the KV pool.
    """

    delta: Delta
    cached_tokens: int
    queue_seconds: float
    compute_seconds: float
    fetched_tokens: int = 0


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Build:
    """What computes a request: a text stays with one `fingerprint`, and with its `generation` while that can serve it.

    `pairing` is that of the fingerprint's workers.
    """

    fingerprint: str
    pairing: str
    generation: str = ""  # empty: not known


@lru_cache(maxsize=256)
def generation_of(pairing: str, kv_protocol: int) -> str:
    """12 hex digits, equal for workers that may hand KV to each other: the old and the new ones of a roll differ."""
    return sha256(f"{pairing}|{kv_protocol}".encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerIdentity:
    """What is constant while a worker process runs. Workers of unequal `generation` never hand KV to each other."""

    instance: str  # new at every start
    name: str  # stable over restarts, for logs and metrics
    role: Role
    model: str
    fingerprint: str  # model, quantization, KV dtype and layout
    pairing: str  # model, quantization and, with --deterministic, what computes
    kv_dtype: str  # a dtype's name
    max_model_len: int  # tokens
    long_rope_after: int = 0  # as in WorkerStatus
    ranks: int = 1  # processes that are this worker
    kv_protocol: int = field(default_factory=lambda: KV_PROTOCOL)

    @property
    def generation(self) -> str:
        return generation_of(self.pairing, self.kv_protocol)


TPOT_BINS_MS = (5.0, 7.0, 10.0, 14.0, 20.0, 28.0, 40.0, 56.0, 80.0, 112.0, 160.0, 224.0, 320.0, 448.0, 640.0)
"""Upper bounds of the bins of WorkerStatus.tpot_counts; a last bin counts sequences with a later objective or none."""
STEP_TOKEN_BINS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens of a step: at most; as vLLM


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """A worker's heartbeat: its identity and load. The first one registers it."""

    instance: str  # new at every start
    name: str  # stable over restarts, for logs and metrics
    role: Role
    address: str  # host:port of its gRPC server, or an in-process name
    fingerprint: str  # model, quantization, KV dtype and layout: decode never moves to an unequal one
    pairing: str  # model and quantization; unequal ones are never paired
    model: str
    max_model_len: int  # tokens
    block_size: int  # tokens
    total_blocks: int
    free_blocks: int
    max_seqs: int
    running: int  # sequences in the decode batch
    waiting: int  # sequences queued or in prefill
    waiting_tokens: int  # prompt tokens still to compute
    waiting_seconds: float = 0.0  # predicted for those, beside what decodes; 0 where it cannot be predicted
    leases: int = 0  # held, running or not
    context_tokens: int = 0  # of the running sequences, summed
    tpot_counts: tuple[int, ...] = ()  # running sequences by TPOT objective, in the bins of TPOT_BINS_MS
    prompt_share: float = 0.0  # share of recent time in steps that computed prompt tokens
    step_cost: StepCost | None = None  # None where the worker does not measure its steps
    max_batched_tokens: int = 0  # of a step
    protocol: int = PROTOCOL
    draining: bool = False
    long_rope_after: int = 0  # requests that may grow beyond so many tokens rotate by LongRoPE's long factors; 0: none
    stalled_seconds: float = 0.0  # age of the step in progress, when there is one
    counters: dict[str, float] = field(default_factory=dict)  # running totals by metric name, for the router's /metrics
    ranks: int = 1  # processes that are this worker; 0 of a version that does not tell
    kv_protocol: int = KV_PROTOCOL  # 0 of a version that does not tell

    @property
    def generation(self) -> str:
        return generation_of(self.pairing, self.kv_protocol)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVEvents:
    """Block keys, cut to 8 bytes, that a worker has stored and removed since its event number `first`.

    With `reset`, `stored` are all keys it has now, and `first` is -1. Ask for the events from `next` on afterwards.
    """

    first: int
    next: int
    reset: bool = False
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()  # none of them is in `stored`


# ---- the KV pool: what its nodes report ------------------------------------------------------------------------


class Tier(StrEnum):
    RAM = "ram"
    DISK = "disk"


@dataclass(frozen=True, kw_only=True, slots=True)
class TierStat:
    """One tier of one node: bytes and blocks held, its capacity, and running totals since the node's start."""

    capacity: int
    bytes: int
    blocks: int
    hits: int = 0  # blocks served from here
    bytes_read: int = 0
    bytes_written: int = 0
    evictions: int = 0
    corrupt: int = 0  # blocks found wrong, dropped and never served
    read_seconds: float = 0.0
    eviction_age_seconds: float = 0.0  # summed over evictions: time since the block was stored


@dataclass(frozen=True, kw_only=True, slots=True)
class NamespaceStat:
    bytes: int
    blocks: int
    quota: int  # bytes that blocks of other namespaces never evict


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolStat:
    """What a node of the KV pool holds, and running totals since its start."""

    name: str
    instance: str
    tiers: dict[Tier, TierStat]
    namespaces: dict[str, NamespaceStat]
    lookups: int  # keys asked for
    found: int  # keys of those that were here
    stored: int  # blocks accepted
    refused: int  # blocks not taken: backlog full, quota, or corrupt on arrival
    pinned: int
    backlog: int  # blocks on their way to disk


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolReport:
    """A pool node's heartbeat."""

    stat: PoolStat
    address: str  # host:port
    draining: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What a service holds at this moment. On an idle service every count is zero."""

    service: str
    counts: dict[str, int]  # name → how many
    leaked: dict[str, int]  # name → how many of those no request owns

    @property
    def idle(self) -> bool:
        return not any(self.counts.values()) and not any(self.leaked.values())
