"""Every series that the Grafana boards shipped with vLLM ask for, by the board, with the labels they pick or group by.

Read from `examples/online_serving/prometheus_grafana/grafana.json` and `examples/observability/dashboards/grafana`
(`*_statistics.json`, `vllm_*.json`) of November 2026. `model_name` is asked for everywhere but in what has no prefix.
What vLLM itself exports only with an option of its own (a KV connector, NIXL, offloading, `--kv-cache-metrics`, MFU,
sleep mode's operations) is left out: those rows of the boards stay empty, as they do there.
"""

from __future__ import annotations

LATENCY = ("_bucket", "_sum", "_count")


def histogram(name: str, *parts: str) -> dict[str, frozenset[str]]:
    return {name + part: frozenset({"le"} if part == "_bucket" else ()) for part in parts or LATENCY}


def plain(*names: str) -> dict[str, frozenset[str]]:
    return dict.fromkeys(names, frozenset())


CLASSIC = {
    **histogram("vllm:e2e_request_latency_seconds"),
    **histogram("vllm:time_per_output_token_seconds"),
    **histogram("vllm:time_to_first_token_seconds"),
    **plain("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    **plain("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc"),
    **histogram("vllm:request_prompt_tokens", "_bucket"),
    **histogram("vllm:request_generation_tokens", "_bucket"),
    "vllm:request_success_total": frozenset({"finished_reason"}),
    **histogram("vllm:request_queue_time_seconds", "_sum"),
    **histogram("vllm:request_prefill_time_seconds", "_sum"),
    **histogram("vllm:request_decode_time_seconds", "_sum"),
    **histogram("vllm:request_max_num_generation_tokens", "_sum"),
}
STATISTICS = {
    **histogram("vllm:e2e_request_latency_seconds"),
    **histogram("vllm:time_to_first_token_seconds"),
    **histogram("vllm:inter_token_latency_seconds"),
    **histogram("vllm:request_prompt_tokens"),
    **histogram("vllm:request_generation_tokens"),
    **plain("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"),
}
OVERVIEW = {
    **STATISTICS,
    **histogram("vllm:request_time_per_output_token_seconds"),
    **histogram("vllm:request_queue_time_seconds"),
    **histogram("vllm:request_prefill_time_seconds", "_sum", "_count"),
    **histogram("vllm:request_decode_time_seconds", "_sum", "_count"),
    **histogram("vllm:iteration_tokens_total"),
    **plain("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    **plain("vllm:num_preemptions_total", "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    **plain("vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total"),
    **plain("vllm:mm_cache_hits_total", "vllm:mm_cache_queries_total"),
    "vllm:num_requests_waiting_by_reason": frozenset({"reason"}),
    "vllm:prompt_tokens_by_source_total": frozenset({"source"}),
    "http_requests_total": frozenset({"handler", "status"}),
    "http_request_duration_seconds_sum": frozenset({"handler"}),
    "http_request_duration_seconds_count": frozenset({"handler"}),
}
INSTANCES = {
    **plain("process_start_time_seconds", "process_cpu_seconds_total", "process_resident_memory_bytes"),
    **plain("process_open_fds", "process_max_fds"),
    "vllm:cache_config_info": frozenset({"block_size", "num_gpu_blocks"}),
    "vllm:lora_requests_info": frozenset({"max_lora", "running_lora_adapters", "waiting_lora_adapters"}),
    "vllm:engine_sleep_state": frozenset({"sleep_state"}),
}
KV_CACHE = {
    **plain("vllm:prompt_tokens_cached_total"),
    "vllm:prompt_tokens_cached_by_source_total": frozenset({"source"}),
    **histogram("vllm:request_prefill_kv_computed_tokens", "_sum", "_count"),
}
SPECULATIVE = {
    **plain("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    **plain("vllm:spec_decode_num_drafts_total"),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": frozenset({"position"}),
}
BOARDS = {
    "grafana.json": CLASSIC,
    "performance_statistics.json, query_statistics.json": STATISTICS,
    "vllm_overview.json, vllm_service_status.json": OVERVIEW,
    "vllm_instances.json": INSTANCES,
    "vllm_kv_cache.json": KV_CACHE,
    "vllm_speculative_decoding.json": SPECULATIVE,
}
PICKER = {  # llm-d's and the Gateway API's: they take the first series of a name
    **plain("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"),
    "vllm:lora_requests_info": frozenset({"max_lora", "running_lora_adapters", "waiting_lora_adapters"}),
    "vllm:cache_config_info": frozenset({"block_size", "num_gpu_blocks"}),
}
