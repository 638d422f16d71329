"""What the workers of a router come to: sums that never fall, and one series where a board or a picker wants one."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from serving import fleet_metrics
from serving.fleet_metrics import FleetCounters, worker_metrics
from serving.messages import Delta, FinishReason, WorkerStatus
from serving.metrics import RouterMetrics
from serving.timeline import Moment, Timeline
from tests.fakes.sequences import make_request
from tests.router.scripted import make_status

NAME = "prefix_cache_hits"


def status(instance: str, hits: float) -> WorkerStatus:
    return make_status(instance, instance=instance, counters={NAME: hits})


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9), max_size=4), max_size=12))
def test_a_sum_is_of_everything_that_was_ever_counted_and_never_falls(beats: list[dict[str, int]]) -> None:
    """Workers come, count on, fall silent, return, and die: a sum that fell would look like a restart of them all."""
    counters, last, before = FleetCounters(), defaultdict[str, int](int), 0.0
    for beat in beats:
        for instance, more in beat.items():
            last[instance] += more
        counters.observe([status(instance, last[instance]) for instance in beat])
        total = counters.totals().get(NAME, 0.0)
        assert total == sum(last.values()) and total >= before
        before = total


def test_of_many_dead_only_the_sum_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_metrics, "MOST_INSTANCES", 2)
    counters = FleetCounters()
    for number in range(50):
        counters.observe([status("alive", number), status(f"life-{number}", 1)])
        assert len(counters._last) <= 2 and counters.totals()[NAME] == number + number + 1
    counters.observe([status(f"at once {number}", 1) for number in range(10)])
    assert counters.totals()[NAME] == 49 + 50 + 10, "those that are there are all kept"
    counters.observe([status(f"at once {number}", 2) for number in range(10)])
    assert counters.totals()[NAME] == 49 + 50 + 20


def values(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(text.decode())
    samples = [sample for family in families for sample in family.samples]
    return {(s.name, frozenset(s.labels.items() - {("model_name", "m")})): s.value for s in samples}


def test_loads_are_added_up_and_what_waits_in_the_router_with_them() -> None:
    here = [
        make_status("a", running=3, waiting=2, waiting_tokens=40, total_blocks=100, free_blocks=25),
        make_status("b", running=1, waiting=0, total_blocks=300, free_blocks=275),
    ]
    told = values(RouterMetrics("m", lambda: here, lambda: 5, prefix="vllm").text())
    none: frozenset[tuple[str, str]] = frozenset()
    assert told["vllm:num_requests_running", none] == 4
    assert told["vllm:num_requests_waiting", none] == 7
    assert told["vllm:num_requests_waiting_by_reason", frozenset({("reason", "capacity")})] == 7
    assert told["vllm:kv_cache_usage_perc", none] == told["vllm:gpu_cache_usage_perc", none] == 0.25
    size = str(here[0].block_size)
    assert told["vllm:cache_config_info", frozenset({("block_size", size), ("num_gpu_blocks", "400")})] == 1
    assert told["vllm:worker_num_requests_running", frozenset({("engine", "a")})] == 3
    assert told["vllm:worker_prompt_tokens_waiting", frozenset({("engine", "a")})] == 40


def test_the_largest_kv_comes_first_where_blocks_differ() -> None:
    here = [make_status("a", block_size=16, total_blocks=10), make_status("b", block_size=32, total_blocks=90)]
    text = RouterMetrics("m", lambda: here, lambda: 0).text().decode()
    found = [line for line in text.splitlines() if line.startswith("millrace:cache_config_info{")]
    assert ['block_size="32"' in line for line in found] == [True, False]


def test_without_workers_nothing_is_made_up() -> None:
    metrics = RouterMetrics("m", lambda: [], lambda: 2)
    metrics.waiting_tokens = lambda: 70
    told = values(metrics.text())
    assert told["millrace:router_prompt_tokens_waiting", frozenset()] == 70
    names = {name for name, _ in told}
    assert not names & {"millrace:kv_cache_usage_perc", "millrace:cache_config_info", "millrace:engine_sleep_state"}
    assert told["millrace:num_requests_waiting", frozenset()] == 2


def test_where_prompt_tokens_came_from_adds_up_and_does_not_fall_when_workers_tell_later() -> None:
    counters: dict[str, float] = {}
    metrics = RouterMetrics("m", lambda: [make_status("a", counters=counters)], lambda: 0)

    def sources() -> list[float]:
        told = values(metrics.text())
        by = "millrace:prompt_tokens_by_source_total"
        names = ("local_compute", "local_cache_hit", "external_kv_transfer")
        return [told[by, frozenset({("source", name)})] for name in names]

    metrics.first_token(make_request([1] * 100), 0.1, 60)
    assert sources() == [40, 60, 0]
    counters["external_prefix_cache_hits"] = 20.0
    assert sources() == [40, 60, 20], "told of late: what was taken for local does not fall"
    metrics.first_token(make_request([1] * 100), 0.1, 50)
    assert sources() == [90, 90, 20] and sum(sources()) == 200


def test_steps_are_a_histogram_over_all_workers() -> None:
    counts = {"iteration_tokens/1": 5.0, "iteration_tokens/64": 2.0, "iteration_tokens/+Inf": 1.0}
    here = [make_status(name, counters={**counts, "engine_tokens": 20_100.0}) for name in "ab"]
    told = values(RouterMetrics("m", lambda: here, lambda: 0).text())
    name = "millrace:iteration_tokens_total"
    below = [told[f"{name}_bucket", frozenset({("le", most)})] for most in ("1.0", "32.0", "64.0", "16384.0", "+Inf")]
    assert below == [10, 10, 14, 14, 16]
    assert (told[f"{name}_count", frozenset()], told[f"{name}_sum", frozenset()]) == (16, 40_200)


def test_a_worker_alone_is_a_fleet_of_one() -> None:
    told = values(worker_metrics("m", lambda: make_status("a", running=2), "vllm")())
    assert told["vllm:num_requests_running", frozenset()] == 2
    assert told["vllm:worker_num_requests_running", frozenset({("engine", "a")})] == 2


def test_an_older_name_shows_the_same_histogram() -> None:
    metrics = RouterMetrics("m", lambda: [], lambda: 0)
    metrics.tokens(0.2, 4)
    told = values(metrics.text())
    mine = {(name, labels): value for (name, labels), value in told.items() if "inter_token_latency" in name}
    older = {
        (name.replace("inter_token_latency", "time_per_output_token"), labels): v for (name, labels), v in mine.items()
    }
    assert older.items() <= told.items() and len(older) > 20


def test_decoding_lasts_from_the_first_token_to_the_last() -> None:
    metrics = RouterMetrics("m", lambda: [], lambda: 0)
    for last, tokens in ((None, 1), (9.0, 5)):
        timeline = Timeline(tokens=tokens, last_token=last)
        timeline.note(Moment.FIRST_TOKEN, 4.0)
        timeline.note(Moment.FINISHED, 10.0)
        metrics.finished(make_request([1]), timeline, Delta(index=0, tokens=(1,), finish=FinishReason.STOP), None)
    told = values(metrics.text())
    name = "millrace:request_decode_time_seconds"
    assert (told[f"{name}_count", frozenset()], told[f"{name}_sum", frozenset()]) == (2, 5.0)
