"""The program's settings as frozen dataclasses; serving.options says how their fields are read."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from serving.eplb_config import EplbConfig, read_eplb_config
from serving.options import ConfigError, option
from serving.speculative_config import SpeculativeConfig, read_speculative_config

KERNELS = ("auto", "compiled", "torch")
CPU_FORMS = ("auto", "avx512_amx", "avx512_bf16", "avx512_vnni", "avx2", "plain")
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is served."""

    dtype: str = option(
        "auto", "type of the weights and of the KV cache", choices=("auto", "float32", "bfloat16", "float16")
    )
    quantization: str | None = option(
        None, "compress wide weights as they are loaded: int8 weights and activations (W8A8)", choices=("int8",)
    )
    kv_cache_dtype: str = option("auto", "type of the KV cache; auto: as --dtype", choices=("auto", "int8"))
    served_model_name: tuple[str, ...] = option(
        (), "names of the model in the API: requests may use any, metrics have the first; default: the model's own"
    )
    max_model_len: int | None = option(
        None, "tokens of prompt and output at most; default: what the model allows", least=2
    )
    load_format: str = option(
        "auto",
        "where weights come from; pool: from the KV pool if it has the model, else from disk or hub and then into it",
        choices=("auto", "pool"),
    )
    generation_config: str = option(
        "auto",
        "sampling where a request names none; auto: as the model's generation_config.json says; none: temperature 1"
        " and nothing else",
        choices=("auto", "none"),
    )
    device: str = option("cpu", "torch device of the workers")
    data_parallel_size: int = option(
        1, "ranks of a worker, on CUDA with a GPU each; above 1 with --enable-expert-parallel alone", least=1
    )
    enable_expert_parallel: bool = option(
        False, "let each rank of a worker hold some of a mixture of experts, and compute some of its rows"
    )
    tensor_parallel_size: int = option(
        1, "ranks of a worker that share each layer, weights and KV by heads; with --device cuda a GPU each", least=1
    )
    pipeline_parallel_size: int = option(
        1,
        "stages of a worker, each with some of the layers and their KV; a stage is --tensor-parallel-size ranks",
        least=1,
    )
    prefill_context_parallel_size: int = option(
        1,
        "ranks of a prefill or mixed worker that share the tokens of a step, and attend by heads; each has the weights"
        " that one of --tensor-parallel-size has",
        least=1,
    )
    prefill_tensor_parallel_size: int | None = option(
        None, "--tensor-parallel-size of prefill workers, where it is to differ", least=1
    )
    decode_tensor_parallel_size: int | None = option(
        None, "--tensor-parallel-size of decode workers, where it is to differ", least=1
    )
    prefill_pipeline_parallel_size: int | None = option(
        None, "--pipeline-parallel-size of prefill workers, where it is to differ", least=1
    )
    decode_pipeline_parallel_size: int | None = option(
        None, "--pipeline-parallel-size of decode workers, where it is to differ", least=1
    )
    enable_eplb: bool = option(
        False, "move experts between the ranks of a worker while it serves, so that their loads are alike"
    )
    eplb_config: str | None = option(
        None,
        "how --enable-eplb does that, as JSON; num_redundant_experts: how many copies of experts each layer has;"
        " step_interval: steps from one round to the next; window_size: about how many steps' loads it goes by;"
        " bytes_per_second: weights that a rank takes in",
    )
    rank_timeout: float = option(
        10.0,
        "seconds a rank may keep the others waiting in a step, until it is given up (and, where ranks hold experts on a"
        " CPU, started again)",
        least=0.01,
        most=3600,
    )

    def of(self, role: str) -> ModelConfig:
        """As workers of this role are configured: what is said of their role alone goes before the rest."""
        own = {name: getattr(self, f"{role}_{name}", None) for name in PARALLEL_SIZES}
        own |= {"prefill_context_parallel_size": 1} if role == "decode" else {}
        return replace(self, **{name: value for name, value in own.items() if value is not None})

    @property
    def rank_flags(self) -> str:
        """The flags, with their values, by which a worker is of several ranks; empty where it is one process."""
        every = ("data_parallel_size", *PARALLEL_SIZES, "prefill_context_parallel_size")
        sizes = {name: getattr(self, name) for name in every}
        return " ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes.items() if size > 1)

    def eplb(self) -> EplbConfig | None:
        """How experts are balanced; None where they stay. Raises ConfigError."""
        found = read_eplb_config(self.eplb_config)
        if self.eplb_config is not None and not self.enable_eplb:
            raise ConfigError("--eplb-config goes with --enable-eplb; give both, or none", param="eplb_config")
        if self.enable_eplb and (self.data_parallel_size == 1 or not self.enable_expert_parallel):
            raise ConfigError(
                "--enable-eplb balances experts between ranks; choose --enable-expert-parallel and a"
                " --data-parallel-size above 1",
                param="enable_eplb",
            )
        return found if self.enable_eplb else None


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a worker batches, and how much KV it holds."""

    block_size: int = option(16, "tokens a KV block", least=1)
    kv_cache_memory: int | None = option(None, "bytes of KV cache a worker, such as 2GiB, a CPU's default", least=1)
    gpu_memory_utilization: float = option(0.9, "share of a GPU to use; what is left is KV cache", least=0.01, most=1)
    num_kv_blocks: int | None = option(None, "KV blocks a worker; overrides --kv-cache-memory", least=1)
    host_kv_memory: int = option(
        0, "bytes of host memory a worker, for KV of sequences longer than its KV cache; 0: none", least=0
    )
    max_num_seqs: int = option(128, "sequences a worker holds at most", least=1)
    max_num_batched_tokens: int = option(512, "tokens a step computes at most: longer prompts go in chunks", least=1)
    chunking: str = option(
        "slack",
        "how many prompt tokens a step computes beside running sequences; slack: as many as let these keep their TPOT"
        " objectives, where they have some; who has none may pause; fixed: always what --max-num-batched-tokens leaves",
        choices=("slack", "fixed"),
    )
    prefill_order: str = option(
        "slack",
        "in which order prompts are computed; slack: by priority, by when they are due, where they have objectives, and"
        " fair to API keys where not all are in time; fcfs: first come, first served",
        choices=("slack", "fcfs"),
    )
    tpot_admission: bool = option(
        True, "refuse sequences beside which the running ones could not keep their TPOT objectives"
    )
    enable_prefix_caching: bool = option(True, "reuse the KV of equal prompt beginnings")
    num_speculative_tokens: int = option(
        4, "tokens to guess ahead from the text so far, where that pays; changes no token; 0 never guesses", least=0
    )
    speculative_config: str | None = option(
        None,
        'what guesses ahead, as JSON with the keys of vLLM: {"method": "ngram"} from the text so far; {"method":'
        ' "draft_model", "model": NAME} with a smaller model of the same vocabulary; {"method": "mtp"} with the layer'
        " of DeepSeek-V3 for it; num_speculative_tokens in it goes before --num-speculative-tokens",
    )
    kv_wire: str = option(
        "auto",
        "how KV travels to decode workers; auto: without loss; int8: LOSSY, in 8 bits with a scale for each head of a"
        " token, a half of bfloat16's bytes, whatever the KV cache keeps",
        choices=("auto", "int8"),
    )
    kv_transport: str = option(
        "auto",
        "how KV travels between processes: over gRPC, written into shared memory where both are on one host, or"
        " written by NIXL where both have it, from GPU to GPU where both have one; auto: the best that leads there,"
        " NIXL with --insecure alone, as it listens on every address and asks nobody who it is",
        choices=("auto", "grpc", "shm", "nixl"),
    )
    profile: str | None = option(None, "trace every step to FILE[.<flip>].<worker>.json, for ui.perfetto.dev")
    deterministic: bool = option(
        False, "promise the same bits whatever runs beside a request, and wherever it goes on; needs compiled kernels"
    )
    kernels: str = option(
        "auto", "compute with compiled kernels or with torch alone; auto: compiled where they fit", choices=KERNELS
    )
    attention_backend: str = option(
        "auto",
        "what attends prompts on CUDA; flashinfer: the library, in steps that no graph computes; auto: the quicker one",
        choices=("auto", "triton", "flashinfer"),
    )
    cpu_form: str = option("auto", "instructions of CPU kernels; auto: the quickest as measured", choices=CPU_FORMS)
    cuda_graphs: bool = option(True, "on CUDA, replay steps from graphs that are captured at start")
    threads: int | None = option(None, "compute threads a worker; default: the host's cores shared out", least=1)
    cpus: str | None = option(None, "cores a worker is bound to, such as 0-3,8; its memory stays on their NUMA node")

    def __post_init__(self) -> None:
        self.speculation()  # wrong words are told before anything is loaded

    def speculation(self) -> SpeculativeConfig:
        """What drafts, and how many tokens at a time: none with --num-speculative-tokens 0. Raises ConfigError."""
        found = read_speculative_config(self.speculative_config)
        if found.num_speculative_tokens is None:
            found = replace(found, num_speculative_tokens=self.num_speculative_tokens)
        return found


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """The HTTP server."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: every address, which asks for --api-key")
    port: int = option(8000, "port of the HTTP API", least=0, most=65535)
    api_key: str | None = option(
        None,
        "require this key, or one of several (Authorization: Bearer ..., or x-api-key: ...); better set"
        " MILLRACE_API_KEY, with commas between several",
        secret=True,
        several=True,
    )
    shutdown_timeout: float = option(120.0, "seconds running requests may take to finish after SIGTERM", least=0)
    max_body_size: int = option(4 << 20, "bytes of a request body at most", least=1)
    body_timeout: float = option(20.0, "seconds a client may take to send a request's body", least=0.01)
    send_timeout: float = option(
        60.0, "seconds a client may take nothing of an answer until it counts as having hung up", least=0.01
    )
    strict_fields: bool = option(
        False, "refuse fields of a body that are not known; else they are ignored and named in x-millrace-ignored"
    )
    tool_call_parser: str = option(
        "auto",
        "the form in which the model writes tool calls; auto: as its chat template shows, generic: described in the"
        " system message, for templates without tools; none: tools are refused",
        choices=("auto", "hermes", "llama3_json", "mistral", "phi4_mini_json", "generic", "none"),
    )
    reasoning_parser: str = option(
        "auto",
        "the form in which the model thinks, which is answered as reasoning_content; auto: as its chat template shows;"
        " deepseek_r1: answers begin with thoughts in any case",
        choices=("auto", "qwen3", "deepseek_r1", "none"),
    )
    max_connections: int = option(4096, "connections at most; one more replaces one that is idle or gets 503", least=1)
    max_connections_per_address: int = option(
        1024, "of those, of one address (behind a proxy all are of one), or of one IPv6 /64; 0: any number", least=0
    )
    header_timeout: float = option(
        10.0, "seconds for a request's headers, also for a new connection to begin with them", least=0.01
    )
    max_header_size: int = option(32 << 10, "bytes of a request's line and headers at most", least=1024)
    max_header_count: int = option(100, "headers of a request at most", least=1)
    keep_alive_timeout: float = option(30.0, "seconds a connection is kept for its next request", least=0.01)
    allowed_origins: tuple[str, ...] = option(
        (), "origins whose pages may call the API from a browser (CORS), such as https://chat.example.com, or *"
    )
    allowed_methods: tuple[str, ...] = option(("*",), "methods that such pages may use")
    allowed_headers: tuple[str, ...] = option(("*",), "headers that such pages may send")
    allow_credentials: bool = option(False, "let such pages send cookies and HTTP authentication along")
    ssl_keyfile: str | None = option(None, "PEM file of the private key for --ssl-certfile; default: that file itself")
    ssl_certfile: str | None = option(None, "PEM file of the server's certificate and its chain: serve HTTPS alone")
    ssl_ca_certs: str | None = option(
        None, "PEM file of the authorities whose certificates clients may show; --ssl-cert-reqs says whether they must"
    )
    ssl_cert_reqs: str = option(
        "0",
        "whether clients show a certificate; 0: they are not asked, 1: if they have one, 2: they must",
        choices=("0", "1", "2"),
    )
    chat_template: str | None = option(
        None, "a file of a chat template in Jinja, or such a template itself, instead of the model's own"
    )
    metrics_prefix: str = option(
        "millrace", "what the names of metrics begin with; vllm: as boards and pickers made for vLLM ask for them"
    )

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.metrics_prefix):
            told = (
                f"--metrics-prefix: {self.metrics_prefix!r} is no beginning of a metric's name: letters, digits and _"
            )
            raise ConfigError(told, param="metrics_prefix")


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """How long requests wait, and when a worker is given up."""

    queue_patience: float = option(60.0, "seconds a request may wait for room before it gets a 429", least=0)
    max_waiting: int = option(1024, "requests that may wait for room; more get a 429 at once", least=1)
    routing_policy: str = option(
        "least_loaded",
        "how workers are chosen; goodput: so that the most requests meet their objectives, by predicted TTFT and TPOT;"
        " prefix_aware: the one with the least to compute, by the blocks each has cached; session_sticky: by session",
        choices=("goodput", "least_loaded", "prefix_aware", "round_robin", "session_sticky"),
    )
    prefix_index_memory: int = option(
        64 << 20, "bytes the router may use for what it knows of workers' cached blocks, such as 64MiB", least=1
    )
    router_snapshot: str = option(
        "auto",
        "file in which a router over other processes keeps what it has learned for its next start: cached blocks, link"
        " costs, output lengths, corrections; auto: one of the cache folder for this model and port; never: nowhere",
    )
    canary_interval: float | None = option(
        None,
        "seconds without traffic after which the router sends a token of its own through a pair of workers, to see"
        " that it works; 0: never; default: 2 where workers are other processes, never in one process",
        least=0,
    )
    heartbeat_interval: float = option(1.0, "seconds between a worker's heartbeats", least=0.01)
    heartbeat_timeout: float = option(
        5.0, "seconds of silence after which a worker is taken for dead; more than two heartbeat intervals", least=0.01
    )


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """How services reach each other."""

    grpc_host: str = option("127.0.0.1", "address a service's gRPC listens on")
    grpc_port: int = option(
        0, "port of a service's gRPC; 0 takes a free one (the router's default is 8100)", least=0, most=65535
    )
    advertise: str | None = option(None, "host:port others reach this service's gRPC at; default: where it listens")
    routers: str = option("127.0.0.1:8100", "routers to report to: host:port,...; dns:host:port: all that a name has")
    worker_name: str | None = option(
        None, "the worker's name; default: role, host and process id; a pool node's is where it is reached"
    )
    metrics_port: int | None = option(
        None, "port of a service's own /health and /metrics, over HTTP without keys; default: none", least=0, most=65535
    )
    cluster_key: str | None = option(None, "key services show each other; set MILLRACE_CLUSTER_KEY", secret=True)


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """How workers use the KV pool."""

    kvcache_nodes: str | None = option(
        None, "nodes of the KV pool beside those that report to the routers: [name@]host:port, comma-separated"
    )
    replication: int = option(1, "nodes that keep each block; the same for all workers of a pool", least=1)
    kvcache_timeout: float = option(
        2.0, "seconds a worker waits for an answer of the KV pool before it goes on without", least=0.001
    )
    kvcache_wait: float = option(
        1.0, "seconds a prompt waits for its prefix from the KV pool in all, before the rest is computed", least=0.001
    )
    kvcache_fetch: str = option(
        "auto",
        "whether prefixes are fetched from the KV pool; auto: where that is quicker than computing them",
        choices=("auto", "always", "never"),
    )
    kvcache_direct: str = option(
        "auto",
        "whether a decode worker fetches prefixes from the KV pool itself, beside the handoff of what follows them;"
        " auto: where that is quicker than through a prefill worker",
        choices=("auto", "always", "never"),
    )
    kvcache_store: str = option(
        "all",
        "which blocks a worker stores in the KV pool: of prompts and outputs, of prompts alone, or none",
        choices=("all", "prompts", "none"),
    )
    kvcache_bandwidth: int = option(
        1 << 30, "bytes a second a worker stores in the KV pool at most, such as 1GiB; 0: no bound", least=0
    )
    reasoning_token_id: int | None = option(
        None, "token that begins a model's reasoning: from it on, an output is not stored in the KV pool", least=0
    )


@dataclass(frozen=True, kw_only=True)
class KvCacheConfig:
    """What a node of the KV pool holds."""

    ram: int = option(1 << 30, "bytes of blocks a node keeps in memory, such as 4GiB", least=0)
    disk: str | None = option(
        None,
        "folder for blocks beside memory, still there after a restart; default: none. Below `millrace serve` each"
        " node has a folder of its own in it",
    )
    disk_size: int = option(10 << 30, "bytes a node keeps on disk at most, such as 50GiB", least=1)
    disk_write: str = option(
        "through",
        "through: blocks go to disk as they come; back: when memory has no more room for them, which writes less and"
        " loses more when the node dies",
        choices=("through", "back"),
    )
    disk_backlog: int = option(
        256,
        "blocks that may wait to be written to disk, in memory beyond --ram; those that come meanwhile are refused",
        least=1,
    )
    quota: str | None = option(
        None,
        "bytes that no other namespace's blocks push out, such as default=1GiB,0123456789abcdef=512MiB;"
        " namespaces as `millrace cache stat` shows them",
    )
    default_quota: int = option(
        0,
        "quota of every namespace that --quota does not name: once quotas fill the node, no others find room in it",
        least=0,
    )

    def __post_init__(self) -> None:
        if self.disk is not None and not self.disk.strip():
            raise ConfigError("--disk: an empty name is no folder; name one, or leave it out", param="disk")
