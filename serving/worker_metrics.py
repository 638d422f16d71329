"""What single workers and nodes of the KV pool report, as of their last heartbeat, for Prometheus.

`docs/metrics.md` documents every name here; what all workers of a router come to is in serving.fleet_metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.messages import PoolReport, PoolStat, TierStat, WorkerStatus
from serving.step_cost import StepCost

PREFIX = "millrace"
GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily
Family = GaugeMetricFamily | CounterMetricFamily
LabelValues = tuple[str, ...]
Samples = Iterable[tuple[LabelValues, float]]
T = TypeVar("T")
Figure = tuple[type[Family], str, Callable[[T], float]]  # what kind it is, its text, and how it is read of something


@dataclass(frozen=True, slots=True)
class Families:
    """Makes families of metrics whose names begin with `prefix`."""

    prefix: str = PREFIX

    def __call__(self, kind: type[Family], name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
        family = kind(f"{self.prefix}:{name}", text, labels=labels)
        for values, number in samples:
            family.add_metric(values, float(number))
        return family

    def each(
        self, figures: Mapping[str, Figure[T]], labels: tuple[str, ...], of: Sequence[tuple[LabelValues, T]]
    ) -> Iterator[Metric]:
        """A family for each figure, by its name, with a sample for each thing that has it."""
        for name, (kind, text, read) in figures.items():
            yield self(kind, name, text, labels, ((values, read(one)) for values, one in of))


_UNMEASURED = StepCost(fixed=0.0, token=0.0, error=0.0)


def _cost(status: WorkerStatus) -> StepCost:
    return status.step_cost or _UNMEASURED


_WORKER_GAUGES: dict[str, Figure[WorkerStatus]] = {
    "worker_num_requests_running": (GAUGE, "Sequences in the running batch", lambda s: s.running),
    "worker_num_requests_waiting": (GAUGE, "Sequences waiting for prefill", lambda s: s.waiting),
    "worker_kv_cache_usage_perc": (
        GAUGE,
        "Share of KV blocks in use, 0 to 1",
        lambda s: 1 - s.free_blocks / max(1, s.total_blocks),
    ),
    "worker_stalled_seconds": (GAUGE, "Age of the engine step in progress", lambda s: s.stalled_seconds),
    "worker_draining": (GAUGE, "1 while the worker takes no new work", lambda s: float(s.draining)),
    "worker_ranks": (GAUGE, "Processes that are the worker", lambda s: max(1, s.ranks)),
    "expert_ranks": (GAUGE, "Ranks that compute just now", lambda s: s.counters.get("expert_ranks", 0.0)),
    "expert_imbalance": (
        GAUGE,
        "Load of the heaviest rank over the mean, of the MoE layer that is balanced worst",
        lambda s: s.counters.get("expert_imbalance", 0.0),
    ),
    "worker_prompt_tokens_waiting": (
        GAUGE,
        "Tokens still to compute of the prompts that wait",
        lambda s: s.waiting_tokens,
    ),
    "worker_waiting_seconds": (GAUGE, "Predicted time of the prompts that wait", lambda s: s.waiting_seconds),
    "worker_prompt_share": (
        GAUGE,
        "Share of recent time in steps with prompt tokens, 0 to 1",
        lambda s: s.prompt_share,
    ),
    "step_cost_fixed_seconds": (GAUGE, "A step, whatever it computes", lambda s: _cost(s).fixed),
    "step_cost_token_seconds": (GAUGE, "Each new token of a step", lambda s: _cost(s).token),
    "step_cost_pair_seconds": (GAUGE, "Each pair of a new token and one it attends to", lambda s: _cost(s).pair),
    "step_cost_sequence_seconds": (GAUGE, "Each sequence of a step", lambda s: _cost(s).sequence),
    "step_cost_context_seconds": (GAUGE, "Each token whose KV a step reads", lambda s: _cost(s).context),
    "step_cost_error": (GAUGE, "Standard deviation of ln(observed / predicted) of steps", lambda s: _cost(s).error),
    "step_cost_samples": (GAUGE, "Steps the cost is fitted to, 0 while it is a guess", lambda s: _cost(s).samples),
}
# Counters under vLLM's names. They are summed over the workers (serving.fleet_metrics), and here begin with `worker_`:
# who asks for vLLM's name takes the first series there is, or adds up all.
SUMMED = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache",
    "external_prefix_cache_queries": "Prompt tokens asked of the KV pool",
    "external_prefix_cache_hits": "Prompt tokens brought from the KV pool",
    "num_preemptions": "Sequences that lost their blocks to others",
    "spec_decode_num_drafts": "Times that tokens were drafted",
    "spec_decode_num_draft_tokens": "Tokens drafted",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted",
}
_WORKER_COUNTERS = {
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
    "kv_transfer_bytes": "Bytes of KV sent to decode workers",
    "role_flips": "Times that the worker's process has begun to serve in another role",
    "mixed_pairs": "Handoffs refused because prefill and decode worker were of different generations: stays 0",
    "leases_gave_way": "Leases ended before anything of them was computed: their first token was late, others were not",
    "decodes_paused": "Tokens that sequences without objectives did not decode in a step, so that prompts are in time",
    "late_prompts": "Prompts that ended late while none of them was computed: their class sheds or degrades",
    "deadlines_exceeded": "Leases and prefills that workers ended because their deadline had passed",
    "expert_dispatch_bytes": "Bytes of rows that ranks of a worker sent to each other's experts, routing included",
    "expert_combine_bytes": "Bytes of results that those experts sent back",
    "expert_bytes_to_hosts": "Bytes that a worker sent to hosts of its ranks, rows and all else, TLS's own not counted",
    "expert_bytes_from_hosts": "Bytes that came from them, results and all else",
    "parallel_bytes": "Bytes that ranks of a worker sent each other of the model they share",
    "expert_ranks_lost": "Ranks of a worker that died, or were given up as too late",
    "expert_ranks_rejoined": "Ranks that have come back and were taken in",
    "expert_steps_repeated": "Steps that were dropped because a rank was lost, and computed again",
    "expert_recovery_seconds": "Time from the beginnings of such steps until the ranks that are left could compute",
    "experts_reloaded": "Experts of a layer that no rank held any more, read again from the checkpoint",
    "experts_moved": "Experts of a layer that ranks took over for the sake of balance",
    "experts_moved_bytes": "Bytes of weights that were copied for that",
    "engine_steps": "Steps the engine has run",
    "engine_tokens": "Tokens those steps computed, prompt and output",
    "engine_step_seconds": "Time in steps",
    "engine_forward_seconds": "Time of steps in the model",
    "engine_sample_seconds": "Time of steps in drawing tokens",
    "engine_proposing_seconds": "Time of steps in a model that drafts, before the one that is served",
    "engine_python_seconds": "Time of steps in everything else: scheduling, batches, accounts",
    "engine_kv_wait_seconds": "Of the time in the model, waiting for layers on their way from the KV pool",
}


def _counted(name: str, text: str) -> Figure[WorkerStatus]:
    """A counter of workers; 0 of one that has not told of it."""
    return COUNTER, text, lambda status: status.counters.get(name, 0.0)


_COUNTED = {f"worker_{name}": _counted(name, text) for name, text in SUMMED.items()} | {
    name: _counted(name, text) for name, text in _WORKER_COUNTERS.items()
}
_TIERS: dict[str, Figure[TierStat]] = {
    "pool_bytes": (GAUGE, "Bytes of blocks a tier of the KV pool holds", lambda t: t.bytes),
    "pool_blocks": (GAUGE, "Blocks a tier holds", lambda t: t.blocks),
    "pool_capacity_bytes": (GAUGE, "Bytes a tier may hold", lambda t: t.capacity),
    "pool_hits": (COUNTER, "Blocks served from a tier", lambda t: t.hits),
    "pool_bytes_read": (COUNTER, "Bytes read from a tier", lambda t: t.bytes_read),
    "pool_bytes_written": (COUNTER, "Bytes written to a tier", lambda t: t.bytes_written),
    "pool_read_seconds": (COUNTER, "Time in reading a tier", lambda t: t.read_seconds),
    "pool_evictions": (COUNTER, "Blocks a tier had no more room for", lambda t: t.evictions),
    "pool_eviction_age_seconds": (COUNTER, "Ages of those blocks, summed", lambda t: t.eviction_age_seconds),
    "pool_corrupt": (COUNTER, "Blocks found corrupt in a tier, dropped and not served", lambda t: t.corrupt),
}
_NODES: dict[str, Figure[PoolStat]] = {
    "pool_pinned": (GAUGE, "Blocks that may not be evicted just now", lambda s: s.pinned),
    "pool_backlog": (GAUGE, "Blocks on their way to disk", lambda s: s.backlog),
    "pool_lookups": (COUNTER, "Keys looked up at a node", lambda s: s.lookups),
    "pool_found": (COUNTER, "Of those, keys that were there", lambda s: s.found),
    "pool_stored": (COUNTER, "Blocks a node has accepted", lambda s: s.stored),
    "pool_refused": (COUNTER, "Blocks a node has refused: backlog, quota, or corrupt on arrival", lambda s: s.refused),
}
# Counters of workers that come apart by a label: `name/value of the label`.
_WORKER_LABELLED = {
    "spec_decode_num_drafts_by_method": ("Times that tokens were drafted, by what drafted them", "method"),
    "spec_decode_num_draft_tokens_by_method": ("Tokens drafted, by what drafted them", "method"),
    "spec_decode_num_accepted_tokens_by_method": ("Drafted tokens that were accepted, by what drafted them", "method"),
    "worker_background_restarts": ("Background tasks of a worker that broke and began again, by task", "task"),
    "kv_chunks_refused": ("KV chunks and commits of handoffs refused, by why", "reason"),
    "kv_received_bytes": ("Bytes of KV taken in from prefill workers, by transport", "transport"),
    "kvcache_fetched_bytes": ("Bytes that came from the KV pool, by transport", "transport"),
    "kv_handoffs": ("Handoffs completed, by transport", "transport"),
    "leases_refused": ("Leases that workers refused for want of room, by what was wanting", "reason"),
}


class WorkerCollector(Collector):
    """Gauges and counters of workers, as of their last heartbeat."""

    def __init__(self, model_name: str, workers: Callable[[], Iterable[WorkerStatus]], prefix: str = PREFIX):
        self.model = model_name
        self.workers = workers
        self.family = Families(prefix)

    def collect(self) -> Iterator[Metric]:
        of = [((self.model, status.name), status) for status in self.workers()]
        labels = ("model_name", "engine")
        yield from self.family.each(_WORKER_GAUGES | _COUNTED, labels, of)
        for name, (text, label) in _WORKER_LABELLED.items():
            parts = [(who, labelled(status.counters, name)) for who, status in of]
            samples = (((*who, word), value) for who, found in parts for word, value in found.items())
            yield self.family(COUNTER, name, text, (*labels, label), samples)


def labelled(counters: Mapping[str, float], name: str) -> Mapping[str, float]:
    """Those that come apart by a label: the numbers by its values."""
    prefix = f"{name}/"
    return {key.removeprefix(prefix): value for key, value in counters.items() if key.startswith(prefix)}


class PoolCollector(Collector):
    """Gauges and counters of the KV pool's nodes, as of their last heartbeat. They know of no model."""

    def __init__(self, reports: Callable[[], Iterable[PoolReport]], prefix: str = PREFIX):
        self.reports = reports
        self.family = Families(prefix)

    def collect(self) -> Iterator[Metric]:
        stats = [report.stat for report in self.reports()]
        tiers = [((stat.name, tier.value), held) for stat in stats for tier, held in stat.tiers.items()]
        yield from self.family.each(_TIERS, ("node", "tier"), tiers)
        yield from self.family.each(_NODES, ("node",), [((stat.name,), stat) for stat in stats])


def pool_metrics(report: Callable[[], PoolReport], prefix: str = PREFIX) -> Callable[[], bytes]:
    """The /metrics of a pool node on its own."""
    registry = CollectorRegistry()
    registry.register(PoolCollector(lambda: [report()], prefix))
    return lambda: generate_latest(registry)
