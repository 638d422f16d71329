"""What the router counts and workers report, for Prometheus, under vLLM's names with our prefix.

`docs/metrics.md` documents every name here; what concerns service classes is in serving.class_metrics. Nothing is
global: each service makes its own registry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily as Counters
from prometheus_client.core import GaugeMetricFamily as Gauges
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from serving.class_metrics import ClassMetrics
from serving.errors import MillraceError
from serving.messages import Audit, Delta, FinishReason, PoolReport, PoolStat, Request, TierStat, WorkerStatus
from serving.service_class import SERVICE_CLASSES
from serving.step_cost import StepCost
from serving.timeline import Moment, Timeline

Family = Counters | Gauges
Sample = tuple[tuple[str, ...], float]  # the values of the labels, and the number

_TTFT = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_E2E = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_LENGTH = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_UNMEASURED = StepCost(fixed=0.0, token=0.0, error=0.0)


def _cost(status: WorkerStatus) -> StepCost:
    return status.step_cost or _UNMEASURED


LEAKS = ("leases", "blocks", "host_extents", "tasks")  # what an audit may find that no request owns

_WORKER_GAUGES: dict[str, tuple[str, Callable[[WorkerStatus], float]]] = {
    "num_requests_running": ("Sequences in the running batch", lambda s: s.running),
    "num_requests_waiting": ("Sequences waiting for prefill", lambda s: s.waiting),
    "kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1", lambda s: 1 - s.free_blocks / max(1, s.total_blocks)),
    "worker_stalled_seconds": ("Age of the engine step in progress", lambda s: s.stalled_seconds),
    "worker_draining": ("1 while the worker takes no new work", lambda s: float(s.draining)),
    "worker_waiting_seconds": ("Predicted time of the prompts that wait", lambda s: s.waiting_seconds),
    "worker_prompt_share": ("Share of recent time in steps with prompt tokens, 0 to 1", lambda s: s.prompt_share),
    "step_cost_fixed_seconds": ("A step, whatever it computes", lambda s: _cost(s).fixed),
    "step_cost_token_seconds": ("Each new token of a step", lambda s: _cost(s).token),
    "step_cost_pair_seconds": ("Each pair of a new token and one it attends to", lambda s: _cost(s).pair),
    "step_cost_sequence_seconds": ("Each sequence of a step", lambda s: _cost(s).sequence),
    "step_cost_context_seconds": ("Each token whose KV a step reads", lambda s: _cost(s).context),
    "step_cost_error": ("Standard deviation of ln(observed / predicted) of steps", lambda s: _cost(s).error),
    "step_cost_samples": ("Steps the cost is fitted to, 0 while it is a guess", lambda s: _cost(s).samples),
}
_WORKER_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache",
    "external_prefix_cache_queries": "Prompt tokens asked of the KV pool",
    "external_prefix_cache_hits": "Prompt tokens brought from the KV pool",
    "kvcache_stored_bytes": "Bytes sent to the KV pool",
    "kvcache_dropped_blocks": "New blocks not offered to the KV pool: too many were on their way",
    "kvcache_timeouts": "Prompts that waited for the KV pool as long as they may",
    "kvcache_not_worth": "Prefixes in the KV pool that were computed, because that was quicker",
    "kvcache_corrupt": "Parts from the KV pool refused on arrival",
    "kvcache_direct_tokens": "Prompt tokens that decode workers brought from the KV pool themselves",
    "kvcache_direct_fallbacks": "Handoffs asked for prompt tokens that the KV pool did not bring, or not in time",
    "kvcache_failures": "Calls to nodes of the KV pool that failed",
    "host_kv_bytes_out": "Bytes of KV moved from the device to host memory",
    "host_kv_bytes_in": "Bytes of KV streamed back from host memory",
    "num_preemptions": "Sequences that lost their blocks to others",
    "kv_transfer_bytes": "Bytes of KV sent to decode workers",
    "deadlines_exceeded": "Leases and prefills that workers ended because their deadline had passed",
    "spec_decode_num_draft_tokens": "Tokens guessed ahead",
    "spec_decode_num_accepted_tokens": "Tokens guessed ahead that were right",
    "engine_steps": "Steps the engine has run",
    "engine_tokens": "Tokens those steps computed, prompt and output",
    "engine_step_seconds": "Time in steps",
    "engine_forward_seconds": "Time of steps in the model",
    "engine_sample_seconds": "Time of steps in drawing tokens",
    "engine_python_seconds": "Time of steps in everything else: scheduling, batches, accounts",
    "engine_kv_wait_seconds": "Of the time in the model, waiting for layers on their way from the KV pool",
}

_TIERS: dict[str, tuple[type[Family], str, Callable[[TierStat], float]]] = {
    "pool_bytes": (Gauges, "Bytes of blocks a tier of the KV pool holds", lambda t: t.bytes),
    "pool_blocks": (Gauges, "Blocks a tier holds", lambda t: t.blocks),
    "pool_capacity_bytes": (Gauges, "Bytes a tier may hold", lambda t: t.capacity),
    "pool_hits": (Counters, "Blocks served from a tier", lambda t: t.hits),
    "pool_bytes_read": (Counters, "Bytes read from a tier", lambda t: t.bytes_read),
    "pool_bytes_written": (Counters, "Bytes written to a tier", lambda t: t.bytes_written),
    "pool_read_seconds": (Counters, "Time in reading a tier", lambda t: t.read_seconds),
    "pool_evictions": (Counters, "Blocks a tier had no more room for", lambda t: t.evictions),
    "pool_eviction_age_seconds": (Counters, "Ages of those blocks, summed", lambda t: t.eviction_age_seconds),
    "pool_corrupt": (Counters, "Blocks found corrupt in a tier, dropped and not served", lambda t: t.corrupt),
}
_NODES: dict[str, tuple[type[Family], str, Callable[[PoolStat], float]]] = {
    "pool_pinned": (Gauges, "Blocks that may not be evicted just now", lambda s: s.pinned),
    "pool_backlog": (Gauges, "Blocks on their way to disk", lambda s: s.backlog),
    "pool_lookups": (Counters, "Keys looked up at a node", lambda s: s.lookups),
    "pool_found": (Counters, "Of those, keys that were there", lambda s: s.found),
    "pool_stored": (Counters, "Blocks a node has accepted", lambda s: s.stored),
    "pool_refused": (Counters, "Blocks a node has refused: backlog, quota, or corrupt on arrival", lambda s: s.refused),
}
# Counters of workers that come apart by a label: `name/value of the label`.
_WORKER_LABELLED = {
    "worker_background_restarts": ("Background tasks of a worker that broke and began again, by task", "task"),
    "kv_chunks_refused": ("KV chunks and commits of handoffs refused, by why", "reason"),
    "kv_received_bytes": ("Bytes of KV taken in from prefill workers, by transport", "transport"),
    "kvcache_fetched_bytes": ("Bytes that came from the KV pool, by transport", "transport"),
    "kv_handoffs": ("Handoffs completed, by transport", "transport"),
    "leases_refused": ("Leases that workers refused for want of room, by what was wanting", "reason"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultFigures:
    """What a router holds against its workers, by their names, and what it had to begin again."""

    breakers: Mapping[str, int] = field(default_factory=dict)  # 0 closed, 1 half-open, 2 open
    slow: Mapping[str, bool] = field(default_factory=dict)  # True: it works, but takes much longer than it should
    pairs: Mapping[tuple[str, str], bool] = field(default_factory=dict)  # (prefill, decode): True if well
    probes: Mapping[str, int] = field(default_factory=dict)  # of the canary, by outcome
    restarts: Mapping[str, int] = field(default_factory=dict)  # of background tasks
    protocols_refused: int = 0  # heartbeats


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionFigures:
    """What the HTTP server says of its connections."""

    open: Mapping[str, int] = field(default_factory=dict)  # now, by state: idle, busy
    ended: Mapping[str, int] = field(default_factory=dict)  # by the server, by why


class RouterMetrics:
    """Metrics of the router (its RouterObserver), the HTTP API (its ApiObserver), the workers and the KV pool."""

    def __init__(
        self,
        model_name: str,
        workers: Callable[[], Iterable[WorkerStatus]],
        waiting: Callable[[], int],
        pools: Callable[[], Iterable[PoolReport]] = tuple,
        faults: Callable[[], FaultFigures] = FaultFigures,
        *,
        classes: Collection[str] = tuple(SERVICE_CLASSES),
        waiting_by_class: Callable[[], Mapping[str, int]] = dict,
        connections: Callable[[], ConnectionFigures] = ConnectionFigures,
    ):
        self.registry = CollectorRegistry()
        self.model = model_name
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests served")
        self.generation_tokens = self._counter("generation_tokens", "Output tokens produced")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens whose KV was reused")
        self.success = self._counter("request_success", "Sequences ended, by how", "finished_reason")
        self.refused = self._counter("request_refused", "Requests answered with an error before any token", "status")
        self.ignored = self._counter("ignored_fields", "Fields of bodies that were ignored, by name", "field")
        self.failed = self._counter("request_failure", "Requests ended by an error, by which", "error")
        self.replacements = self._counter("replacements", "Tries that failed and were placed again, by why", "reason")
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", _TTFT)
        self.itl = self._histogram("inter_token_latency_seconds", "Time between a request's tokens", _TPOT)
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first", _TPOT
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end", _E2E)
        self.queue = self._histogram("request_queue_time_seconds", "Arrival to lease", _E2E)
        self.prefill = self._histogram("request_prefill_time_seconds", "Prefill order to first token", _E2E)
        self.prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens a request", _LENGTH)
        self.output_length = self._histogram("request_generation_tokens", "Output tokens a request", _LENGTH)
        self._gauge("router_queue_requests", "Requests waiting for room").set_function(waiting)
        self.leaked = {
            kind: self._gauge(f"leaked_{kind}", "Held by no request: 0 unless something leaked") for kind in LEAKS
        }
        self.registry.register(WorkerCollector(model_name, workers))
        self.registry.register(PoolCollector(pools))
        self.placements = ClassMetrics(self.registry, model_name, classes, waiting_by_class)
        self.registry.register(FaultCollector(model_name, faults))
        self.registry.register(ConnectionCollector(model_name, connections))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"millrace:{name}", text, ("model_name", *labels), registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"millrace:{name}", text, ("model_name",), registry=self.registry).labels(self.model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"millrace:{name}", text, ("model_name",), registry=self.registry, buckets=buckets)
        return made.labels(self.model)

    def first_token(self, request: Request, seconds: float, cached: int) -> None:
        self.ttft.observe(seconds)
        self.prompt_tokens.labels(self.model).inc(len(request.prompt))
        self.cached_tokens.labels(self.model).inc(cached)
        self.generation_tokens.labels(self.model).inc()

    def tokens(self, seconds: float, count: int) -> None:
        self.itl.observe(seconds / max(1, count))
        self.generation_tokens.labels(self.model).inc(count)

    def replaced(self, error: MillraceError) -> None:
        self.replacements.labels(self.model, error.code or type(error).__name__).inc()

    def finished(self, request: Request, timeline: Timeline, last: Delta | None, error: BaseException | None) -> None:
        """The router has finished a request: its latencies are known. How it ended for the client, the API says."""
        if isinstance(error, MillraceError):
            self.failed.labels(self.model, type(error).__name__).inc()
            return
        spans = (
            (self.e2e, timeline.between(Moment.ARRIVED, Moment.FINISHED)),
            (self.queue, timeline.between(Moment.ARRIVED, Moment.LEASED)),
            (self.prefill, timeline.between(Moment.PREFILL_SENT, Moment.FIRST_TOKEN)),
            (self.tpot, timeline.tpot),
        )
        for histogram, seconds in spans:
            if seconds is not None:
                histogram.observe(seconds)

    def request_started(self, *, prompt_tokens: int) -> None:
        self.prompt_length.observe(prompt_tokens)

    def request_finished(self, *, finish: FinishReason, completion_tokens: int) -> None:
        """How a sequence ended for the client: the API sees stop strings and hang-ups, the router does not."""
        self.success.labels(self.model, finish.value).inc()
        self.output_length.observe(completion_tokens)

    def request_refused(self, *, status: int) -> None:
        self.refused.labels(self.model, str(status)).inc()

    def field_ignored(self, name: str) -> None:
        self.ignored.labels(self.model, name).inc()

    def note_audit(self, audits: Sequence[Audit]) -> None:
        """Keep the counts of what an audit found that no request owns."""
        for kind, gauge in self.leaked.items():
            gauge.set(sum(audit.leaked.get(kind, 0) for audit in audits))

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _family(kind: type[Family], name: str, text: str, labels: tuple[str, ...], samples: Iterable[Sample]) -> Metric:
    family = kind(f"millrace:{name}", text, labels=labels)
    for values, number in samples:
        family.add_metric(values, float(number))
    return family


class WorkerCollector(Collector):
    """Gauges and counters of workers, as of their last heartbeat."""

    def __init__(self, model_name: str, workers: Callable[[], Iterable[WorkerStatus]]):
        self.model = model_name
        self.workers = workers

    def collect(self) -> Iterator[Metric]:
        of = [((self.model, status.name), status) for status in self.workers()]
        labels = ("model_name", "engine")
        for name, (text, read) in _WORKER_GAUGES.items():
            yield _family(Gauges, name, text, labels, ((who, read(status)) for who, status in of))
        for name, text in _WORKER_COUNTERS.items():
            yield _family(Counters, name, text, labels, ((who, status.counters.get(name, 0.0)) for who, status in of))
        for name, (text, label) in _WORKER_LABELLED.items():
            counts = (
                ((*who, key.removeprefix(f"{name}/")), value)
                for who, status in of
                for key, value in status.counters.items()
                if key.startswith(f"{name}/")
            )
            yield _family(Counters, name, text, (*labels, label), counts)


class PoolCollector(Collector):
    """Gauges and counters of the KV pool's nodes, as of their last heartbeat. They know of no model."""

    def __init__(self, reports: Callable[[], Iterable[PoolReport]]):
        self.reports = reports

    def collect(self) -> Iterator[Metric]:
        stats = [report.stat for report in self.reports()]
        tiers = [((stat.name, tier.value), held) for stat in stats for tier, held in stat.tiers.items()]
        for name, (kind, text, of_tier) in _TIERS.items():
            yield _family(kind, name, text, ("node", "tier"), ((where, of_tier(held)) for where, held in tiers))
        for name, (kind, text, of_node) in _NODES.items():
            yield _family(kind, name, text, ("node",), (((stat.name,), of_node(stat)) for stat in stats))


class FaultCollector:
    """Breakers, pairs of workers, the canary and background tasks of a router."""

    def __init__(self, model_name: str, faults: Callable[[], FaultFigures]):
        self.model = model_name
        self.faults = faults

    def collect(self) -> Iterator[Metric]:
        now, model = self.faults(), self.model
        by_engine, by_pair = ("model_name", "engine"), ("model_name", "prefill", "decode")
        text = "Breaker of a worker: 0 closed, 1 half-open, 2 open"
        yield _family(Gauges, "worker_breaker", text, by_engine, (((model, who), s) for who, s in now.breakers.items()))
        text = "1 while a worker takes much longer than others of its kind, or than it used to, else 0"
        yield _family(Gauges, "worker_slow", text, by_engine, (((model, who), slow) for who, slow in now.slow.items()))
        text = "1 while nothing is held against a pair of workers, else 0"
        yield _family(Gauges, "pair_up", text, by_pair, (((model, *pair), well) for pair, well in now.pairs.items()))
        text = "Tokens the canary has sent, by outcome"
        probes = (((model, how), number) for how, number in now.probes.items())
        yield _family(Counters, "canary_probes", text, ("model_name", "outcome"), probes)
        text = "Background tasks of the router that broke and began again, by task"
        restarts = (((model, task), number) for task, number in now.restarts.items())
        yield _family(Counters, "background_restarts", text, ("model_name", "task"), restarts)
        text = "Heartbeats refused because the worker speaks another protocol"
        yield _family(Counters, "protocol_refused", text, ("model_name",), [((model,), now.protocols_refused)])


class ConnectionCollector(Collector):
    """Connections of the HTTP server."""

    def __init__(self, model_name: str, figures: Callable[[], ConnectionFigures]):
        self.model = model_name
        self.figures = figures

    def collect(self) -> Iterator[Metric]:
        now, model = self.figures(), self.model
        text = "Connections of the HTTP server: idle ones wait for a request or its headers"
        states = (((model, state), number) for state, number in now.open.items())
        yield _family(Gauges, "http_connections", text, ("model_name", "state"), states)
        text = "Connections that the HTTP server ended, by why"
        ended = (((model, why), number) for why, number in now.ended.items())
        yield _family(Counters, "http_connections_ended", text, ("model_name", "reason"), ended)


def worker_metrics(model_name: str, status: Callable[[], WorkerStatus]) -> Callable[[], bytes]:
    """The /metrics of a worker on its own."""
    return _text_of(WorkerCollector(model_name, lambda: [status()]))


def pool_metrics(report: Callable[[], PoolReport]) -> Callable[[], bytes]:
    """The /metrics of a pool node on its own."""
    return _text_of(PoolCollector(lambda: [report()]))


def _text_of(collector: Collector) -> Callable[[], bytes]:
    registry = CollectorRegistry()
    registry.register(collector)
    return lambda: generate_latest(registry)
