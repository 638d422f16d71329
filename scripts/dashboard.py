"""Writes the Grafana dashboard of deploy/compose from the list of its panels: queries are read and checked here.

python -m scripts.dashboard
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "deploy/compose/grafana/millrace.json"
SOURCE = {"type": "prometheus", "uid": "millrace"}
WIDTH, HEIGHT, ACROSS = 8, 7, 3  # of a panel, on Grafana's grid of 24 columns
RATE = "$__rate_interval"


def rate(metric: str, by: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ''}(rate(millrace:{metric}[{RATE}]))"


def quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', 'le')})"


def quantiles(metric: str) -> dict[str, str]:
    return {name: quantile(share, metric) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}


# Of those offered, the ones that could be served: what attainment is counted by (docs/metrics.md).
VALID = f'sum by (class) (rate(millrace:requests_offered_total{{outcome!="invalid"}}[{RATE}]))'
PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "Requests: offered, within their objectives",
        "reqps",
        {
            "offered": rate("requests_offered_total"),
            "within, {{class}}": rate("requests_within_slo_total", "class"),
        },
    ),
    (
        "Share within objectives, by class",
        "percentunit",
        {"{{class}}": f"{rate('requests_within_slo_total', 'class')} / {VALID}"},
    ),
    (
        "Requests refused and failed",
        "reqps",
        {
            "refused, {{status}}": rate("request_refused_total", "status"),
            "failed, {{error}}": rate("request_failure_total", "error"),
        },
    ),
    ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
    ("Time per output token", "s", quantiles("request_time_per_output_token_seconds")),
    (
        "Tokens",
        "short",
        {
            "prompt": rate("prompt_tokens_total"),
            "of those cached": rate("prompt_tokens_cached_total"),
            "output": rate("generation_tokens_total"),
        },
    ),
    (
        "Running and waiting, by worker",
        "short",
        {
            "running, {{engine}}": "millrace:worker_num_requests_running",
            "waiting, {{engine}}": "millrace:worker_num_requests_waiting",
            "waiting in the router": "sum(millrace:router_queue_requests)",
        },
    ),
    ("KV cache in use, by worker", "percentunit", {"{{engine}}": "millrace:worker_kv_cache_usage_perc"}),
    (
        "Phases of a request, mean",
        "s",
        {
            name: f"{rate(f'request_{name}_time_seconds_sum')} / {rate(f'request_{name}_time_seconds_count')}"
            for name in ("queue", "prefill", "decode")
        },
    ),
    (
        "KV handed over, by worker",
        "Bps",
        {"{{engine}}": rate("kv_transfer_bytes_total", "engine")},
    ),
    (
        "KV pool: blocks found and stored",
        "ops",
        {
            "looked up": rate("pool_lookups_total"),
            "found": rate("pool_found_total"),
            "stored": rate("pool_stored_total"),
        },
    ),
    (
        "Faults",
        "short",
        {
            "placed again": rate("replacements_total"),
            "chunks refused": rate("kv_chunks_refused_total"),
            "leaked leases": "sum(millrace:leaked_leases)",
            "stalled, {{engine}}": "millrace:worker_stalled_seconds > 5",
        },
    ),
)


def panel(number: int, title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    row, column = divmod(number, ACROSS)
    targets = [
        {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
        for at, (legend, expression) in enumerate(queries.items())
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def dashboard() -> str:
    """The file's text."""
    made = {
        "uid": "millrace",
        "title": "millrace",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "panels": [panel(number, *given) for number, given in enumerate(PANELS)],
    }
    return json.dumps(made, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(dashboard())
    print(FILE)
