"""What Prometheus is told: counts and latencies of requests, workers' own figures, and leaks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.errors import CorruptChunk, NoRoom
from serving.fleet_metrics import worker_metrics
from serving.messages import Audit, Delta, FinishReason, Pooling, PoolReport, PoolStat, Tier, TierStat, WorkerStatus
from serving.metrics import FaultFigures, RouterMetrics
from serving.step_cost import StepCost
from serving.timeline import Moment, Timeline
from serving.worker_metrics import pool_metrics
from tests.fakes.sequences import make_request
from tests.router.scripted import make_status

REQUEST = make_request([1, 2, 3])


def samples(text: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    """Value by name and by the values of its labels besides the model's."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = tuple(value for key, value in sample.labels.items() if key != "model_name")
            of_the_pool = sample.name.startswith("millrace:pool_")  # which serves any number of models
            assert sample.labels.get("model_name") == (None if of_the_pool else "tiny")
            assert sample.name.startswith("millrace:")
            found[sample.name.removeprefix("millrace:"), labels] = sample.value
    return found


class Told:
    def __init__(self, workers: Iterable[WorkerStatus] = (), waiting: int = 0):
        self.metrics = RouterMetrics("tiny", lambda: workers, lambda: waiting)

    def value(self, name: str, *labels: str) -> float:
        return samples(self.metrics.text())[name, labels]

    def has(self, name: str, *labels: str) -> bool:
        return (name, labels) in samples(self.metrics.text())


def test_tokens_are_counted_as_they_come() -> None:
    told = Told()
    told.metrics.first_token(REQUEST, 0.05, 2)
    told.metrics.tokens(0.2, 4)
    assert told.value("prompt_tokens_total") == 3
    assert told.value("prompt_tokens_cached_total") == 2
    assert told.value("generation_tokens_total") == 5
    assert told.value("time_to_first_token_seconds_sum") == pytest.approx(0.05)
    assert told.value("inter_token_latency_seconds_sum") == pytest.approx(0.05), "seconds a token, not a message"


def test_an_embedding_has_a_prompt_and_no_token() -> None:
    told = Told()
    told.metrics.first_token(replace(REQUEST, pooling=Pooling.MEAN), 0.05, 2)
    assert told.value("prompt_tokens_total") == 3 and told.value("prompt_tokens_cached_total") == 2
    assert not told.has("generation_tokens_total")
    assert told.value("time_to_first_token_seconds_count") == 0


def timeline() -> Timeline:
    moments = (Moment.ARRIVED, Moment.LEASED, Moment.PREFILL_SENT, Moment.FIRST_TOKEN)
    made = Timeline(tokens=5, last_token=9.0)
    for now, moment in enumerate(moments):
        made.note(moment, now + 1.0)
    made.note(Moment.FINISHED, 10.0)
    return made


def test_a_finished_request_leaves_its_latencies() -> None:
    told = Told()
    told.metrics.finished(REQUEST, timeline(), Delta(index=4, tokens=(1,), finish=FinishReason.STOP), None)
    for name, seconds in (
        ("e2e_request_latency_seconds", 9.0),
        ("request_queue_time_seconds", 1.0),
        ("request_prefill_time_seconds", 1.0),
        ("request_decode_time_seconds", 5.0),
        ("request_time_per_output_token_seconds", 1.25),
    ):
        assert (told.value(f"{name}_count"), told.value(f"{name}_sum")) == (1, seconds), name


def test_a_failed_request_leaves_its_error_and_no_latency() -> None:
    told = Told()
    told.metrics.finished(REQUEST, timeline(), None, NoRoom("full"))
    assert told.value("request_failure_total", "NoRoom") == 1
    assert told.value("e2e_request_latency_seconds_count") == 0


def test_endings_refusals_and_repetitions_are_told_apart() -> None:
    told = Told()
    told.metrics.request_started(prompt_tokens=7)
    told.metrics.request_finished(finish=FinishReason.ABORT, completion_tokens=4)
    told.metrics.request_refused(status=429)
    told.metrics.replaced(CorruptChunk("harmed", code="digest"))
    told.metrics.replaced(NoRoom("full"))
    assert told.value("request_success_total", "abort") == 1 and told.value("request_refused_total", "429") == 1
    assert told.value("replacements_total", "digest") == told.value("replacements_total", "NoRoom") == 1
    assert (told.value("request_prompt_tokens_sum"), told.value("request_generation_tokens_sum")) == (7, 4)


def test_workers_are_told_apart_by_name() -> None:
    counters = {"prefix_cache_hits": 6.0, "kv_chunks_refused/digest": 2.0, "kv_chunks_refused/epoch": 1.0}
    counters |= {"kv_handoffs/nixl": 3.0, "kv_received_bytes/grpc": 7.0}
    one = make_status("one", running=3, waiting=2, free_blocks=25, draining=True, counters=counters)
    told = Told([one, make_status("two", total_blocks=0, free_blocks=0)])
    assert told.value("worker_num_requests_running", "one") == 3
    assert told.value("worker_num_requests_waiting", "one") == 2
    assert told.value("worker_kv_cache_usage_perc", "one") == 0.75
    assert (told.value("worker_draining", "one"), told.value("worker_draining", "two")) == (1, 0)
    hits = "worker_prefix_cache_hits_total"
    assert (told.value(hits, "one"), told.value(hits, "two")) == (6, 0)
    assert told.value("kv_chunks_refused_total", "one", "digest") == 2
    assert told.value("kv_chunks_refused_total", "one", "epoch") == 1
    assert not told.has("kv_chunks_refused_total", "two", "digest")
    assert (
        told.value("kv_handoffs_total", "one", "nixl") == 3
        and told.value("kv_received_bytes_total", "one", "grpc") == 7
    )


def test_what_a_workers_steps_cost_is_told() -> None:
    cost = StepCost(fixed=1e-3, token=2e-4, pair=3e-8, sequence=4e-5, context=5e-7, error=0.12, samples=60)
    told = Told([make_status("one", step_cost=cost, waiting_seconds=2.5, prompt_share=0.4), make_status("two")])
    for name in ("fixed", "token", "pair", "sequence", "context"):
        assert told.value(f"step_cost_{name}_seconds", "one") == getattr(cost, name)
        assert told.value(f"step_cost_{name}_seconds", "two") == 0.0
    assert (told.value("step_cost_error", "one"), told.value("step_cost_samples", "one")) == (0.12, 60)
    assert (told.value("worker_waiting_seconds", "one"), told.value("worker_prompt_share", "one")) == (2.5, 0.4)


def test_the_queue_and_the_leaks_are_told() -> None:
    told = Told(waiting=4)
    assert told.value("router_queue_requests") == 4 and told.value("leaked_blocks") == 0
    leaked = {"blocks": 2, "leases": 1, "host_extents": 3}
    audits = [Audit(service=name, counts={"blocks": 9}, leaked=leaked) for name in "ab"]
    told.metrics.note_audit(audits)
    assert told.value("leaked_host_extents") == 6
    assert (told.value("leaked_blocks"), told.value("leaked_leases"), told.value("leaked_tasks")) == (4, 2, 0)
    told.metrics.note_audit([])
    assert told.value("leaked_blocks") == 0


def test_a_worker_alone_tells_of_itself_as_it_is_now() -> None:
    running = [1]
    text = worker_metrics("tiny", lambda: make_status("one", running=running[0]))
    assert samples(text())["worker_num_requests_running", ("one",)] == 1
    running[0] = 5
    assert samples(text())["worker_num_requests_running", ("one",)] == 5


def test_two_services_in_a_process_do_not_mix() -> None:
    one, other = Told(), Told()
    one.metrics.first_token(REQUEST, 0.1, 0)
    assert one.has("generation_tokens_total") and not other.has("generation_tokens_total")


def pool_report(name: str) -> PoolReport:
    tiers = {
        Tier.RAM: TierStat(capacity=100, bytes=60, blocks=3, hits=5, evictions=4, eviction_age_seconds=8.0),
        Tier.DISK: TierStat(capacity=900, bytes=70, blocks=4, corrupt=2, bytes_read=11, read_seconds=0.5),
    }
    stat = PoolStat(
        name=name,
        instance="life",
        tiers=tiers,
        namespaces={},
        lookups=20,
        found=15,
        stored=9,
        refused=1,
        pinned=2,
        backlog=3,
    )
    return PoolReport(stat=stat, address=f"{name}:1")


def test_the_pools_nodes_are_told_by_tier() -> None:
    metrics = RouterMetrics("tiny", lambda: (), lambda: 0, lambda: [pool_report("one"), pool_report("two")])
    found = samples(metrics.text())
    for name in ("one", "two"):
        assert (found["pool_bytes", (name, "ram")], found["pool_bytes", (name, "disk")]) == (60, 70)
        assert (found["pool_blocks", (name, "ram")], found["pool_capacity_bytes", (name, "disk")]) == (3, 900)
        assert (found["pool_hits_total", (name, "ram")], found["pool_evictions_total", (name, "ram")]) == (5, 4)
        assert found["pool_eviction_age_seconds_total", (name, "ram")] == 8
        assert (found["pool_corrupt_total", (name, "disk")], found["pool_bytes_read_total", (name, "disk")]) == (2, 11)
        counts = [found[f"pool_{kind}_total", (name,)] for kind in ("lookups", "found", "stored", "refused")]
        assert counts == [20, 15, 9, 1]
        assert (found["pool_pinned", (name,)], found["pool_backlog", (name,)]) == (2, 3)
    alone = pool_metrics(lambda: pool_report("one"))
    assert samples(alone()) == {key: value for key, value in found.items() if key[1] and key[1][0] == "one"}


def test_what_a_router_holds_against_its_workers_is_shown() -> None:
    figures = FaultFigures(
        breakers={"p0": 2, "d0": 0},
        slow={"p0": False, "d0": True},
        pairs={("p0", "d0"): False, ("m", "m"): True},
        probes={"ok": 3, "failed": 1},
        restarts={"expire": 2},
        protocols_refused=4,
    )
    shown = samples(RouterMetrics("tiny", lambda: [], lambda: 0, faults=lambda: figures).text())
    assert shown["worker_breaker", ("p0",)] == 2 and shown["worker_breaker", ("d0",)] == 0
    assert shown["worker_slow", ("p0",)] == 0 and shown["worker_slow", ("d0",)] == 1
    assert shown["pair_up", ("d0", "p0")] == 0 and shown["pair_up", ("m", "m")] == 1
    assert shown["canary_probes_total", ("failed",)] == 1
    assert shown["background_restarts_total", ("expire",)] == 2
    assert shown["protocol_refused_total", ()] == 4


def test_a_workers_restarts_come_apart_by_task() -> None:
    status = make_status("w", counters={"worker_background_restarts/write-back": 2.0})
    assert Told([status]).value("worker_background_restarts_total", "w", "write-back") == 2
