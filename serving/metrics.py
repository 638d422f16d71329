"""What the router counts and workers report, for Prometheus, under vLLM's names with our prefix.

`docs/metrics.md` documents every name here; what concerns service classes is in serving.class_metrics, what concerns
workers in serving.fleet_metrics and serving.worker_metrics. Nothing is global: each service makes its own registry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from serving.class_metrics import ClassMetrics
from serving.errors import MillraceError
from serving.fleet_metrics import FleetCollector
from serving.messages import Audit, Delta, FinishReason, PoolReport, Request, WorkerStatus
from serving.service_class import SERVICE_CLASSES
from serving.timeline import Moment, Timeline
from serving.worker_metrics import COUNTER, GAUGE, PREFIX, Families, PoolCollector, WorkerCollector

# vLLM's bounds, so that boards find the ones they name, and shorter times than it tells apart.
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_TTFT = (*_FIRST, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
_TPOT = (*_FAST, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_E2E = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_LENGTH = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

LEAKS = ("leases", "blocks", "host_extents", "tasks")  # what an audit may find that no request owns


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultFigures:
    """What a router holds against its workers, by their names, and what it had to begin again."""

    breakers: Mapping[str, int] = field(default_factory=dict)  # 0 closed, 1 half-open, 2 open
    slow: Mapping[str, bool] = field(default_factory=dict)  # True: it works, but takes much longer than it should
    pairs: Mapping[tuple[str, str], bool] = field(default_factory=dict)  # (prefill, decode): True if well
    probes: Mapping[str, int] = field(default_factory=dict)  # of the canary, by outcome
    restarts: Mapping[str, int] = field(default_factory=dict)  # of background tasks
    protocols_refused: int = 0  # heartbeats
    ready: Mapping[tuple[str, str], int] = field(default_factory=dict)  # workers, by generation and what they do
    shares: Mapping[str, float] = field(default_factory=dict)  # of new requests, by generation


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
        prefix: str = PREFIX,
    ):
        self.registry = CollectorRegistry()
        self.model = model_name
        self.prefix = prefix
        self._reused = self._computed = 0
        self.registry.register(
            FleetCollector(model_name, workers, waiting, lambda: (self._computed, self._reused), prefix)
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests served")
        self.generation_tokens = self._counter("generation_tokens", "Output tokens produced")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens whose KV was reused")
        self.success = self._counter("request_success", "Sequences ended, by how", "finished_reason")
        self.refused = self._counter("request_refused", "Requests answered with an error before any token", "status")
        self.ignored = self._counter("ignored_fields", "Fields of bodies that were ignored, by name", "field")
        self.failed = self._counter("request_failure", "Requests ended by an error, by which", "error")
        self.replacements = self._counter("replacements", "Tries that failed and were placed again, by why", "reason")
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", _TTFT)
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Time between a request's tokens", _TPOT, "time_per_output_token_seconds"
        )
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first", _TPOT
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end", _E2E)
        self.queue = self._histogram("request_queue_time_seconds", "Arrival to lease", _E2E)
        self.prefill = self._histogram("request_prefill_time_seconds", "Prefill order to first token", _E2E)
        self.decode = self._histogram("request_decode_time_seconds", "First to last token", _E2E)
        self.prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens a request", _LENGTH)
        self.output_length = self._histogram("request_generation_tokens", "Output tokens a request", _LENGTH)
        self.longest = self._histogram(
            "request_max_num_generation_tokens", "Output tokens of a request's longest choice", _LENGTH
        )
        self.computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were computed for a request", _LENGTH
        )
        self.waiting_tokens: Callable[[], int] = int  # of the prompts of those; the router says how many
        self._watch_queue(waiting)
        self.leaked = {
            kind: self._gauge(f"leaked_{kind}", "Held by no request: 0 unless something leaked") for kind in LEAKS
        }
        self.placements = ClassMetrics(self.registry, model_name, classes, waiting_by_class, prefix)
        for collector in (
            WorkerCollector(model_name, workers, prefix),
            PoolCollector(pools, prefix),
            FaultCollector(model_name, faults, prefix),
            ConnectionCollector(model_name, connections, prefix),
        ):
            self.registry.register(collector)

    def _watch_queue(self, waiting: Callable[[], int]) -> None:
        self._gauge("router_queue_requests", "Requests waiting for room").set_function(waiting)
        text = "Prompt tokens of the requests waiting for room"
        self._gauge("router_prompt_tokens_waiting", text).set_function(lambda: self.waiting_tokens())

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{self.prefix}:{name}", text, ("model_name", *labels), registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"{self.prefix}:{name}", text, ("model_name",), registry=self.registry).labels(self.model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], older: str | None = None) -> Histogram:
        """`older` is a name that vLLM had for it: there it is shown as well."""
        made = Histogram(f"{self.prefix}:{name}", text, ("model_name",), registry=self.registry, buckets=buckets)
        if older is not None:
            self.registry.register(OlderName(made, f"{self.prefix}:{name}", f"{self.prefix}:{older}"))
        return made.labels(self.model)

    def first_token(self, request: Request, seconds: float, cached: int) -> None:
        self.prompt_tokens.labels(self.model).inc(len(request.prompt))
        self.cached_tokens.labels(self.model).inc(cached)
        computed = max(0, len(request.prompt) - cached)
        self.computed.observe(computed)
        self._reused += cached
        self._computed += computed
        if request.pooling is None:  # an embedding has no tokens
            self.ttft.observe(seconds)
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
            (self.decode, timeline.decode_seconds),
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

    def response_finished(self, *, most_tokens: int) -> None:
        self.longest.observe(most_tokens)

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


class OlderName(Collector):
    """A metric once more, under another name."""

    def __init__(self, metric: Collector, name: str, older: str):
        self.metric = metric
        self.name = name
        self.older = older

    def collect(self) -> Iterator[Metric]:
        for family in self.metric.collect():
            again = Metric(self.older, f"{self.name} under its older name", family.type)
            again.samples = [
                sample._replace(name=self.older + sample.name.removeprefix(self.name)) for sample in family.samples
            ]
            yield again


class FaultCollector:
    """Breakers, pairs of workers, generations, the canary and background tasks of a router."""

    def __init__(self, model_name: str, faults: Callable[[], FaultFigures], prefix: str = PREFIX):
        self.model = model_name
        self.faults = faults
        self.family = Families(prefix)

    def collect(self) -> Iterator[Metric]:
        now, model = self.faults(), self.model
        by_engine, by_pair = ("model_name", "engine"), ("model_name", "prefill", "decode")
        text = "Breaker of a worker: 0 closed, 1 half-open, 2 open"
        yield self.family(
            GAUGE, "worker_breaker", text, by_engine, (((model, who), s) for who, s in now.breakers.items())
        )
        text = "1 while a worker takes much longer than others of its kind, or than it used to, else 0"
        yield self.family(
            GAUGE, "worker_slow", text, by_engine, (((model, who), slow) for who, slow in now.slow.items())
        )
        text = "1 while nothing is held against a pair of workers, else 0"
        yield self.family(GAUGE, "pair_up", text, by_pair, (((model, *pair), well) for pair, well in now.pairs.items()))
        labels: tuple[str, ...] = ("model_name", "generation", "role")
        text = "Workers that may be given new requests, by generation and what they do: a mixed one does both"
        ready = (((model, *which), number) for which, number in now.ready.items())
        yield self.family(GAUGE, "generation_workers", text, labels, ready)
        text = "Share of new requests that a generation is given: 0 while one of its roles is missing"
        shares = (((model, which), share) for which, share in now.shares.items())
        yield self.family(GAUGE, "generation_share", text, labels[:2], shares)
        text = "Tokens the canary has sent, by outcome"
        probes = (((model, how), number) for how, number in now.probes.items())
        yield self.family(COUNTER, "canary_probes", text, ("model_name", "outcome"), probes)
        text = "Background tasks of the router that broke and began again, by task"
        restarts = (((model, task), number) for task, number in now.restarts.items())
        yield self.family(COUNTER, "background_restarts", text, ("model_name", "task"), restarts)
        text = "Heartbeats refused because the worker speaks another protocol"
        yield self.family(COUNTER, "protocol_refused", text, ("model_name",), [((model,), now.protocols_refused)])


class ConnectionCollector(Collector):
    """Connections of the HTTP server."""

    def __init__(self, model_name: str, figures: Callable[[], ConnectionFigures], prefix: str = PREFIX):
        self.model = model_name
        self.figures = figures
        self.family = Families(prefix)

    def collect(self) -> Iterator[Metric]:
        now, model = self.figures(), self.model
        text = "Connections of the HTTP server: idle ones wait for a request or its headers"
        states = (((model, state), number) for state, number in now.open.items())
        yield self.family(GAUGE, "http_connections", text, ("model_name", "state"), states)
        text = "Connections that the HTTP server ended, by why"
        ended = (((model, why), number) for why, number in now.ended.items())
        yield self.family(COUNTER, "http_connections_ended", text, ("model_name", "reason"), ended)
