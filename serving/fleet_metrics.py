"""What all workers of a router come to, for Prometheus, under vLLM's names and without a worker's.

Boards add up the series of a name, and pickers of endpoints take the first: so each of these is one series for a model.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.messages import STEP_TOKEN_BINS, WorkerStatus
from serving.worker_metrics import COUNTER, GAUGE, PREFIX, SUMMED, Families, WorkerCollector, labelled

MOST_INSTANCES = 1024  # lives of workers whose last numbers are kept, where no more are there
BY_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_SLEEP = {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}
_NEVER = {
    "mm_cache_queries": "Images looked up in a cache: there are none",
    "mm_cache_hits": "Images found in a cache: there are none",
}


class FleetCounters:
    """Counters of workers, summed over all that have ever reported, the dead included: so a sum never falls. Pure."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, Mapping[str, float]] = OrderedDict()  # by instance, heard of longest ago first
        self._gone: Counter[str] = Counter()  # of instances that are not kept any more

    def observe(self, statuses: Iterable[WorkerStatus]) -> None:
        """These are the last words of their instances; none of an instance's counters has ever fallen."""
        here = {status.instance: status.counters for status in statuses}
        for instance, counters in here.items():
            self._last[instance] = counters
            self._last.move_to_end(instance)
        while len(self._last) > max(MOST_INSTANCES, len(here)):
            self._gone.update(self._last.popitem(last=False)[1])

    def totals(self) -> Mapping[str, float]:
        """By name, as in WorkerStatus.counters."""
        found: Counter[str] = Counter(self._gone)
        for counters in self._last.values():
            found.update(counters)
        return found


class FleetCollector(Collector):
    """`queued` are requests that wait for room in the router; `computed` and `cached` count prompt tokens of requests
    that have their first token: computed for them, and not.
    """

    def __init__(
        self,
        model_name: str,
        workers: Callable[[], Iterable[WorkerStatus]],
        queued: Callable[[], int] = int,
        tokens: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
        prefix: str = PREFIX,
    ):
        self.model = model_name
        self.workers = workers
        self.queued = queued
        self.tokens = tokens
        self.family = Families(prefix)
        self.counters = FleetCounters()
        self._reused_here = 0.0

    def collect(self) -> Iterator[Metric]:
        statuses = list(self.workers())
        self.counters.observe(statuses)
        totals = self.counters.totals()
        yield from self._load(statuses)
        yield from self._about(statuses)
        yield from self._sums(totals)
        yield from self._sources(totals)
        yield self._steps(totals)

    def _one(self, kind: type, name: str, text: str, number: float | None) -> Metric:
        numbers = [] if number is None else [((self.model,), number)]
        return self.family(kind, name, text, ("model_name",), numbers)

    def _by(self, kind: type, name: str, text: str, label: str, numbers: Mapping[str, float]) -> Metric:
        samples = (((self.model, value), number) for value, number in numbers.items())
        return self.family(kind, name, text, ("model_name", label), samples)

    def _load(self, statuses: Sequence[WorkerStatus]) -> Iterator[Metric]:
        waiting = self.queued() + sum(status.waiting for status in statuses)
        total = sum(status.total_blocks for status in statuses)
        used = 1 - sum(status.free_blocks for status in statuses) / total if total else None
        text = "Sequences in the running batches of all workers"
        yield self._one(GAUGE, "num_requests_running", text, sum(status.running for status in statuses))
        text = "Requests waiting for room in the router, and sequences waiting for prefill in all workers"
        yield self._one(GAUGE, "num_requests_waiting", text, waiting)
        text = "The same, by what they wait for"
        yield self._by(GAUGE, "num_requests_waiting_by_reason", text, "reason", {"capacity": waiting, "deferred": 0.0})
        yield self._one(GAUGE, "kv_cache_usage_perc", "Share of all workers' KV blocks in use, 0 to 1", used)
        yield self._one(GAUGE, "gpu_cache_usage_perc", "kv_cache_usage_perc under its older name", used)

    def _about(self, statuses: Sequence[WorkerStatus]) -> Iterator[Metric]:
        """What the series say is in their labels."""
        blocks: Counter[int] = Counter()
        for status in statuses:
            blocks[status.block_size] += status.total_blocks
        sizes = [((self.model, str(size), str(count)), 1.0) for size, count in blocks.most_common()]
        labels: tuple[str, ...] = ("model_name", "block_size", "num_gpu_blocks")
        yield self.family(GAUGE, "cache_config_info", "KV blocks of all workers, by tokens of a block", labels, sizes)
        labels = ("model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters")
        none = [((self.model, "0", "", ""), 0.0)]
        yield self.family(GAUGE, "lora_requests_info", "LoRA adapters in use: there are none", labels, none)
        states = _SLEEP if statuses else {}
        yield self._by(GAUGE, "engine_sleep_state", "1 for awake: workers never sleep", "sleep_state", states)

    def _sums(self, totals: Mapping[str, float]) -> Iterator[Metric]:
        for name, text in SUMMED.items():
            yield self._one(COUNTER, name, f"{text}, of all workers", totals.get(name, 0.0))
        at = labelled(totals, BY_POSITION)
        yield self._by(
            COUNTER, BY_POSITION, "Drafted tokens that were accepted, by their place in the draft", "position", at
        )
        for name, text in _NEVER.items():
            yield self._one(COUNTER, name, text, 0.0)

    def _sources(self, totals: Mapping[str, float]) -> Iterator[Metric]:
        """Workers tell later than the router what came from the pool. So what was reused where it lay is what they
        have not told of, and does not fall when they do.
        """
        computed, cached = self.tokens()
        pool = totals.get("external_prefix_cache_hits", 0.0)
        self._reused_here = max(self._reused_here, cached - pool)
        sources = {"local_compute": computed, "local_cache_hit": self._reused_here, "external_kv_transfer": pool}
        text = "Prompt tokens by where their KV came from: computed, reused in the worker, brought from the KV pool"
        yield self._by(COUNTER, "prompt_tokens_by_source", text, "source", sources)
        text = "Those that were not computed, by what held them"
        held = {"device": self._reused_here, "external_unspecified": pool}
        yield self._by(COUNTER, "prompt_tokens_cached_by_source", text, "source", held)

    def _steps(self, totals: Mapping[str, float]) -> Metric:
        counts = labelled(totals, "iteration_tokens")
        buckets, below = [], 0.0
        for most in STEP_TOKEN_BINS:
            below += counts.get(str(most), 0.0)
            buckets.append((str(float(most)), below))
        buckets.append(("+Inf", below + counts.get("+Inf", 0.0)))
        name = f"{self.family.prefix}:iteration_tokens_total"
        family = HistogramMetricFamily(name, "Tokens a step computes, of all workers", labels=("model_name",))
        family.add_metric((self.model,), buckets, totals.get("engine_tokens", 0.0))
        return family


def worker_metrics(model_name: str, status: Callable[[], WorkerStatus], prefix: str = PREFIX) -> Callable[[], bytes]:
    """The /metrics of a worker on its own, which is a fleet of one."""
    registry = CollectorRegistry()
    registry.register(FleetCollector(model_name, lambda: [status()], prefix=prefix))
    registry.register(WorkerCollector(model_name, lambda: [status()], prefix))
    return lambda: generate_latest(registry)
