from serving.proto import pool_pb2 as _pool_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias_tokens", "bias_values", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs", "grammar")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_tokens: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    grammar: str
    def __init__(self, max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias_tokens: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[str] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("request_id", "prompt", "sampling", "ttft_slo_ms", "tpot_slo_ms", "tenant", "prompt_logprobs", "service_class", "priority", "pooling", "client", "trace")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    ttft_slo_ms: float
    tpot_slo_ms: float
    tenant: str
    prompt_logprobs: int
    service_class: str
    priority: int
    pooling: str
    client: str
    trace: TraceContext
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., ttft_slo_ms: _Optional[float] = ..., tpot_slo_ms: _Optional[float] = ..., tenant: _Optional[str] = ..., prompt_logprobs: _Optional[int] = ..., service_class: _Optional[str] = ..., priority: _Optional[int] = ..., pooling: _Optional[str] = ..., client: _Optional[str] = ..., trace: _Optional[_Union[TraceContext, _Mapping]] = ...) -> None: ...

class TraceContext(_message.Message):
    __slots__ = ("traceparent", "tracestate")
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    traceparent: str
    tracestate: str
    def __init__(self, traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("logprob", "top_tokens", "top_logprobs", "absent")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    absent: bool
    def __init__(self, logprob: _Optional[float] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., absent: _Optional[bool] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("index", "tokens", "logprobs", "finish", "cached_tokens", "prompt_logprobs", "embedding")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    index: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    finish: str
    cached_tokens: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    embedding: bytes
    def __init__(self, index: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., finish: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., embedding: _Optional[bytes] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("kind", "message", "param", "code", "retry_after")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    param: str
    code: str
    retry_after: float
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., code: _Optional[str] = ..., retry_after: _Optional[float] = ...) -> None: ...

class LeaseId(_message.Message):
    __slots__ = ("lease", "epoch", "instance")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    lease: str
    epoch: int
    instance: str
    def __init__(self, lease: _Optional[str] = ..., epoch: _Optional[int] = ..., instance: _Optional[str] = ...) -> None: ...

class LeaseOrder(_message.Message):
    __slots__ = ("lease", "request", "generated", "first_token_in", "ends_in", "prefill", "sheddable")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_IN_FIELD_NUMBER: _ClassVar[int]
    ENDS_IN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    SHEDDABLE_FIELD_NUMBER: _ClassVar[int]
    lease: LeaseId
    request: Request
    generated: _containers.RepeatedScalarFieldContainer[int]
    first_token_in: float
    ends_in: float
    prefill: bool
    sheddable: bool
    def __init__(self, lease: _Optional[_Union[LeaseId, _Mapping]] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., generated: _Optional[_Iterable[int]] = ..., first_token_in: _Optional[float] = ..., ends_in: _Optional[float] = ..., prefill: _Optional[bool] = ..., sheddable: _Optional[bool] = ...) -> None: ...

class LeaseGrant(_message.Message):
    __slots__ = ("lease", "cached_tokens", "address", "kv_dtype", "transports")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    lease: LeaseId
    cached_tokens: int
    address: str
    kv_dtype: str
    transports: _containers.RepeatedCompositeFieldContainer[TransportOffer]
    def __init__(self, lease: _Optional[_Union[LeaseId, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., address: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., transports: _Optional[_Iterable[_Union[TransportOffer, _Mapping]]] = ...) -> None: ...

class TransportOffer(_message.Message):
    __slots__ = ("kind", "details")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    details: bytes
    def __init__(self, kind: _Optional[str] = ..., details: _Optional[bytes] = ...) -> None: ...

class PrefillOrder(_message.Message):
    __slots__ = ("order", "grant")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    order: LeaseOrder
    grant: LeaseGrant
    def __init__(self, order: _Optional[_Union[LeaseOrder, _Mapping]] = ..., grant: _Optional[_Union[LeaseGrant, _Mapping]] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("delta", "cached_tokens", "queue_seconds", "compute_seconds", "fetched_tokens")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    delta: Delta
    cached_tokens: int
    queue_seconds: float
    compute_seconds: float
    fetched_tokens: int
    def __init__(self, delta: _Optional[_Union[Delta, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., fetched_tokens: _Optional[int] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("hello", "open", "advance", "cancel")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ADVANCE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    hello: str
    open: LeaseOrder
    advance: LeaseOrder
    cancel: str
    def __init__(self, hello: _Optional[str] = ..., open: _Optional[_Union[LeaseOrder, _Mapping]] = ..., advance: _Optional[_Union[LeaseOrder, _Mapping]] = ..., cancel: _Optional[str] = ...) -> None: ...

class LeaseEvent(_message.Message):
    __slots__ = ("lease", "epoch", "delta", "error")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    lease: str
    epoch: int
    delta: Delta
    error: Error
    def __init__(self, lease: _Optional[str] = ..., epoch: _Optional[int] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class LeaseAnswer(_message.Message):
    __slots__ = ("lease", "grant", "error")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    lease: LeaseId
    grant: LeaseGrant
    error: Error
    def __init__(self, lease: _Optional[_Union[LeaseId, _Mapping]] = ..., grant: _Optional[_Union[LeaseGrant, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class LeasePrefilled(_message.Message):
    __slots__ = ("lease", "prefilled", "error")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    lease: LeaseId
    prefilled: Prefilled
    error: Error
    def __init__(self, lease: _Optional[_Union[LeaseId, _Mapping]] = ..., prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("welcome", "answer", "events", "prefilled")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    welcome: bool
    answer: LeaseAnswer
    events: _containers.RepeatedCompositeFieldContainer[LeaseEvent]
    prefilled: LeasePrefilled
    def __init__(self, welcome: _Optional[bool] = ..., answer: _Optional[_Union[LeaseAnswer, _Mapping]] = ..., events: _Optional[_Iterable[_Union[LeaseEvent, _Mapping]]] = ..., prefilled: _Optional[_Union[LeasePrefilled, _Mapping]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("lease", "layout", "first_layer", "last_layer", "start", "end", "payload", "digest", "encoding", "first_head", "last_head", "buffer", "buffer_bytes")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    LAST_HEAD_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    lease: LeaseId
    layout: str
    first_layer: int
    last_layer: int
    start: int
    end: int
    payload: bytes
    digest: bytes
    encoding: str
    first_head: int
    last_head: int
    buffer: int
    buffer_bytes: int
    def __init__(self, lease: _Optional[_Union[LeaseId, _Mapping]] = ..., layout: _Optional[str] = ..., first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., payload: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., encoding: _Optional[str] = ..., first_head: _Optional[int] = ..., last_head: _Optional[int] = ..., buffer: _Optional[int] = ..., buffer_bytes: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("lease", "first_token", "digest", "waited")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    lease: LeaseId
    first_token: int
    digest: bytes
    waited: float
    def __init__(self, lease: _Optional[_Union[LeaseId, _Mapping]] = ..., first_token: _Optional[int] = ..., digest: _Optional[bytes] = ..., waited: _Optional[float] = ...) -> None: ...

class PushHello(_message.Message):
    __slots__ = ("transport", "lease", "generation")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    transport: str
    lease: LeaseId
    generation: str
    def __init__(self, transport: _Optional[str] = ..., lease: _Optional[_Union[LeaseId, _Mapping]] = ..., generation: _Optional[str] = ...) -> None: ...

class PushMessage(_message.Message):
    __slots__ = ("chunk", "commit", "hello", "settled")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    commit: Commit
    hello: PushHello
    settled: bool
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., hello: _Optional[_Union[PushHello, _Mapping]] = ..., settled: _Optional[bool] = ...) -> None: ...

class PushWelcome(_message.Message):
    __slots__ = ("buffers", "buffer_size", "start")
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_SIZE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    buffers: _containers.RepeatedScalarFieldContainer[int]
    buffer_size: int
    start: int
    def __init__(self, buffers: _Optional[_Iterable[int]] = ..., buffer_size: _Optional[int] = ..., start: _Optional[int] = ...) -> None: ...

class TokenRange(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("welcome", "error", "freed_buffer", "committed", "lacking")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FREED_BUFFER_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    welcome: PushWelcome
    error: Error
    freed_buffer: int
    committed: bool
    lacking: TokenRange
    def __init__(self, welcome: _Optional[_Union[PushWelcome, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., freed_buffer: _Optional[int] = ..., committed: _Optional[bool] = ..., lacking: _Optional[_Union[TokenRange, _Mapping]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("instance", "name", "role", "address", "fingerprint", "model", "max_model_len", "block_size", "total_blocks", "free_blocks", "max_seqs", "running", "waiting", "waiting_tokens", "draining", "stalled_seconds", "counters", "pairing", "long_rope_after", "waiting_seconds", "context_tokens", "tpot_counts", "prompt_share", "step_cost", "max_batched_tokens", "protocol", "leases", "ranks", "kv_protocol")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STALLED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    PAIRING_FIELD_NUMBER: _ClassVar[int]
    LONG_ROPE_AFTER_FIELD_NUMBER: _ClassVar[int]
    WAITING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TPOT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SHARE_FIELD_NUMBER: _ClassVar[int]
    STEP_COST_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    KV_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    instance: str
    name: str
    role: str
    address: str
    fingerprint: str
    model: str
    max_model_len: int
    block_size: int
    total_blocks: int
    free_blocks: int
    max_seqs: int
    running: int
    waiting: int
    waiting_tokens: int
    draining: bool
    stalled_seconds: float
    counters: _containers.ScalarMap[str, float]
    pairing: str
    long_rope_after: int
    waiting_seconds: float
    context_tokens: int
    tpot_counts: _containers.RepeatedScalarFieldContainer[int]
    prompt_share: float
    step_cost: StepCost
    max_batched_tokens: int
    protocol: int
    leases: int
    ranks: int
    kv_protocol: int
    def __init__(self, instance: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., fingerprint: _Optional[str] = ..., model: _Optional[str] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., max_seqs: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., draining: _Optional[bool] = ..., stalled_seconds: _Optional[float] = ..., counters: _Optional[_Mapping[str, float]] = ..., pairing: _Optional[str] = ..., long_rope_after: _Optional[int] = ..., waiting_seconds: _Optional[float] = ..., context_tokens: _Optional[int] = ..., tpot_counts: _Optional[_Iterable[int]] = ..., prompt_share: _Optional[float] = ..., step_cost: _Optional[_Union[StepCost, _Mapping]] = ..., max_batched_tokens: _Optional[int] = ..., protocol: _Optional[int] = ..., leases: _Optional[int] = ..., ranks: _Optional[int] = ..., kv_protocol: _Optional[int] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("fixed", "token", "pair", "sequence", "context", "error", "samples")
    FIXED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    fixed: float
    token: float
    pair: float
    sequence: float
    context: float
    error: float
    samples: int
    def __init__(self, fixed: _Optional[float] = ..., token: _Optional[float] = ..., pair: _Optional[float] = ..., sequence: _Optional[float] = ..., context: _Optional[float] = ..., error: _Optional[float] = ..., samples: _Optional[int] = ...) -> None: ...

class KVEvents(_message.Message):
    __slots__ = ("first", "next", "reset", "stored", "removed")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    first: int
    next: int
    reset: bool
    stored: bytes
    removed: bytes
    def __init__(self, first: _Optional[int] = ..., next: _Optional[int] = ..., reset: _Optional[bool] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("status", "kv_events", "router_time")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_TIME_FIELD_NUMBER: _ClassVar[int]
    status: WorkerStatus
    kv_events: KVEvents
    router_time: float
    def __init__(self, status: _Optional[_Union[WorkerStatus, _Mapping]] = ..., kv_events: _Optional[_Union[KVEvents, _Mapping]] = ..., router_time: _Optional[float] = ...) -> None: ...

class PoolNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("router", "pool_nodes", "kv_events_since", "router_time", "workers")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    POOL_NODES_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_SINCE_FIELD_NUMBER: _ClassVar[int]
    ROUTER_TIME_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    router: str
    pool_nodes: _containers.RepeatedScalarFieldContainer[str]
    kv_events_since: int
    router_time: float
    workers: int
    def __init__(self, router: _Optional[str] = ..., pool_nodes: _Optional[_Iterable[str]] = ..., kv_events_since: _Optional[int] = ..., router_time: _Optional[float] = ..., workers: _Optional[int] = ...) -> None: ...

class WithoutRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class WithoutReply(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: str
    def __init__(self, role: _Optional[str] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Audit(_message.Message):
    __slots__ = ("service", "counts", "leaked")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class LeakedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    LEAKED_FIELD_NUMBER: _ClassVar[int]
    service: str
    counts: _containers.ScalarMap[str, int]
    leaked: _containers.ScalarMap[str, int]
    def __init__(self, service: _Optional[str] = ..., counts: _Optional[_Mapping[str, int]] = ..., leaked: _Optional[_Mapping[str, int]] = ...) -> None: ...

class AuditReply(_message.Message):
    __slots__ = ("audits",)
    AUDITS_FIELD_NUMBER: _ClassVar[int]
    audits: _containers.RepeatedCompositeFieldContainer[Audit]
    def __init__(self, audits: _Optional[_Iterable[_Union[Audit, _Mapping]]] = ...) -> None: ...

class FlipRequest(_message.Message):
    __slots__ = ("role", "seconds")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    role: str
    seconds: float
    def __init__(self, role: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class FlipReply(_message.Message):
    __slots__ = ("instance",)
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    instance: str
    def __init__(self, instance: _Optional[str] = ...) -> None: ...

class ControlFlipRequest(_message.Message):
    __slots__ = ("worker", "flip", "holder")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    FLIP_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    flip: FlipRequest
    holder: str
    def __init__(self, worker: _Optional[str] = ..., flip: _Optional[_Union[FlipRequest, _Mapping]] = ..., holder: _Optional[str] = ...) -> None: ...

class ControlDrainRequest(_message.Message):
    __slots__ = ("worker", "holder")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    holder: str
    def __init__(self, worker: _Optional[str] = ..., holder: _Optional[str] = ...) -> None: ...

class ControlAddRequest(_message.Message):
    __slots__ = ("role", "holder")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    role: str
    holder: str
    def __init__(self, role: _Optional[str] = ..., holder: _Optional[str] = ...) -> None: ...

class ControlReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ControlWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ControlWorker(_message.Message):
    __slots__ = ("name", "role", "state")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    state: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class ControlWorkersReply(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[ControlWorker]
    def __init__(self, workers: _Optional[_Iterable[_Union[ControlWorker, _Mapping]]] = ...) -> None: ...

class ControlClaimRequest(_message.Message):
    __slots__ = ("holder", "seconds")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    holder: str
    seconds: float
    def __init__(self, holder: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...
